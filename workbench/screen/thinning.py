"""A curve of any length as the points that a picture can show.

Of each column of pixels the first, lowest, highest and last value are kept, which draws what all of them would, within
a pixel: U. Jugel, Z. Jerzak, G. Hackenbroich and V. Markl, M4: A Visualization-Oriented Time Series Data Aggregation,
Proc. VLDB Endow. 7 (2014) 797-808. So a spike of a single step among a million never vanishes. Where two neighbouring
columns span much the same values, the last of one and the first of the next draw nothing that is not drawn in any case,
and lines from highest to highest and from lowest to lowest by turns are half as long. Shorter still, and drawn in a
fifth of the time, is the outline of all that lies between the lowest and the highest. Knows arrays only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    found = _columns(steps, values, low, high, pixels)
    if isinstance(found, list):
        return found
    rising = np.arange(len(found.starts)) % 2 == 0
    between = np.where(rising, found.lowest, found.highest), np.where(rising, found.highest, found.lowest)
    return found.path(found.values[found.starts], *between, found.values[found.ends])


def outlined(
    steps: np.ndarray, values: np.ndarray, low: float, high: float, pixels: int = PIXELS
) -> list[np.ndarray] | None:
    """The outline of what a curve covers between two steps: filled, and with a border as broad as the curve's line, it
    is the curve's picture. Arguments as of `thinned`.

    Returns:
        Steps and values, along the highest ones and back along the lowest; None where they are so few that `thinned`
        returns them all.
    """
    found = _columns(steps, values, low, high, pixels)
    if isinstance(found, list):
        return None
    sides = []
    for side, inner, outer in ((found.highest, np.minimum, np.maximum), (found.lowest, np.maximum, np.minimum)):
        first, last = found.values[found.starts], found.values[found.ends]
        # From column to column as far out as both reach, so that a spike is upright; over a gap there is but a line.
        both = inner(side[1:], side[:-1])
        first[1:], last[:-1] = (np.where(found.gaps, own, outer(own, both)) for own in (first[1:], last[:-1]))
        sides.append(found.path(first, side, last))
    return [np.concatenate([there, back[::-1]]) for there, back in zip(*sides, strict=True)]


@dataclass(frozen=True)
class _Columns:
    """The columns of pixels that hold points.

    Attributes:
        steps, values: of all points, shape (n,).
        width: of a column, in steps.
        starts, ends: place of the first and the last point of each column, shape (columns,).
        lowest, highest: value in each column.
    """

    steps: np.ndarray
    values: np.ndarray
    width: float
    starts: np.ndarray
    ends: np.ndarray
    lowest: np.ndarray
    highest: np.ndarray

    @property
    def gaps(self) -> np.ndarray:
        """Whether a column is more than its width from the next, shape (columns - 1,)."""
        found: np.ndarray = self.steps[self.starts[1:]] - self.steps[self.ends[:-1]] > self.width
        return found

    def path(self, *values: np.ndarray) -> list[np.ndarray]:
        """Steps and values of a line through the columns, at the first and the last step of each only where that shows.

        Args:
            values: of each column, at its first step, in its middle (some), and at its last, each of shape (columns,).
        """
        first, last = self.steps[self.starts], self.steps[self.ends]
        x, y = np.stack([first, *[(first + last) // 2] * (len(values) - 2), last], axis=1), np.stack(values, axis=1)
        both = np.minimum(self.highest[1:], self.highest[:-1]) - np.maximum(self.lowest[1:], self.lowest[:-1])
        longer = np.maximum(self.highest[1:] - self.lowest[1:], self.highest[:-1] - self.lowest[:-1])
        kept = np.ones(x.shape, bool)
        kept[1:, 0] = kept[:-1, -1] = ~(both > MUCH * longer) | self.gaps
        return [x[kept], y[kept]]


def _columns(
    steps: np.ndarray, values: np.ndarray, low: float, high: float, pixels: int
) -> _Columns | list[np.ndarray]:
    """A curve between two steps, with the neighbours just outside: in columns of pixels, or its steps and values where
    they are no more than four to a column."""
    # Whole numbers, for others would have all steps turned into floats first.
    start, end = np.searchsorted(steps, [math.ceil(low), math.floor(high) + 1]).tolist()
    start, end = max(0, start - 1), min(len(steps), end + 1)
    steps, values = steps[start:end], values[start:end]
    if len(steps) <= 4 * pixels:
        return [steps, values]
    width = (high - low) / pixels
    edges = np.searchsorted(steps, np.ceil(low + width * np.arange(pixels + 1)).astype(np.int64))
    starts = np.unique(np.concatenate([[0], edges[edges < len(steps)]]))
    ends = np.append(starts[1:], len(steps)) - 1
    lowest, highest = (extreme.reduceat(values, starts) for extreme in (np.minimum, np.maximum))
    return _Columns(steps, values, width, starts, ends, lowest, highest)


def thinned_marks(steps: np.ndarray, values: np.ndarray, low: float, high: float, pixels: int = PIXELS) -> np.ndarray:
    """Indices of marks that are to be drawn: between two steps, and of several in a column of pixels the highest."""
    inside = np.flatnonzero((steps >= low) & (steps <= high))
    column = ((steps[inside] - low) * (pixels / max(high - low, 1))).astype(int)
    order = np.lexsort((np.nan_to_num(values[inside], nan=np.inf), column))
    last = np.flatnonzero(np.diff(column[order], append=-1))
    return np.sort(inside[order[last]])
