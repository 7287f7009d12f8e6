"""AdamW whose beta2, epsilon or weight decay is a function of the update, as a learning rate is; and groups of it.

A setting that changes during a run has to be in the state that a compiled step captures, or the first value would hold
for ever. MLX keeps scheduled values there, by name, beside `learning_rate`. Knows nothing of models, data or faults.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import mlx.core as mx
import mlx.optimizers as optim
import msgspec

from ..errors import ExperimentError

Schedule = Callable[[mx.array], mx.array]
SMALLEST = 1e-12  # learning rate by which a decay is divided at least


class AdamChange(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In updates `step` … `until` (None: all that follow) the option has another value."""

    step: int
    until: int | None = None
    option: Literal["beta2", "eps"]
    value: float


class Drift(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """In updates `step` … `until` (None: all that follow) weight decay multiplies parameters by `growth`.

    Above 1 it is a decay with the wrong sign. It stands in the place of the ordinary decay, before Adam's own update.
    """

    step: int
    until: int | None = None
    growth: float
    parameters: tuple[str, ...]  # paths

    def __post_init__(self) -> None:
        if not 0 < self.growth < 100:
            raise ExperimentError(f"a drift has the growth {self.growth}; expected a factor an update, above 0")


class ScheduledAdamW(optim.AdamW):
    """AdamW with some of `beta2`, `eps` and `weight_decay` on a schedule.

    Args:
        scheduled: functions of the number of updates made, float32 scalars, by name.
        settings: of `AdamW`. An attribute that is set later takes its schedule's place.
    """

    def __init__(self, learning_rate: Schedule, *, scheduled: Mapping[str, Schedule], **settings: Any) -> None:
        super().__init__(learning_rate, **settings)
        for name, schedule in scheduled.items():
            self._maybe_schedule(name, schedule)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if "_schedulers" in vars(self):
            self._schedulers.pop({"betas": "beta2"}.get(name, name), None)

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """One parameter's update, with the values that the state holds."""
        own, usual = vars(self), {name: vars(self)[name] for name in ("betas", "eps", "weight_decay")}
        held = {
            name: self.state[name].astype(gradient.dtype)
            for name in ("beta2", "eps", "weight_decay")
            if name in self._schedulers
        }
        if "beta2" in held:
            held["betas"] = [self.betas[0], held.pop("beta2")]
        own.update(held)
        try:
            return super().apply_single(gradient, parameter, state)
        finally:
            own.update(usual)


def adamw(
    rate: Schedule, settings: Mapping[str, Any], changes: Sequence[AdamChange], drifts: Sequence[Drift]
) -> optim.Optimizer:
    """AdamW as the settings have it, where nothing changes; otherwise one that is scheduled, or several of them: one
    for the parameters of each drift, and one for the rest.

    Args:
        rate: the learning rate, a function of the number of updates made.
        settings: `betas`, `eps`, `weight_decay`, `bias_correction`.
    """
    usual = {"beta2": settings["betas"][1], "eps": settings["eps"]}
    scheduled = {
        name: _changing(usual[name], [one for one in changes if one.option == name])
        for name in dict.fromkeys(one.option for one in changes)
    }

    def one(extra: Mapping[str, Schedule]) -> optim.Optimizer:
        if not scheduled and not extra:
            return optim.AdamW(rate, **settings)
        return ScheduledAdamW(rate, scheduled=scheduled | dict(extra), **settings)

    if not drifts:
        return one({})
    members = [one({"weight_decay": _drifting(rate, settings["weight_decay"], drift)}) for drift in drifts]
    return optim.MultiOptimizer([*members, one({})], [_among(drift.parameters) for drift in drifts])


def _among(paths: Sequence[str]) -> Callable[[str, mx.array], bool]:
    return lambda path, array: path in paths


def _holds(updates: mx.array, step: int, until: int | None) -> mx.array:
    """Whether the next update is one of them."""
    number = updates.astype(mx.int64) + 1
    return mx.logical_and(number >= step, number <= (2**53 if until is None else until))


def _changing(usual: float, changes: Sequence[AdamChange]) -> Schedule:
    def schedule(updates: mx.array) -> mx.array:
        value = mx.array(usual, mx.float32)
        for one in changes:
            value = mx.where(_holds(updates, one.step, one.until), mx.array(one.value, mx.float32), value)
        return value

    return schedule


def _drifting(rate: Schedule, usual: float, drift: Drift) -> Schedule:
    def schedule(updates: mx.array) -> mx.array:
        decay = (1 - drift.growth) / mx.maximum(rate(updates), SMALLEST)
        return mx.where(_holds(updates, drift.step, drift.until), decay, mx.array(usual, mx.float32)).astype(mx.float32)

    return schedule
