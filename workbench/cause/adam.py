"""How far Adam may move an element in one update, by its own settings, and how far it did.

With m = (1 − β1) Σ β1^i g_i and v = (1 − β2) Σ β2^i g_i², Cauchy and Schwarz give, for any gradients whatever,

    m² ≤ v · (1 − β1)² / (1 − β2) · Σ (β1²/β2)^i        so        |m| / √v ≤ (1 − β1) / √((1 − β2)(1 − β1²/β2))

if β1² < β2, and no bound at all otherwise: an element whose gradient fades is then moved by more and more. Kingma & Ba
2015 (arXiv:1412.6980) ask for β1²/√β2 < 1 in their theorem 4.1, and expect |m̂|/√v̂ of about 1 at most (section 2.1).
At β1 = 0.9 the bound is 1.17 for β2 = 0.95 and 7.27 for β2 = 0.999, the two values in common use.

Knows states and the optimizer's description in a manifest; performs no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..observe import moment_paths
from ..snapshot import State

FOLLOWING = ("Adam", "AdamW", "ScheduledAdamW")  # classes; the last is the built-in trainer's, with schedules
USUAL_BETA1, USUAL_BETA2 = 0.9, 0.999
# Half a unit in the last place, relative to the weight: an update may be off by as much through rounding alone.
ROUNDING = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}


def bound(beta1: float, beta2: float) -> float:
    """The largest |m|/√v that any gradients can bring about; infinite where there is none."""
    if not beta1**2 < beta2 < 1:
        return math.inf
    return (1 - beta1) / math.sqrt((1 - beta2) * (1 - beta1**2 / beta2))


def fresh(beta1: float, beta2: float, updates: int) -> tuple[float, float]:
    """How many times as large as usual the k-th update is after m and v were lost, without bias correction.

    From zeros m = (1 − β1) Σ β1^i g_i and v = (1 − β2) Σ β2^i g_i² over k gradients: of one that stays the same
    m/√v = (1 − β1^k) / √(1 − β2^k), and usually 1; of one that is noise its root mean square is
    √((1 − β1)/(1 + β1)) · √(1 − β1^2k) / √(1 − β2^k), and usually the first factor alone. At MLX's defaults, which do
    not correct, the first is 6.57 at most (k = 12), and the second 13.8 (k = 1).

    Returns:
        For a gradient that stays the same, and for noise.
    """
    v = math.sqrt(1 - beta2**updates)
    return (1 - beta1**updates) / v, math.sqrt(1 - beta1 ** (2 * updates)) / v


USUAL_BOUND = bound(USUAL_BETA1, USUAL_BETA2)  # 7.27


@dataclass(frozen=True)
class Settings:
    """Of the optimizer of one parameter.

    Attributes:
        member: its number in a MultiOptimizer; 0 otherwise.
    """

    beta1: float
    beta2: float
    eps: float
    decay: float
    member: int
    bias_correction: bool = False

    @property
    def bound(self) -> float:
        return bound(self.beta1, self.beta2)


def settings(optimizer: Mapping[str, Any], state: State) -> dict[str, Settings]:
    """Of each parameter that Adam or AdamW updates, by path; no others are known to follow the formula.

    Args:
        optimizer: the manifest's description. Of what it has on a schedule the state holds the value that the update
            before it used.
    """
    members = optimizer.get("members", [optimizer])
    found = {}
    for parameter, path in moment_paths(state.optimizer, "v", state.weights).items():
        number = int(path.split(".")[1]) if "members" in optimizer else 0
        one, place = members[number], f"states.{number}." if "members" in optimizer else ""
        if one.get("class") in FOLLOWING and f"{path[:-2]}.m" in state.optimizer:
            beta1, beta2 = one["betas"]
            told = {"beta2": beta2, "eps": one["eps"], "weight_decay": one.get("weight_decay", 0.0) or 0.0}
            for name in told.keys() & set(one.get("schedules", ())):
                told[name] = state.optimizer[f"{place}{name}"].item()
            decay = float(told["weight_decay"])
            corrected = bool(one.get("bias_correction", False))
            numbers = float(beta1), float(told["beta2"]), float(told["eps"]), decay
            found[parameter] = Settings(*numbers, number, corrected)
    return found


def allowed(before: mx.array, rate: float, decay: float, times: float = 1.0) -> mx.array:
    """How far each element may move: `times` the learning rate, decay and rounding beside it; float32."""
    weight = mx.abs(before.astype(mx.float32))
    return rate * times + (rate * abs(decay) + 2 * ROUNDING.get(before.dtype, 0.0)) * weight


def excess(before: mx.array, after: mx.array, rate: float, decay: float) -> float:
    """The largest |update| of an element over the learning rate, decay and rounding taken off; of the finite ones."""
    moved = mx.abs(after.astype(mx.float32) - before.astype(mx.float32)) - allowed(before, rate, decay, 0.0)
    largest = float(np.array(mx.max(mx.where(mx.isfinite(moved), moved, 0.0)))) if moved.size else 0.0
    return max(0.0, largest) / rate if rate > 0 else 0.0


def limited(before: mx.array, after: mx.array, rate: float, decay: float) -> mx.array:
    """What the update moved beyond the learning rate, element by element, float32; 0 where it is not finite."""
    moved = after.astype(mx.float32) - before.astype(mx.float32)
    limit = allowed(before, rate, decay)
    over = moved - mx.clip(moved, -limit, limit)
    return mx.where(mx.isfinite(over), over, 0.0)
