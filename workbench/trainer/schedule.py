"""Learning-rate schedules: how the rate depends on the number of the update, and on nothing else.

`make_schedule` gives the function that an MLX optimizer takes as `learning_rate=`; `lr_at` says the same in plain
Python, for plots and checks. Both read one immutable `ScheduleConfig`, so a manifest rebuilds a schedule exactly.

Steps count optimizer updates from 1. MLX calls a schedule with the number of updates *already made*, so step N uses
`make_schedule(config)(N - 1)`, which is `lr_at(config, N)`. With W warm-up steps, a decay of D steps that ends at step
S = `steps`, and p = (N - 1 - (S - D)) / D, the share of the decay that lies behind:

    warm-up   N <= W              max_lr · N / W: the first update is not wasted on a rate of 0
    stable    W < N <= S - D      max_lr
    decay     S - D < N <= S      min_lr + (max_lr - min_lr) · shape(p): p = 0 first, so step S still moves
    after     N > S               min_lr

`cosine` decays from the end of the warm-up (Loshchilov & Hutter 2017, arXiv:1608.03983, without restarts). `wsd` is
warm-up, stable, decay (Hu et al. 2024, MiniCPM, arXiv:2404.06395, which finds a decay of 10 % of the tokens enough).
`constant` stays at max_lr after the warm-up, beyond `steps` too.

Shapes: `linear` is 1 - p, `cosine` (1 + cos πp) / 2, and `1-sqrt` is 1 - √p, which Hägele et al. 2024,
arXiv:2405.18392, found better than linear.

`changes` come on top, in order: from one step to another the rate is multiplied, or is another.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import mlx.core as mx
import msgspec

from ..errors import ExperimentError

Kind = Literal["cosine", "wsd", "constant"]
Shape = Literal["1-sqrt", "cosine", "linear"]

MAX_STEPS = 2**24  # float32 holds every whole number up to here; the schedule computes with step counts in float32


class RateChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rate of updates `step` … `until` is `factor` times what it would be, or it is `rate`.

    Args:
        step: the first update, from 1.
        until: the last; None: all from `step` on.
        factor, rate: exactly one of them; finite, 0 or more.

    Raises:
        ExperimentError: a value out of range, naming the field, what was found and what is possible.
    """

    step: int
    until: int | None = None
    factor: float | None = None
    rate: float | None = None

    def __post_init__(self) -> None:
        if type(self.step) is not int or not 1 <= self.step < 2**53:
            raise ExperimentError(f"a change of the learning rate is at step {self.step!r}; expected a step from 1")
        if self.until is not None and (type(self.until) is not int or not self.step <= self.until < 2**53):
            raise ExperimentError(
                f"a change of the learning rate at step {self.step} lasts until {self.until!r}; expected that step or "
                "a later one, or none for all that follow"
            )
        given = [value for value in (self.factor, self.rate) if value is not None]
        if len(given) != 1 or not isinstance(given[0], int | float) or not 0 <= given[0] < math.inf:
            raise ExperimentError(
                f"the change of the learning rate at step {self.step} has the factor {self.factor!r} and the rate "
                f"{self.rate!r}; expected one of them, a finite number from 0"
            )

    def holds(self, step: int) -> bool:
        """Whether update `step` is one of those changed."""
        return self.step <= step and (self.until is None or step <= self.until)


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of a schedule. Settings that a kind does not use are ignored.

    Args:
        kind: "cosine", "wsd" or "constant".
        max_lr: the rate after warm-up.
        min_lr: the rate after the last step. The default 0 is approached, never used within `steps`.
        warmup: warm-up length in updates; 0 for none.
        steps: length of the run in updates, warm-up included.
        decay_steps: length of the decay of `wsd` in updates; None is a fifth of `steps`, rounded down, at least 1.
        decay_shape: of the decay of `wsd`.
        changes: departures from the rest, as planted faults and forks have them.

    Raises:
        ExperimentError: a value out of range, naming the field, what was found and what is possible.
    """

    kind: Kind = "cosine"
    max_lr: float = 1e-3
    min_lr: float = 0.0
    warmup: int = 0
    steps: int
    decay_steps: int | None = None
    decay_shape: Shape = "1-sqrt"
    changes: tuple[RateChange, ...] = ()

    def __post_init__(self) -> None:
        for name, choices in (("kind", get_args(Kind)), ("decay_shape", get_args(Shape))):
            if getattr(self, name) not in choices:
                raise ExperimentError(
                    f"schedule.{name} is {getattr(self, name)!r}; expected one of {', '.join(choices)}"
                )
        for name, least in (("steps", 1), ("warmup", 0), ("decay_steps", 1)):
            count = getattr(self, name)
            if name == "decay_steps" and count is None:
                continue
            if type(count) is not int or not least <= count <= MAX_STEPS:
                raise ExperimentError(
                    f"schedule.{name} is {count!r}; expected a whole number of updates from {least} to {MAX_STEPS}"
                )
        if not isinstance(self.max_lr, int | float) or not 0 < self.max_lr < math.inf:
            raise ExperimentError(f"schedule.max_lr is {self.max_lr!r}; expected a finite rate above 0")
        if not isinstance(self.min_lr, int | float) or not 0 <= self.min_lr <= self.max_lr:
            raise ExperimentError(
                f"schedule.min_lr is {self.min_lr!r}; expected a rate from 0 to schedule.max_lr = {self.max_lr!r}"
            )
        needed = {"constant": 0, "cosine": 1, "wsd": _decay_steps(self)}[self.kind]
        if self.warmup + needed > self.steps:
            raise ExperimentError(
                f"schedule.steps is {self.steps}, but warm-up ({self.warmup}) and decay ({needed} or more) need "
                f"{self.warmup + needed}; shorten them or train longer"
            )


def make_schedule(config: ScheduleConfig) -> Callable[[mx.array], mx.array]:
    """A function for `learning_rate=` of an MLX optimizer, usable inside `mx.compile`.

    It maps the number of updates made so far, an unsigned scalar, to the rate of the next one, a float32 scalar.

    The arithmetic is float32, and written so that rates near 0 keep their relative precision: the share r = 1 - p that
    lies ahead is formed from whole numbers, the cosine is sin²(πr/2), and 1 - √p is r / (1 + √p).
    """
    max_lr, min_lr, warmup, steps = config.max_lr, config.min_lr, config.warmup, config.steps
    decay, shape = _decay_steps(config), _decay_shape(config)

    def schedule(done: mx.array) -> mx.array:
        # Clamped while still an integer, so that the conversion below is exact however long the run goes on.
        n = mx.minimum(done, steps).astype(mx.float32)
        rate = mx.array(max_lr, dtype=mx.float32)
        if config.kind != "constant":
            ahead = mx.minimum(steps - n, decay) / decay
            if shape == "linear":
                factor = ahead
            elif shape == "cosine":
                factor = mx.square(mx.sin(0.5 * math.pi * ahead))
            else:
                behind = mx.maximum(n - (steps - decay), 0.0) / decay
                factor = ahead / (1 + mx.sqrt(behind))
            rate = max_lr * factor + min_lr * (1 - factor)  # exactly max_lr at 1, exactly min_lr at 0
        if warmup > 0:
            rate = mx.where(n < warmup, max_lr * ((n + 1) / warmup), rate)
        for change in config.changes:
            held = done >= change.step - 1
            if change.until is not None:
                held = mx.logical_and(held, done < change.until)
            other = rate * change.factor if change.factor is not None else mx.array(change.rate or 0.0, mx.float32)
            rate = mx.where(held, other, rate)
        return rate

    return schedule


def lr_at(config: ScheduleConfig, step: int) -> float:
    """The learning rate of step `step` (1 is the first update), in double precision.

    Raises:
        ExperimentError: `step` is below 1; step 0 is the initial state and has no rate.
    """
    if step < 1:
        raise ExperimentError(f"step {step} has no learning rate; steps count updates from 1")
    rate = _plain_lr(config, step)
    for change in config.changes:
        if change.holds(step):
            rate = rate * change.factor if change.factor is not None else change.rate or 0.0
    return rate


def _plain_lr(config: ScheduleConfig, step: int) -> float:
    if step <= config.warmup:
        return config.max_lr * step / config.warmup
    start = config.steps - _decay_steps(config)
    if config.kind == "constant" or step <= start:
        return config.max_lr
    if step > config.steps:
        return config.min_lr
    p = (step - 1 - start) / _decay_steps(config)
    shapes = {"1-sqrt": 1 - math.sqrt(p), "cosine": (1 + math.cos(math.pi * p)) / 2, "linear": 1 - p}
    return config.min_lr + (config.max_lr - config.min_lr) * shapes[_decay_shape(config)]


def _decay_steps(config: ScheduleConfig) -> int:
    """The length of the decay in updates; the last of them is `steps`."""
    if config.kind == "cosine":
        return config.steps - config.warmup
    return max(1, config.steps // 5) if config.decay_steps is None else config.decay_steps


def _decay_shape(config: ScheduleConfig) -> Shape:
    return "cosine" if config.kind == "cosine" else config.decay_shape
