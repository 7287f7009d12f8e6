"""A curve of any length as the points that a picture can show.

Of each column of pixels the first, lowest, highest and last value are kept, which draws what all of them would, within
a pixel: U. Jugel, Z. Jerzak, G. Hackenbroich and V. Markl, M4: A Visualization-Oriented Time Series Data Aggregation,
Proc. VLDB Endow. 7 (2014) 797-808. So a spike of a single step among a million never vanishes. Where two neighbouring
columns span much the same values, the last of one and the first of the next draw nothing that is not drawn in any case,
and lines from highest to highest and from lowest to lowest by turns are half as long. Knows arrays only.
"""

from __future__ import annotations

import math

import numpy as np

PIXELS = 820  # columns of an axis: 900 pixels less its margins
MUCH = 0.5  # of what a column spans, a spike or a slope has less in common with the next


def thinned(steps: np.ndarray, values: np.ndarray, low: float, high: float, pixels: int = PIXELS) -> list[np.ndarray]:
    """The points of a curve between two steps that make its picture, and the neighbours just outside.

    Lowest and highest values are set in the middle of their column: less than a pixel from where they stand.

    Args:
        steps: int64, rising, shape (n,).
        values: finite, shape (n,).
        low, high: the ends of the axis.
        pixels: columns between them.

    Returns:
        Steps and values; all of them where they are no more than four to a column.
    """
    # Whole numbers, for others would have all steps turned into floats first.
    start, end = np.searchsorted(steps, [math.ceil(low), math.floor(high) + 1]).tolist()
    start, end = max(0, start - 1), min(len(steps), end + 1)
    steps, values = steps[start:end], values[start:end]
    if len(steps) <= 4 * pixels:
        return [steps, values]
    inner = np.ceil(low + (high - low) / pixels * np.arange(pixels + 1)).astype(np.int64)
    edges = np.searchsorted(steps, inner)
    starts = np.unique(np.concatenate([[0], edges[edges < len(steps)]]))
    ends = np.append(starts[1:], len(steps)) - 1
    lowest, highest = (extreme.reduceat(values, starts) for extreme in (np.minimum, np.maximum))
    rising = np.arange(len(starts)) % 2 == 0
    between = np.where(rising, lowest, highest), np.where(rising, highest, lowest)
    x = np.stack([steps[starts], *[(steps[starts] + steps[ends]) // 2] * 2, steps[ends]], axis=1)
    y = np.stack([values[starts], *between, values[ends]], axis=1)
    both = np.minimum(highest[1:], highest[:-1]) - np.maximum(lowest[1:], lowest[:-1])
    longer = np.maximum(highest[1:] - lowest[1:], highest[:-1] - lowest[:-1])
    kept = np.ones(x.shape, bool)
    kept[1:, 0] = kept[:-1, 3] = ~(both > MUCH * longer)
    return [x[kept], y[kept]]


def thinned_marks(steps: np.ndarray, values: np.ndarray, low: float, high: float, pixels: int = PIXELS) -> np.ndarray:
    """Indices of marks that are to be drawn: between two steps, and of several in a column of pixels the highest."""
    inside = np.flatnonzero((steps >= low) & (steps <= high))
    column = ((steps[inside] - low) * (pixels / max(high - low, 1))).astype(int)
    order = np.lexsort((np.nan_to_num(values[inside], nan=np.inf), column))
    last = np.flatnonzero(np.diff(column[order], append=-1))
    return np.sort(inside[order[last]])
