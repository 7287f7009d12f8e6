"""What a step did to loss, gradient, weights and the steps after it: the same numbers, whatever was changed in it.

Knows a performed step; nothing of how it came about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..norms import square_sums
from ..step import StepResult
from .changes import Change


@dataclass(frozen=True)
class Effect:
    """What a step did, changed or untouched.

    Attributes:
        change: None for the untouched step.
        loss: float32, of step N; None if the step was skipped.
        grad_norm: float32, global L2 norm before clipping; None if the step was skipped.
        updates: L2 norm of the change of each parameter in step N, in float32, by path.
        ratios: `updates` over the L2 norm of the parameter before the step; NaN where that is 0.
        next_losses: float32, of the steps after N on the batches and with the random states of the untouched run.
        steps: steps that were computed for this.
        compiled: whether step N went through `mx.compile`.
        notes: what else had to be different, and what else is to be known.
    """

    change: Change | None
    loss: np.float32 | None
    grad_norm: np.float32 | None
    updates: dict[str, float]
    ratios: dict[str, float]
    next_losses: list[np.float32]
    steps: int
    compiled: bool
    notes: list[str] = field(default_factory=list)

    @property
    def update_norm(self) -> float | None:
        """L2 norm of the whole update; None if the step was skipped."""
        if not self.updates:
            return None
        with np.errstate(over="ignore", invalid="ignore"):
            return float(np.float32(np.sqrt(np.sum(np.square(list(self.updates.values()))))))

    @property
    def worst(self) -> tuple[str, float] | None:
        """The parameter that moved most for its size, and its update ratio; one that is not finite comes first."""
        known = {path: ratio for path, ratio in self.ratios.items() if self.updates[path] or not np.isnan(ratio)}
        if not known:
            return None
        path = max(known, key=lambda one: np.nan_to_num(known[one], nan=np.inf))
        return path, known[path]


def effect(
    change: Change | None, result: StepResult | None, before: Mapping[str, mx.array], after: Mapping[str, mx.array]
) -> Effect:
    """The effect of a performed step (None: it was skipped) on the weights `before`, without the steps after it."""
    if result is None:
        return Effect(change, None, None, {}, {}, [], 0, False)
    paths = sorted(result.gradients)
    moved = {path: after[path].astype(mx.float32) - before[path].astype(mx.float32) for path in paths}
    updates = _norms(moved)
    weights = _norms({path: before[path] for path in paths})
    ratios = {path: updates[path] / weights[path] if weights[path] else float("nan") for path in paths}
    return Effect(change, result.loss, result.grad_norm, updates, ratios, [], 1, False)


def _norms(arrays: Mapping[str, mx.array]) -> dict[str, float]:
    with np.errstate(over="ignore", invalid="ignore"):
        return {path: float(np.float32(np.sqrt(total))) for path, total in square_sums(arrays).items()}
