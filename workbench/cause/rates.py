"""Was it the learning rate? Steps whose rate is far above that of the steps before, and those steps with the usual one.

Knows an inquiry.
"""

from __future__ import annotations

import statistics

from ..bits import bits_float, json_float
from ..interventions.changes import Change, Times
from ..number_text import number
from .inquiry import Conclusion, Inquiry, Tried, setting

# A linear warm-up raises the rate to at most twice the median of the steps before (step 2 beside step 1, step 2n beside
# steps 1 to 2n - 1), and any decay lowers it: what is beyond is no schedule's ordinary course.
OUT_OF_LINE = 2.2
LASTS = "in a fork this holds from its first step on"
REACH = 24  # held steps whose rates are looked at: what they break may show late
BEFORE = 8  # steps whose median is the usual rate


def rate(inquiry: Inquiry, step: int) -> float | None:
    """The learning rate that a step used; None for an optimizer without one. Of several, the first."""
    if inquiry.scene.first < step <= inquiry.step:
        bits = inquiry.scene.moment(step).rates[0]
        return None if bits is None else float(bits_float(bits))
    line = inquiry.run.line(step, inquiry.scene.segment)
    logged = None if line is None else line.lr
    return float(logged) if isinstance(logged, int | float) else None


def usual_rate(inquiry: Inquiry, step: int) -> float | None:
    """The median rate of the steps before, without those that were out of line themselves."""
    found: list[float] = []
    for other in range(max(1, step - 3 * BEFORE), step):
        value = rate(inquiry, other)
        if value and (len(found) < 2 or value <= OUT_OF_LINE * statistics.median(found[-BEFORE:])):
            found.append(value)
    return statistics.median(found[-BEFORE:]) if found else None


def examine(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion where usual rates take the rise away."""
    step, known = inquiry.step, {}
    first = max(inquiry.scene.first, step - 1 - REACH) + 1
    for other in range(first, step):
        value, usual = rate(inquiry, other), usual_rate(inquiry, other)
        if value is not None and usual:
            known[other] = value, usual
    if not known:
        inquiry.skip("learning rate", "the optimizer keeps none in its state, or no earlier one is known")
        return None
    odd = [other for other, (value, usual) in known.items() if value > OUT_OF_LINE * usual]
    if not odd:
        value, usual = max(known.values(), key=lambda pair: pair[0] / pair[1])
        inquiry.refute(
            "schedule",
            f"no learning rate of steps {first} to {step - 1} is out of line: at most "
            f"{number(value / usual, 3)} times the usual one ({number(value, 3)} and {number(usual, 3)})",
        )
        return None
    first = odd[0]
    value, usual = known[first]
    more = f"; {len(odd)} steps did so" if len(odd) > 1 else ""
    inquiry.found(
        "learning rate",
        f"Step {first} used the learning rate {number(value)}, {number(value / usual, 3)} times the median of the "
        f"steps before, {number(usual)}{more}.",
        "schedule",
        rate=value,
        usual=usual,
        ratio=value / usual,
    )
    several = len(inquiry.scene.moment(first).rates) > 1
    if several:
        inquiry.skip("learning rates of the optimizers after the first", "the first one's stands for all")
    usually = Change("lr", Times(usual / value) if several else usual)
    redone = inquiry.tried("the usual learning rate", first, usually, steps=odd)
    if redone is None:
        return None
    where = f"step {first}" if len(odd) == 1 else f"steps {', '.join(map(str, odd))}"
    sentence = f"With the usual rate in {where}, step {step} has {inquiry.comparison(redone[-1])}"
    if not inquiry.gone(redone[-1]):
        inquiry.refute("schedule", f"{sentence}: the rise stays")
        return None
    inquiry.found("usual rate", f"{sentence}: the rise is gone.", "schedule", redone=inquiry.value(redone[-1]))
    return Conclusion(
        "schedule",
        f"The update of step {first} did it: its learning rate was {number(value)}, {number(value / usual, 3)} times "
        f"the usual {number(usual)}.",
        {"step": first, "lr": json_float(value), "usual_lr": json_float(usual), "ratio": value / usual},
        f"the same rise at step {step} with the usual learning rate in step {first}",
        [
            setting(f"lr={number(usual / value, 6)}x" if several else f"lr={number(usual, 6)}", first, note=LASTS),
            Tried("batch=skip", first, words=f"step {first} left out"),
            setting("clip=0.1", first),
        ],
    )
