"""A sample of a run's steps, proven by replay: each has the recorded bits, or a sentence says what stood against it.

What is proven of a step is what a replay of it alone shows: it starts from the nearest checkpoint, in an experiment
that is built for it. Rolled on from an older one, a step that depends on hidden Python state would have the run's bits,
and no checkpoint be tried.

Knows run folders and replays; writes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import (
    ChangedByHand,
    CheckpointError,
    DataError,
    EnvironmentMismatch,
    ExperimentError,
    ReplayError,
    TelemetryError,
)
from .fan_out import WorkerLost, fan_out
from .ranks.attendance import setup_of
from .replay import Outcome, replay_steps
from .replaying.fallback import entered
from .replaying.legs import ONE_EXPERIMENT
from .replaying.preparation import Prepared, undisturbed
from .replaying.reasons import reasons
from .run import Run
from .verification import Check, Verdict

if TYPE_CHECKING:
    from .experiment import Experiment

Progress = Callable[[int, int, str], None]
# What damage on disk raises. That a run can't be rebuilt, or not on this machine, is no finding about the run.
_DAMAGE = (CheckpointError, DataError, ReplayError, TelemetryError)
_NOT_HERE = (EnvironmentMismatch, ExperimentError)


def sample(run: Run, count: int, seed: int) -> list[tuple[int, int]]:
    """(segment, step) of so many steps, spread over the run: one drawn from each of `count` equal stretches of all the
    steps that have a checkpoint before them.

    In every second stretch that has some it is the first step after a checkpoint: there a run and its replay part first
    if a step depends on what no checkpoint holds.
    """
    telemetry = run.telemetry  # once: it is read again when the run has gone on
    columns = [telemetry.column(name) for name in ("segment", "step")]
    if columns[0] is None or columns[1] is None:
        return []
    pairs = sorted(zip(columns[0].tolist(), columns[1].tolist(), strict=True))
    first = {entry.segment: min((step for step, _ in run.checkpoints_before(2**62, entry.segment)), default=None)
             for entry in run.manifest.segments}  # fmt: skip
    able = [(segment, step) for segment, step in pairs if (low := first.get(segment)) is not None and step > low]
    draw, count = random.Random(seed), min(count, len(able))
    bounds = [round(number * len(able) / count) for number in range(count + 1)] if count else []
    committed, found, turn = set(run.checkpoints), list[tuple[int, int]](), True
    for low, high in zip(bounds, bounds[1:], strict=False):
        stretch = able[low:high]
        after = [
            (segment, step)
            for segment, step in stretch
            if (step - 1, run.manifest.lineage(segment, step - 1)) in committed
        ]
        found.append(draw.choice(after if after and turn else stretch))
        turn = not (after and turn)
    return found


def replayed(
    run: Run,
    count: int,
    seed: int,
    notices: list[str],
    progress: Progress,
    *,
    experiment: Experiment | None,
    lost: bool = False,
    workers: int | None = None,
    **options: Any,
) -> tuple[list[Check], int]:
    """Replays a sample, each step from the nearest checkpoint, in an experiment built anew; those that share one in a
    single roll-forward.

    Args:
        experiment: given, there is no other to restore into: a notice says what that leaves open.
        lost: a data file is not there, which says nothing against the run.
        workers: processes to spread the groups over; None: all in this one, as those of an `experiment` are.

    Returns:
        A check of kind "step" for each of the sample, and how many steps were performed only to reach those. A step
        that can't be reached, for something of the run is damaged, is a mismatch too. Where the experiment can't be had
        here, or not for these steps, they are unverified: that is no finding about the run.
    """
    if (setup := setup_of(run.manifest)) is not None:
        why = f"the steps of {setup.size} ranks are performed by all of them; prove one by `workbench replay`"
        return [not_replayed(f"{count} to sample", why, "unverified")], 0
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for segment, step in sample(run, count, seed):
        groups.setdefault((segment, run.checkpoints_before(step, segment)[-1]), []).append(step)
    if not groups:
        return [not_replayed(f"{count} to sample", "none has a checkpoint before it", "unverified")], 0
    total = sum(max(steps) - start for (_, (start, _)), steps in groups.items())
    if workers is not None and experiment is None:
        return _apart(run, groups, count, total, notices, progress, workers, lost=lost, **options)
    checks, done, way = list[Check](), 0, 0
    if experiment is not None and len(groups) > 1 and run.manifest.rebuild.get("kind") != "trainer":
        notices.append(ONE_EXPERIMENT)
    for (segment, (start, _)), steps in groups.items():

        def report(ahead: int, all_: int, what: str, before: int = done) -> None:
            progress(before + ahead, total, what)

        try:
            found = _group(run, segment, start, steps, report, experiment=experiment, lost=lost, **options)
        except _NOT_HERE as error:
            if not checks:
                return [_none_replayed(count, error)], 0
            checks += _unreached(segment, steps, error)
            continue
        checks += found.checks
        notices += found.notices
        way, done = way + found.way, done + max(steps) - start
    return checks, way


@dataclass
class _Proven:
    """Of one group.

    Attributes:
        way: steps that were performed only to reach others.
    """

    checks: list[Check]
    notices: list[str]
    way: int


def _group(
    run: Run,
    segment: int,
    start: int,
    steps: list[int],
    progress: Progress,
    *,
    experiment: Experiment | None,
    lost: bool,
    **options: Any,
) -> _Proven:
    found, waiting = _Proven([], [], 0), list(steps)
    try:
        ready = None
        for ready, outcome in outcomes_of(run, steps, segment, experiment=experiment, progress=progress, **options):
            found.checks.append(_check(outcome, ready, segment))
            waiting.remove(outcome.step)
        if ready is not None:
            found.notices += ready.notices
            start = ready.plan.checkpoint[0]  # an earlier one, where it is gone since
    except _NOT_HERE:  # the one is a ReplayError, too
        raise
    except ChangedByHand as error:  # nothing was performed yet
        able = [step for step in waiting if error.step is not None and step < error.step]
        if able:
            found = _group(run, segment, start, able, progress, experiment=experiment, lost=lost, **options)
        beyond = [step for step in waiting if step not in able]
        found.checks += [not_replayed(f"{step}, segment {segment}", str(error), "unverified") for step in beyond]
        return found
    except _DAMAGE as error:
        gone = isinstance(error, CheckpointError) and start not in {step for step, _ in run.checkpoints}  # thinned
        verdict: Verdict = "unverified" if gone or lost and isinstance(error, DataError) else "mismatch"
        found.checks += [not_replayed(f"{step}, segment {segment}", str(error), verdict) for step in waiting]
    reached = [step for step in steps if step not in waiting]
    found.way = max(reached, default=start) - start - len(reached)
    return found


def outcomes_of(
    run: Run,
    steps: Sequence[int],
    segment: int,
    *,
    experiment: Experiment | None,
    progress: Progress = lambda done, total, what: None,
    **options: Any,
) -> Iterator[tuple[Prepared, Outcome]]:
    """Replays steps, ascending, in one roll-forward from the checkpoint before the first; each compared, none repeated.

    Args:
        steps: for all of which that checkpoint is the nearest; else those after a later one are not what a replay of
            them alone is.
        experiment: None: one is built for these steps.

    Raises:
        EnvironmentMismatch, ExperimentError, CheckpointError, DataError, ReplayError: as `Run.replay`.
    """
    plan = run.plan(steps, segment, passes=1)
    with ExitStack() as stack:
        ready = entered(stack, run, plan, damaged=False, experiment=experiment, **options)
        for outcome in replay_steps(
            ready.experiment,
            ready.start,
            plan.steps,
            ready.evidence,
            layers=run.manifest.layers,
            method=ready.method,
            checkpoint=ready.committed,
            edits=ready.edits,
            with_probe=False,
            repeat=lambda step: False,
            progress=progress,
        ):
            yield ready, outcome


def _apart(
    run: Run,
    groups: dict[tuple[int, tuple[int, int]], list[int]],
    asked: int,
    total: int,
    notices: list[str],
    progress: Progress,
    workers: int,
    **options: Any,
) -> tuple[list[Check], int]:
    """The groups, each in another process."""
    jobs = [(str(run.path), segment, start, steps, options) for (segment, (start, _)), steps in groups.items()]
    count = 0

    def done(number: int, result: Any) -> None:
        nonlocal count
        count += max(jobs[number][3]) - jobs[number][2]
        progress(count, total, f"steps {min(jobs[number][3])} to {max(jobs[number][3])}")

    progress(0, total, f"{len(jobs)} roll-forwards")
    checks, way = list[Check](), 0
    for (_, segment, _, steps, _), found in zip(
        jobs, fan_out(_in_worker, jobs, workers=workers, done=done), strict=True
    ):
        if isinstance(found, WorkerLost):
            checks += [not_replayed(f"{step}, segment {segment}", str(found), "unverified") for step in steps]
        elif isinstance(found, _NOT_HERE):
            if not checks:
                return [_none_replayed(asked, found)], 0
            checks += _unreached(segment, steps, found)
        elif isinstance(found, Exception):
            raise found
        else:
            checks += found.checks
            notices += found.notices
            way += found.way
    return checks, way


def _in_worker(job: tuple[str, int, int, list[int], dict[str, Any]]) -> _Proven:
    path, segment, start, steps, options = job
    with undisturbed():
        return _group(Run(Path(path)), segment, start, steps, _unseen, experiment=None, **options)


def _unseen(done: int, total: int, what: str) -> None:
    """Progress that nobody sees."""


def _check(outcome: Outcome, ready: Prepared, segment: int) -> Check:
    name = f"{outcome.step}, segment {segment}"
    if (difference := outcome.first_difference) is not None:
        where = f"{difference.item} at step {difference.step} ({difference.where}): {difference.detail}"
        noted = "" if ready.unlike else " ".join(reasons(ready, segment, difference.step))
        return Check("step", name, "mismatch", f"the first difference is {where}" + (f". {noted}" if noted else ""))
    if not outcome.exact:
        return Check("step", name, "unverified", outcome.gates.faithful.explanation)
    if ready.unlike:
        return Check("step", name, "unverified", f"informational: {'; '.join(ready.unlike)}")
    compared = sum(item.verdict == "exact" for item in outcome.items.values())
    checkpoint = ready.plan.checkpoint[0]
    silent = [item for item in outcome.items if outcome.items[item].verdict == "unverified" and item != "checkpoint"]
    rest = f"; not recorded: {', '.join(silent)}" if silent else ""
    return Check("step", name, "exact", f"all {compared} recorded items, from checkpoint {checkpoint}{rest}")


def not_replayed(what: str, reason: str, verdict: Verdict = "mismatch") -> Check:
    """A step that no replay reached, and why."""
    return Check("step", what, verdict, f"could not be replayed: {reason}")


def _none_replayed(count: int, error: Exception) -> Check:
    return not_replayed(f"{count} to sample", str(error).rstrip("."), "unverified")


def _unreached(segment: int, steps: Sequence[int], error: Exception) -> list[Check]:
    return [not_replayed(f"{step}, segment {segment}", str(error).rstrip("."), "unverified") for step in steps]
