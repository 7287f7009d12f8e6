"""The rules: what each compares a value with, from when on it speaks, and what it says.

Every rule looks at the finite values of one quantity, in the order of the log, and compares each with values before
it. So values that were not logged, and non-finite ones, leave no gap and count for nothing; windows count values, not
steps.

    rule              fires where
    non_finite        the loss or the gradient norm is NaN or infinite
    moving_average    loss > factor * mean of the last `window`
    loss_z            loss > median + z * sigma of the last `window`, sigma = 1.4826 MAD
    six_sigma         loss > mean + sigmas * standard deviation of the last `sigma_window`
    grad_norm_median  gradient norm > grad_norm_factor * median of the last `window`
    drift             the loss, or the logarithm of the gradient norm, has long been a little above its level: CUSUM

Sources. `moving_average` is the rule of the posttrainllm trainer (LossSpikeDetector in its TinyGPT sources: window 50,
factor 3, silent until the window is full and for window / 2 steps after it fired), in float64 instead of float32, and
with one difference: there a NaN enters the window and silences the rule until it leaves. `loss_z` is the modified
z-score of B. Iglewicz and D. Hoaglin (How to Detect and Handle Outliers, ASQC Quality Press 1993); the threshold of 6
instead of their 3.5 because it is asked at every step; a recorder's rule of this name (`spikes`) has the same
threshold, and leaves the spikes that it found out of its window. `six_sigma` is that of OLMo-core's StabilityMonitor
and SkipStepOptimizer: 6 standard deviations, window 128. `grad_norm_median`, 3 times the median of 50, is also what
`recovery` calls unstable; both numbers are a choice of the issue that asked for that. `drift` is `cusum`: the reference
is the median and 1.4826 MAD of some 500 values before, k = 0.5 (half a shift of one sigma, the usual choice: D.
Montgomery, Introduction to Statistical Quality Control, section 9.1), and scores are cut at 3, so that a single spike
is no drift (winsorizing: D. Hawkins and D. Olwell, Cumulative Sum Charts and Charting, Springer 1998). Charts of that
kind take h = 5, which on healthy noise means an alarm every 930 values; h = 20 was chosen by simulation.

False alarms in a million healthy values, measured with these defaults (where none is given, none was seen):

    loss, normal noise of 2.5 %            loss_z 4, six_sigma 0.3
    the same, correlated by 0.3; by 0.6    loss_z 8, drift 4; loss_z 8, drift 290
    the same with 5 degrees of freedom (t) loss_z 970, six_sigma 360
    gamma noise, skewed to the right       loss_z 220, six_sigma 30, drift 0.5
    gradient norm, lognormal of width 0.2; 0.3; 0.5   grad_norm_median 0; 140; 10,700

So `drift` asks for losses that do not hang together over some steps, and a factor of the median for gradient norms that
stray little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import WorkbenchError
from ..number_text import number
from ..spikes import LOG_GRAD_NORM_SIGMA_FLOOR, LOSS_SIGMA_FLOOR, SMALLEST_WINDOW
from . import cusum, rolling
from .window import NORMAL_SIGMA_PER_MAD

CUT = 3.0  # standard deviations: what a value can add to a drift at most
# A loss that flickers between two neighbours in bfloat16, 0.8 % apart, has the lower one as its median every other
# time, and is 0.4 % above that on the average. With sigma at least 1 % that is less than the allowance k.
DRIFT_SIGMA_FLOOR = 0.01  # relative to |median|
QUANTITIES = {"loss": "loss", "grad_norm": "gradient norm"}


@dataclass(frozen=True)
class DetectionSettings:
    """How far from its past a value must be; see `rules` for where the defaults come from.

    Args:
        window: values that `moving_average`, `loss_z` and `grad_norm_median` look back on; 4 or more.
        factor: of `moving_average`; more than 1.
        z: of `loss_z`; more than 0.
        sigma_window, sigmas: of `six_sigma`; 4 or more, and more than 0.
        grad_norm_factor: of `grad_norm_median`; more than 1.
        drift_window: values of the reference of `drift`; a multiple of 10, 40 or more.
        drift_k, drift_h: of `drift`, in standard deviations; more than 0.
        falls: report drifts downwards, too. A loss that is being learned drifts down.

    Raises:
        WorkbenchError: a setting is out of range.
    """

    window: int = 50
    factor: float = 3.0
    z: float = 6.0
    sigma_window: int = 128
    sigmas: float = 6.0
    grad_norm_factor: float = 3.0
    drift_window: int = 500
    drift_k: float = 0.5
    drift_h: float = 20.0
    falls: bool = False

    def __post_init__(self) -> None:
        for name in ("window", "sigma_window", "drift_window"):
            value = getattr(self, name)
            if type(value) is not int or not SMALLEST_WINDOW <= value < 2**24:
                raise WorkbenchError(f"{name} is {value!r}; expected a whole number of {SMALLEST_WINDOW} or more.")
        if self.drift_window % cusum.BLOCKS or self.drift_window < SMALLEST_WINDOW * cusum.BLOCKS:
            raise WorkbenchError(f"drift_window is {self.drift_window}; expected a multiple of 10, 40 or more.")
        least = {"factor": 1, "grad_norm_factor": 1, "z": 0, "sigmas": 0, "drift_k": 0, "drift_h": 0}
        for name, low in least.items():
            value = getattr(self, name)
            if not (isinstance(value, int | float) and not isinstance(value, bool) and low < value < 1e300):
                raise WorkbenchError(f"{name} is {value!r}; expected a finite number above {low}.")


class Judged(NamedTuple):
    """Of each value, what it is compared with, and from where on it is beyond. NaN where the rule is silent.

    A value above `threshold` fires. A departure begins with the first of the unbroken row of values above `weak` that
    leads to it: two thresholds, as in J. Canny's hysteresis (IEEE Trans. Pattern Anal. 8 (1986) 679-698).
    """

    level: np.ndarray
    threshold: np.ndarray
    weak: np.ndarray


class Departure(NamedTuple):
    """Positions in a series of values: where it begins, fires, is largest and ends; and numbers for the table."""

    onset: int
    fired: int
    peak: int
    last: int
    value: float
    threshold: float
    level: float
    text: str


def moving_average(values: np.ndarray, settings: DetectionSettings) -> Judged:
    """The weak threshold is half way between 1 and the factor on a logarithmic scale."""
    mean = rolling.mean(values, settings.window)
    mean = np.where(mean > 0, mean, np.nan)  # a factor of a mean that is not positive means nothing
    return Judged(mean, settings.factor * mean, settings.factor**0.5 * mean)


def loss_z(values: np.ndarray, settings: DetectionSettings) -> Judged:
    """Sigma is at least 0.5 % of the median; see `spikes.LOSS_SIGMA_FLOOR`. The weak threshold is at z / 2."""
    median, mad = rolling.median_and_mad(values, settings.window)
    sigma = _at_least(NORMAL_SIGMA_PER_MAD * mad, LOSS_SIGMA_FLOOR * np.abs(median))
    return Judged(median, median + settings.z * sigma, median + settings.z / 2 * sigma)


def six_sigma(values: np.ndarray, settings: DetectionSettings) -> Judged:
    """The same with mean and standard deviation, which a spike in the window widens; the same floor."""
    mean, deviation = rolling.mean_and_deviation(values, settings.sigma_window)
    sigma = _at_least(deviation, LOSS_SIGMA_FLOOR * np.abs(mean))
    return Judged(mean, mean + settings.sigmas * sigma, mean + settings.sigmas / 2 * sigma)


def grad_norm_median(values: np.ndarray, settings: DetectionSettings) -> Judged:
    """The weak threshold is half way between 1 and the factor on a logarithmic scale."""
    median = rolling.median(values, settings.window)
    median = np.where(median > 0, median, np.nan)
    return Judged(median, settings.grad_norm_factor * median, settings.grad_norm_factor**0.5 * median)


def _at_least(sigma: np.ndarray, floor: np.ndarray) -> np.ndarray:
    """A scale; NaN where it is 0, for nothing can be measured with that."""
    sigma = np.maximum(sigma, floor)
    return np.where(sigma > 0, sigma, np.nan)


class Rule(NamedTuple):
    """A rule with a threshold: of which quantity, how it judges, after how many values it speaks, and its words."""

    quantity: str
    judge: Callable[[np.ndarray, DetectionSettings], Judged]
    needs: str
    words: str


FORMER = {"robust_z": "loss_z"}  # names that rules had
THRESHOLD_RULES = {
    "moving_average": Rule("loss", moving_average, "window", "{far} times the mean"),
    "loss_z": Rule("loss", loss_z, "window", "{far} robust standard deviations above the median"),
    "six_sigma": Rule("loss", six_sigma, "sigma_window", "{far} standard deviations above the mean"),
    "grad_norm_median": Rule("grad_norm", grad_norm_median, "window", "{far} times the median"),
}


def by_threshold(name: str, values: np.ndarray, settings: DetectionSettings) -> list[Departure]:
    """The departures that one of `THRESHOLD_RULES` finds; after one has fired it is silent for `window // 2` values."""
    rule = THRESHOLD_RULES[name]
    with np.errstate(over="ignore", invalid="ignore"):  # near the largest float64: no threshold, so silence
        level, threshold, weak = rule.judge(values, settings)
        strong, above = np.flatnonzero(values > threshold), values > weak
    if not len(strong):
        return []
    below = np.flatnonzero(~above)
    asked = {"moving_average": settings.factor, "grad_norm_median": settings.grad_norm_factor}
    scale = asked.get(name, settings.z if name == "loss_z" else settings.sigmas)
    found, place = [], 0
    while place < len(strong):
        fired = int(strong[place])
        place = int(np.searchsorted(strong, fired + settings.window // 2, "right"))
        around = int(np.searchsorted(below, fired))
        onset = int(below[around - 1]) + 1 if around else 0
        last = int(below[around]) - 1 if around < len(below) else len(values) - 1
        following = int(strong[place]) if place < len(strong) else len(values)
        peak = fired + int(np.argmax(values[fired : min(last + 1, following)]))
        if name in asked:
            far = values[fired] / level[fired]
        else:
            far = (values[fired] - level[fired]) / (threshold[fired] - level[fired]) * scale
        past = f"{number(level[fired])} of the last {getattr(settings, rule.needs)} values"
        text = f"{QUANTITIES[rule.quantity]} {number(values[fired])} is {rule.words.format(far=number(far, 3))} {past}"
        numbers = (float(values[fired]), float(threshold[fired]), float(level[fired]))
        found.append(Departure(onset, fired, peak, last, *numbers, text))
    return found


def by_drift(quantity: str, values: np.ndarray, settings: DetectionSettings) -> list[Departure]:
    """The drifts of a series; for the gradient norm, all positive, of its logarithm. See `cusum`.

    `value` and `threshold` are the cumulative sum and h, in standard deviations; `level` is the reference's median
    where the drift began, in the unit of the quantity.
    """
    logarithmic = quantity == "grad_norm"
    series = np.log(values) if logarithmic else values
    with np.errstate(over="ignore", invalid="ignore"):
        median, mad = cusum.reference(series, settings.drift_window)
        floor = np.full(len(series), LOG_GRAD_NORM_SIGMA_FLOOR) if logarithmic else DRIFT_SIGMA_FLOOR * np.abs(median)
        scores = np.clip((series - median) / _at_least(NORMAL_SIGMA_PER_MAD * mad, floor), -CUT, CUT)
    scores = np.where(np.isfinite(scores), scores, 0.0)
    found = []
    for sign in (1, -1) if settings.falls else (1,):
        for onset, noticed, last, total in cusum.alarms(sign * scores, settings.drift_k, settings.drift_h):
            peak = onset + int(np.argmax(sign * series[onset : last + 1]))
            level, mean = (float(number) for number in (median[onset], series[onset : noticed + 1].mean()))
            if logarithmic:
                level, mean = float(np.exp(level)), float(np.exp(mean))
            name = QUANTITIES[quantity]
            way, count = "up" if sign > 0 else "down", noticed + 1 - onset
            text = f"{name} has drifted {way}: {number(mean)} on the average of {count} values, against a median "
            text += f"{number(level)} of the {settings.drift_window} before"
            found.append(Departure(onset, noticed, peak, last, total, settings.drift_h, level, text))
    return sorted(found)
