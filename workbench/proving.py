"""A sample of a run's steps, proven by replay: each has the recorded bits, or a sentence says what stood against it.

Knows run folders and replays; writes nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, DataError, EnvironmentMismatch, ReplayError, TelemetryError
from .replay import Outcome, replay_steps
from .run import Run
from .session import Prepared, prepared
from .verification import Check, Verdict

if TYPE_CHECKING:
    from .experiment import Experiment

Progress = Callable[[int, int, str], None]
# What damage on disk raises. That a run can't be rebuilt, or not on this machine, is no finding about the run.
_DAMAGE = (CheckpointError, DataError, ReplayError, TelemetryError)


def sample(run: Run, count: int, seed: int) -> list[tuple[int, int]]:
    """(segment, step) of so many steps, spread over the run: one drawn from each of `count` equal stretches of all the
    steps that have a checkpoint before them."""
    columns = [run.telemetry.column(name) for name in ("segment", "step")]
    if columns[0] is None or columns[1] is None:
        return []
    pairs = sorted(zip(columns[0].tolist(), columns[1].tolist(), strict=True))
    first = {entry.segment: min((step for step, _ in run.checkpoints_before(2**62, entry.segment)), default=None)
             for entry in run.manifest.segments}  # fmt: skip
    able = [(segment, step) for segment, step in pairs if (low := first.get(segment)) is not None and step > low]
    draw, count = random.Random(seed), min(count, len(able))
    bounds = [round(number * len(able) / count) for number in range(count + 1)] if count else []
    return [able[draw.randrange(low, high)] for low, high in zip(bounds, bounds[1:], strict=False)]


def replayed(
    run: Run,
    count: int,
    seed: int,
    notices: list[str],
    progress: Progress,
    *,
    experiment: Experiment | None,
    lost: bool = False,
    **options: Any,
) -> tuple[list[Check], int]:
    """Replays a sample, each step from the nearest checkpoint; those that share one in a single roll-forward.

    Args:
        lost: a data file is not there, which says nothing against the run.

    Returns:
        A check of kind "step" for each of the sample, and how many steps were performed only to reach those. A step
        that can't be reached, for something of the run is damaged, is a mismatch too.

    Raises:
        EnvironmentMismatch, ExperimentError: the experiment can't be had here at all.
    """
    groups: dict[tuple[int, tuple[int, int]], list[int]] = {}
    for segment, step in sample(run, count, seed):
        groups.setdefault((segment, run.checkpoints_before(step, segment)[-1]), []).append(step)
    if not groups:
        return [not_replayed(f"{count} to sample", "none has a checkpoint before it", "unverified")], 0
    total = sum(max(steps) - start for (_, (start, _)), steps in groups.items())
    checks, done, way = list[Check](), 0, 0
    for (segment, (start, _)), steps in groups.items():

        def report(ahead: int, all_: int, what: str, before: int = done) -> None:
            progress(before + ahead, total, what)

        waiting = list(steps)
        try:
            plan = run.plan(steps, segment, passes=1)
            with prepared(run, plan, experiment=experiment, **options) as ready:
                experiment = ready.experiment  # built once
                outcomes = replay_steps(
                    ready.experiment,
                    ready.start,
                    plan.steps,
                    ready.evidence,
                    layers=run.manifest.layers,
                    method=ready.method,
                    edits=ready.edits,
                    with_probe=False,
                    repeat=lambda step: False,
                    progress=report,
                )
                for outcome in outcomes:
                    checks.append(_check(outcome, ready, segment))
                    waiting.remove(outcome.step)
                notices += ready.notices
        except EnvironmentMismatch:  # a ReplayError too
            raise
        except _DAMAGE as error:
            verdict: Verdict = "unverified" if lost and isinstance(error, DataError) else "mismatch"
            checks += [not_replayed(f"{step}, segment {segment}", str(error), verdict) for step in waiting]
        done += max(steps) - start
        reached = [step for step in steps if step not in waiting]
        way += max(reached, default=start) - start - len(reached)
    return checks, way


def _check(outcome: Outcome, ready: Prepared, segment: int) -> Check:
    name = f"{outcome.step}, segment {segment}"
    if (difference := outcome.first_difference) is not None:
        where = f"{difference.item} at step {difference.step} ({difference.where}): {difference.detail}"
        return Check("step", name, "mismatch", f"the first difference is {where}")
    if not outcome.exact:
        return Check("step", name, "unverified", outcome.gates.faithful.explanation)
    if ready.unlike:
        return Check("step", name, "unverified", f"informational: {'; '.join(ready.unlike)}")
    compared = sum(item.verdict == "exact" for item in outcome.items.values())
    checkpoint = ready.plan.checkpoint[0]
    return Check("step", name, "exact", f"all {compared} recorded items, from checkpoint {checkpoint}")


def not_replayed(what: str, reason: str, verdict: Verdict = "mismatch") -> Check:
    """A step that no replay reached, and why."""
    return Check("step", what, verdict, f"could not be replayed: {reason}")
