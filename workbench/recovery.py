"""When training becomes unstable, and how it is taken back: the rules, and the states to go back to.

A step is unstable if its gradient norm is above `factor` times the median of the last `window` ones, or if its loss or
gradient norm is not finite. Taking it back restores a state of at least `back` steps before it, and goes on from there
at `rate` times the learning rate, or without the batch of that step. Factor 3, window 50, back 10, rate 0.5 and the
limit of 3 in a row are choices of the issue that asked for them, not findings. Knows numbers and states; nothing of
folders or telemetry.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, get_args

from .blackbox import Held
from .errors import ExperimentError
from .plain_numbers import real, truth, whole

Mode = Literal["off", "warn", "on"]


@dataclass(frozen=True)
class Recovery:
    """What to do about an unstable step.

    Args:
        mode: "off": nothing. "warn": say so, note it in the telemetry, and keep the state before the step. "on": go
            back, too.
        factor: of the median above which a gradient norm is unstable; more than 1.
        window: how many gradient norms the median is of; until there are so many only what is not finite is unstable.
        back: the least number of steps to go back.
        rate: what the learning rate is multiplied by each time; 0 < rate <= 1. (That of a loop which sets it itself
            before each step is not touched: multiply it by `Recorder.rate_factor`.)
        skip_batch: leave out the batch of the unstable step instead; the learning rate stays.
        limit: the how-manieth time in a row ends the run. It is in a row if it comes no more than `back` steps after
            the step that was taken back before.

    Raises:
        ExperimentError: a setting is out of range.
    """

    mode: Mode = "warn"
    factor: float = 3.0
    window: int = 50
    back: int = 10
    rate: float = 0.5
    skip_batch: bool = False
    limit: int = 3

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ExperimentError(f"auto_rollback is {self.mode!r}; expected one of {', '.join(get_args(Mode))}")
        for name in ("window", "back", "limit"):
            value = whole(getattr(self, name))
            if value is None or not 1 <= value < 2**31:
                raise ExperimentError(
                    f"{name} of auto_rollback is {getattr(self, name)!r}; expected a whole number from 1"
                )
            object.__setattr__(self, name, value)
        factor, rate, skip = real(self.factor), real(self.rate), truth(self.skip_batch)
        if factor is None or not 1 < factor < math.inf:
            raise ExperimentError(f"factor of auto_rollback is {self.factor!r}; expected a finite number above 1")
        if rate is None or not 0 < rate <= 1:
            raise ExperimentError(f"rate of auto_rollback is {self.rate!r}; expected a number above 0, at most 1")
        if skip is None:
            raise ExperimentError(f"skip_batch of auto_rollback is {self.skip_batch!r}; expected True or False")
        for name, found in (("factor", factor), ("rate", rate), ("skip_batch", skip)):
            object.__setattr__(self, name, found)

    @classmethod
    def of(cls, given: Recovery | str) -> Recovery:
        return given if isinstance(given, Recovery) else cls(given)  # type: ignore[arg-type]


class Stability:
    """Judges one step after another by the gradient norms before it."""

    def __init__(self, settings: Recovery) -> None:
        self.settings = settings
        self.reset()

    def reset(self) -> None:
        """Forgets every step."""
        self._recent: deque[float] = deque()
        self._sorted: list[float] = []

    def judge(self, loss: float, grad_norm: float | None) -> str | None:
        """Takes the next step; why it is unstable, as a fragment of a sentence, or None.

        Args:
            grad_norm: None: there is none, and the loss alone is judged.

        A finite gradient norm counts for the steps that follow, whatever it is: the median bears it.
        """
        if self.settings.mode == "off":
            return None
        if grad_norm is None:
            return None if math.isfinite(loss) else f"loss is {loss}"
        reason = self._reason(loss, grad_norm)
        if math.isfinite(grad_norm):
            if len(self._recent) == self.settings.window:
                del self._sorted[bisect_left(self._sorted, self._recent.popleft())]
            self._recent.append(grad_norm)
            insort(self._sorted, grad_norm)
        return reason

    def _reason(self, loss: float, grad_norm: float) -> str | None:
        for name, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                return f"{name} is {value}"
        if len(self._sorted) < self.settings.window:
            return None
        half = len(self._sorted) // 2
        odd = len(self._sorted) % 2
        median = self._sorted[half] if odd else (self._sorted[half - 1] + self._sorted[half]) / 2
        if grad_norm <= self.settings.factor * median:
            return None
        times = f"{grad_norm / median:.3g} times" if median else "above"
        past = f"of the last {self.settings.window} steps"
        return f"gradient norm {grad_norm:.4g} is {times} the median {median:.4g} {past}"


@dataclass
class Trail:
    """States held in memory to go back to: two, of steps that are multiples of `back`, so that one of them is between
    `back` and twice as many steps behind.

    Attributes:
        back: 0: none is held.
    """

    back: int
    _held: list[Held] = field(default_factory=list)

    def wants(self, step: int) -> bool:
        """Whether the state of a step is one of them."""
        return self.back > 0 and step % self.back == 0

    def hold(self, held: Held) -> None:
        """Holds a state if it is one of them, in place of the older of the two."""
        if self.wants(held.state.step):
            self._held = [*self._held[-1:], held]

    def before(self, step: int) -> Held | None:
        """The latest held state of a step that is not after this one."""
        return max((one for one in self._held if one.state.step <= step), key=lambda one: one.state.step, default=None)

    def forget_after(self, step: int) -> None:
        self._held = [one for one in self._held if one.state.step <= step]


@dataclass
class Row:
    """How many times in a row, and the last step that was taken back; 0: none."""

    count: int = 0
    step: int = 0

    def add(self, step: int, back: int) -> int:
        """Counts one more; returns the how-manieth in a row it is."""
        self.count = self.count + 1 if self.step and step <= self.step + back else 1
        self.step = step
        return self.count
