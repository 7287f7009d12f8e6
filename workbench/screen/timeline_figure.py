"""The timeline of a run: loss, gradient norm and learning rate over its steps, with spikes and checkpoints marked.

Knows columns; nothing of files, runs, widgets or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from ..detection.spike_table import recorded
from ..figures import (
    BLACK,
    BLUE,
    DPI,
    GREEN,
    INK,
    ON_WHITE,
    ORANGE,
    PURPLE,
    SKY,
    TOP_EDGE,
    VERMILION,
    add_legend,
    add_title,
    begin_at_zero,
    blank,
    dress,
    finite_only,
    floats,
    logarithmic,
    mark_edge,
    plain,
    require,
    say_nothing,
    span,
    step_axis,
)

SEGMENT_STYLES = ((BLUE, "-"), (ORANGE, (0, (5, 1))), (GREEN, (0, (3, 1, 1, 1))), (PURPLE, (0, (1, 1))), (SKY, "-"))
POINTS = 4000  # of a curve: more than four to a pixel column shows nothing more and costs time
LOG_ABOVE = 4.0  # max / median beyond which a linear axis would press the healthy part into the lowest quarter
DOTTED_STEPS = 60  # so few that each step can have its dot, and a single one must
LABELLED_SPIKES = 8  # more names than this overlap
NAME_PIXELS = 15  # height of a line of 9 point text
NAME_GAP = 4  # pixels between a spike's name and its line, on which the cursor may stand


def decimate(values: np.ndarray, limit: int = POINTS) -> np.ndarray:
    """Indices that keep the look of a curve: its ends, and the lowest and highest point of each stretch.

    Args:
        values: float, shape (n,); non-finite ones are never a lowest or highest point.
        limit: 4 or more.

    Returns:
        Rising int64 indices, at most `limit` of them; all n if they fit.
    """
    count = len(values)
    if count <= limit:
        return np.arange(count)
    size = math.ceil(count / ((limit - 2) // 2))
    padded = np.full(size * math.ceil(count / size), np.nan)
    padded[:count] = np.where(np.isfinite(values), values, np.nan)
    stretches = padded.reshape(-1, size)
    lows = np.where(np.isnan(stretches), np.inf, stretches).argmin(axis=1)
    highs = np.where(np.isnan(stretches), -np.inf, stretches).argmax(axis=1)
    starts = np.arange(len(stretches)) * size
    return np.unique(np.concatenate([[0, count - 1], starts + lows, starts + highs]))


def timeline(
    steps: pd.DataFrame,
    spikes: pd.DataFrame | None = None,
    *,
    step: int | None = None,
    checkpoints: Sequence[int] = (),
    title: str = "",
) -> Figure:
    """Loss, gradient norm and learning rate over the steps of a run.

    Loss and gradient norm get a logarithmic axis when all their values are positive and the largest is more than 4
    times the median, so that a spike does not crush the rest. A non-finite value is an x at the top edge.

    Args:
        steps: one row a step: `step` (int), and if recorded `segment` (int), `loss`, `grad_norm` (L2, before clipping),
            `lr` and `val_loss` (float). NaN is non-finite in loss and gradient norm, unless `<name>_recorded` is False;
            in the others it is absent. An axis without any value says "not recorded".
        spikes: rows `step`, `rule`, `value`, as `workbench.find_spikes` returns them: a diamond each. Step and
            rule are written beside them if there are 8 or fewer; a stretch of non-finite steps counts once.
        step: the selected step, a vertical line in all three.
        checkpoints: their steps, ticks at the bottom.
        title: such as the run's name.

    Returns:
        A figure of 900 x 640 pixels with three axes that share the steps.

    Raises:
        WorkbenchError: a frame lacks `step`.
    """
    require(steps, "step")
    figure = blank(6.4)
    upper, middle, lower = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1.4, 1]})
    figure.subplots_adjust(left=0.09, right=0.97, bottom=0.085, hspace=0.1)
    for axes, label in ((upper, "loss"), (middle, "gradient norm (L2)"), (lower, "learning rate")):
        dress(axes, label)

    _curves(upper, steps, "loss")
    _curves(middle, steps, "grad_norm")
    _curves(lower, steps, "lr")
    begin_at_zero(lower, floats(steps, "lr"))
    if "val_loss" in steps and steps["val_loss"].notna().any():
        seen = steps[steps["val_loss"].notna()]
        upper.plot(
            seen["step"], seen["val_loss"], "s", ms=5, mfc="white", mec=BLACK, ls="none", label="validation loss"
        )
    for axes, names in ((upper, ("loss", "val_loss")), (middle, ("grad_norm",))):
        finite = finite_only(np.concatenate([floats(steps, name) for name in names]))
        if len(finite) and finite.min() > 0 and finite.max() > LOG_ABOVE * np.median(finite):
            logarithmic(axes, finite)

    if len(checkpoints):
        style: dict[str, Any] = {"marker": "|", "ms": 8, "mew": 1.2, "color": BLACK, "ls": "none"}
        height = np.full(len(checkpoints), 0.05)
        lower.plot(checkpoints, height, transform=lower.get_xaxis_transform(), label="checkpoint", **style)
    if step is not None:
        for axes in (upper, middle, lower):
            axes.axvline(step, color=BLACK, lw=1.1, ls=(0, (4, 2)), zorder=1.5, label=f"step {step:,}")
    ends = [] if steps.empty else [steps["step"].min(), steps["step"].max()]
    low, high = span([*ends, *checkpoints, *([] if step is None else [step])])
    lower.set_xlim(low - 0.015 * (high - low), high + 0.015 * (high - low))
    if spikes is not None and len(spikes):
        _mark_spikes(upper, middle, steps, spikes)
    step_axis(lower)
    add_legend(figure, (upper, middle, lower))
    add_title(figure, title)
    return figure


def _curves(axes: Axes, steps: pd.DataFrame, name: str) -> None:
    """One line a segment, and an x at the top for each value that is not finite."""
    values = floats(steps, name)
    there = np.isfinite(values) if name == "lr" else recorded(steps, name)
    if not there.any():
        say_nothing(axes, "not recorded")
        return
    numbers = steps["step"].to_numpy()
    segments = steps["segment"].to_numpy() if "segment" in steps else np.zeros(len(steps), dtype=int)
    different = list(dict.fromkeys(segments[there].tolist()))
    for position, segment in enumerate(different):
        rows = np.flatnonzero(there & (segments == segment))
        kept = rows[decimate(values[rows], max(16, POINTS * len(rows) // len(steps)))]
        color, dashes = SEGMENT_STYLES[position % len(SEGMENT_STYLES)]
        label = f"segment {segment}" if name == "loss" and 1 < len(different) <= len(SEGMENT_STYLES) else None
        marker = "." if len(steps) <= DOTTED_STEPS else None
        shown = np.where(np.isfinite(values[kept]), values[kept], np.nan)
        axes.plot(numbers[kept], shown, color=color, ls=dashes, lw=1.1, marker=marker, ms=4, label=label)
    broken = there & ~np.isfinite(values)
    if broken.any():
        low, high = span([numbers.min(), numbers.max()])
        # One mark a pixel: a run that stays NaN has thousands.
        _, first = np.unique(((numbers[broken] - low) / (high - low) * 800).astype(int), return_index=True)
        mark_edge(axes, numbers[broken][first], TOP_EDGE, "x", "non-finite")


def _mark_spikes(upper: Axes, middle: Axes, steps: pd.DataFrame, spikes: pd.DataFrame) -> None:
    """A diamond on the curve that spiked. Values that are not finite have their x already, and get only a name."""
    table = spikes.sort_values("step", kind="stable")
    number, rule = table["step"].to_numpy(), table["rule"].to_numpy()
    # `value` of a non-finite step is the loss, unless only the gradient norm was not finite.
    broken = recorded(steps, "loss") & ~np.isfinite(floats(steps, "loss"))
    on_norm = (rule == "grad_norm_z") | ((rule == "non_finite") & ~np.isin(number, steps["step"].to_numpy()[broken]))
    names = [f"{step:,} {plain(rule)}" for step, rule in zip(number.tolist(), rule, strict=True)]
    # Of a stretch of non-finite steps the first is named.
    named = np.append(True, (np.diff(number) > 1) | (rule[1:] != "non_finite") | (rule[:-1] != "non_finite"))
    for axes, here in ((upper, ~on_norm), (middle, on_norm)):
        x, y = number[here], floats(table, "value")[here]
        finite = np.isfinite(y)
        if finite.any():
            style: dict[str, Any] = {"marker": "D", "ms": 7, "mfc": "none", "mec": VERMILION, "mew": 1.6, "zorder": 4}
            axes.plot(x[finite], y[finite], ls="none", label="spike", **style)
        if named.sum() <= LABELLED_SPIKES:
            chosen = np.flatnonzero(here & named)
            _name_spikes(axes, number[chosen], floats(table, "value")[chosen], [names[index] for index in chosen])


def _name_spikes(axes: Axes, x: np.ndarray, y: np.ndarray, names: list[str]) -> None:
    """Writes names under the top edge of the axis, each with a thin line up from its marker.

    Names flow to the right, those near the right edge to the left. One that would touch others goes a line below them,
    so that neighbours form a staircase and no line runs through the text of the spike before it.
    """
    left, right = axes.get_xlim()
    across = (x - left) / (right - left)
    placed: list[tuple[float, float, int]] = []  # start and end in widths of the axis, level from the top
    levels: dict[int, int] = {}
    widths = [0.0085 * len(name) + 0.015 for name in names]  # 9 point letters in an axis of 800 pixels
    leftward = [start + width > 1 for start, width in zip(across, widths, strict=True)]
    order = [index for index in range(len(names)) if not leftward[index]]
    for index in order + [index for index in reversed(range(len(names))) if leftward[index]]:
        start = across[index] - (widths[index] if leftward[index] else 0)
        end = start + widths[index]
        level = 1 + max((other for low, high, other in placed if low < end and start < high), default=-1)
        placed.append((start, end, level))
        levels[index] = level
    if not placed:
        return
    height = axes.bbox.height  # pixels
    marks = 18 if any(line.get_label() == "non-finite" for line in axes.lines) else 4
    _make_room(axes, (marks + NAME_PIXELS * (1 + max(levels.values())) + 8) / height)  # and half a diamond
    beside = axes.get_xaxis_transform() + ScaledTranslation(NAME_GAP / DPI, 0, axes.figure.dpi_scale_trans)
    before = axes.get_xaxis_transform() + ScaledTranslation(-NAME_GAP / DPI, 0, axes.figure.dpi_scale_trans)
    for index, name in enumerate(names):
        gap = NAME_GAP / (6.8 * len(name))  # in widths of the name, about, so that its line is a vertical one
        top = 1 - (marks + NAME_PIXELS * (levels[index] + 0.5)) / height
        finite = math.isfinite(y[index])
        axes.annotate(
            name,
            (x[index], y[index] if finite else TOP_EDGE),
            xycoords="data" if finite else axes.get_xaxis_transform(),
            xytext=(x[index], top),
            textcoords=before if leftward[index] else beside,
            ha="right" if leftward[index] else "left",
            va="center",
            fontsize=9,
            color=INK,
            zorder=3.5,
            arrowprops={
                "arrowstyle": "-",
                "color": VERMILION,
                "lw": 0.7,
                "shrinkA": 0,
                "shrinkB": 4,
                "relpos": (1 + gap if leftward[index] else -gap, 0.5),
            },
            bbox=ON_WHITE,
        )


def _make_room(axes: Axes, fraction: float) -> None:
    """Raises the upper limit until this part of the axis, 0 to 1, is empty of data at the top."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform([axes.get_ylim()[0], axes.dataLim.y1])
    if math.isfinite(high):  # else there is no data
        axes.set_ylim(top=float(scale.inverted().transform([low + (high - low) / (1 - fraction)])[0]))
