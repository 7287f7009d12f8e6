"""Figures from frames: the run's timeline, the layers of a step beside the run's own record, the rows of a batch.

Knows columns and colours; nothing of files, runs, widgets or MLX. Every function returns a `matplotlib.figure.Figure`
that is built directly, never through pyplot, and lets matplotlib lay out nothing, so figures can be drawn in any thread
and cost tens of milliseconds. Text from outside never reaches mathtext, whose parser is not thread-safe.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator
from PIL import Image

from .errors import WorkbenchError
from .spikes import recorded

# M. Okabe and K. Ito, Color Universal Design (2008): colours that all common kinds of colour vision keep apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
INK, FAINT, BAND = "#222222", "#E6E6E6", "#D3D3D3"
SEGMENT_STYLES = ((BLUE, "-"), (ORANGE, (0, (5, 1))), (GREEN, (0, (3, 1, 1, 1))), (PURPLE, (0, (1, 1))), (SKY, "-"))

WIDTH, DPI = 9.0, 100  # inches and pixels an inch: 900 pixels
POINTS = 4000  # of a curve: more than four to a pixel column shows nothing more and costs time
LOG_ABOVE = 4.0  # max / median beyond which a linear axis would press the healthy part into the lowest quarter
DOTTED_STEPS = 60  # so few that each step can have its dot, and a single one must
LABELLED_SPIKES = 8  # more names than this overlap
LABELLED_LAYERS = 30
SHOWN_ROWS = 32
LEGEND_PIXELS = 860
NAME_PIXELS = 15  # height of a line of 9 point text
ON_WHITE = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}  # text that crosses a line
TOP_EDGE, BOTTOM_EDGE = 0.96, 0.04  # heights in an axis at which values without a place on the scale are marked

# Ticks within a decade, for an axis of so many decades.
LOG_TICKS = ((0.9, (1.0, 2.0, 3.0, 5.0, 7.0)), (1.6, (1.0, 2.0, 5.0)), (2.6, (1.0, 3.0)))

KIND_NAMES = {"activation_gradient": "activation gradient", "adam_m": "Adam m", "adam_v": "Adam v"}


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
        spikes: rows `step`, `rule`, `value`, as `workbench.spikes.find_spikes` returns them: a diamond each. Step and
            rule are written beside them if there are 8 or fewer; a stretch of non-finite steps counts once.
        step: the selected step, a vertical line in all three.
        checkpoints: their steps, ticks at the bottom.
        title: such as the run's name.

    Returns:
        A figure of 900 x 640 pixels with three axes that share the steps.

    Raises:
        WorkbenchError: a frame lacks `step`.
    """
    _require(steps, "step")
    figure = _figure(6.4)
    upper, middle, lower = figure.subplots(3, 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1.4, 1]})
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.085, hspace=0.1)
    for axes, label in ((upper, "loss"), (middle, "gradient norm (L2)"), (lower, "learning rate")):
        _dress(axes, label)

    _curves(upper, steps, "loss")
    _curves(middle, steps, "grad_norm")
    _curves(lower, steps, "lr")
    if "val_loss" in steps and steps["val_loss"].notna().any():
        seen = steps[steps["val_loss"].notna()]
        upper.plot(
            seen["step"], seen["val_loss"], "s", ms=5, mfc="white", mec=BLACK, ls="none", label="validation loss"
        )
    for axes, names in ((upper, ("loss", "val_loss")), (middle, ("grad_norm",))):
        finite = _finite(np.concatenate([_floats(steps, name) for name in names]))
        if len(finite) and finite.min() > 0 and finite.max() > LOG_ABOVE * np.median(finite):
            _log(axes, finite)

    if len(checkpoints):
        style: dict[str, Any] = {"marker": "|", "ms": 8, "mew": 1.2, "color": BLACK, "ls": "none"}
        height = np.full(len(checkpoints), 0.05)
        lower.plot(checkpoints, height, transform=lower.get_xaxis_transform(), label="checkpoint", **style)
    if step is not None:
        for axes in (upper, middle, lower):
            axes.axvline(step, color=BLACK, lw=1.1, ls=(0, (4, 2)), zorder=1.5, label=f"step {step:,}")
    low, high = _span([*steps["step"], *checkpoints, *([] if step is None else [step])])
    lower.set_xlim(low - 0.015 * (high - low), high + 0.015 * (high - low))
    if spikes is not None and len(spikes):
        _mark_spikes(upper, middle, steps, spikes)
    lower.set_xlabel("step", color=INK)
    lower.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    lower.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    _legend(figure, (upper, middle, lower))
    _title(figure, title)
    return figure


def _curves(axes: Axes, steps: pd.DataFrame, name: str) -> None:
    """One line a segment, and an x at the top for each value that is not finite."""
    values = _floats(steps, name)
    there = np.isfinite(values) if name == "lr" else recorded(steps, name)
    if not there.any():
        _nothing(axes, "not recorded")
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
        low, high = _span(numbers)
        # One mark a pixel: a run that stays NaN has thousands.
        _, first = np.unique(((numbers[broken] - low) / (high - low) * 800).astype(int), return_index=True)
        _edge(axes, numbers[broken][first], TOP_EDGE, "x", "non-finite")


def _mark_spikes(upper: Axes, middle: Axes, steps: pd.DataFrame, spikes: pd.DataFrame) -> None:
    """A diamond on the curve that spiked. Values that are not finite have their x already, and get only a name."""
    table = spikes.sort_values("step", kind="stable")
    number, rule = table["step"].to_numpy(), table["rule"].to_numpy()
    # `value` of a non-finite step is the loss, unless only the gradient norm was not finite.
    broken = recorded(steps, "loss") & ~np.isfinite(_floats(steps, "loss"))
    on_norm = (rule == "grad_norm_z") | ((rule == "non_finite") & ~np.isin(number, steps["step"].to_numpy()[broken]))
    names = [f"{step:,} {rule}" for step, rule in zip(number.tolist(), rule, strict=True)]
    # Of a stretch of non-finite steps the first is named.
    named = np.append(True, (np.diff(number) > 1) | (rule[1:] != "non_finite") | (rule[:-1] != "non_finite"))
    for axes, here in ((upper, ~on_norm), (middle, on_norm)):
        x, y = number[here], _floats(table, "value")[here]
        finite = np.isfinite(y)
        if finite.any():
            style: dict[str, Any] = {"marker": "D", "ms": 7, "mfc": "none", "mec": VERMILION, "mew": 1.6, "zorder": 4}
            axes.plot(x[finite], y[finite], ls="none", label="spike", **style)
        if named.sum() <= LABELLED_SPIKES:
            chosen = np.flatnonzero(here & named)
            _name_spikes(axes, number[chosen], _floats(table, "value")[chosen], [names[index] for index in chosen])


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
    for index, name in enumerate(names):
        top = 1 - (marks + NAME_PIXELS * (levels[index] + 0.5)) / height
        finite = math.isfinite(y[index])
        axes.annotate(
            name,
            (x[index], y[index] if finite else TOP_EDGE),
            xycoords="data" if finite else axes.get_xaxis_transform(),
            xytext=(x[index], top),
            textcoords=axes.get_xaxis_transform(),
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
                "relpos": (float(leftward[index]), 0.5),
            },
            bbox=ON_WHITE,
        )


def _make_room(axes: Axes, fraction: float) -> None:
    """Raises the upper limit until this part of the axis, 0 to 1, is empty of data at the top."""
    scale = axes.yaxis.get_transform()
    low, high = scale.transform([axes.get_ylim()[0], axes.dataLim.y1])
    if math.isfinite(high):  # else there is no data
        axes.set_ylim(top=float(scale.inverted().transform([low + (high - low) / (1 - fraction)])[0]))


def layer_norms(
    layers: pd.DataFrame,
    *,
    step: int,
    kinds: Sequence[str] = ("activation", "gradient", "adam_m", "adam_v"),
    neighbours: pd.DataFrame | None = None,
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

    Returns:
        A figure 900 pixels wide with one axis a kind, which share the layers.

    Raises:
        WorkbenchError: a column is missing, or `kinds` is empty or a plain string.
    """
    _require(layers, "layer", "kind", "l2", "recorded")
    if neighbours is not None:
        _require(neighbours, "step", "layer", "kind", "recorded")
    if not kinds or isinstance(kinds, str):
        raise WorkbenchError(
            f"The kinds to draw are {kinds!r}; expected a list of one or more, such as ['activation']."
        )
    names = list(dict.fromkeys(layers["layer"]))
    if neighbours is not None:
        neighbours = neighbours[neighbours["layer"].isin(names)]
    labels = [_plain(label) for label in short_names(names)]
    every = math.ceil(len(names) / LABELLED_LAYERS) or 1
    ticks = range(0, len(names), every)
    foot = 0.35 + 0.05 * max((len(labels[tick]) for tick in ticks), default=0)  # inches that the slanted names need
    height = 0.75 + 1.5 * len(kinds) + foot
    figure = _figure(height)
    panels = figure.subplots(len(kinds), 1, sharex=True, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.11, right=0.98, bottom=foot / height, hspace=0.12)
    position = {name: index for index, name in enumerate(names)}
    for axes, kind in zip(panels, kinds, strict=True):
        _dress(axes, f"{KIND_NAMES.get(kind, kind)}\nL2 norm")
        rows = layers[layers["kind"] == kind]
        near = None if neighbours is None else neighbours[neighbours["kind"] == kind]
        _norm_panel(axes, rows, near, position)
    panels[-1].set_xticks(
        list(ticks), [labels[tick] for tick in ticks], rotation=45, ha="right", rotation_mode="anchor"
    )
    panels[-1].set_xlim(-0.7, max(len(names), 1) - 0.3)
    _legend(figure, panels)
    _title(figure, f"Layers at step {step:,}")
    return figure


def _norm_panel(axes: Axes, rows: pd.DataFrame, near: pd.DataFrame | None, position: dict[str, int]) -> None:
    if rows.empty:
        _nothing(axes, "not measured")
        return
    at = rows["layer"].map(position).to_numpy(float)
    replayed, logged = _floats(rows, "l2"), _floats(rows, "recorded")
    everything = [replayed, logged]
    if near is not None:
        everything.append(_floats(near, "recorded"))
    ring: dict[str, Any] = {"marker": "o", "ms": 9, "mfc": "none", "mec": ORANGE, "mew": 1.6, "ls": "none", "zorder": 3}
    dot: dict[str, Any] = {"marker": "o", "ms": 4.5, "color": BLUE, "ls": "none", "zorder": 4}
    for values, label, style in ((replayed, "replay", dot), (logged, "telemetry", ring)):
        drawn = np.isfinite(values) & (values > 0)
        if drawn.any():
            axes.plot(at[drawn], values[drawn], label=label, **style)
    if near is not None:
        _neighbour_band(axes, near, position)
    positive = _finite(np.concatenate(everything))
    positive = positive[positive > 0]
    if len(positive):
        _log(axes, positive)
    else:
        axes.set_yticks([])
    broken = (recorded(rows, "l2") & ~np.isfinite(replayed)) | np.isinf(logged)
    if broken.any():
        _edge(axes, at[broken], TOP_EDGE, "x", "non-finite")
    zero = (replayed == 0) | (logged == 0)
    if zero.any():
        _edge(axes, at[zero], BOTTOM_EDGE, "v", "zero")


def _neighbour_band(axes: Axes, near: pd.DataFrame, position: dict[str, int]) -> None:
    """Least, median and greatest norm of each layer. Layers are categories: each has a level stretch of its own."""
    values = pd.Series(_floats(near, "recorded")).where(lambda column: np.isfinite(column))
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
            loss, 0 to 1). Rows whose loss is not finite come first. Of more than 32 rows the first 32 are drawn.
        step: the step, for the title.

    Returns:
        A figure 900 pixels wide with one axis.

    Raises:
        WorkbenchError: a column is missing.
    """
    _require(rows, "row", "loss", "share")
    table = pd.DataFrame({name: _floats(rows, name) for name in ("row", "loss", "share")})
    table["share"] = table["share"].where(np.isfinite(table["loss"]) & np.isfinite(table["share"]))
    table = table.sort_values("share", ascending=False, na_position="first", kind="stable").head(SHOWN_ROWS)
    height = 1.3 + 0.27 * max(len(table), 2)
    figure = _figure(height)
    axes = figure.subplots()
    figure.subplots_adjust(left=0.09, right=0.98, bottom=0.6 / height)
    _dress(axes, "row of the batch")
    axes.grid(False, axis="y")
    widths = 100 * table["share"].fillna(0).to_numpy()
    places = np.arange(len(table))
    axes.barh(places, widths, height=0.72, color=SKY, zorder=2)
    widest = max(widths.max(initial=0), 1e-9)
    for place, width, loss, share in zip(places.tolist(), widths.tolist(), table["loss"], table["share"], strict=True):
        text = f"loss {loss:.4g}" if math.isnan(share) else f"{width:.1f} %   loss {loss:.4g}"
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
    _legend(figure, [axes])
    _title(figure, f"Rows of step {step:,}" + (f": {len(table)} of {len(rows)}" if len(table) < len(rows) else ""))
    return figure


def short_names(paths: Sequence[str]) -> list[str]:
    """Labels for dotted layer paths, such as ``b3.attention.query`` for ``blocks.3.attention.query``.

    A leading part that all paths share is dropped, a name with a number behind it becomes its first letter and the
    number, and what is then longer than 26 letters loses its middle. If two labels came out alike, all paths are
    returned as they are.
    """
    parts = [path.split(".") for path in paths]
    while len(parts) > 1 and all(path[0] == parts[0][0] and len(path) > 1 and not path[1].isdigit() for path in parts):
        parts = [path[1:] for path in parts]
    labels = []
    for path in parts:
        words: list[str] = []
        for word in path:
            if word.isdigit() and words and not words[-1][-1:].isdigit():
                words[-1] = f"{words[-1][:1]}{word}"
            else:
                words.append(word)
        label = ".".join(words)
        labels.append(label if len(label) <= 26 else f"{label[:8]}…{label[-17:]}")
    return labels if len(set(labels)) == len(labels) else list(paths)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file. The same figure gives the same bytes: no date and no version is written into it."""
    buffer = io.BytesIO()
    # Not savefig: it would obey the user's rcParams, such as savefig.bbox, and so change the size.
    FigureCanvasAgg(figure).print_png(buffer, metadata={"Software": None})
    return buffer.getvalue()


def stacked(figures: Sequence[Figure]) -> bytes:
    """Figures of one width below each other, as one PNG file of at most 128 colours, a third as large as with all."""
    canvases = [FigureCanvasAgg(figure) for figure in figures]
    for canvas in canvases:
        canvas.draw()
    pixels = np.concatenate([np.asarray(canvas.buffer_rgba())[:, :, :3] for canvas in canvases])
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).quantize(128, dither=Image.Dither.NONE).save(buffer, "png")
    return buffer.getvalue()


def img(figure: Figure, alt: str, width: int | None = None) -> str:
    """An HTML img tag that holds the figure.

    Args:
        figure: any figure.
        alt: what a reader who can't see it should be told; escaped here.
        width: pixels on the page; the figure's own if None. The height follows. For a screen with two pixels where the
            page has one, `figure.set_dpi(200)` and half the width.
    """
    content = png(figure)
    pixels = [int.from_bytes(content[start : start + 4], "big") for start in (16, 20)]  # PNG: the IHDR chunk
    shown = pixels[0] if width is None else width
    height = round(pixels[1] * shown / pixels[0])
    source = base64.b64encode(content).decode("ascii")
    # decoding="sync": the new picture replaces the old one in one frame, without a flicker.
    size = f'width="{shown}" height="{height}" decoding="sync"'
    return f'<img alt="{html.escape(alt)}" {size} src="data:image/png;base64,{source}">'


# ---- what all figures share


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _dress(axes: Axes, label: str) -> None:
    """White, dark on light whatever the user's rcParams say, and numbers without mathtext."""
    axes.set_facecolor("white")
    axes.grid(True, color=FAINT, lw=0.6, ls="-")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color="#888888")
    axes.set_ylabel(_plain(label), color=INK, fontsize=10)
    axes.yaxis.set_label_coords(-0.068, 0.5)  # in line with the other panels' labels, however wide their numbers
    axes.margins(y=0.12)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _log(axes: Axes, positive: np.ndarray) -> None:
    """A logarithmic axis with room above for marks, and with labels even when it spans less than a decade."""
    low, high = float(positive.min()), float(positive.max())
    decades = max(math.log10(high) - math.log10(low), 0.2)
    axes.set_yscale("log")
    axes.set_ylim(low / 10 ** (0.1 * decades), high * 10 ** (0.16 * decades))
    subs = next((subs for limit, subs in LOG_TICKS if decades < limit), (1.0,))
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=8) if decades >= 0.4 else MaxNLocator(4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def number(value: float) -> str:
    """A tick label: 0.25, 1500, 3e-4; at most six digits, and plain text where matplotlib would typeset 10^-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.6g}"
    digits, exponent = f"{value:.5e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def _edge(axes: Axes, x: np.ndarray, height: float, marker: str, label: str) -> None:
    """Marks at a fixed height of the axis, for values that have no place on its scale."""
    style: dict[str, Any] = {"color": VERMILION, "ms": 7, "mew": 1.8, "ls": "none", "zorder": 4}
    axes.plot(x, np.full(len(x), height), marker, transform=axes.get_xaxis_transform(), label=label, **style)


def _nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=INK, fontsize=11)
    axes.set_yticks([])


def _legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """One legend for all panels, above the first, with each label once; sets where the panels begin."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    width = sum(52 + 6.3 * len(label) for label in handles)  # pixels, about
    rows = math.ceil(width / LEGEND_PIXELS)
    columns = math.ceil(len(handles) / max(rows, 1))
    figure.subplots_adjust(top=1 - (0.36 + 0.21 * rows) / figure.get_figheight())
    if not handles:
        return
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="lower right",
        bbox_to_anchor=(0.985, figure.subplotpars.top),
        ncols=columns,
        fontsize=9,
        labelcolor=INK,
        frameon=False,
        borderaxespad=0.2,
        columnspacing=1.4,
        handletextpad=0.5,
    )


def _title(figure: Figure, text: str) -> None:
    left = figure.subplotpars.left
    text = text if len(text) <= 90 else f"{text[:89]}…"
    figure.text(left, 1 - 0.1 / figure.get_figheight(), _plain(text), va="top", color=INK, fontsize=11, weight="bold")


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # else a name with two dollar signs would be typeset as mathematics


def _floats(frame: pd.DataFrame, name: str) -> np.ndarray:
    """A column as float64, NaN where it has nothing or is not there."""
    return frame[name].to_numpy(dtype=float, na_value=np.nan) if name in frame else np.full(len(frame), np.nan)


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def _span(values: Iterable[float]) -> tuple[float, float]:
    """Least and greatest; never the same, for an axis needs a width."""
    array = np.asarray(list(values), dtype=float)
    low, high = (float(array.min()), float(array.max())) if len(array) else (0.0, 1.0)
    return (low, high) if low < high else (low - 1, high + 1)


def _require(frame: pd.DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in frame]
    if missing:
        raise WorkbenchError(f"The frame has no column {missing[0]!r}; it has {list(frame.columns)}.")
