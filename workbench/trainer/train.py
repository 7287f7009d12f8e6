"""The built-in trainer: a client of the core like any other loop. Trains what a recipe makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import msgspec
import numpy as np

from .. import snapshot
from ..experiment import Experiment, as_batch, read_cursor
from ..interrupts import Interrupted, interrupts
from ..manifest import DataFile
from ..ranks.world import first_signal
from ..record import Recorder
from ..sabotage.saboteur import Acts, Saboteur
from ..spikes import Reading
from ..step import Stepper
from .corpus import Corpus
from .data import split_point, validation_batches
from .model import Transformer, generate, token_losses
from .prefetch import Prefetcher
from .recipe import TrainConfig, build

VALIDATION_BATCHES = 8  # enough for a curve; the held-out tail may be long


class Watcher(Protocol):
    """What the trainer tells while it runs."""

    def on_step(self, step: int, loss: float, reading: Reading | None) -> None: ...
    def on_validation(self, step: int, loss: float) -> None: ...
    def on_sample(self, step: int, text: str) -> None: ...


def train(
    config: TrainConfig,
    files: Sequence[Path],
    out: Path | None,
    watcher: Watcher,
    *,
    data: Sequence[DataFile] = (),
    resume: bool | int = False,
    acts: Acts | None = None,
    **recording: Any,
) -> tuple[int, dict[str, str]]:
    """Trains, until `config.steps`.

    Args:
        out: the run's folder; None: train without telemetry or checkpoints.
        resume: as `Recorder`.
        acts: faults to plant while recording.
        recording: further arguments of `Recorder`.

    Returns:
        The last step, and the fingerprint of each lane of its state.

    Raises:
        Interrupted: Ctrl-C or SIGTERM came; the step under way was finished, and a recorded run's state is saved.
    """
    mx.set_default_device(mx.Device(mx.DeviceType.cpu if config.device == "cpu" else mx.DeviceType.gpu))
    experiment = build(config, files, prefetch=config.prefetch)
    held_out = _held_out(config, files)
    with contextlib.ExitStack() as stack:
        if isinstance(experiment.sampler, Prefetcher):
            stack.enter_context(experiment.sampler)
        interrupted = stack.enter_context(interrupts())
        loop: Recorder | _Bare
        if out is None:
            loop = _Bare(experiment)
        else:
            loop = (Recorder if acts is None else partial(Saboteur, acts))(
                out,
                experiment.model,
                experiment.optimizer,
                experiment.loss_fn,
                experiment.sampler,
                **msgspec.to_builtins(experiment.options),
                resume=resume,
                data=data,
                rebuild={"kind": "trainer", "config": msgspec.to_builtins(config)},
                **recording,
            )
        with loop:
            for batch in loop.batches(config.steps):
                value = loop.step(batch)
                watcher.on_step(loop.step_number, value, loop.reading)
                if loop.rolled_back is None:
                    _evaluate(config, experiment, files, held_out, loop, watcher)
                if number := first_signal(interrupted()):
                    saved = "nothing was recorded" if out is None else f"all is saved; go on with --out {out} --resume"
                    raise Interrupted(f"interrupted after step {loop.step_number}; {saved}", number)
        cursor = read_cursor(experiment.sampler)
        return loop.step_number, snapshot.capture(experiment, loop.step_number, cursor).lanes()


class _Bare:
    """The same loop without a record: the very step function that a recorder calls, and nothing measured."""

    def __init__(self, experiment: Experiment) -> None:
        self._stepper, self._sampler = Stepper(experiment), experiment.sampler
        self.step_number, self.reading, self.rolled_back = 0, None, None

    def __enter__(self) -> _Bare:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def batches(self, steps: int) -> Iterator[Any]:
        while self.step_number < steps:
            yield next(self._sampler)

    def step(self, batch: Any) -> float:
        result = self._stepper(as_batch(batch))
        self.step_number += 1
        return float(result.loss)

    def log_validation(self, loss: float) -> None:
        pass


def _held_out(config: TrainConfig, files: Sequence[Path]) -> list[Any]:
    if not config.val_every:
        return []
    corpus = Corpus.open(files[0])
    start = split_point(len(corpus), config.val_split, config.model.ctx)
    return validation_batches(corpus, config.batch, config.model.ctx, start, None, VALIDATION_BATCHES)


def _evaluate(
    config: TrainConfig,
    experiment: Experiment,
    files: Sequence[Path],
    held_out: list[Any],
    loop: Recorder | _Bare,
    watcher: Watcher,
) -> None:
    """Validation and samples. Neither draws from the global random state, so neither moves a bit of the run."""
    step, model = loop.step_number, experiment.model
    assert isinstance(model, Transformer)
    if config.val_every and step % config.val_every == 0:
        model.eval()
        losses = [mx.mean(token_losses(model, *as_batch(batch))) for batch in held_out]
        model.train()
        value = float(np.mean(np.array(mx.stack(losses)), dtype=np.float64))
        loop.log_validation(value)
        watcher.on_validation(step, value)
    if config.sample_every and step % config.sample_every == 0:
        corpus = Corpus.open(files[0])
        prompt = [int(token) for token in corpus.tokens[: min(8, config.model.ctx)]]
        tokens = generate(model, prompt, 120, temperature=0.8, key=mx.random.key(config.seed + step))
        watcher.on_sample(step, corpus.decode(prompt + tokens))
