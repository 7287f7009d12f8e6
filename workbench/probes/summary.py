"""One flat array in a few numbers. numpy only; knows no MLX, no kinds, no paths."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .quantities import STRETCH


@dataclass(frozen=True)
class Summary:
    """What one reading of an array gives, a stretch at a time.

    Attributes:
        total: sum of the elements, float32 (pairwise) over a stretch and float64 above; NaN or inf if an element is.
        zeros: elements that are exactly 0.
        nonfinite: NaN or infinite elements.
        max_abs: largest |x| of the finite elements; None if there are none.
    """

    total: float
    zeros: int
    nonfinite: int
    max_abs: float | None


def summarise(values: np.ndarray) -> Summary:
    """Summarises a flat float32 array."""
    total, zeros, nonfinite, peak = 0.0, 0, 0, -1.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, values.size, STRETCH):
            part = values[start : start + STRETCH]
            part_sum = float(np.add.reduce(part))
            zeros += part.size - int(np.count_nonzero(part != 0))  # of truth values: floats are counted one by one
            if not np.isfinite(part_sum):  # NaN and infinities reach the sum; so does an overflow
                finite = np.isfinite(part)
                bad = part.size - int(np.count_nonzero(finite))
                nonfinite += bad
                part_sum = part_sum if bad else float(np.sum(part, dtype=np.float64))
                part = part[finite]
            total += part_sum
            if part.size:
                peak = max(peak, float(part.max()), -float(part.min()))
    return Summary(total, zeros, nonfinite, None if peak < 0 else peak)
