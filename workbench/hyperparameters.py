"""What an optimizer was told, as JSON: MLX keeps betas, eps and the like as attributes, outside the state it saves."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim


def describe_optimizer(optimizer: optim.Optimizer) -> dict[str, Any]:
    """Class and public attributes; the name of a schedule in place of the function; members of a MultiOptimizer."""
    if isinstance(optimizer, optim.MultiOptimizer):
        return {"class": "MultiOptimizer", "members": [describe_optimizer(member) for member in optimizer.optimizers]}
    found: dict[str, Any] = {"class": type(optimizer).__name__}
    for name, value in sorted(vars(optimizer).items()):
        if not name.startswith("_"):
            found[name] = _plain(value)
    schedules = getattr(optimizer, "_schedulers", {})
    return found | {"schedules": sorted(schedules)}


def _plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no word for it
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return (
        value
        if isinstance(value, (bool, int, float, str, type(None)))
        else getattr(value, "__name__", str(type(value)))
    )
