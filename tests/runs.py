"""Tiny recorded runs that several test files share, and ways to look at them from outside.

A run is recorded once a session, by another process than the tests' own, so that it is an independent witness.
"""

import atexit
import functools
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from click.testing import CliRunner

from workbench import cli
from workbench.experiment import Experiment, StepOptions

# One block of width 64 on 4 rows of 16 tokens: a step takes milliseconds, and every kernel is compiled only once.
SMALL = {"ctx": 16, "batch": 4, "depth": 1, "device": "cpu"}
FLAGS = ("--ctx", "16", "--batch", "4", "--depth", "1", "--device", "cpu")
STEPS, SAVE_EVERY = 12, 4


@functools.cache
def scratch() -> Path:
    """A folder for this session's shared runs."""
    folder = Path(tempfile.mkdtemp(prefix="workbench-tests-"))
    atexit.register(shutil.rmtree, folder, True)
    return folder


@functools.cache
def corpus() -> Path:
    path = scratch() / "corpus.txt"
    draw = random.Random(1)
    path.write_text("".join(draw.choice("the quick brown fox jumps over\n") for _ in range(6000)))
    return path


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def sentence(self) -> str:
        """The error message: the last line of stderr, once everything that an error must be was checked."""
        assert self.code == 2, self
        assert "Traceback" not in self.err + self.out, self.err
        last = self.err.strip().splitlines()[-1]
        assert last.startswith("workbench: ") and len(last) > len("workbench: ") + 10, self.err
        return last


def workbench(*args: object, cwd: Path | None = None, **variables: str) -> Said:
    """Runs the command in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "workbench", *map(str, args)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=cwd or scratch(),
        env=os.environ | {"PYTHONWARNINGS": "error", "COLUMNS": "200"} | variables,
        timeout=120,
    )
    return Said(done.returncode, done.stdout, done.stderr)


def here(*args: object) -> Said:
    """Runs the command in this process: no start-up time. An exception that escapes is raised."""
    result = CliRunner().invoke(cli.main, [str(arg) for arg in args], prog_name="workbench", catch_exceptions=False)
    return Said(result.exit_code, result.stdout, result.stderr)


@functools.cache
def _recorded() -> Path:
    out = scratch() / "recorded"
    said = workbench(
        *("train", "--corpus", corpus(), "--steps", STEPS, "--out", out, "--save-every", SAVE_EVERY, *FLAGS),
        *("--spike-window", 4, "--val-every", 5, "--val-split", 0.2, "--print-fingerprint"),
    )
    assert said.code == 0, said.err
    (scratch() / "fingerprint.json").write_text(said.out)
    return out


def recorded(folder: Path) -> Path:
    """A copy of the shared run: one segment, 12 steps, checkpoints 0, 4, 8, 12, validation at 5 and 10."""
    return Path(shutil.copytree(_recorded(), folder / "run"))


def recorded_read_only() -> Path:
    """The shared run itself, for tests that write nothing into it."""
    return _recorded()


@functools.cache
def _segmented() -> Path:
    out = Path(shutil.copytree(_recorded(), scratch() / "segmented"))
    said = here("train", "--out", out, "--resume", "8", "--steps", "14")
    assert said.code == 0, said.err
    return out


def segmented(folder: Path) -> Path:
    """The shared run, resumed from step 8 by another process: segment 1 has steps 9 to 14, and 9 to 12 stand twice."""
    return Path(shutil.copytree(_segmented(), folder / "run"))


def fingerprint() -> dict[str, Any]:
    """What `--print-fingerprint` printed when the shared run was recorded."""
    _recorded()
    return json.loads((scratch() / "fingerprint.json").read_text())


def digest(folder: Path) -> dict[str, str]:
    """Every file below a folder, with its SHA-256."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def strict(text: str | bytes) -> Any:
    """JSON as a strict parser reads it: NaN and Infinity are no JSON."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def lines(run: Path) -> list[dict[str, Any]]:
    """The telemetry, line by line."""
    return [strict(line) for line in (run / "telemetry.jsonl").read_bytes().splitlines()]


def edit_json(path: Path, change: Any) -> None:
    """Passes the parsed file to `change`, which alters it in place, and writes it back, with digests that agree."""
    helpers.edit_json(path, change)


def edit_line(run: Path, step: int, **fields: Any) -> None:
    """Overwrites fields of the (last) telemetry line of a step; None for null, `...` to remove one."""
    path = run / "telemetry.jsonl"
    content = path.read_text().splitlines()
    index = max(i for i, line in enumerate(content) if (d := json.loads(line))["type"] == "step" and d["step"] == step)
    line = json.loads(content[index]) | fields
    content[index] = json.dumps({key: value for key, value in line.items() if value is not ...})
    path.write_text("\n".join(content) + "\n")
    helpers.reseal(run)


def as_ranks(run: Path, *hosts: str) -> Path:
    """Makes of a run what ranks on these hosts would have recorded together, had each had the same batches."""
    content = lines(run)
    for line in content:
        if line["type"] == "step":
            loss = {name: line[name] for name in ("loss", "loss_bits")}
            line["ranks"] = [{"rank": rank} | loss for rank in range(len(hosts))]
    (run / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in content))
    setup = {"size": len(hosts), "backend": "ring", "connections": 1, "hosts": list(hosts)}
    edit_json(run / "run.json", lambda document: document.update(ranks=setup))
    helpers.reseal(run)
    return run


# ------------------------------------------------------------------------------------------------ a loop of one's own


class Numbers:
    """Batches of numbers drawn from their own step: the smallest sampler with a cursor."""

    def __init__(self, size: int = 4) -> None:
        self.position, self.size = 0, size

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        self.position += 1
        draw = np.random.default_rng(self.position)
        x = draw.normal(size=(self.size, 3)).astype(np.float32)
        return x, x @ np.array([[1.0], [-2.0], [0.5]], np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        self.position = cursor["position"]


def squares(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    return mx.mean(mx.square(model(x) - y))


def build(
    lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.95), clip: float | None = None, **adam: Any
) -> Experiment:
    """A factory: `runs:build`. Linear regression with AdamW, not compiled."""
    mx.random.seed(7)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    settings = {"eps": 1e-8, "bias_correction": True} | adam
    optimizer = optim.AdamW(lr, betas=list(betas), **settings)
    return Experiment(model, optimizer, squares, Numbers(), StepOptions(clip=clip, compile=False))


def parts(experiment: Experiment) -> tuple[Any, ...]:
    """The arguments of `Recorder` that make the experiment."""
    return experiment.model, experiment.optimizer, experiment.loss_fn, experiment.sampler


def build_nothing(**arguments: Any) -> str:
    """A factory that returns something else."""
    return "no experiment"


def build_badly(**arguments: Any) -> Experiment:
    """A factory that fails."""
    raise RuntimeError("the cluster is asleep")
