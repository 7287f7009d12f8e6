"""Curves of several runs over each other: loss, gradient norm, learning rate and speed, with spikes and segments.

A run has a colour, and the marker of its spikes a shape of its own, so that nothing hangs on telling colours apart.
Knows curves; nothing of files, widgets or MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Polygon

from ..errors import WorkbenchError
from ..figures import (
    BLACK,
    BLUE,
    BOTTOM_EDGE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    TOP_EDGE,
    add_legend,
    add_title,
    blank,
    dress,
    logarithmic,
    say_nothing,
    step_axis,
)
from .curve import GRAD_NORM, LABELS, LOSS, VALIDATION, Curve
from .thinning import outlined, thinned, thinned_marks
from .timeline_figure import DOTTED_STEPS, LOG_ABOVE

COLOURS = (BLUE, ORANGE, GREEN, PURPLE, SKY, BLACK)
SHAPES = ("D", "s", "^", "o", "v", "P")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))  # of segments
SCALES = ("auto", "linear", "log")
AXES_MARGIN = 0.015  # of the steps, on both sides
FAINT_RAW = 0.3  # opacity of what is behind a smoothed curve


@dataclass(frozen=True)
class Drawn:
    """What is drawn of one run.

    Attributes:
        name: for the legend.
        place: number of its colour and shape.
        curves: by quantity, a curve a segment.
        smoothed: the same, where a smoothed one is drawn over them.
        marks: spikes, as `RunCurves.marks`.
        begins: segment and first step of each segment but the first.
    """

    name: str
    place: int
    curves: Mapping[str, Sequence[Curve]]
    smoothed: Mapping[str, Sequence[Curve]] = field(default_factory=dict)
    marks: pd.DataFrame | None = None
    begins: Sequence[tuple[int, int]] = ()


def overlay(
    runs: Sequence[Drawn],
    quantities: Sequence[str],
    low: int,
    high: int,
    *,
    scale: str = "auto",
    smooth: int = 1,
    title: str = "",
) -> Figure:
    """The curves of some runs over the steps from `low` to `high`, one panel a quantity.

    However long they are, every pixel column shows its lowest and highest value; see `thinning`.

    Args:
        runs: those that are drawn.
        quantities: panels from top to bottom: some of `curve.LABELS`. Validation losses are squares in the panel of
            the loss.
        scale: of loss and gradient norm. "auto": logarithmic where all shown values are positive and the largest is
            more than 4 times their median. "log" where a value is not positive is linear.
        smooth: what `smoothed` is the mean of, for the legend.
        title: above all.

    Returns:
        A figure 900 pixels wide.

    Raises:
        WorkbenchError: there is nothing to draw, or a name is unknown.
    """
    panels = [name for name in quantities if name != VALIDATION]
    if unknown := [name for name in panels if name not in LABELS]:
        raise WorkbenchError(f"{unknown[0]!r} is no quantity; expected some of {', '.join(LABELS)}.")
    if not panels:
        raise WorkbenchError("No quantity is chosen to be drawn; choose one or more besides the validation loss.")
    if scale not in SCALES:
        raise WorkbenchError(f"scale is {scale!r}; expected one of {', '.join(SCALES)}.")
    ratios = [2.1 if name == LOSS else 1.4 if name == GRAD_NORM else 1.0 for name in panels]
    height = 1.25 + 1.25 * sum(ratios)
    figure = blank(height)
    grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.55 / height, hspace=0.12)
    margin = AXES_MARGIN * max(high - low, 1)
    left, right = (low - margin, high + margin) if low < high else (low - 1, high + 1)
    for axes, quantity in zip(grid, panels, strict=True):
        dress(axes, LABELS[quantity])
        axes.set_xlim(left, right)
        _panel(axes, quantity, runs, left, right, scale, smooth, VALIDATION in quantities)
        step_axis(axes, numbered=axes is grid[-1])
    add_legend(figure, grid)
    add_title(figure, title)
    return figure


def _panel(
    axes: Axes,
    quantity: str,
    runs: Sequence[Drawn],
    left: float,
    right: float,
    scale: str,
    smooth: int,
    with_validation: bool,
) -> None:
    shown: list[np.ndarray] = []
    broken = False
    for number, run in enumerate(runs):
        color = COLOURS[run.place % len(COLOURS)]
        # The first ones are broader, and show at the sides where others are the same.
        width = 1.1 + 0.7 * max(0, min(len(runs), 3) - 1 - number)
        over = run.smoothed.get(quantity)
        for curve in run.curves.get(quantity, ()):
            style: dict[str, Any] = {"color": color, "ls": DASHES[curve.segment % len(DASHES)], "lw": width}
            style["label"] = f"_{run.name}" if run.smoothed else run.name
            if over is not None:
                style |= {"alpha": FAINT_RAW, "ls": "-", "lw": 0.8}
            shown.append(_line(axes, curve, left, right, style))
            broken |= _broken(axes, curve, left, right, color)
        for curve in over or ():
            x, y = thinned(curve.steps, curve.values, left, right)
            label = f"{run.name}, mean of {smooth:,} values"
            axes.plot(x, y, color=color, ls=DASHES[curve.segment % len(DASHES)], lw=1.8, zorder=2.6, label=label)
        if quantity == LOSS and with_validation:
            for curve in run.curves.get(VALIDATION, ()):
                x, y = thinned(curve.steps, curve.values, left, right)
                shown.append(y)
                style = {"ms": 5, "mfc": "white", "mec": color, "ls": "none", "zorder": 3}
                axes.plot(x, y, "s", label=f"{run.name}, validation", **style)
        for segment, begin in run.begins:
            if left <= begin <= right:
                axes.axvline(
                    begin, color=color, lw=1.0, ls=(0, (1, 2)), zorder=1.5, label=f"{run.name}, segment {segment}"
                )
    values = np.concatenate(shown) if shown else np.array([])
    if not len(values):
        say_nothing(axes, "not finite" if broken else "not recorded")
        return
    if quantity in (LOSS, GRAD_NORM) and scale != "linear" and values.min() > 0:
        if scale == "log" or values.max() > LOG_ABOVE * np.median(values):
            logarithmic(axes, values)
    if (
        values.min() == values.max() != 0 and axes.get_yscale() == "linear"
    ):  # a flat line: else its axis would have nothing but digits
        axes.set_ylim(*sorted([0.0, 2 * float(values[0])]))
    for run in runs:
        _marks(axes, quantity, run, left, right)


def _line(axes: Axes, curve: Curve, left: float, right: float, style: Mapping[str, Any]) -> np.ndarray:
    """Draws a curve; returns the values that stand for it. A dense one is an area, unless one would see through it,
    darker where its border is, or its line is to have gaps."""
    outline = outlined(curve.steps, curve.values, left, right) if style["ls"] == "-" and "alpha" not in style else None
    if outline is None:
        x, y = thinned(curve.steps, curve.values, left, right)
        axes.plot(x, y, marker="." if len(x) <= DOTTED_STEPS else None, ms=4, **style)
        return y
    points = np.stack(outline, axis=1)
    axes.plot([], [], **style)  # for the legend
    axes.add_artist(Polygon(points, color=style["color"], lw=style["lw"], joinstyle="round", zorder=2))
    axes.update_datalim(points)  # add_patch would, too, but a point at a time
    return outline[1]


def _broken(axes: Axes, curve: Curve, left: float, right: float, color: str) -> bool:
    kept = thinned_marks(curve.broken, np.zeros(len(curve.broken)), left, right)
    if not len(kept):
        return False
    style: dict[str, Any] = {"color": color, "ms": 7, "mew": 1.8, "ls": "none", "zorder": 4}
    height = np.full(len(kept), TOP_EDGE)
    axes.plot(curve.broken[kept], height, "x", transform=axes.get_xaxis_transform(), label="non-finite", **style)
    return True


def _marks(axes: Axes, quantity: str, run: Drawn, left: float, right: float) -> None:
    if run.marks is None or run.marks.empty:
        return
    own = run.marks[run.marks["quantity"] == quantity]
    steps, values = own["step"].to_numpy(np.int64), own["value"].to_numpy(float)
    drifts = own["rule"].to_numpy() == "drift"  # whose value is a sum
    color, shape = COLOURS[run.place % len(COLOURS)], SHAPES[run.place % len(SHAPES)]
    for chosen, label in ((~drifts & np.isfinite(values), "spike"), (drifts, "drift noticed")):
        x = steps[chosen]
        y = np.full(len(x), BOTTOM_EDGE) if label != "spike" else values[chosen]
        kept = thinned_marks(x, y, left, right)
        if not len(kept):
            continue
        style: dict[str, Any] = {"ms": 8, "mfc": "none", "mec": color, "mew": 1.7, "ls": "none", "zorder": 4}
        style |= {} if label == "spike" else {"transform": axes.get_xaxis_transform(), "ms": 6, "mfc": color}
        axes.plot(x[kept], y[kept], shape, label=f"{run.name}, {label}", **style)
    onsets = own["onset"].to_numpy(np.int64)
    early = onsets < steps
    begun = onsets[early][thinned_marks(onsets[early], np.zeros(int(early.sum())), left, right)]
    if len(begun):
        style = {"marker": "|", "ms": 11, "mew": 1.8, "color": color, "ls": "none", "zorder": 3.8}
        height = np.full(len(begun), BOTTOM_EDGE)
        label = f"{run.name}, departure begins"
        axes.plot(begun, height, transform=axes.get_xaxis_transform(), label=label, **style)
