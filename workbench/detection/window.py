"""The last healthy values of a series: their mean, their median, and how far they stray. Knows numbers only."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection

NORMAL_SIGMA_PER_MAD = 1.4826  # of a MAD, for normal noise; see `spikes`


class Window:
    """The last `size` healthy values, and the unhealthy ones since."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._recent: deque[float] = deque()  # in time order
        self._sorted: list[float] = []  # the same values: the median is read off
        self._shares: list[float] = []  # of each of these in the mean, once there are so many
        self._held: list[float] = []  # beyond a threshold, and not followed by a healthy value

    def __len__(self) -> int:
        return len(self._recent)

    @property
    def full(self) -> bool:
        return len(self._recent) == self._size

    def admit(self, value: float, healthy: bool) -> None:
        if healthy:
            self._held.clear()
            self.add(value)
            return
        self._held.append(value)
        if len(self._held) > self._size // 2:  # a new level
            self._recent, self._sorted, self._held = deque(self._held), sorted(self._held), []
            self._shares = []

    def add(self, value: float) -> None:
        if self.full:
            place = bisect_left(self._sorted, self._recent.popleft())
            del self._sorted[place]
            del self._shares[place : place + 1]
        self._recent.append(value)
        place = bisect_right(self._sorted, value)
        self._sorted.insert(place, value)
        if self._shares:
            self._shares.insert(place, value / self._size)

    def mean(self) -> float | None:
        """`mean_of` the values."""
        if self.full and not self._shares:
            self._shares = [value / self._size for value in self._sorted]
        return math.fsum(self._shares) if self.full else mean_of(self._recent)

    def median(self) -> float:
        return _middle(self._sorted)

    def sigma(self, median: float) -> float:
        deviations = sorted([abs(value - median) for value in self._sorted])
        return NORMAL_SIGMA_PER_MAD * _middle(deviations)


def mean_of(values: Collection[float]) -> float | None:
    """None of none."""
    # fsum has no rounding of its own: the same bits on every Python. Divided first, so that no sum overflows.
    count = len(values)
    return math.fsum([value / count for value in values]) if count else None


def _middle(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
