"""Slow drifts: the cumulative sum of what is beyond the noise, which a change adds to at every step.

S = max(0, S + z - k), and an alarm where S > h: E. Page, Continuous inspection schemes, Biometrika 41 (1954) 100-115.
The change began after the last S = 0 before the alarm, the usual estimate (M. Basseville and I. Nikiforov, Detection of
Abrupt Changes, Prentice Hall 1993, section 2.2). Knows numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from .rolling import sorted_middle

BLOCKS = 10  # that the reference is made of: it moves on by a tenth of itself at a time
_FIRST, _LARGEST = 1 << 12, 1 << 17  # values that are summed at a time


class Alarm(NamedTuple):
    """Positions in the series: where the change began, where it was noticed, and the last at which S was above h; and
    the sum at which it was noticed."""

    onset: int
    noticed: int
    last: int
    total: float


def reference(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Median and MAD of the `size` values before the block of `size / 10` in which each value stands.

    Args:
        values: float64, shape (n,), finite.
        size: a multiple of 10.

    Returns:
        Two arrays of shape (n,), NaN for the first `size`.
    """
    block = size // BLOCKS
    median, mad = np.full(len(values), np.nan), np.full(len(values), np.nan)
    whole = len(values) // block
    if len(values) <= size:
        return median, mad
    windows = sliding_window_view(values[: whole * block].reshape(whole, block), BLOCKS, axis=0)
    windows = np.array(windows).reshape(len(windows), size)
    middle = sorted_middle(windows)
    deviation = sorted_middle(np.abs(windows - middle[:, None]))
    median[size:] = np.repeat(middle, block)[: len(values) - size]
    mad[size:] = np.repeat(deviation, block)[: len(values) - size]
    return median, mad


def alarms(scores: np.ndarray, k: float, h: float) -> list[Alarm]:
    """Where the sum goes above h; each alarm lasts until the sum is 0 again.

    The sum is kept below 2 h, or it would take as long to forget a change as the change lasted.

    Args:
        scores: float64, shape (n,), finite: how far each value is from its reference, in standard deviations.
        k: allowance, taken off each score: half of the shift that is to be noticed soonest.
        h: decision interval.
    """
    found: list[Alarm] = []
    place, total, zero, size = 0, 0.0, -1, _FIRST
    while place < len(scores):
        sums = np.cumsum(scores[place : place + size] - k)
        floor = np.minimum.accumulate(np.minimum(sums, -total))
        level = sums - floor
        above = np.flatnonzero(level > h)
        end = int(above[0]) if len(above) else len(level) - 1
        zeros = np.flatnonzero(level[: end + 1] <= 0)
        zero = place + int(zeros[-1]) if len(zeros) else zero
        if not len(above):
            place, total, size = place + len(level), float(level[-1]), min(2 * size, _LARGEST)
            continue
        noticed = place + end
        total, last, place = float(level[end]), noticed, noticed + 1
        for score in _floats(scores, place):
            total = min(total + score - k, 2 * h)
            if total <= 0:
                break
            if total > h:
                last = place
            place += 1
        found.append(Alarm(zero + 1, noticed, last, float(level[end])))
        if total > 0:
            break
        place, total, zero, size = place + 1, 0.0, place, _FIRST
    return found


def _floats(scores: np.ndarray, place: int) -> Iterator[float]:
    while place < len(scores):
        yield from scores[place : place + _FIRST].tolist()
        place += _FIRST
