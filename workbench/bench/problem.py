"""What the benchmark suite measures on: a GPT of one of two sizes on Shakespeare, for the workbench and for its peers.

The peers get the same shape, initial weights and batches, and the settings of AdamW, in a JSON file.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from ..environment import numeric_environment
from ..experiment import Experiment, as_batch
from ..interpreter import python_command
from ..manifest import DataFile
from ..share import shared
from ..step import Stepper
from ..trainer import training
from ..trainer.recipe import TrainConfig, build
from .child_output import output_of

# The two sizes of the published figures; `tiny` is smaller than the trainer's preset of that name.
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"preset": "tiny", "ctx": 32, "batch": 4},  # 2 blocks of width 64
    "small": {"preset": "small"},  # 6 blocks of width 384, 6 heads, ctx 128, batch 8: 10.7M parameters
}
BATCHES = 64  # that the peers take turns through
LR = 1e-3


@dataclass
class Problem:
    """
    Args:
        size: one of `SIZES`.
        scratch: a folder for runs and files.
        rounds: turns of each variant, and repetitions of each command.
    """

    size: str
    scratch: Path
    rounds: int
    config: TrainConfig = field(init=False)
    files: list[Path] = field(init=False)
    data: Sequence[DataFile] = field(init=False)

    def __post_init__(self) -> None:
        corpus = shared("data") / "shakespeare.txt"
        given = {"corpus": corpus, "steps": 10**6, "no_record": True, "device": "cpu", "max_lr": LR, "min_lr": LR}
        job = training.fresh(given | SIZES[self.size])
        self.config, self.files, self.data = job.config, list(job.files), job.data
        self.scratch.mkdir(parents=True, exist_ok=True)

    def build(self) -> Experiment:
        return build(self.config, self.files)

    @property
    def burst(self) -> int:
        """Steps a turn."""
        return {"tiny": 40, "small": 1}[self.size]

    def recorded(self, steps: int, save_every: int) -> Path:
        """A run of so many steps, recorded by another process; made at the first call.

        Raises:
            WorkbenchError: the training failed.
        """
        path = self.scratch / f"run-{steps}-{save_every}"
        if not path.exists():
            model = self.config.model
            command = python_command("workbench", "train", "--corpus", str(self.files[0]), "--out", str(path))
            command += ["--steps", str(steps), "--save-every", str(save_every), "--preset", SIZES[self.size]["preset"]]
            command += ["--ctx", str(model.ctx), "--batch", str(self.config.batch), "--device", "cpu"]
            output_of(command, "recording the run that the suite replays")
        return path

    def for_peers(self) -> Path:
        """The problem as a peer reads it."""
        path = self.scratch / "problem.json"
        if path.exists():
            return path
        experiment = self.build()
        weights, batches = self.scratch / "weights.safetensors", self.scratch / "batches.npz"
        mx.save_safetensors(str(weights), dict(tree_flatten(experiment.model.parameters())))
        drawn = [next(experiment.sampler) for _ in range(BATCHES)]
        x, y = (np.stack([np.asarray(batch[part]) for batch in drawn]) for part in (0, 1))
        np.savez(batches, x=x, y=y)
        document = {
            "model": msgspec.to_builtins(self.config.model),
            "adamw": msgspec.to_builtins(self.config.adamw),
            "lr": LR,
            "clip": self.config.clip,
            "threads": threads(),
            "weights": str(weights),
            "batches": str(batches),
            "scratch": str(self.scratch),
        }
        path.write_text(json.dumps(document))
        return path


def of_preset(preset: str, corpus: Path | None) -> tuple[TrainConfig, list[Path]]:
    """A training as `workbench train --preset` would start it, without end.

    Args:
        corpus: None: the plays that come with the workbench.
    """
    given = {"corpus": corpus or shared("data") / "shakespeare.txt", "steps": 10**6, "no_record": True}
    job = training.fresh(given | {"preset": preset})
    return job.config, list(job.files)


def plain_step(experiment: Experiment) -> Callable[[], None]:
    """Performs the next step of an experiment, measuring nothing."""
    stepper = Stepper(experiment)

    def perform() -> None:
        stepper(as_batch(next(experiment.sampler)))

    return perform


def median_seconds(work: Callable[[], object], count: int = 7) -> float:
    """Of so many calls; one more before them is not counted."""
    taken = []
    for _ in range(count + 1):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def threads() -> int:
    """Compute threads of MLX's BLAS, which the peers get too."""
    blas = numeric_environment()["blas"] or {}
    return int(blas.get("num_threads") or os.cpu_count() or 1)
