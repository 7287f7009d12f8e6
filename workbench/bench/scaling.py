"""How costs grow: recording with the size of the model, opening and replaying with the number of recorded steps."""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pandas as pd

from ..environment import on_device
from ..record import Recorder
from ..trainer.model import ModelConfig, parameter_count
from ..trainer.recipe import TrainConfig, build
from .child_output import output_of
from .growth import COLUMNS, SIZE, STEPS, slopes
from .problem import Problem, plain_step
from .recording_cost import recording_cost

SHAPES = ((2, 64), (2, 128), (4, 192), (4, 256), (6, 384))  # depth and width: 0.1M to 10.7M parameters
LONGEST = 10**5
BURST_SECONDS = 0.5  # a turn of a variant lasts about so long

_CHILD = """
import json, sys, time
from pathlib import Path
import workbench.session
from workbench import open_run
from workbench.lines import column_cache
path, folder, step = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
column_cache.folder = lambda: folder / "cache"
began = time.perf_counter()
run = open_run(path)
run.last_step, run.steps, run.plan(run.last_step), run.checkpoints
opened = time.perf_counter()
trace = run.replay(step, with_probe=False, repeat=False, trace_dir=folder / "traces")
assert trace.exact, trace
print(json.dumps([opened - began, time.perf_counter() - opened]))
"""


def scaling(
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    most_steps: int = LONGEST,
    rounds: int = 5,
    say: Callable[[str], None] = lambda what: None,
) -> pd.DataFrame:
    """Measures cost against size and against steps.

    Args:
        shapes: depth and width of each model.
        most_steps: of the longest run: 100, 1,000, … up to it.
        rounds: turns of each variant; and fresh processes that open and replay.

    Returns:
        Columns against ("parameters" or "steps"), what, x (how many), seconds (medians). `attrs["slopes"]` holds a
        sentence for each line: the slope of a straight line through it on two logarithmic axes.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder, on_device("cpu"):
        scratch = Path(folder).resolve()
        problem = Problem("tiny", scratch, rounds)
        rows = [*_by_size(problem, shapes, say), *_by_steps(problem, most_steps, say)]
    found = pd.DataFrame(rows, columns=list(COLUMNS))
    found.attrs["slopes"] = slopes(found)
    return found


def _by_size(
    problem: Problem, shapes: Sequence[tuple[int, int]], say: Callable[[str], None]
) -> list[tuple[str, str, float, float]]:
    rows = []
    for depth, width in shapes:
        model = msgspec.structs.replace(problem.config.model, depth=depth, width=width, heads=width // 64, ctx=64)
        config = msgspec.structs.replace(problem.config, model=model)
        count = parameter_count(_checked(model))
        say(f"recording at {count / 1e6:.1f}M parameters")
        burst = max(1, round(BURST_SECONDS / _step_seconds(config, problem.files)))
        cost = recording_cost(config, problem.files, rounds=max(problem.rounds, 3), burst=min(burst, 40))
        rows += [
            (SIZE, "a bare step", float(count), cost.bare_ms / 1e3),
            (SIZE, "what recording adds", float(count), (cost.recorded - 1) * cost.bare_ms / 1e3),
        ]
    return rows


def _checked(model: ModelConfig) -> ModelConfig:
    return msgspec.convert(msgspec.to_builtins(model), ModelConfig)  # `replace` does not check


def _step_seconds(config: TrainConfig, files: list[Path]) -> float:
    perform = plain_step(build(config, files))
    perform()
    began = time.perf_counter()
    perform()
    return time.perf_counter() - began


def _by_steps(problem: Problem, most: int, say: Callable[[str], None]) -> list[tuple[str, str, float, float]]:
    """One run of a small model, looked at from fresh processes each time it is ten times as long."""
    model = msgspec.structs.replace(problem.config.model, depth=1, width=16, heads=1, ctx=8)
    config = msgspec.structs.replace(problem.config, model=model, batch=2)
    own, path, rows = build(config, problem.files), problem.scratch / "long", list[tuple[str, str, float, float]]()
    rebuild = {"kind": "trainer", "config": msgspec.to_builtins(config)}
    parts = (own.model, own.optimizer, own.loss_fn, own.sampler)
    options = msgspec.to_builtins(own.options) | {"rebuild": rebuild, "data": problem.data, "spikes": None}
    begun, decades = None, [count for count in (10**power for power in range(2, 10)) if count <= most]
    for count in decades:
        say(f"recording up to step {count:,}")
        settings = options | {"save_every": 50, "keep_last": 3, "black_box": 0, "resume": begun is not None}
        with Recorder(path, *parts, **settings) as recorder:
            for batch in recorder.batches(count):
                recorder.step(batch)
        begun = count
        first, after = list[list[float]](), list[list[float]]()
        for _ in range(problem.rounds):
            shutil.rmtree(problem.scratch / "opened", ignore_errors=True)
            first.append(_opened(path, problem.scratch / "opened", count))
            after.append(_opened(path, problem.scratch / "opened", count))
        opening, replaying = (statistics.median(one[part] for one in after) for part in (0, 1))
        rows += [
            (STEPS, "opening, the first time", float(count), statistics.median(one[0] for one in first)),
            (STEPS, "opening, after that", float(count), opening),
            (STEPS, "replaying the last step", float(count), replaying),
        ]
    return rows


def _opened(path: Path, folder: Path, step: int) -> list[float]:
    command = [sys.executable, "-c", _CHILD, str(path), str(folder), str(step)]
    return json.loads(output_of(command, f"opening {path}")[0])
