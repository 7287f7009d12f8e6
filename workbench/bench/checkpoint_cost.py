"""What checkpoints cost: how long they hold up the loop, and how much longer it takes with one at every tenth step.

Recorders with and without them take turns in one run, so that a shared machine disturbs both alike.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from .. import deduplication
from ..environment import numeric_environment
from ..memory import state_size
from ..record import Recorder
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..trainer.recipe import TrainConfig, build


@dataclass(frozen=True)
class CheckpointCost:
    """Medians over rounds; seconds and bytes.

    Attributes:
        step_s: a recorded step without checkpoints.
        blocked_s: the loop's own work for one: capturing the state and handing it over.
        durable_s: from handing it over until it is on the disk, while training goes on.
        compared_s: of that, comparing the state with the checkpoint before it, to store once what did not change.
        raw_s: the floor: one write of as many bytes, and an fsync, with nothing else going on.
        ratio: time of `every` steps with one checkpoint to that of as many without.
        control: the same of two recorders without: differences below its distance from 1 can't be resolved.
        bytes: one checkpoint's; `new_bytes`: what a later one added to the disk; `state_bytes`: of the weights and the
            optimizer's arrays.
    """

    step_s: float
    blocked_s: float
    blocked: float
    durable_s: float
    compared_s: float
    raw_s: float
    ratio: float
    control: float
    bytes: int
    new_bytes: int
    state_bytes: int
    every: int
    rounds: int
    environment: dict[str, Any]


def checkpoint_cost(config: TrainConfig, files: list[Path], *, rounds: int, every: int = 10) -> CheckpointCost:
    """Measures in rounds; in each, three recorders perform `every` steps in turn, one of them with a checkpoint."""
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder, contextlib.ExitStack() as stack:

        def recording(name: str, save_every: int) -> Recorder:
            own = build(config, files)
            parts = (own.model, own.optimizer, own.loss_fn, own.sampler)
            options = msgspec.to_builtins(own.options)
            return stack.enter_context(Recorder(Path(folder) / name, *parts, **options, save_every=save_every))

        with_them, *without = recording("saving", every), recording("plain", 0), recording("control", 0)
        recorders = [with_them, *without]
        for recorder in recorders:  # compiles; and the first checkpoint falls into the first round
            recorder.step(next(recorder.experiment.sampler))
        blocked, durable, compared = _watched(with_them, stack)
        times: dict[int, list[float]] = {number: [] for number in range(len(recorders))}
        for turn in range(rounds):
            for number in [(turn + offset) % len(recorders) for offset in range(len(recorders))]:
                began = time.perf_counter()
                for _ in range(every):
                    recorders[number].step(next(recorders[number].experiment.sampler))
                times[number].append(time.perf_counter() - began)
        with_them._out.saves.checkpointer.wait()
        median = [statistics.median(values) for values in times.values()]
        saved = Path(folder) / "saving" / CHECKPOINTS
        size = sum(path.stat().st_size for path in saved.glob("00000000*"))
        raw = statistics.median(_raw(Path(folder), size) for _ in range(5))
        state = state_size(with_them.experiment)
        new = Run(Path(folder) / "saving").checkpoint_sizes()["new_bytes"].iloc[1:].median()
    return CheckpointCost(
        median[1] / every,
        statistics.median(blocked),
        statistics.median(blocked) / (median[1] / every),
        statistics.median(durable),
        statistics.median(compared),
        raw,
        median[0] / median[1],
        median[2] / median[1],
        size,
        int(new),
        state,
        every,
        rounds,
        numeric_environment(),
    )


def _watched(recorder: Recorder, stack: contextlib.ExitStack) -> tuple[list[float], list[float], list[float]]:
    """Lists that will hold how long each checkpoint kept the loop, how long it took in all, and of that, how long it
    was compared with the one before."""
    blocked: list[float] = []
    durable: list[float] = []
    compared: list[float] = []
    split, looking = deduplication.split, [0.0]
    stack.callback(setattr, deduplication, "split", split)
    checkpointer, captured = recorder._out.saves.checkpointer, recorder._standing.captured
    put, write = checkpointer.put, checkpointer.write
    began = [0.0]

    def timed_capture(*arguments: Any) -> Any:
        began[0] = time.perf_counter()
        return captured(*arguments)

    def timed_put(*arguments: Any) -> None:
        put(*arguments)
        blocked.append(time.perf_counter() - began[0])

    def timed_split(*arguments: Any) -> Any:
        start = time.perf_counter()
        found = split(*arguments)
        looking[0] += time.perf_counter() - start
        return found

    def timed_write(*arguments: Any) -> None:
        looking[0] = 0.0
        write(*arguments)
        compared.append(looking[0])
        durable.append(time.perf_counter() - began[0])

    for owner, name, timed in (
        (recorder._standing, "captured", timed_capture),
        (checkpointer, "put", timed_put),
        (checkpointer, "write", timed_write),
        (deduplication, "split", timed_split),
    ):
        setattr(owner, name, timed)
    return blocked, durable, compared


def _raw(folder: Path, size: int) -> float:
    content = os.urandom(1 << 20) * (size // (1 << 20) + 1)
    began = time.perf_counter()
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        left = memoryview(content)[:size]
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - began
