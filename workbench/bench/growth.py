"""By which power a cost grows: the slope of a straight line through it on two logarithmic axes.

Knows numbers only.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

COLUMNS = ("against", "what", "x", "seconds")
SIZE, STEPS = "parameters", "steps"  # what costs are set against


def slopes(found: pd.DataFrame) -> list[str]:
    """A sentence for each line of what `scaling` returns: seconds grow as x to the power of the slope."""
    said = []
    for (against, what), group in found.groupby(["against", "what"], sort=False):
        positive = group[group["seconds"] > 0]
        if len(positive) < 2:
            said.append(f"{what} against {against}: no slope, as fewer than two of its costs are above the noise")
            continue
        slope, off = fitted(positive["x"].to_numpy(float), positive["seconds"].to_numpy(float))
        left = len(group) - len(positive)
        more = f"; {left} of {len(group)} points are not above 0 and left out" if left else ""
        said.append(f"{what} grows as {against} to the power {slope:.2f} (the line is off by at most {off:.0%}){more}")
    return said


def fitted(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Slope of the least-squares line through log x and log y, and by which share a point is off it at the most."""
    slope, offset = np.polyfit(np.log(x), np.log(y), 1)
    off = np.abs(np.exp(np.log(y) - (slope * np.log(x) + offset)) - 1)
    return float(slope), float(off.max())
