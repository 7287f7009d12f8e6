"""How a replay would be done: from which checkpoint, over how many steps, for how long."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import seams
from ..errors import ReplayError

if TYPE_CHECKING:
    from .recorded_run import RecordedRun


@dataclass(frozen=True)
class Plan:
    """How a replay would be done.

    Attributes:
        steps: the asked ones, ascending.
        segment: the segment they stand in.
        checkpoint: step and segment of the checkpoint to restore.
        rolled: steps to roll forward before the first asked one.
        seconds: estimate from the run's own step times, of the way and of the asked steps with all their passes; None
            if it logged none.
        notices: what the user should know.
        passes: how many times each asked step is computed.
    """

    steps: Sequence[int]
    segment: int
    checkpoint: tuple[int, int]
    rolled: int
    seconds: float | None
    notices: list[str] = field(default_factory=list)
    passes: int = 1

    def sentence(self) -> str:
        """Such as "17 steps to roll forward from checkpoint 4200, about 4 s"; of several steps, what is done with them
        is named, and at which speed."""
        cost = "" if self.seconds is None else f", about {duration(self.seconds)}"
        steps = f"{self.rolled:,} step{'' if self.rolled == 1 else 's'} to roll forward"
        then = ""
        if len(self.steps) > 1:
            times = _TIMES.get(self.passes, f"{self.passes} times")
            then = f", and {len(self.steps):,} to replay, each performed {times}"
            cost = cost and f"{cost} at the speed of the training, and what is measured on top"
        return f"{steps} from checkpoint {self.checkpoint[0]}{then}{cost}"


_TIMES = {1: "once", 2: "twice"}


def duration(seconds: float) -> str:
    """For people: such as "4 s", "12 min", "3.0 h"."""
    if seconds < 1:
        return "1 s"
    return (
        f"{seconds:.0f} s"
        if seconds < 90
        else f"{seconds / 60:.0f} min"
        if seconds < 5400
        else f"{seconds / 3600:.1f} h"
    )


def plan_replay(
    run: RecordedRun, steps: int | Sequence[int], segment: int | None, passes: int, checkpoint: int | None
) -> Plan:
    """What `RecordedRun.plan` returns; arguments and errors are described there."""
    asked = asked_steps(steps)
    if not len(asked):
        found = f"{steps.start}..{steps.stop - 1}" if isinstance(steps, range) and steps.step == 1 else str(steps)
        raise ReplayError(f"{found} is an empty range of steps; expected first..last with first <= last")
    chosen, notices = run.segment_of(asked[-1], segment)
    wanted = list(asked)
    for step in wanted:
        if run.line(step, chosen) is None:
            run.segment_of(step)  # says which steps there are
            raise ReplayError(f"step {step} is not on the way to segment {chosen}; replay it on its own")
    before = run.checkpoints_before(wanted[0], chosen)
    if not before:
        there = _named(run.checkpoints)
        raise ReplayError(f"no checkpoint of {run.path} comes before step {wanted[0]}; the run's checkpoints: {there}")
    wished = [key for key in before if checkpoint in (None, key[0])]
    if not wished:
        later = [key for key in run.checkpoints_before(2**62, chosen) if key not in before]
        there = f"{_named(before)} before it" + (f", and from there on {_named(later)}" if later else "")
        raise ReplayError(f"{run.path} has no checkpoint {checkpoint} before step {wanted[0]}; it has {there}")
    start = wished[-1]
    notices += seams.notices(run, chosen, start[0], wanted[-1])
    rolled = wanted[0] - 1 - start[0]
    speeds = run.telemetry.column("step_per_s")
    known = np.empty(0) if speeds is None else speeds[np.isfinite(speeds)]
    # The upper median: an estimate needs no better one, and `np.median` imports all of `numpy.ma`.
    speed = float(np.partition(known, len(known) // 2)[len(known) // 2]) if len(known) else 0.0
    count = rolled + (wanted[-1] - wanted[0] + 1 - len(wanted)) + passes * len(wanted)
    return Plan(wanted, chosen, start, rolled, count / speed if speed > 0 else None, notices, passes)


def _named(keys: Sequence[tuple[int, int]]) -> str:
    """Such as "0, 4, 8 of segment 1": checkpoints, the first ones and the last where there are many."""
    names = [f"{step} of segment {segment}" if segment else f"{step}" for step, segment in keys]
    return ", ".join(names if len(names) < 13 else [*names[:6], "...", *names[-6:]]) or "none"


def asked_steps(steps: Any) -> Sequence[int]:
    """A step or a range of them as a sequence; numpy's integers, as a DataFrame holds them, are steps too."""
    if isinstance(steps, range):
        return steps
    try:
        return [operator.index(step) for step in (steps if isinstance(steps, Sequence) else [steps])]
    except TypeError:
        raise ReplayError(f"{steps!r} is no step; expected a whole number from 1, or a range of them") from None


def asked_step(step: Any, has: str) -> int:
    """A single step.

    Args:
        has: what each step has of its own, so that several can't be asked for at once; for the sentence.

    Raises:
        ReplayError: it is none, or several.
    """
    asked = asked_steps(step)
    if len(asked) != 1:
        raise ReplayError(f"{step!r} is no single step; expected one, for each has {has} of its own")
    return asked[0]
