"""How a step stands that no rule of spike detection names, or could judge: in plain numbers, beside the few before it.

What rules ask at every step is asked once here, so that less has to be out of the ordinary. Knows a run's telemetry;
performs no step and imports no MLX.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from ..number_text import number
from ..spikes import SpikeSettings
from .alarm import Alarm, Metric, level, numbers

if TYPE_CHECKING:
    from ..run import Run

# Robust standard deviations above the steps before from which there is a rise to explain: C. Leys et al. (`spikes` has
# the reference) call 3 very conservative for a single sample, and a step that a person asks about is one. The 6 of the
# rules is for a question that is asked at every step.
ONCE = 3.0
# A loss that falls fast is below most of a window, and may rise unseen by that. So the last few steps are a yardstick
# of their own; the scatter of so few is poorly known, and the rules' own threshold has to do.
NEAR, NEAR_SIGMAS = 8, 6.0
SHOWN = 4  # values in a sentence


def standing(run: Run, alarm: Alarm, segment: int) -> tuple[Alarm, bool]:
    """A step that no rule names as it stands beside the healthy ones before it, and whether it rises above them.

    The loss is looked at, or where that does not rise, the gradient norm. It rises where it is more than `ONCE` robust
    standard deviations above the median of the steps before, as many as a rule's window has, or `NEAR_SIGMAS` above
    that of the last `NEAR`; with fewer than 4 before it, where it is a rule's factor above their median.

    Returns:
        The alarm, with no rule, and what stands out of the ordinary in `metric`, `value`, `usual`, `sigma`; its
        `explanation` has the numbers.
    """
    given = run.manifest.spikes
    settings = SpikeSettings() if given is None else SpikeSettings(**given)
    frame = run.history(segment, alarm.step, 6 * settings.window)
    steps = frame["step"].tolist()
    found: list[Alarm] = []
    metrics: tuple[Metric, ...] = ("loss", "grad_norm")
    for metric in metrics:
        *former, value = numbers(frame, metric) or [None]
        pairs = zip(steps, former, strict=False)
        there = [(step, one) for step, one in pairs if one is not None and math.isfinite(one)]
        there = there[-settings.window :]
        if value is None or not math.isfinite(value):
            continue
        words = "loss" if metric == "loss" else "gradient norm"
        said = f"the {words} of step {alarm.step} is {number(value)}"
        if there:
            last = there[-SHOWN:]
            amounts, which = (
                ", ".join(texts) for texts in zip(*((number(one), str(at)) for at, one in last), strict=True)
            )
            said += f", and that of step{'s' if len(last) > 1 else ''} {which} before it {amounts}"
        values = [one for _, one in there]
        for past, least in ((values, ONCE), (values[-NEAR:], NEAR_SIGMAS)):
            usual, sigma = level(past, metric)
            if past and math.isnan(usual):
                usual = sorted(past)[len(past) // 2]
            of = replace(alarm, metric=metric, value=value, usual=usual, sigma=sigma, explanation=said)
            if _rises(of, least, settings):
                return of, True
            found.append(of)
    return (found or [replace(alarm, explanation=f"step {alarm.step} has no loss in the log")])[0], False


def _rises(one: Alarm, least: float, settings: SpikeSettings) -> bool:
    if math.isnan(one.sigma):
        return one.value > settings.factor * one.usual > 0
    if one.metric == "grad_norm":
        return one.value > one.usual * math.exp(least * one.sigma)
    return one.value > one.usual + least * one.sigma
