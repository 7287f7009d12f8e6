"""Where a fork starts: a state of another run, proven to be that state, and what is changed in it.

    point = wb.fork_point("runs/mine", 4217, changes=["reset=v", "batch=skip"])
    with wb.Recorder("runs/fork", model, optimizer, loss_fn, sampler, fork=point) as recorder:

or, of a loop with a step of its own that hands over its batches:

    point = wb.fork_point("runs/mine", 4217, factory="my_loop.py")
    with wb.Recorder("runs/fork", model, optimizer, loss_fn, step_fn=step, fork=point) as recorder:

The parent is read, and never written to. Knows runs, states and replays; nothing of trainers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from . import state_edits
from .checkpoints import checkpoint_reader
from .errors import CheckpointError, ExperimentError, ReplayError
from .experiment import Experiment
from .fingerprint import known_method
from .interventions.changes import Change, parse_change
from .manifest import Parent
from .ranks.attendance import refuse_ranks
from .recorded.layout import CHECKPOINTS
from .replay import Progress, replay_steps
from .replaying.preparation import prepared, undisturbed
from .run import Run
from .seams import state_segment
from .snapshot import State

ONCE = ("drop-row", "v", "state")  # changes of one step only, which no run can go on with


@dataclass(frozen=True)
class ForkPoint:
    """Where a fork starts.

    Attributes:
        parent: where the state is from, and how the fork differs.
        state: the first state of the fork.
        skip: batches to draw and leave unused before the first step.
        rate_factor: what rollbacks of the parent have multiplied its schedules of learning rates by.
    """

    parent: Parent
    state: State
    skip: int = 0
    rate_factor: float = 1.0


def fork_point(
    run: Run | str | os.PathLike[str],
    step: int,
    *,
    changes: Sequence[str] = (),
    segment: int | None = None,
    experiment: Experiment | None = None,
    factory: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> ForkPoint:
    """The state of a run after a step, to start a run of your own loop from: `Recorder(…, fork=point)`.

    Without a checkpoint of that step the run is rolled forward to it from an earlier one, and every step on the way
    must have the run's bits.

    Args:
        step: the fork's first step will be the next one.
        changes: `reset=m`, `reset=v`, `reset=m,v` and `rng=SEED` are made in the state, and `batch=skip` draws a batch
            from the fork's sampler that no step uses; settings (`lr=0.5x`, `clip=off`, …) are your loop's to make, and
            only noted here. A loop that hands each batch to the recorder itself leaves one out itself, without
            `batch=skip`: the fork starts at state `step`, and its first batch is that of step `step` + 1 unless the
            loop hands over another.
        segment: where the state stands in several segments that differ.
        experiment, factory: as for `Run.replay` ("module:function", or the script that recorded the run); needed only
            where the run has to be rolled forward.

    Raises:
        ReplayError: the run has no such state, or its replay is not exact.
        CheckpointError, DataError, ExperimentError, EnvironmentMismatch: the state can't be had here.
    """
    run = run if isinstance(run, Run) else Run(Path(run))
    parsed = parse_changes(changes)
    if other := [change for change in parsed if change.name == "batch" and change.value != "skip"]:
        raise ExperimentError(f"change {other[0]} is for your sampler to make; expected batch=skip")
    state, holder = state_at(run, step, segment=segment, experiment=experiment, factory=factory, progress=progress)
    skip = sum(change.name == "batch" for change in parsed)
    noted = [f"--set {change}" for change in parsed]
    factor = run.manifest.segments[holder].rate_factor
    return ForkPoint(parent_of(run, step, holder, noted), changed_state(state, parsed), skip, factor)


def parse_changes(texts: Sequence[str]) -> list[Change]:
    """The changes of a fork.

    Raises:
        ExperimentError: one is malformed, stands twice, or is not one that a run can go on with.
    """
    parsed = [parse_change(text) for text in texts]
    for number, change in enumerate(parsed):
        if change.name in ONCE:
            raise ExperimentError(
                f"change {change} is of one step only, and a fork goes on; try it as an intervention: workbench whatif"
            )
        if change.name in [other.name for other in parsed[:number]]:
            raise ExperimentError(f"{change.name} is changed twice; expected one value")
    return parsed


def parent_of(run: Run, step: int, segment: int, changes: list[str]) -> Parent:
    """The record of where a fork came from."""
    return Parent(run.manifest.run, str(run.path.resolve()), step, segment, changes)


def changed_state(state: State, changes: Sequence[Change]) -> State:
    """The state with what is changed in it: moments set to zero, the random state."""
    for change in changes:
        if change.name == "reset":
            state = state_edits.zeroed(state, change.value)
        elif change.name == "rng":
            state = state_edits.seeded(state, change.value)
    return state


def state_at(
    run: Run,
    step: int,
    *,
    segment: int | None = None,
    experiment: Experiment | None = None,
    factory: str | None = None,
    progress: Progress = lambda done, total, what: None,
) -> tuple[State, int]:
    """The state of a run after a step, and the segment that it is of: read from a checkpoint, or rolled forward to.

    Raises:
        As `fork_point`.
    """
    refuse_ranks(run.manifest, run.path, "a fork")
    holder = _holder(run, step, segment)
    if (step, holder) in run.checkpoints:
        state = checkpoint_reader.read(run.path / CHECKPOINTS, step, holder, run.manifest.run)
        _refuse_other_state(run, state, holder)
        return state, holder
    _refuse_own_script(factory)
    plan = run.plan(step, holder, passes=2)
    ready = prepared(run, plan, experiment=experiment, factory=factory, other_environment=False)
    with undisturbed(), ready as at:
        (outcome,) = replay_steps(
            at.experiment,
            at.start,
            plan.steps,
            at.evidence,
            layers=run.manifest.layers,
            method=at.method,
            edits=at.edits,
            with_probe=False,
            progress=progress,
        )
    if not outcome.exact:
        where = outcome.first_difference
        raise ReplayError(
            f"state {step} of {run.path} has no checkpoint, and rolling forward to it from checkpoint "
            f"{plan.checkpoint[0]} is not exact{f' ({where.item} differs at step {where.step})' if where else ''}; "
            f"fork from a checkpoint: {[one for one, _ in run.checkpoints]}"
        )
    return outcome.after, holder


def _refuse_own_script(factory: str | None) -> None:
    """A script that asks to be run again, up to where it asks, would never end."""
    running = getattr(sys.modules.get("__main__"), "__file__", None)
    if factory and factory.endswith(".py") and running and Path(running).resolve() == Path(factory).resolve():
        raise ExperimentError(
            f"the script {factory} asks for a fork point itself, so it can't be run to rebuild the run; fork from "
            "another script, or pass the experiment (experiment=…) or a state that has a checkpoint"
        )


def _holder(run: Run, step: int, segment: int | None) -> int:
    """The segment whose state `step` is meant.

    Raises:
        ReplayError: there is no such state, or several that differ and none was chosen.
    """
    there, telemetry = run.checkpoints, run.telemetry
    began = [entry.segment for entry in run.manifest.segments if (entry.start, entry.segment) in there]
    having = {s for s in began if run.manifest.segments[s].start == step} | set(telemetry.segments_with(step))
    if segment is not None:
        having &= {state_segment(run.manifest, there, step, segment)}
        onward = run.manifest.lineage(segment, step + 1)  # what the state is to be the start of, on this way
        started = run.manifest.segments[onward].start == step and onward not in having
        if started and run.seam(onward):
            raise ReplayError(
                f"the state {step} from which segment {onward} of {run.path} started is not the one that the step had "
                f"left, and that segment has no checkpoint of it; fork from a checkpoint: {[one for one, _ in there]}"
            )
    if not having:
        first, last = run.manifest.segments[0].start, telemetry.last_step()
        of = "" if segment is None else f" on the way to segment {segment}"
        raise ReplayError(f"{run.path} has no state {step}{of}; it has states {first} to {last}")
    lanes = [_lanes(run.state_evidence(step, one)) for one in sorted(having)]
    if len(lanes) > 1 and not all(one and one == lanes[0] for one in lanes):
        how = "they differ" if all(lanes) else "the telemetry does not say whether they are the same"
        raise ReplayError(
            f"state {step} of {run.path} stands in segments {sorted(having)}, and {how}; choose one: "
            f"{', '.join(f'--from {step}.s{one}' for one in sorted(having))} (segment=…)"
        )
    return max(having, key=lambda one: ((step, one) in there, one))


def _lanes(evidence: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in evidence.items() if name.startswith("state.")}


def _refuse_other_state(run: Run, state: State, segment: int) -> None:
    lanes = state.lanes(known_method(run.manifest.fingerprint, run.path))
    recorded = run.state_evidence(state.step, segment)
    if unlike := [lane for lane, value in lanes.items() if recorded.get(f"state.{lane}", value) != value]:
        raise CheckpointError(
            f"checkpoint {state.step} of {run.path} is not the state that its telemetry recorded: {', '.join(unlike)} "
            "differ. Fork from another step (--from)."
        )
