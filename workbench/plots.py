"""Figures of one step: its layers beside the run's own record, and the rows of its batch.

Knows columns; nothing of files, runs, widgets or MLX. Every function returns a `matplotlib.figure.Figure`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from .detection.spike_table import recorded
from .errors import WorkbenchError
from .figures import (
    BAND,
    BLUE,
    BOTTOM_EDGE,
    FAINT,
    INK,
    ON_WHITE,
    ORANGE,
    SKY,
    TOP_EDGE,
    add_legend,
    add_title,
    blank,
    dress,
    finite_only,
    floats,
    logarithmic,
    mark_edge,
    plain,
    require,
    say_nothing,
)
from .number_text import number

LABELLED_LAYERS = 30
SHOWN_ROWS = 32
KIND_NAMES = {"activation_gradient": "activation gradient", "adam_m": "Adam m", "adam_v": "Adam v"}


def layer_norms(
    layers: pd.DataFrame,
    *,
    step: int,
    kinds: Sequence[str] = ("activation", "gradient", "adam_m", "adam_v"),
    neighbours: pd.DataFrame | None = None,
    names: Mapping[str, str] | None = None,
) -> Figure:
    """The L2 norms of a replayed step, layer by layer, beside what the run logged.

    A replay that agrees is a filled dot inside a ring. The axes are logarithmic: a norm of 0 is marked at the bottom
    edge, NaN and inf are an x at the top.

    Args:
        layers: rows `layer`, `kind`, `l2` (float; the replay, pandas.NA where there is none) and `recorded` (float;
            telemetry of the same step, NaN where not recorded). Layers are drawn in the order in which they first
            appear.
        step: the step, for the title.
        kinds: the panels, from top to bottom; one without rows says "not measured".
        neighbours: telemetry of steps nearby, rows `step`, `layer`, `kind`, `recorded`: their range as a band, their
            median as a line.
        names: of kinds that are not what they are called (see `kind_names`).

    Returns:
        A figure 900 pixels wide with one axis a kind, which share the layers.

    Raises:
        WorkbenchError: a column is missing, or `kinds` is empty or a plain string.
    """
    require(layers, "layer", "kind", "l2", "recorded")
    if neighbours is not None:
        require(neighbours, "step", "layer", "kind", "recorded")
    if not kinds or isinstance(kinds, str):
        raise WorkbenchError(
            f"The kinds to draw are {kinds!r}; expected a list of one or more, such as ['activation']."
        )
    called = KIND_NAMES | dict(names or {})
    paths = list(dict.fromkeys(layers["layer"]))
    if neighbours is not None:
        neighbours = neighbours[neighbours["layer"].isin(paths)]
    labels = [plain(label) for label in short_names(paths)]
    every = math.ceil(len(paths) / LABELLED_LAYERS) or 1
    ticks = range(0, len(paths), every)
    foot = 0.35 + 0.05 * max((len(labels[tick]) for tick in ticks), default=0)  # inches that the slanted names need
    height = 0.75 + 1.5 * len(kinds) + foot
    figure = blank(height)
    panels = figure.subplots(len(kinds), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.11, right=0.98, bottom=foot / height, hspace=0.12)
    position = {name: index for index, name in enumerate(paths)}
    for axes, kind in zip(panels, kinds, strict=True):
        # A tick is slow to make and to draw; shared axes would make every one of them in every panel.
        axes.xaxis.set_major_locator(NullLocator())
        axes.set_xlim(-0.7, max(len(paths), 1) - 0.3)
        dress(axes, f"{called.get(kind, kind)}\nL2 norm")
        _upright_lines(axes, ticks)
        rows = layers[layers["kind"] == kind]
        near = None if neighbours is None else neighbours[neighbours["kind"] == kind]
        _norm_panel(axes, rows, near, position)
    panels[-1].set_xticks(
        list(ticks), [labels[tick] for tick in ticks], rotation=45, ha="right", rotation_mode="anchor"
    )
    add_legend(figure, panels)
    add_title(figure, f"Layers at step {step:,}")
    return figure


def _upright_lines(axes: Axes, at: Sequence[int]) -> None:
    """The grid's, all in one."""
    x, y = np.repeat(np.asarray(at, dtype=float), 3), np.tile([0.0, 1.0, np.nan], len(at))
    axes.plot(x, y, transform=axes.get_xaxis_transform(), color=FAINT, lw=0.6, zorder=0.5, label="_grid")


def _norm_panel(axes: Axes, rows: pd.DataFrame, near: pd.DataFrame | None, position: dict[str, int]) -> None:
    if rows.empty:
        say_nothing(axes, "not measured")
        return
    at = rows["layer"].map(position).to_numpy(float)
    replayed, logged = floats(rows, "l2"), floats(rows, "recorded")
    everything = [replayed, logged]
    if near is not None:
        everything.append(floats(near, "recorded"))
    ring: dict[str, Any] = {"marker": "o", "ms": 9, "mfc": "none", "mec": ORANGE, "mew": 1.6, "ls": "none", "zorder": 3}
    dot: dict[str, Any] = {"marker": "o", "ms": 4.5, "color": BLUE, "ls": "none", "zorder": 4}
    for values, label, style in ((replayed, "replay", dot), (logged, "telemetry", ring)):
        drawn = np.isfinite(values) & (values > 0)
        if drawn.any():
            axes.plot(at[drawn], values[drawn], label=label, **style)
    if near is not None:
        _neighbour_band(axes, near, position)
    positive = finite_only(np.concatenate(everything))
    positive = positive[positive > 0]
    if len(positive):
        logarithmic(axes, positive)
    else:
        axes.set_yticks([])
    broken = (recorded(rows, "l2") & ~np.isfinite(replayed)) | np.isinf(logged)
    if broken.any():
        mark_edge(axes, at[broken], TOP_EDGE, "x", "non-finite")
    zero = (replayed == 0) | (logged == 0)
    if zero.any():
        mark_edge(axes, at[zero], BOTTOM_EDGE, "v", "zero")


def _neighbour_band(axes: Axes, near: pd.DataFrame, position: dict[str, int]) -> None:
    """Least, median and greatest norm of each layer. Layers are categories: each has a level stretch of its own."""
    values = pd.Series(floats(near, "recorded")).where(lambda column: np.isfinite(column))
    groups = values.groupby(near["layer"].map(position).to_numpy())
    table = groups.agg(["min", "median", "max"]).dropna()
    if table.empty:
        return
    edges = np.repeat(table.index.to_numpy(float), 3) + np.tile([-0.5, 0.5, 0.5], len(table))
    low, middle, high = (np.repeat(table[name].to_numpy(float), 3) for name in ("min", "median", "max"))
    for curve in (low, middle, high):
        curve[2::3] = np.nan  # between two layers the pen is up
    span = f"steps {near['step'].min():,}–{near['step'].max():,}"
    axes.fill_between(edges, low, high, color=BAND, lw=0, label=f"range of {span}", zorder=1)
    axes.plot(edges, middle, color="#777777", lw=1.3, label=f"median of {span}", zorder=2)


def row_losses(rows: pd.DataFrame, *, step: int) -> Figure:
    """Which rows of the batch carry the step's loss: a bar a row, the largest share on top.

    Args:
        rows: `row` (int; its place in the batch), `loss` (float; of the row) and `share` (float; of the step's summed
            loss, 0 to 1). Rows whose loss is not finite come first, unless `targets` says that it is not known: missing
            or 0. Of more than 32 rows the first 32 are drawn.
        step: the step, for the title.

    Returns:
        A figure 900 pixels wide with one axis.

    Raises:
        WorkbenchError: a column is missing.
    """
    require(rows, "row", "loss", "share")
    table = pd.DataFrame({name: floats(rows, name) for name in ("row", "loss", "share")})
    unknown = ~(floats(rows, "targets") > 0) if "targets" in rows else np.zeros(len(rows), bool)
    table["share"] = table["share"].where((np.isfinite(table["loss"]) | unknown) & np.isfinite(table["share"]))
    table = table.sort_values("share", ascending=False, na_position="first", kind="stable").head(SHOWN_ROWS)
    height = 1.3 + 0.27 * max(len(table), 2)
    figure = blank(height)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.6 / height)
    dress(axes, "row of the batch")
    axes.grid(False, axis="y")
    widths = 100 * table["share"].fillna(0).to_numpy()
    places = np.arange(len(table))
    axes.barh(places, widths, height=0.72, color=SKY, zorder=2)
    widest = max(widths.max(initial=0), 1e-9)
    for place, width, loss, share in zip(places.tolist(), widths.tolist(), table["loss"], table["share"], strict=True):
        text = f"loss {number(loss)}" if math.isnan(share) else f"{width:.1f} %   loss {_known(loss)}"
        axes.text(
            max(width, 0) + 0.012 * widest, place, text, va="center", fontsize=9, color=INK, zorder=3, bbox=ON_WHITE
        )
    if len(rows):
        axes.axvline(
            100 / len(rows), color=INK, lw=1.1, ls=(0, (4, 2)), label=f"equal share (1 of {len(rows)})", zorder=2.5
        )
    axes.set_xlim(min(0, widths.min(initial=0)), 1.22 * max(widest, 100 / max(len(rows), 1)))
    axes.set_ylim(max(len(table), 1) - 0.4, -0.6)  # the first row on top
    axes.set_yticks(places, [f"{row:.0f}" for row in table["row"]])
    axes.set_xlabel("share of the step's summed loss (%)", color=INK)
    add_legend(figure, [axes])
    add_title(figure, f"Rows of step {step:,}" + (f": {len(table)} of {len(rows)}" if len(table) < len(rows) else ""))
    return figure


def _known(loss: float) -> str:
    return "not known" if math.isnan(loss) else number(loss)


def short_names(paths: Sequence[str]) -> list[str]:
    """Labels for dotted layer paths, such as ``b3.attention.query`` for ``blocks.3.attention.query``.

    A leading part that all paths share is dropped, a name with a number behind it becomes its first letter and the
    number, and what is then longer than 26 letters loses its middle; or, if two labels came out alike so, what stands
    before its first number. If two still are, all paths are returned as they are.
    """
    parts = [path.split(".") for path in paths]
    while len(parts) > 1 and all(path[0] == parts[0][0] and len(path) > 1 and not path[1].isdigit() for path in parts):
        parts = [path[1:] for path in parts]
    joined, numbered = [], []
    for path in parts:
        words: list[str] = []
        for word in path:
            if word.isdigit() and words and not words[-1][-1:].isdigit():
                words[-1] = f"{words[-1][:1]}{word}"
            else:
                words.append(word)
        joined.append(".".join(words))
        first = next((place for place, word in enumerate(words) if word[-1:].isdigit()), 0)
        numbered.append(f"{'…' if first else ''}{'.'.join(words[first:])}")
    for labels in (joined, [far if len(near) > 26 else near for near, far in zip(joined, numbered, strict=True)]):
        shortened = [label if len(label) <= 26 else f"{label[:8]}…{label[-17:]}" for label in labels]
        if len(set(shortened)) == len(shortened):
            return shortened
    return list(paths)
