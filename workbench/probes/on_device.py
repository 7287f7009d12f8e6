"""What `summary` and `quantities` say of arrays, computed where the arrays are.

For devices whose memory the host reads slowly: a copy of each array costs more there than all reductions together. Sums
are float32 in the device's order, so the last digits are its own. What leaves float32's range is None here, and for the
host to compute. Lazy MLX until the end: one wait for all that is asked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from .summary import Summary

LEAST, MOST = 1e-30, 1e30  # sums of squares between which float32 products have neither over- nor underflowed


def summaries(arrays: Sequence[mx.array]) -> list[Summary | None]:
    """The summary of each floating array; None: the host must look, for its sum has overflowed."""
    asked = [_summary(array) for array in arrays]
    mx.eval(asked)
    found: list[Summary | None] = []
    for array, parts in zip(arrays, asked, strict=True):
        total, zeros, nonfinite, peak = _numbers(parts) if array.size else (0.0, 0.0, 0.0, -1.0)
        overflowed = not math.isfinite(total) and not nonfinite
        found.append(None if overflowed else Summary(total, int(zeros), int(nonfinite), None if peak < 0 else peak))
    return found


def _summary(array: mx.array) -> list[mx.array]:
    if not array.size:
        return []
    x = array.astype(mx.float32)
    finite = mx.isfinite(x)
    peak = mx.max(mx.where(finite, mx.abs(x), -1.0))
    return [mx.sum(x), mx.sum(x == 0), mx.sum(~finite), peak]


def _numbers(evaluated: Sequence[mx.array]) -> list[float]:
    return [float(part.item()) for part in evaluated]  # type: ignore[arg-type]  # none is complex


@dataclass(frozen=True)
class Moved:
    """How one parameter was updated; the fields are what `quantities` calls so, and None where it says None."""

    ratio: float | None
    cosine: float | None
    staleness: float | None
    eps_fraction: float | None
    stuck: float | None


def moved(
    now: mx.array,
    then: mx.array,
    gradient: mx.array,
    m: mx.array | None,
    v: mx.array | None,
    *,
    eps: float = 0.0,
    correction: float = 1.0,
    scale: float = 1.0,
) -> Moved | None:
    """A parameter's update, all arrays of one shape; None: the host must look, for float32's range does not suffice.

    Args:
        now, then: the weight in states N and N-1.
        gradient: before clipping.
        m, v: first and second moment in state N, if the optimizer has them.
        eps, correction, scale: as `quantities.staleness_rms`.
    """
    if not now.size or (v is not None and np.float32(eps) < np.finfo(np.float32).tiny):
        return None
    new, old, g = (array.astype(mx.float32) for array in (now, then, gradient))
    update = new - old
    wants = (g != 0) if m is None else (g != 0) | (m.astype(mx.float32) != 0)
    asked = [mx.sum(one * other) for one, other in ((update, update), (old, old), (g, g), (update, g))]
    asked += [mx.sum(wants), mx.sum(wants & (update == 0))]
    if v is not None:
        root = mx.sqrt(v.astype(mx.float32)) * math.sqrt(correction)
        least = np.float32(eps)
        below = root < float(least) if least >= eps else root <= float(least)
        stale = mx.where(g == 0, 0.0, g / mx.maximum(root, float(least)))
        asked += [mx.sum(stale * stale), mx.sum(below)]
    mx.eval(asked)
    updates, weights, gradients, product, wanted, stuck, *second = _numbers(asked)
    if not all(LEAST < square < MOST for square in (updates, weights, gradients, *second[:1])):
        return None
    return Moved(
        ratio=math.sqrt(updates) / math.sqrt(weights),
        cosine=max(-1.0, min(product / math.sqrt(updates) / math.sqrt(gradients), 1.0)),  # the sums are rounded
        staleness=scale * math.sqrt(second[0] / now.size) if second else None,
        eps_fraction=second[1] / now.size if second else None,
        stuck=stuck / wanted if wanted else None,
    )
