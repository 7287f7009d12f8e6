"""Which earlier update did the damage: one batch on each state from N-9 to N-1. Knows an inquiry."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..number_text import number
from .inquiry import Inquiry
from .precision_cause import broken_state

HALF = 0.5  # of the whole rise: one update that brings more did more than all others together
KEPT = 24  # step-times that must be left for finding out what of the update it was


@dataclass(frozen=True)
class Walk:
    """
    Attributes:
        batch: the step whose batch was used.
        values: what is out of the ordinary at N, of that batch, by state.
        update: the step whose update brought most of the rise.
        share: of the whole rise that it brought; 1 where it made finite values something else, NaN without a rise.
    """

    batch: int
    values: dict[int, float]
    update: int
    share: float

    @property
    def single(self) -> bool:
        """Whether one update did it."""
        return self.share >= HALF


def broken(inquiry: Inquiry) -> Walk | None:
    """The update after which a weight is not finite, where the scene holds it: no step is needed to find it."""
    found = broken_state(inquiry) if inquiry.alarm.rule == "non_finite" else None
    if found is None or found[0] <= inquiry.scene.first:
        return None
    update, path = found
    inquiry.found("broken weight", f"Update {update} left {path} not finite; before it every weight was.", "unknown")
    return Walk(inquiry.step, {}, update, 1.0)


def walk(inquiry: Inquiry, batch: int) -> Walk | None:
    """Performs a batch on each state; None, with a note, where there is no time for that."""
    trials, states = inquiry.trials, list(range(inquiry.earliest, inquiry.step))
    if len(states) < 2:
        inquiry.skip("walking back over the states before", f"the replay started from state {states[0]}")
        return None
    cost = sum(1 + inquiry.distance(state) for state in states if (state, batch) not in trials.shots)
    if not inquiry.affords(cost, "walking back over the states before", kept=KEPT):
        return None
    values = {state: inquiry.value(trials.shot(state, batch)) for state in states}
    heights = list(values.values())
    if inquiry.alarm.metric == "grad_norm":
        heights = [math.log(value) if value > 0 else -math.inf for value in heights]
    broken = [not math.isfinite(height) for height in heights]
    if any(broken):
        place = broken.index(True)
        update, share = (states[place], 1.0) if place else (states[0], math.nan)
    else:
        rises = np.diff(heights)
        place = int(np.argmax(rises))
        whole = heights[-1] - min(heights[: place + 1])
        update, share = states[place + 1], float(rises[place] / whole) if whole > 0 else math.nan
    found = Walk(batch, values, update, share)
    _say(inquiry, found)
    return found


def _say(inquiry: Inquiry, found: Walk) -> None:
    before, after = (found.values.get(state, math.nan) for state in (found.update - 1, found.update))
    sentence = (
        f"On the batch of step {found.batch} state {found.update - 1} has {inquiry.alarm.phrase} {number(before)}, and "
        f"state {found.update} has {number(after)}: "
    )
    if found.single:
        sentence += f"update {found.update} did more than all others together."
    else:
        sentence += "the largest rise of one update, and no single one did it."
    inquiry.found(
        "walk back", sentence, "unknown", **{f"state {state}": value for state, value in found.values.items()}
    )
