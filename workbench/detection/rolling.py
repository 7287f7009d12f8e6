"""Mean, standard deviation, median and MAD of the values before each value: whole series at once.

Every function takes float64 of shape (n,), all finite, and gives for each value the statistics of the `size` values
before it, NaN for the first `size`. No running sum is ever subtracted from, so that a value of 1e30 leaves no trace in
windows that it has left.
"""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

CHUNK = 1 << 18  # values in a block of windows that is sorted at a time: 2 MB


def mean(values: np.ndarray, size: int) -> np.ndarray:
    return _mean_and_deviation(values, size, with_deviation=False)[0]


def mean_and_deviation(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation (n - 1 in the denominator).

    The series is cut into blocks of `size`; a window is the end of a block and the beginning of the next. Sums from
    each side of a block are joined: M. van Herk, Pattern Recognit. Lett. 13 (1992) 517, for sums instead of maxima; and
    the squares as in T. Chan, G. Golub and R. LeVeque, Am. Stat. 37 (1983) 242.
    """
    return _mean_and_deviation(values, size, with_deviation=True)


def _mean_and_deviation(values: np.ndarray, size: int, with_deviation: bool) -> tuple[np.ndarray, np.ndarray]:
    mean, deviation = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(values) <= size:
        return mean, deviation
    blocks = -(-len(values) // size)
    padded = np.full(blocks * size, values[-1])
    padded[: len(values)] = values
    grid = padded.reshape(blocks, size)
    # Taken off first, so that squares do not cancel: the value next to 0, which no huge one beside it can be.
    centre = np.take_along_axis(grid, np.abs(grid).argmin(axis=1)[:, None], axis=1)
    with np.errstate(over="ignore", invalid="ignore"):  # squares beyond float64: the deviation is then not finite
        grid = grid - centre
        before = [part[:, ::-1] for part in _parts(grid[:, ::-1], with_deviation)]
        after = _parts(grid, with_deviation)
        # The window before value b * size + k: the last size - k of block b - 1, and the first k of block b.
        count = np.arange(1, size)
        left, right = size - count, count
        a, b = before[0][:-1, 1:] + centre[:-1], after[0][1:, :-1] + centre[1:]
        apart = b - a
        means = np.concatenate([before[0][:-1, :1] + centre[:-1], a + apart * (right / size)], axis=1)
        mean[size:] = means.ravel()[: len(values) - size]
        if with_deviation:
            squares = before[1][:-1, 1:] + after[1][1:, :-1] + apart * apart * (left * right / size)
            squares = np.concatenate([before[1][:-1, :1], squares], axis=1)
            deviation[size:] = np.sqrt(squares.ravel()[: len(values) - size] / max(size - 1, 1))
    return mean, deviation


def _parts(grid: np.ndarray, with_squares: bool) -> list[np.ndarray]:
    """Mean, and sum of squares about it, of the first 1, 2, … values of each row."""
    count = np.arange(1, grid.shape[1] + 1)
    total = np.cumsum(grid, axis=1)
    if not with_squares:
        return [total / count]
    squares = np.cumsum(grid * grid, axis=1) - total * total / count
    return [total / count, np.maximum(squares, 0)]


def median(values: np.ndarray, size: int) -> np.ndarray:
    return _medians(values, size, with_mad=False)[0]


def median_and_mad(values: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Median, and median absolute deviation from it."""
    return _medians(values, size, with_mad=True)


def _medians(values: np.ndarray, size: int, with_mad: bool) -> tuple[np.ndarray, np.ndarray]:
    middle, mad = np.full(len(values), np.nan), np.full(len(values), np.nan)
    if len(values) > size:
        windows = sliding_window_view(values, size)[:-1]
        rows = max(1, CHUNK // size)
        for start in range(0, len(windows), rows):
            window = np.array(windows[start : start + rows])
            place = slice(size + start, size + start + len(window))
            middle[place] = sorted_middle(window)
            if with_mad:
                window -= middle[place, None]
                mad[place] = sorted_middle(np.abs(window, out=window))
    return middle, mad


def sorted_middle(rows: np.ndarray) -> np.ndarray:
    """The median of each row. The rows are sorted in place, which for short ones is faster than a search by far."""
    rows.sort(axis=1)
    half = rows.shape[1] // 2
    return rows[:, half].copy() if rows.shape[1] % 2 else (rows[:, half - 1] + rows[:, half]) / 2
