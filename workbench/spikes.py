"""Spikes: steps whose loss or gradient norm departs from the run's own recent past.

Knows numbers only; nothing of files, traces or MLX. A trainer feeds `SpikeDetector` one step at a time; `find_spikes`
(in `detection.spike_table`) says of a telemetry frame what the very same detector would, so a run and its reader never
disagree about what a spike is.

Rules, strongest first; the first that holds names the step:

    non_finite    the loss or the gradient norm is NaN or infinite
    loss_factor   loss > factor * mean(window)
    loss_z        loss > median(window) + z * sigma(window)
    grad_norm_z   the same for log(gradient norm)

The window holds the last `window` healthy values, and sigma is 1.4826 * MAD: the median absolute deviation, scaled
so that it estimates the standard deviation of normal noise. 1.4826 is 1 / 0.6745, and 0.6745 the normal 0.75
quantile: B. Iglewicz and D. Hoaglin, How to Detect and Handle Outliers, ASQC Quality Press 1993 (their modified
z-score is 0.6745 (x - median) / MAD); C. Leys et al., J. Exp. Soc. Psychol. 49 (2013) 764-766. Both clean one sample
at 2 to 3.5; a rule that is asked at every step needs more. 6 is the `sigma_factor` of OLMo-core's SkipStepOptimizer;
OLMo 2's spike score counts 7 or more (arXiv:2501.00656). Factor 3 and window 50 are choices, not findings.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .detection.window import Window
from .errors import WorkbenchError
from .number_text import number
from .plain_numbers import real, whole

RULES = ("non_finite", "loss_factor", "loss_z", "grad_norm_z")

# On a flat window the MAD is 0 or rounding noise, and then any z is large. bfloat16, the coarsest dtype that a loss is
# logged in, has a spacing of up to 0.8 % of the value, so a loss that flickers between two neighbours must stay silent:
# with sigma at least 0.5 % of the median, z = 6 asks for a rise of 3 %.
LOSS_SIGMA_FLOOR = 0.005  # relative to |median|
# A healthy gradient norm strays further: on a small byte-level model (8 rows a batch) single norms stood at 1.4 times a
# calm window's median, with nothing wrong. With this floor z = 6 asks for exp(0.6), a norm 1.8 times the median.
LOG_GRAD_NORM_SIGMA_FLOOR = 0.1  # absolute, since a logarithm is relative already
SMALLEST_WINDOW = 4  # the median and MAD of fewer values say nothing


@dataclass(frozen=True)
class SpikeSettings:
    """How far from its past a step must be.

    Args:
        factor: `loss_factor` fires above this many times the moving average; more than 1.
        window: healthy values that the statistics cover, and whose absence keeps the rules silent; 4 or more.
        z: `loss_z` and `grad_norm_z` fire above this many robust standard deviations; more than 0.

    Raises:
        WorkbenchError: a setting is out of range.
    """

    factor: float = 3.0
    window: int = 50
    z: float = 6.0

    def __post_init__(self) -> None:
        window = whole(self.window)
        if window is None or not SMALLEST_WINDOW <= window < 2**31:
            raise WorkbenchError(
                f"Spike window is {self.window!r}; expected a whole number of {SMALLEST_WINDOW} or more."
            )
        object.__setattr__(self, "window", window)
        for name, value, least in (("factor", self.factor, 1), ("z", self.z, 0)):
            number = real(value)
            if number is None or not least < number < 1e300:
                raise WorkbenchError(f"Spike {name} is {value!r}; expected a finite number above {least}.")
            object.__setattr__(self, name, number)


@dataclass(frozen=True)
class Reading:
    """What the detector says of one step. Without a spike all but the moving average are None.

    `value` and `threshold` are in the unit of the quantity that fired: the loss, or the gradient norm itself rather
    than its logarithm. `non_finite` has no threshold. `moving_average` is the mean of the window *before* this step,
    None while that is empty.
    """

    moving_average: float | None
    rule: str | None = None
    value: float | None = None
    threshold: float | None = None
    explanation: str | None = None


class SpikeDetector:
    """Judges one step after another against the healthy steps before it.

    - The rules are silent until their window is full of finite values; `non_finite` never waits.
    - Debounced: after a firing the rules stay silent for the next `window // 2` updates. Two exceptions: `non_finite`
      fires at every such step, and `grad_norm_z` silences only itself, because gradient norms often move some steps
      before the loss does (OLMo 2, arXiv:2501.00656, section 3), and the loss spike that follows must be named.
    - A value beyond a threshold, fired or debounced, does not enter the window, and nor does a non-finite one: the
      moving average would carry a single spike of 1e4 for 50 steps. But more than `window // 2` such values in a row
      are a new level, not a spike; then the window starts afresh from them. So a jump that stays alarms once.
    - One-sided: a falling loss leaves the window's median above the newest values and can't fire.
    - Gradient norms are judged by their logarithm. They are positive and skewed to the right, and vary by factors
      rather than by amounts; on the plain scale their healthy right tail passes z = 6 (simulated, lognormal of width
      0.5: at 4 steps in 1000, and on the log scale at none of 50,000). A norm of 0 has no logarithm: it is skipped.
    - `loss_factor` needs a positive average. A window whose median and MAD are both 0 has no scale: `loss_z` is silent.
    """

    def __init__(self, settings: SpikeSettings | None = None) -> None:
        self.settings = settings or SpikeSettings()
        self.reset()

    def reset(self) -> None:
        """Forgets everything, as at the start of a run or segment."""
        self._losses = Window(self.settings.window)
        self._log_norms = Window(self.settings.window)
        self._quiet_loss = self._quiet_norm = 0  # updates for which the rules on each are still debounced
        self._last_step: int | None = None

    def update(self, step: int, loss: float | None, grad_norm: float | None) -> Reading:
        """Takes the next recorded step.

        Args:
            step: a step that is not after the previous one means that the run went back; the detector then resets.
            loss: None if not recorded; NaN or inf if not finite.
            grad_norm: L2 norm before clipping; None if not recorded.
        """
        if self._last_step is not None and step <= self._last_step:
            self.reset()
        self._last_step = step
        loss = None if loss is None else float(loss)  # a float32 scalar would make float32 statistics
        grad_norm = None if grad_norm is None else float(grad_norm)
        average = self._losses.mean()
        # Both are always judged: judging is also what fills the windows.
        loss_spike = self._judge_loss(loss, average)
        norm_spike = self._judge_grad_norm(grad_norm, average)
        broken = non_finite(loss, grad_norm, average)
        spike = broken or (None if self._quiet_loss else loss_spike) or (None if self._quiet_norm else norm_spike)
        half = self.settings.window // 2
        self._quiet_loss = half if spike and spike.rule != "grad_norm_z" else max(0, self._quiet_loss - 1)
        self._quiet_norm = half if spike else max(0, self._quiet_norm - 1)
        return spike or Reading(average)

    def _judge_loss(self, loss: float | None, average: float | None) -> Reading | None:
        if loss is None or not math.isfinite(loss):
            return None
        if average is None or not self._losses.full:
            self._losses.add(loss)
            return None
        median = self._losses.median()
        least = LOSS_SIGMA_FLOOR * abs(median)
        if not (average > 0 and loss > self.settings.factor * average) and loss <= median + self.settings.z * least:
            self._losses.admit(loss, healthy=True)  # whatever the MAD is, which takes a sort
            return None
        sigma = max(self._losses.sigma(median), least)
        past = f"of the last {self.settings.window} steps"
        spike = None
        if average > 0 and loss > (limit := self.settings.factor * average):
            text = f"loss {number(loss)} is {number(loss / average, 3)} times the moving average {number(average)} "
            text += past
            spike = Reading(average, "loss_factor", loss, limit, text)
        elif sigma > 0 and loss > (limit := median + self.settings.z * sigma):
            text = f"loss {number(loss)} is {number((loss - median) / sigma, 3)} robust standard deviations above "
            spike = Reading(average, "loss_z", loss, limit, f"{text}the median {number(median)} {past}")
        self._losses.admit(loss, healthy=spike is None)
        return spike

    def _judge_grad_norm(self, grad_norm: float | None, average: float | None) -> Reading | None:
        if grad_norm is None or not 0 < grad_norm < math.inf:
            return None
        log_norm = math.log(grad_norm)
        if not self._log_norms.full:
            self._log_norms.add(log_norm)
            return None
        median = self._log_norms.median()
        if log_norm <= median + self.settings.z * LOG_GRAD_NORM_SIGMA_FLOOR:
            self._log_norms.admit(log_norm, healthy=True)  # whatever the MAD is
            return None
        sigma = max(self._log_norms.sigma(median), LOG_GRAD_NORM_SIGMA_FLOOR)
        spike = None
        if log_norm > (limit := median + self.settings.z * sigma):
            text = (
                f"gradient norm {number(grad_norm)} is {number((log_norm - median) / sigma, 3)} robust standard "
                f"deviations (of its logarithm) above the median {number(math.exp(median))} of the last "
                f"{self.settings.window} steps"
            )
            spike = Reading(average, "grad_norm_z", grad_norm, math.exp(limit), text)
        self._log_norms.admit(log_norm, healthy=spike is None)
        return spike


def non_finite(loss: float | None, grad_norm: float | None, average: float | None) -> Reading | None:
    named = (("loss", loss), ("gradient norm", grad_norm))
    broken = [(name, value) for name, value in named if value is not None and not math.isfinite(value)]
    if not broken:
        return None
    text = " and ".join(f"{name} is {number(value)}" for name, value in broken)
    return Reading(average, "non_finite", broken[0][1], None, text)
