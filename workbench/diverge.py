"""The divergence ladder: one step of a run performed in other and other ways, each compared with the recorded way.

From the nearest way, the same process again, to the farthest, another device: where a rung is not equal, the first
tensor that differs is named. Nothing is written, and what an intervention gives is never called a replay.
The bridge between run folders and `ways`; see `ladder` for what comes back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import msgspec

from . import own_step, worker
from .checkpoints import checkpoint_reader
from .divergence import fresh_process
from .divergence.difference import TensorDifference
from .divergence.ladder import Departure, Ladder, Rung, Verdict
from .divergence.tensors import Tensors, differing, state_tensors, step_tensors
from .divergence.ways import Way, first_departing_step
from .environment import numeric_environment
from .errors import CheckpointError, ExperimentError, ReplayError
from .experiment import Experiment
from .recorded.layout import CHECKPOINTS
from .replay import Outcome, Progress, replay_steps
from .replaying.preparation import Prepared, prepared, undisturbed
from .run import Run
from .snapshot import State

RUNGS = ("same process", "another thread", "fresh process", "compile", "deterministic", "device")


def diverge_run(run: Run, step: int, **options: Any) -> Ladder:
    """See `Run.diverge`."""
    with undisturbed():
        return _diverge_run(run, step, **options)


def _diverge_run(
    run: Run,
    step: int,
    *,
    segment: int | None,
    experiment: Experiment | None,
    factory: str | None,
    other_environment: bool,
    checkpoint: int | None,
    rungs: Sequence[str] | None,
    variables: Mapping[str, str],
    bisect: bool,
    progress: Progress,
) -> Ladder:
    chosen = RUNGS if rungs is None else tuple(rungs)
    if unknown := [name for name in chosen if name not in RUNGS]:
        raise ReplayError(f"{unknown[0]!r} is no rung; expected some of {', '.join(RUNGS)}")
    names = (*chosen, *(f"{name}={value}" for name, value in variables.items()))
    plan = run.plan(step, segment, passes=2 + len(names), checkpoint=checkpoint)
    rebuilt, tried = experiment is None, plan.rolled + 2
    with prepared(run, plan, experiment=experiment, factory=factory, other_environment=other_environment) as ready:
        committed = _committed(ready, step)
        (outcome,) = replay_steps(
            ready.experiment,
            ready.start,
            plan.steps,
            ready.evidence,
            layers=run.manifest.layers,
            method=ready.method,
            checkpoint=lambda _: committed,
            edits=ready.edits,
            with_probe=False,
            progress=lambda done, _, what: progress(done, tried + len(names), what),
        )
        climb = _Climb(ready, outcome, factory, rebuilt, bisect)
        found: list[Rung] = []
        for name in names:
            progress(tried + len(found), tried + len(names), f"step {step}: {name}")
            found.append(climb.rung(name, lambda what: progress(tried + len(found), tried + len(names), what)))
        progress(tried + len(names), tried + len(names), "compared")
    return Ladder(
        run=run.name,
        step=step,
        segment=run.manifest.lineage(plan.segment, step),
        checkpoint=plan.checkpoint[0],
        options=msgspec.to_builtins(ready.experiment.options),
        record=_against_record(run, outcome, committed),
        rungs=found,
        environment=ready.here,
        environment_differences=ready.unlike,
        notices=ready.notices,
    )


def _committed(ready: Prepared, step: int) -> State | None:
    """The run's own checkpoint of the step, to compare with; a damaged one is no reason not to climb."""
    run = ready.run
    key = (step, run.manifest.lineage(ready.plan.segment, step))
    if key not in run.checkpoints:
        return None
    try:
        return checkpoint_reader.read(run.path / CHECKPOINTS, *key, run.manifest.run)
    except CheckpointError as error:
        ready.notices.append(f"checkpoint {step} was not compared: {error}")
        return None


def _against_record(run: Run, outcome: Outcome, committed: State | None) -> Rung:
    """The recorded way against the run: by what telemetry holds, and tensor by tensor where there is a checkpoint."""
    gate, departed = outcome.gates.faithful, outcome.first_difference
    verdicts: dict[str, Verdict] = {"exact": "equal", "unverified": "unverified"}
    detail, first, count, compared = gate.explanation, None, 0, 0
    if departed is not None:
        more = f"; {len(departed.consequences)} more items differ" if departed.consequences else ""
        detail = f"first at step {departed.step} ({departed.where}) in {departed.item}: {departed.detail}{more}"
    if committed is not None:
        parameters = [path for layer in run.manifest.layers for path in run.manifest.owned[layer]]
        recorded, replayed = (state_tensors(parameters, state) for state in (committed, outcome.after))
        first, count = differing(recorded, replayed)
        compared = len(recorded)
    name = "the run's record"
    verdict = verdicts.get(gate.verdict, "differs")
    return Rung(name=name, verdict=verdict, detail=detail, compared=compared, differing=count, first=first)


@dataclass
class _Climb:
    """What every rung needs: the recorded way's tensors, and the states to start from."""

    ready: Prepared
    outcome: Outcome
    factory: str | None
    rebuilt: bool  # from the manifest, so that another process can do it too
    bisect: bool

    def __post_init__(self) -> None:
        outcome, manifest = self.outcome, self.ready.run.manifest
        self.experiment, self.backend = self.ready.experiment, self.ready.backend
        self.reference: Tensors = step_tensors(
            manifest.layers, manifest.owned, outcome.batch, outcome.result, outcome.after
        )

    def rung(self, name: str, say: Callable[[str], None]) -> Rung:
        options = self.experiment.options
        if name == "same process":
            return self._repeated(name, self._here)
        if name == "another thread":
            if threading.current_thread().name == "workbench-replay":
                return _skipped(name, "this already is the background thread")  # which would wait for itself
            return self._repeated(name, self._in_thread)
        if name == "fresh process":
            return self._in_process(name, {})
        if name == "compile":
            named = f"compile={_word(not options.compile)}"
            if reason := _never_compiles():
                return _skipped(named, reason, intervention=True)
            try:
                return self._changed(named, say, compile=not options.compile)
            except own_step.NotCompilable as error:
                return _skipped(named, error.reason, intervention=True)
            except ExperimentError as error:
                if options.compile:
                    raise
                return _skipped(named, f"this step can't be compiled: {error}", intervention=True)
        if name == "deterministic":
            named = f"deterministic={_word(not options.deterministic)}"
            if self.backend == "cpu":
                return _skipped(named, "the same operations on the CPU: nothing is replaced there", intervention=True)
            return self._changed(named, say, deterministic=not options.deterministic)
        if name == "device":
            other = "gpu" if self.backend == "cpu" else "cpu"
            if not mx.is_available(mx.Device(mx.DeviceType.cpu if other == "cpu" else mx.DeviceType.gpu)):
                return _skipped(f"device={other}", f"this machine has no {other.upper()} that MLX can use", True)
            return self._intervened(f"device={other}", self._way(self.experiment, other), say)
        variable, _, value = name.partition("=")
        return self._in_process(name, {variable: value})

    # ---- repetitions

    def _here(self) -> Tensors:
        return self._way(self.experiment, self.backend).perform(self.outcome.before)

    def _in_thread(self) -> Tensors:
        done: list[Tensors] = []
        worker.submit(lambda: done.append(self._here())).result()
        return done[0]

    def _repeated(self, name: str, perform: Callable[[], Tensors]) -> Rung:
        return self._compared(name, *differing(self.reference, perform()))

    def _in_process(self, name: str, variables: Mapping[str, str]) -> Rung:
        if not self.rebuilt:
            return _skipped(name, "this experiment exists only in this process", intervention=bool(variables))
        first, count = fresh_process.perform(
            self.ready.run,
            self.outcome.before,
            self.reference,
            backend=self.backend,
            factory=self.factory,
            variables=variables,
        )
        return self._compared(name, first, count, intervention=bool(variables))

    # ---- interventions

    def _changed(self, name: str, say: Callable[[str], None], **option: bool) -> Rung:
        options = msgspec.structs.replace(self.experiment.options, **option)
        return self._intervened(name, self._way(replace(self.experiment, options=options), self.backend), say)

    def _intervened(self, name: str, way: Way, say: Callable[[str], None]) -> Rung:
        first, count = differing(self.reference, way.perform(self.outcome.before))
        departure = self._departure(way, lambda step: say(f"{name}: rolling to step {step}")) if self.bisect else None
        return self._compared(name, first, count, intervention=True, departure=departure)

    def _departure(self, way: Way, say: Callable[[int], None]) -> Departure:
        recorded, stop = self._way(self.experiment, self.backend), self.outcome.step
        found = first_departing_step(recorded, way, self.ready.start, stop, say)
        first = None
        if found.step is not None:
            first, _ = differing(recorded.perform(found.before), way.perform(found.before))
        return Departure(start=self.ready.start.step, stop=stop, step=found.step, computed=found.computed, first=first)

    def _way(self, experiment: Experiment, backend: str) -> Way:
        return Way(experiment, self.ready.run.manifest.layers, backend=backend, edits=self.ready.edits)

    def _compared(self, name: str, first: TensorDifference | None, count: int, **more: Any) -> Rung:
        verdict: Verdict = "equal" if first is None else "differs"
        return Rung(name=name, verdict=verdict, compared=len(self.reference), differing=count, first=first, **more)


def _skipped(name: str, reason: str, intervention: bool = False) -> Rung:
    return Rung(name=name, verdict="skipped", detail=reason, intervention=intervention)


def _word(on: bool) -> str:
    return "on" if on else "off"


def _never_compiles() -> str | None:
    """Why both settings are the same computation here, if they are."""
    if "MLX_DISABLE_COMPILE" in os.environ:
        return "MLX_DISABLE_COMPILE is set, so neither setting compiles"
    if (numeric_environment()["jit_compiler"] or "").startswith("none"):
        return "MLX finds no g++ and runs uncompiled in either setting"
    return None
