"""What recording costs: a recorded step beside the bare one, interleaved in one run, as a ratio of medians.

A timed test would measure the neighbours of a shared machine; two things measured in turn are disturbed alike.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec

from ..environment import numeric_environment
from ..experiment import Experiment, as_batch
from ..record import Recorder
from ..step import Stepper
from ..trainer.recipe import TrainConfig, build


@dataclass(frozen=True)
class Cost:
    """Medians in milliseconds a step, and ratios of each variant to the bare step measured beside it.

    Attributes:
        bare: the training loop anyone would write (`value_and_grad`, clipping, update, compiled), no workbench in it.
        unrecorded: the workbench's step, nothing measured (`--no-record`).
        recorded: the same with norms, batch hash, fingerprints and the telemetry line.
        boxless: the same without the black box, which holds the state before each step.
        control: the bare step against itself: differences below its distance from 1 can't be resolved.
    """

    bare_ms: float
    unrecorded_ms: float
    recorded_ms: float
    control: float
    unrecorded: float
    recorded: float
    boxless: float
    rounds: int
    environment: dict[str, Any]


def recording_cost(config: TrainConfig, files: list[Path], *, rounds: int, burst: int) -> Cost:
    """Measures in rounds; each runs a burst of every variant, in an order that turns from round to round.

    Args:
        rounds: how many times each variant has its turn.
        burst: steps a turn.
    """
    bare, plain = build(config, files), build(config, files)
    with tempfile.TemporaryDirectory(prefix="workbench-bench-") as folder, contextlib.ExitStack() as stack:

        def recording(name: str, **settings: Any) -> Callable[[], object]:
            own = build(config, files)
            parts = (own.model, own.optimizer, own.loss_fn, own.sampler)
            options = msgspec.to_builtins(own.options) | settings
            recorder = stack.enter_context(Recorder(Path(folder) / name, *parts, **options, save_every=0))
            return lambda: recorder.step(next(own.sampler))

        variants: dict[str, Callable[[], object]] = {
            "bare": _bare_step(bare),
            "unrecorded": _stepper(plain),
            "recorded": recording("recorded"),
            "boxless": recording("boxless", black_box=0),
        }
        variants["control"] = variants["bare"]
        for step in variants.values():
            step()  # compiles
        times: dict[str, list[float]] = {name: [] for name in variants}
        names = list(variants)
        for turn in range(rounds):
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                began = time.perf_counter()
                for _ in range(burst):
                    variants[name]()
                times[name].append((time.perf_counter() - began) / burst)
    median = {name: statistics.median(values) * 1e3 for name, values in times.items()}
    ratio = {name: median[name] / median["bare"] for name in names}
    return Cost(
        median["bare"],
        median["unrecorded"],
        median["recorded"],
        ratio["control"],
        ratio["unrecorded"],
        ratio["recorded"],
        ratio["boxless"],
        rounds,
        numeric_environment(),
    )


def _bare_step(experiment: Experiment) -> Callable[[], None]:
    """Written without the workbench, so that it shares none of its costs."""
    model, optimizer, options = experiment.model, experiment.optimizer, experiment.options
    value_and_grad = nn.value_and_grad(model, lambda *batch: experiment.loss_fn(model, *batch)[0])
    state = [model.state, optimizer.state, mx.random.state]
    optimizer.init(model.trainable_parameters())

    def step(*batch: mx.array) -> mx.array:
        loss, gradients = value_and_grad(*batch)
        if options.clip is not None:
            gradients, _ = optim.clip_grad_norm(gradients, options.clip)
        optimizer.update(model, gradients)
        return loss

    run = mx.compile(step, inputs=state, outputs=state) if options.compile else step

    def perform() -> None:
        loss = run(*(mx.array(array) for array in next(experiment.sampler)))
        mx.eval(loss, state)
        loss.item()

    return perform


def _stepper(experiment: Experiment) -> Callable[[], None]:
    stepper = Stepper(experiment)

    def perform() -> None:
        stepper(as_batch(next(experiment.sampler)))

    return perform
