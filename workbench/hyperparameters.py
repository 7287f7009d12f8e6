"""What an optimizer was told, as JSON: MLX keeps betas, eps and the like as attributes, outside the state it saves; and
in which of its other parts an experiment differs from the recorded one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim

if TYPE_CHECKING:
    from .experiment import Experiment
    from .manifest import Manifest


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


def other_parts(experiment: Experiment, manifest: Manifest) -> list[str]:
    """Phrases on a step function and extra state that one has and the other has not."""
    kinds = {True: "one of its own", False: "the built-in one"}
    have, want, found = experiment.step_fn is not None, manifest.own_step, []
    if have != want:
        found.append(f"the step is {kinds[have]}, recorded {kinds[want]}")
    if sorted(experiment.extra) != manifest.extra:
        found.append(f"extra is {sorted(experiment.extra)}, recorded {manifest.extra}")
    return found


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
