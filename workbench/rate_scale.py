"""A learning rate times a factor, whether a schedule sets it or the optimizer's state holds it.

Knows MLX's optimizers; nothing of steps or runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


class Scaled:
    """A schedule times a factor.

    Attributes:
        schedule: the schedule itself.
        factor: float; multiplied in the schedule's own dtype.
    """

    def __init__(self, schedule: Callable[[mx.array], mx.array], factor: float) -> None:
        self.schedule, self.factor = schedule, factor

    def __call__(self, step: mx.array) -> mx.array:
        return self.schedule(step) * self.factor


def schedules(optimizer: Any) -> list[dict[str, Any]]:
    """The schedules of an optimizer, or of each member of a MultiOptimizer: functions by the name of what they set."""
    return [dict(getattr(member, "_schedulers", {})) for member in getattr(optimizer, "optimizers", [optimizer])]


def scale_schedules(optimizer: Any, factor: float) -> None:
    """Has every schedule of a learning rate give `factor` times what it says, whatever it was made to give before."""
    for member in getattr(optimizer, "optimizers", [optimizer]):
        found = getattr(member, "_schedulers", {}).get("learning_rate")
        if found is None:
            continue
        schedule, before = (found.schedule, found.factor) if isinstance(found, Scaled) else (found, 1.0)
        if before != factor:
            member._schedulers["learning_rate"] = schedule if factor == 1.0 else Scaled(schedule, factor)


def rate_paths(optimizer: Any) -> list[str]:
    """Where the state of an optimizer, or that of each member of a MultiOptimizer, would hold the learning rate."""
    members = getattr(optimizer, "optimizers", None)
    return ["learning_rate"] if members is None else [f"states.{n}.learning_rate" for n in range(len(members))]


def scale_constants(optimizer: Any, factor: float) -> None:
    """Multiplies each learning rate that no schedule sets, in the optimizer's state; one of whole numbers becomes
    float32."""
    for member in getattr(optimizer, "optimizers", [optimizer]):
        rate = member.state.get("learning_rate")
        if rate is not None and "learning_rate" not in getattr(member, "_schedulers", {}):
            kind = rate.dtype if mx.issubdtype(rate.dtype, mx.floating) else mx.float32
            scaled = mx.array(float(rate.item()) * factor, kind) if rate.ndim == 0 else rate.astype(kind) * factor
            member.state["learning_rate"] = scaled


@contextmanager
def without_schedules(optimizer: Any) -> Iterator[None]:
    """Within: no schedule sets a learning rate, so that a step uses the one in the optimizer's state."""
    members = getattr(optimizer, "optimizers", [optimizer])
    before = [member._schedulers for member in members]
    try:
        for member, found in zip(members, before, strict=True):
            member._schedulers = {name: one for name, one in found.items() if name != "learning_rate"}
        yield
    finally:
        for member, found in zip(members, before, strict=True):
            member._schedulers = found
