"""Whether a step is out of the ordinary by the rules of spike detection, and where the spike it stands in began.

Spike detection is debounced: after a firing it stays silent. Here every step is judged, against the same healthy past.
Knows a run's telemetry; performs no step and imports no MLX.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from msgspec import UNSET

from ..detection.spike_table import recorded
from ..detection.window import NORMAL_SIGMA_PER_MAD
from ..spikes import LOG_GRAD_NORM_SIGMA_FLOOR, LOSS_SIGMA_FLOOR, SMALLEST_WINDOW, SpikeDetector, SpikeSettings

if TYPE_CHECKING:
    from ..run import Run

GAP = 2  # unflagged steps within one spike: a loss that comes down may dip below the threshold
LEFT = 1 / 3  # of a rise: what is left when the two thirds are gone that make a carrier (`intervene.SHARE`)
Metric = Literal["loss", "grad_norm"]


class _Judge(SpikeDetector):
    """A detector that is never debounced."""

    def update(self, step: int, loss: float | None, grad_norm: float | None) -> Any:
        self._quiet_loss = self._quiet_norm = 0
        return super().update(step, loss, grad_norm)

    def full(self, metric: Metric) -> bool:
        """Whether the window of what a step logged is full before it."""
        return (self._losses if metric == "loss" else self._log_norms).full


@dataclass(frozen=True)
class Alarm:
    """How a step stands in the run's own recent past.

    Attributes:
        step: the step.
        rule: of spike detection that it breaks; None: it breaks none.
        metric: what is out of the ordinary; the loss where nothing is.
        value: of it, as logged; NaN where it was not logged.
        usual: median of the healthy steps before; NaN without any.
        sigma: robust standard deviation, of the loss, or of the logarithm of the gradient norm.
        usual_loss, loss_sigma: median and robust standard deviation of the loss, whatever `metric` is.
        began: first step of the spike that it stands in; the step itself where no rule names it.
        explanation: a sentence fragment.
        judged: whether the rules on levels had enough steps before it: whose loss was logged, or where the step has
            none, whose gradient norm was.
        told: why the recorder called it unstable when it logged it (see `recovery`); None: it did not.
    """

    step: int
    rule: str | None
    metric: Metric
    value: float
    usual: float
    sigma: float
    usual_loss: float
    loss_sigma: float
    began: int
    explanation: str
    judged: bool
    told: str | None = None

    def rise(self, value: float) -> float:
        """How much of the step's rise a value has: 1 is all of it, 0 none. Any value that is not finite has all; where
        the step's own is not finite, a rise of `usual` itself (a loss twice as high) counts as all."""
        if not math.isfinite(value):
            return 1.0
        if not math.isfinite(self.value) and not math.isfinite(self.usual):
            return 0.0  # finite again, and nothing to compare it with
        of = (lambda x: math.log(x) if x > 0 else -math.inf) if self.metric == "grad_norm" else float
        usual = of(self.usual)
        height = of(self.value) - usual if math.isfinite(self.value) else max(abs(usual), 6 * self.sigma)
        return (of(value) - usual) / height if height > 0 else math.nan

    def gone(self, value: float) -> bool:
        """Whether at most `LEFT` of the rise is left."""
        return self.rise(value) <= LEFT

    @property
    def phrase(self) -> str:
        return "loss" if self.metric == "loss" else "gradient norm"


def alarms(run: Run, step: int, segment: int) -> tuple[dict[int, Alarm], Alarm]:
    """Every flagged step up to `step` on the way to it, and how the step itself stands."""
    given = run.manifest.spikes
    settings = SpikeSettings() if given is None else SpikeSettings(**given)
    entry = run.manifest.segments[run.manifest.lineage(segment, step)]
    frame = run.history(segment, step, 6 * settings.window + max(0, step - entry.start))
    judge, flagged, found = _Judge(settings), dict[int, Alarm](), None
    losses, norms = (numbers(frame, name) for name in ("loss", "grad_norm"))
    healthy: dict[Metric, list[float]] = {"loss": [], "grad_norm": []}
    for number, loss, norm in zip(frame["step"].tolist(), losses, norms, strict=True):
        judged = judge.full("loss" if loss is not None else "grad_norm")
        reading = judge.update(number, loss, norm)
        broken = reading.rule == "non_finite" and loss is not None and math.isfinite(loss)
        metric: Metric = "grad_norm" if broken or reading.rule == "grad_norm_z" else "loss"
        value = loss if metric == "loss" else norm
        usual, sigma = level(healthy[metric][-settings.window :], metric)
        before = [other for other in flagged if number - other <= GAP + 1]
        began = flagged[before[-1]].began if reading.rule and before else number
        found = Alarm(
            number,
            reading.rule,
            metric,
            math.nan if value is None else value,
            usual,
            sigma,
            *level(healthy["loss"][-settings.window :], "loss"),
            began,
            reading.explanation or "",
            judged,
        )
        if reading.rule is not None:
            flagged[number] = found
        else:
            for name, value in (("loss", loss), ("grad_norm", norm)):
                if value is not None and math.isfinite(value):
                    healthy[name].append(value)  # type: ignore[index]
    assert found is not None and found.step == step
    line = run.line(step, entry.segment)
    told = None if line is None or line.unstable is UNSET else line.unstable
    return flagged, replace(found, told=told)


def numbers(frame: Any, name: str) -> list[float | None]:
    """A column of a telemetry frame; None where it was not logged."""
    values = frame[name].tolist() if name in frame else [None] * len(frame)
    return [float(value) if there else None for value, there in zip(values, recorded(frame, name), strict=True)]


def level(past: list[float], metric: Metric) -> tuple[float, float]:
    """Median and robust standard deviation of healthy values, as the detector has them; NaN of fewer than 4."""
    values = np.array(past)
    values = np.log(values[values > 0]) if metric == "grad_norm" else values
    if len(values) < SMALLEST_WINDOW:
        return math.nan, math.nan
    median = float(np.median(values))
    spread = NORMAL_SIGMA_PER_MAD * float(np.median(np.abs(values - median)))
    if metric == "grad_norm":
        return math.exp(median), max(spread, LOG_GRAD_NORM_SIGMA_FLOOR)
    return median, max(spread, LOSS_SIGMA_FLOOR * abs(median))
