"""Cost against size and against steps, on logarithmic axes: where it grows by a power, the points lie on a line.

Knows a frame; measures nothing. Returns a figure.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from ..figures import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, add_title, blank, dress, require
from .growth import SIZE, STEPS, fitted

LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"), (PURPLE, "D"), (SKY, "v"))


def scaling_figure(found: pd.DataFrame) -> Figure:
    """Two panels: seconds a step against parameters, and seconds against recorded steps, each with its fitted lines.

    Args:
        found: columns against, what, x, seconds, as `scaling` returns them; a cost that is not above 0 is not drawn.

    Returns:
        A figure 900 pixels wide.

    Raises:
        WorkbenchError: a column is missing.
    """
    require(found, "against", "what", "x", "seconds")
    figure = blank(4.2)
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.14, top=0.74, wspace=0.27)
    for axes, against, label in zip(panels, (SIZE, STEPS), ("seconds a step", "seconds"), strict=True):
        dress(axes, label)
        axes.set(xscale="log", yscale="log")
        axes.set_xlabel(against, color=INK)
        axes.yaxis.set_label_coords(-0.16, 0.5)
        rows = found[(found["against"] == against) & (found["seconds"] > 0)]
        for (color, marker), (what, group) in zip(LOOKS, rows.groupby("what", sort=False), strict=False):
            x, y = group["x"].to_numpy(float), group["seconds"].to_numpy(float)
            name = str(what)
            if len(x) > 1:
                slope, _ = fitted(x, y)
                middle = np.exp(np.log(y).mean() - slope * np.log(x).mean())
                axes.plot(x, middle * x**slope, color=color, lw=1, zorder=2)
                name += f" (slope {slope:.2f})"
            axes.plot(x, y, marker, color=color, ms=6, ls="none", label=name, zorder=3)
        low, high = axes.get_ylim()
        if high < 20 * low:  # else noise looks like growth; and so a decade is on the axis, the only places with labels
            middle = np.sqrt(low * high)
            axes.set_ylim(middle / np.sqrt(20), middle * np.sqrt(20))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), fontsize=8, frameon=False)
    add_title(figure, "Cost against size and against steps")
    return figure
