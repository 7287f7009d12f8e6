"""Whole training steps, repeated from one state: in this process and in fresh ones, every tensor's bits compared.

Steps are performed by the `Stepper` that records and replays runs, so that what is examined is what will be used.
Knows experiments, states and runs; nothing of reports. `python -m workbench.examination.repeats JOB` is the fresh
process.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np

from ..checkpoints.checkpoint_reader import read
from ..errors import ReplayError, WorkbenchError
from ..experiment import Batch, Experiment, StepOptions, as_batch, read_cursor
from ..fingerprint import fingerprint
from ..interpreter import python_command
from ..rebuild import rebuild
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..snapshot import State, capture, restore
from ..step import Stepper, StepResult
from ..trainer.model import ModelConfig, build_model, loss

STEPS = 4  # of the small transformer: enough for a difference in a gradient to reach the loss, by way of the weights
PATIENCE = 300.0  # seconds for a fresh process; it takes a few


class Setting(msgspec.Struct, frozen=True):
    """How a step is performed: what a user chooses when recording."""

    dtype: str
    compile: bool
    deterministic: bool


Digests = dict[str, str]  # a fingerprint by name, in order of execution
Subject = Callable[[Setting], tuple[Stepper, State]]  # what performs steps in a setting, and the state to start from


class Job(msgspec.Struct, kw_only=True):
    """What a fresh process is asked to do: each setting once.

    Attributes:
        device: "cpu" or "gpu".
        run: folder of the run whose first step it is; None: the small transformer.
        factory: as for a replay.
    """

    device: str
    settings: list[Setting]
    steps: int
    run: str | None = None
    factory: str | None = None


# ---- what is repeated


def small_transformer(setting: Setting) -> Experiment:
    """A transformer of the built-in kind with everything that training one usually has: dropout, clipping, AdamW.

    Head size 64 and a length that is a multiple of 128, where CUDA takes cuDNN's fused attention backward.
    """
    large = mx.default_device().type == mx.DeviceType.gpu
    vocabulary, length, width, rows = (8192, 512, 512, 8) if large else (256, 128, 128, 1)
    config = ModelConfig(
        vocabulary=vocabulary,
        ctx=length,
        depth=2,
        width=width,
        heads=width // 64,
        dropout=0.1,
        dtype=setting.dtype,  # type: ignore[arg-type]  # checked by the model
    )
    mx.random.seed(5)
    return Experiment(
        build_model(config, seed=5),
        optim.AdamW(1e-3, betas=[0.9, 0.95], weight_decay=0.1, bias_correction=True),
        loss,
        _Tokens(vocabulary, rows, length),
        StepOptions(clip=1.0, compile=setting.compile, deterministic=setting.deterministic),
    )


class _Tokens:
    """Batches that depend on their number only; low tokens are frequent, as words in a text."""

    def __init__(self, vocabulary: int, rows: int, length: int) -> None:
        self._vocabulary, self._shape, self.number = vocabulary, (rows, length + 1), 0

    def __iter__(self) -> _Tokens:
        return self

    def __next__(self) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.Generator(np.random.Philox(key=[9, self.number]))
        self.number += 1
        tokens = (self._vocabulary * draw.random(self._shape) ** 3).astype(np.int32)
        return tokens[:, :-1], tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        self.number = cursor["number"]


def fresh_experiments(build: Callable[[Setting], Experiment]) -> Subject:
    """A newly built experiment for each setting, at its initial state."""

    def subject(setting: Setting) -> tuple[Stepper, State]:
        stepper = Stepper(build(setting))
        return stepper, capture(stepper.experiment, 0, read_cursor(stepper.experiment.sampler))

    return subject


def run_experiment(run: Run, experiment: Experiment | None, factory: str | None) -> tuple[Experiment, Subject]:
    """A run's own experiment, at its earliest checkpoint.

    Raises:
        ReplayError: it has no checkpoint.
        ExperimentError, DataError, CheckpointError: as for a replay.
    """
    if not run.checkpoints:
        raise ReplayError(f"{run.path} has no checkpoint, so there is no state to start from; record one step or more")
    start = read(run.path / CHECKPOINTS, *run.checkpoints[0], run.manifest.run)
    built = rebuild(run.manifest, run.path, factory) if experiment is None else experiment

    def subject(setting: Setting) -> tuple[Stepper, State]:
        options = msgspec.structs.replace(built.options, compile=setting.compile, deterministic=setting.deterministic)
        return Stepper(replace(built, options=options), run.manifest.layers), start

    return built, subject


# ---- repeating


def perform(stepper: Stepper, start: State, steps: int) -> Digests:
    """Restores the state, performs steps, and takes the fingerprint of all that they computed, in that order."""
    experiment = stepper.experiment
    restore(experiment, start)
    found: Digests = {}
    for number in range(1, steps + 1):
        try:
            batch = as_batch(next(experiment.sampler))
        except StopIteration:
            raise ReplayError(f"the sampler has no batch after step {start.step + number - 1}") from None
        where = f" (step {number})" if steps > 1 else ""
        found |= {name + where: digest for name, digest in digests(stepper, batch, stepper(batch))}
    lanes = capture(experiment, start.step + steps, read_cursor(experiment.sampler)).lanes()
    return found | {f"state ({lane})": digest for lane, digest in lanes.items()}


def digests(stepper: Stepper, batch: Batch, result: StepResult) -> Iterator[tuple[str, str]]:
    """Name and fingerprint of the batch and of all that a step returned, in order of execution."""
    yield "batch", fingerprint({str(number): array for number, array in enumerate(batch)})
    for layer in stepper.layers:
        if layer in result.activations:
            yield f"activation of {layer or '(model)'}", fingerprint({"": result.activations[layer]})
    yield "loss", result.loss.tobytes().hex()
    for layer in reversed(stepper.layers):  # gradients flow backwards
        for path in stepper.owned[layer]:
            yield f"gradient of {path}", fingerprint({"": result.gradients[path]})
    yield "gradient norm", result.grad_norm.tobytes().hex()


def repeat(
    stepper: Stepper, start: State, steps: int, repeats: int, seconds: float, disturb: Callable[[int], None]
) -> list[Digests]:
    """`perform`, again and again: at least twice, then until `repeats` or until the time is used up."""
    found: list[Digests] = []
    end = time.monotonic() + seconds
    while len(found) < 2 or (len(found) < repeats and time.monotonic() < end):
        disturb(len(found))
        found.append(perform(stepper, start, steps))
    return found


@dataclass(frozen=True)
class Tally:
    """Repetitions compared.

    Attributes:
        distinct: different results, all tensors together.
        counts: the same for each tensor, in order of execution.
        first: the first tensor that varies, in that order; None: all are alike.
    """

    distinct: int
    counts: dict[str, int]
    first: str | None


def tally(found: Sequence[Mapping[str, str]]) -> Tally:
    """Counts the different results. What one repetition lacks counts as different."""
    names = dict.fromkeys(name for digests in found for name in digests)
    counts = {name: len(Counter(digests.get(name) for digests in found)) for name in names}
    distinct = len({tuple(digests.get(name) for name in names) for digests in found})
    return Tally(distinct, counts, next((name for name, count in counts.items() if count > 1), None))


# ---- fresh processes


def in_fresh_processes(job: Job, count: int) -> list[list[Digests]]:
    """What `count` new processes, side by side, found: for each of them, the digests of each setting.

    Raises:
        ReplayError: one of them failed.
    """
    with _started([job] * count) as answers:
        return answers()


@contextlib.contextmanager
def one_process_each(job: Job) -> Iterator[Callable[[], list[Digests]]]:
    """As one fresh process would find it, with a process for each setting, at work while the block runs.

    What is yielded waits for them, and gives the digests of each setting, or raises as `in_fresh_processes` does. They
    are ended with the block.
    """
    with _started([msgspec.structs.replace(job, settings=[setting]) for setting in job.settings]) as answers:
        yield lambda: [found for (found,) in answers()]


@contextlib.contextmanager
def _started(jobs: Sequence[Job]) -> Iterator[Callable[[], list[list[Digests]]]]:
    with contextlib.ExitStack() as stack:
        children = []
        for job in jobs:
            command = python_command("workbench.examination.repeats", msgspec.json.encode(job).decode())
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.enter_context(child)
            stack.callback(child.kill)
            children.append(child)
        yield lambda: [_answer(child) for child in children]


def _answer(child: subprocess.Popen[str]) -> list[Digests]:
    try:
        out, said = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise ReplayError(f"a fresh process did not answer within {PATIENCE:.0f} s") from None
    try:
        if child.returncode == 0:
            return msgspec.json.decode(out, type=list[Digests])
    except msgspec.MsgspecError as error:
        said = f"its answer can't be read: {error}"
    last = (said.strip().splitlines() or [f"it said nothing, and ended with code {child.returncode}"])[-1]
    raise ReplayError(f"a fresh process failed: {last}")


def answer(job: Job) -> list[Digests]:
    """Does the job in this process."""
    mx.set_default_device(mx.Device(mx.DeviceType.cpu if job.device == "cpu" else mx.DeviceType.gpu))
    if job.run is None:
        subject = fresh_experiments(small_transformer)
    else:
        subject = run_experiment(Run(Path(job.run)), None, job.factory)[1]
    return [perform(*subject(setting), job.steps) for setting in job.settings]


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
            done = answer(msgspec.json.decode(sys.argv[1], type=Job))
    except WorkbenchError as problem:
        sys.exit(str(problem))
    sys.stdout.write(msgspec.json.encode(done).decode())
