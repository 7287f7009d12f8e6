"""What the spike detector says of a whole series, without asking it step by step: the same bits, some twenty times as
fast.

As long as nothing is unhealthy, the window before a value is simply the values before it. So medians and MADs of all
such windows are computed at once, and only where a value may be beyond a threshold does the detector itself judge: from
there on step by step, until its window is again the values just before, which takes as many healthy values as it holds.
Knows numbers only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from ..spikes import LOG_GRAD_NORM_SIGMA_FLOOR, LOSS_SIGMA_FLOOR, Reading, SpikeDetector, SpikeSettings, non_finite
from .rolling import CHUNK, sorted_middle
from .window import NORMAL_SIGMA_PER_MAD, Window, mean_of


def spikes_of(
    losses: np.ndarray, grad_norms: np.ndarray, there: tuple[np.ndarray, np.ndarray], settings: SpikeSettings
) -> Iterator[tuple[int, Reading]]:
    """Every spike of steps that follow each other, in their order, as a fresh `SpikeDetector` would read it.

    Args:
        losses, grad_norms: float64, shape (steps,).
        there: of each, bool, shape (steps,): the step has logged one, finite or not.

    Yields:
        The step's place, from 0, and its reading.
    """
    values, norms = (
        _Series(numbers, seen & np.isfinite(numbers)) for numbers, seen in ((losses, there[0]), (grad_norms, there[1]))
    )
    past = _Losses(values, settings)
    found = past.found, _Norms(norms, settings).found
    broken = np.flatnonzero((there[0] & ~np.isfinite(losses)) | (there[1] & ~np.isfinite(grad_norms)))
    is_broken, half = set(broken.tolist()), settings.window // 2
    loud_loss = loud_norm = 0  # the first step at which the rules on each are not debounced
    for place in sorted(is_broken.union(*found)):
        spike = None
        if place in is_broken:
            loss, norm = (
                float(numbers[place]) if seen[place] else None
                for numbers, seen in ((losses, there[0]), (grad_norms, there[1]))
            )
            spike = non_finite(loss, norm, None)
        spike = spike or (found[0].get(place) if place >= loud_loss else None)
        spike = spike or (found[1].get(place) if place >= loud_norm else None)
        if spike is None:
            continue
        if spike.rule != "grad_norm_z":
            loud_loss = place + half + 1
        loud_norm = place + half + 1
        yield place, replace(spike, moving_average=past.mean_before(place))


class _Series:
    """The values of a series that count, and the places in which they stand."""

    def __init__(self, numbers: np.ndarray, counts: np.ndarray) -> None:
        self.places = np.flatnonzero(counts)
        self.values = numbers[self.places]


class _Judged(SpikeDetector):
    """A series that was judged as a whole.

    Attributes:
        found: of each place with a value beyond a threshold its reading, whose moving average is yet to be filled in.
    """

    def __init__(self, series: _Series, settings: SpikeSettings) -> None:
        super().__init__(settings)
        self._series, self._size = series, settings.window
        self._scale = self._scaled(series.values)  # on which windows are
        self.found: dict[int, Reading] = {}
        # From a value on (the first number), its window is what stands before it, but not before the second number;
        # except where the detector judged itself, of which the means of its windows are kept.
        self._plain: list[tuple[int, int]] = [(0, 0)]
        self._means: dict[int, float | None] = {}
        self._walk()

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _suspects(self, window: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Which values may be beyond a threshold: never too few, seldom too many.

        Args:
            window: shape (values, size), which may be overwritten.
            now: the value after each window, shape (values,).
        """
        raise NotImplementedError

    def _judge(self, value: float, window: Window, average: float | None) -> Reading | None:
        raise NotImplementedError

    def _walk(self) -> None:
        size, count = self._size, len(self._scale)
        suspects, place, begin = self._all_suspects(), 0, 0
        while True:
            following = int(np.searchsorted(suspects, max(place, begin + size)))
            if following == len(suspects):
                return
            place = int(suspects[following])
            window, healthy = Window(size), size
            for value in self._scale[place - size : place].tolist():
                window.add(value)
            while window.full and place < count:
                average = self._means[place] = window.mean()
                reading = self._judge(float(self._series.values[place]), window, average)
                if reading is not None:
                    self.found[int(self._series.places[place])] = reading
                healthy, place = (0 if reading else healthy + 1), place + 1
                if healthy >= size:
                    break
            if place == count:
                self._means[place] = window.mean()
            begin = place - len(window)
            self._plain.append((place, begin))

    def _all_suspects(self) -> np.ndarray:
        size, found = self._size, []
        if len(self._scale) <= size:
            return np.array([], np.int64)
        windows = sliding_window_view(self._scale, size)[:-1]
        rows = max(1, CHUNK // size)
        for start in range(0, len(windows), rows):
            window = np.array(windows[start : start + rows])
            now = self._scale[size + start : size + start + len(window)]
            # Near the largest float64 a threshold is infinite, or NaN where the sum of a window is: as in Python.
            with np.errstate(over="ignore", invalid="ignore"):
                found.append(size + start + np.flatnonzero(self._suspects(window, now)))
        return np.concatenate(found)

    def mean_before(self, place: int) -> float | None:
        """The mean of the window as it is before a place."""
        value = int(np.searchsorted(self._series.places, place))
        if value in self._means:
            return self._means[value]
        begin = self._plain[bisect_right(self._plain, (value, math.inf)) - 1][1]
        return mean_of(self._scale[max(begin, value - self._size) : value].tolist())


class _Losses(_Judged):
    def _scaled(self, values: np.ndarray) -> np.ndarray:
        return values

    def _suspects(self, window: np.ndarray, now: np.ndarray) -> np.ndarray:
        factor, size = self.settings.factor, self._size
        mean = window.sum(axis=1) / size
        middle = sorted_middle(window)
        # Beyond what any order of summing can differ by.
        slack = 4 * size * np.finfo(float).eps * np.maximum(np.abs(window[:, 0]), np.abs(window[:, -1])) + 1e-300
        beyond = ~((mean + slack <= 0) | (now <= factor * (mean - slack)))
        return beyond | _beyond(window, middle, now, LOSS_SIGMA_FLOOR * np.abs(middle), self.settings.z)

    def _judge(self, value: float, window: Window, average: float | None) -> Reading | None:
        self._losses = window
        return self._judge_loss(value, average)


class _Norms(_Judged):
    def __init__(self, series: _Series, settings: SpikeSettings) -> None:
        positive = series.values > 0
        series.places, series.values = series.places[positive], series.values[positive]
        super().__init__(series, settings)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        # As the detector does it: numpy's logarithm has other bits.
        return np.fromiter(map(math.log, values.tolist()), float, len(values))

    def _suspects(self, window: np.ndarray, now: np.ndarray) -> np.ndarray:
        middle = sorted_middle(window)
        return _beyond(window, middle, now, np.full(len(now), LOG_GRAD_NORM_SIGMA_FLOOR), self.settings.z)

    def _judge(self, value: float, window: Window, average: float | None) -> Reading | None:
        self._log_norms = window
        return self._judge_grad_norm(value, average)


def _beyond(window: np.ndarray, middle: np.ndarray, now: np.ndarray, floor: np.ndarray, z: float) -> np.ndarray:
    """Where a value is beyond z robust standard deviations, as the detector computes them."""
    beyond = now > middle + z * floor  # the MAD is only needed where that is so, for sigma is no less than its floor
    rows = np.flatnonzero(beyond)
    deviation = sorted_middle(np.abs(window[rows] - middle[rows, None]))
    sigma = np.maximum(NORMAL_SIGMA_PER_MAD * deviation, floor[rows])
    beyond[rows] = (sigma > 0) & (now[rows] > middle[rows] + z * sigma)
    return beyond
