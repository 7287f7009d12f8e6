"""The loss curves of two runs, and how far apart they are. Knows columns; nothing of files, runs or MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from ..figures import (
    BLACK,
    BLUE,
    BOTTOM_EDGE,
    INK,
    ORANGE,
    TOP_EDGE,
    VERMILION,
    add_legend,
    add_title,
    blank,
    dress,
    finite_only,
    logarithmic,
    mark_edge,
    require,
    say_nothing,
    span,
)
from ..screen.timeline_figure import DOTTED_STEPS, LOG_ABOVE, decimate

MARKS = 200  # of equal steps: more would be one bar


def loss_pair(
    table: pd.DataFrame, *, a: str, b: str, parting: int | None = None, unit: str = "", title: str = ""
) -> Figure:
    """Two loss curves above, and the size of their difference below, on a logarithmic axis.

    Args:
        table: one row a step: `step` (int), `loss_a`, `loss_b` and `difference` (float; NaN where not recorded).
        a, b: names of the runs.
        parting: the step at which they part, a vertical line in both.
        unit: of the loss, such as "nats per token"; "" if not known.
        title: above all.

    Returns:
        A figure of 900 x 520 pixels with two axes that share the steps. A difference of exactly 0, which a logarithmic
        axis can't hold, is marked at its bottom edge.

    Raises:
        WorkbenchError: a column is missing.
    """
    require(table, "step", "loss_a", "loss_b", "difference")
    figure = blank(5.2)
    upper, lower = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [1.6, 1]})
    figure.subplots_adjust(left=0.1, right=0.98, bottom=0.105, hspace=0.1)
    dress(upper, f"loss ({unit})" if unit else "loss")
    dress(lower, f"|difference|\n({unit})" if unit else "|difference|")
    steps = table["step"].to_numpy()
    dotted = "." if len(steps) <= DOTTED_STEPS else None
    both = [table[name].to_numpy(float) for name in ("loss_a", "loss_b")]
    # The second is dashed and thinner, so that the first shows through where they are the same.
    styles: list[dict[str, Any]] = [{"color": BLUE, "lw": 2.4}, {"color": ORANGE, "lw": 1.5, "ls": (0, (4, 2))}]
    for values, name, style in zip(both, (a, b), styles, strict=True):
        kept = decimate(values)
        shown = np.where(np.isfinite(values[kept]), values[kept], np.nan)
        upper.plot(steps[kept], shown, marker=dotted, ms=5, label=name, **style)
        broken = ~np.isfinite(values)
        if broken.any() and not broken.all():
            mark_edge(upper, steps[broken], TOP_EDGE, "x", "not finite, or not logged")
    finite = finite_only(np.concatenate(both))
    if not len(finite):
        say_nothing(upper, "not recorded")
    elif finite.min() > 0 and finite.max() > LOG_ABOVE * np.median(finite):
        logarithmic(upper, finite)
    _differences(lower, steps, np.abs(table["difference"].to_numpy(float)))
    if parting is not None:
        for axes in (upper, lower):
            axes.axvline(
                parting, color=BLACK, lw=1.1, ls=(0, (1, 1.5)), zorder=1.5, label=f"they part: step {parting:,}"
            )
    low, high = span([*steps, *([] if parting is None else [parting])])
    lower.set_xlim(low - 0.015 * (high - low), high + 0.015 * (high - low))
    lower.set_xlabel("step", color=INK)
    lower.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    add_legend(figure, (upper, lower))
    add_title(figure, title)
    return figure


def _differences(axes: Axes, steps: np.ndarray, sizes: np.ndarray) -> None:
    drawn, equal = np.isfinite(sizes) & (sizes > 0), sizes == 0
    if drawn.any():
        values = np.where(drawn, sizes, np.nan)
        kept = decimate(values)
        dotted = "." if len(steps) <= DOTTED_STEPS else None
        axes.plot(steps[kept], values[kept], color=VERMILION, lw=1.3, marker=dotted, ms=5, label="difference")
        logarithmic(axes, sizes[drawn])
    else:
        axes.set_yticks([])
    if equal.any():
        few = np.unique(np.linspace(0, equal.sum() - 1, MARKS).astype(int))
        mark_edge(axes, steps[equal][few], BOTTOM_EDGE, "v", "exactly 0")
    elif not drawn.any():
        say_nothing(axes, "not recorded")
