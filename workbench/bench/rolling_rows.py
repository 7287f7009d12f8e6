"""Rows of the benchmark suite: a step of a roll-forward beside one of training, and what the probe pass takes."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from ..checkpoints.checkpoint_reader import read
from ..experiment import Experiment
from ..record import Recorder
from ..recorded.layout import CHECKPOINTS
from ..replay import replay_steps
from ..run import Run
from ..snapshot import State
from .peer import Peers
from .problem import Problem, plain_step
from .replay_rows import SAVE_EVERY, STEPS
from .suite_table import Measured

ROLLED = 6  # steps, of which the first compiles


def rolling(problem: Problem, peers: Peers, say: Callable[[str], None]) -> list[Measured]:
    """A step of a roll-forward beside a recorded step of training; a probed step beside a plain one, and its memory."""
    say("roll-forward and probe pass")
    run = Run(problem.recorded(STEPS, SAVE_EVERY))
    training_peak, replay_peak = _peak(lambda: _trained(problem)), _peak(lambda: _probed(problem, run))
    experiment, plain = problem.build(), plain_step(problem.build())
    own = problem.build()
    parts = (own.model, own.optimizer, own.loss_fn, own.sampler)
    options: dict[str, Any] = {"clip": own.options.clip, "compile": own.options.compile}
    taken: dict[str, list[float]] = {"plain": [], "recorded": [], "rolled": [], "probe": []}
    with Recorder(problem.scratch / f"training-{time.time_ns()}", *parts, **options, save_every=0) as recorder:
        for _ in range(2):  # the first step is performed twice
            recorder.step(next(own.sampler))
        plain()
        for turn in range(problem.rounds):
            say(f"roll-forward and probe pass, {turn + 1} of {problem.rounds}")
            for name, seconds in _timed_replay(experiment, run):
                if "rolling" in name:
                    taken["rolled"].append(seconds)
                elif "probe" in name:
                    taken["probe"].append(seconds)
            for _ in range(ROLLED - 1):
                taken["recorded"].append(_call(lambda: recorder.step(next(own.sampler))))
            taken["plain"].append(_call(plain))
    middle = {name: statistics.median(values) for name, values in taken.items()}
    pieces = {"a plain step": middle["plain"] * 1e3, "the probe pass": middle["probe"] * 1e3}
    return [
        Measured(
            "roll-forward",
            "a step of the roll-forward, checked, beside a recorded step of training",
            "× training",
            middle["rolled"] / middle["recorded"],
            1.02,
            1.0,
            noise=_spread(taken["recorded"]),
            parts={name: middle[name] * 1e3 for name in ("rolled", "recorded", "plain")},
        ),
        Measured(
            "probe",
            "a probed step: the exact one, and the probe pass with all its reductions",
            "× plain step",
            (middle["plain"] + middle["probe"]) / middle["plain"],
            1.8,
            1.0,
            parts=pieces,
        ),
        Measured("probe", "the probe pass by itself", "× plain step", middle["probe"] / middle["plain"], parts=pieces),
        Measured(
            "probe",
            "peak memory of replaying a probed step, its states included",
            "× a training loop's",
            replay_peak / training_peak,
            1.2,
            1.0,
            parts={"replay": replay_peak / 1e6, "training": training_peak / 1e6},
            parts_unit="MB",
        ),
    ]


def _call(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _start(run: Run) -> State:
    return read(run.path / CHECKPOINTS, 0, 0, run.manifest.run)


def _timed_replay(experiment: Experiment, run: Run) -> list[tuple[str, float]]:
    """What a replay with a roll-forward says that it does, and the seconds of each; the first step compiles and is left
    out."""
    times: list[tuple[str, float]] = []
    outcomes = replay_steps(
        experiment,
        _start(run),
        [ROLLED + 1],
        lambda step: run.evidence(step, 0) if step else {},
        layers=run.manifest.layers,
        repeat=lambda step: False,
        progress=lambda done, total, what: times.append((what, time.perf_counter())),
    )
    for _ in outcomes:
        pass
    return [(name, after - at) for (name, at), (_, after) in itertools.pairwise(times)][1:]


def _spread(values: Sequence[float]) -> float:
    """How far apart the medians of every other value are: what such a median is good for here."""
    return abs(statistics.median(values[::2]) / statistics.median(values[1::2]) - 1)


def _peak(work: Callable[[], object]) -> int:
    """Bytes that MLX held at the most during some work, above what it held before."""
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    work()
    return mx.get_peak_memory() - before


def _trained(problem: Problem) -> None:
    perform = plain_step(problem.build())
    for _ in range(3):
        perform()


def _probed(problem: Problem, run: Run) -> None:
    _timed_replay(problem.build(), run)
