"""Steps that are replayed together, in legs: those of a leg have their nearest checkpoint in common, and are rolled
forward to from it in an experiment that is built for them.

So a step has the same verdict however it was asked for: rolled on past a checkpoint, what no checkpoint holds would be
carried along, as a replay of the step alone does not. Knows plans; performs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from ..recorded.plan import Plan
from ..run import Run

ONE_EXPERIMENT = (
    "each checkpoint was restored into the one experiment that was given, so that Python state which no checkpoint "
    "holds went on from one to the next; with a factory instead (factory=, --factory) each has an experiment of its own"
)


def legs_of(run: Run, plan: Plan, checkpoint: int | None = None) -> list[Plan]:
    """A plan of one or several steps, ascending, cut where a later checkpoint is nearer than the one before.

    Args:
        checkpoint: from which the user asked to start; then all is one leg.
    """
    if checkpoint is not None or len(plan.steps) < 2:
        return [plan]
    before = run.checkpoints_before(plan.steps[-1], plan.segment)
    starts: list[tuple[int, int]] = []
    at = 0
    for step in plan.steps:
        while at < len(before) and before[at][0] < step:
            at += 1
        starts.append(before[at - 1] if at else plan.checkpoint)  # which may be thinned since
    cuts = [0, *(number for number in range(1, len(starts)) if starts[number] != starts[number - 1]), len(starts)]
    return [_leg(plan, plan.steps[low:high], starts[low]) for low, high in pairwise(cuts)]


def _leg(plan: Plan, steps: Sequence[int], start: tuple[int, int]) -> Plan:
    return replace(plan, steps=steps, checkpoint=start, rolled=steps[0] - 1 - start[0])
