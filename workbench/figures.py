"""What all figures share: a blank one, its dress, its scales and marks; and figures as pictures.

Built directly, never through pyplot, and laid out by fixed margins, so figures can be drawn in any thread and cost tens
of milliseconds. Text from outside never reaches mathtext, whose parser is not thread-safe. Knows no run, no columns.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import html
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import FuncFormatter, Locator, LogLocator, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation
from PIL import Image

from .errors import WorkbenchError

# M. Okabe and K. Ito, Color Universal Design (2008): colours that all common kinds of colour vision keep apart.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
INK, FAINT, BAND = "#222222", "#E6E6E6", "#D3D3D3"

WIDTH, DPI = 9.0, 100  # inches and pixels an inch: 900 pixels
SHARP = 200  # pixels an inch, for screens with two where the page has one
LEGEND_PIXELS = 860
TITLE, LEGEND = 78, 48  # letters at most of a title, some 790 pixels, and of a line of a legend, some 300
ON_WHITE = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 0.8}  # text that crosses a line
TOP_EDGE, BOTTOM_EDGE = 0.96, 0.04  # heights in an axis at which values without a place on the scale are marked

# Numbers at most, on an axis of steps and on a linear one of values: each costs a millisecond, and seven digits room.
STEP_NUMBERS, VALUE_NUMBERS = 8, 5
TICK_POINTS = 7  # from an axis to its numbers
NUMBERS_END = 25  # pixels below an axis, at which its numbers have ended

# Ticks within a decade, for an axis of so many decades.
LOG_TICKS = ((0.9, (1.0, 2.0, 3.0, 5.0, 7.0)), (1.6, (1.0, 2.0, 5.0)), (2.6, (1.0, 3.0)))


class _Linear(MaxNLocator):
    def __call__(self) -> Sequence[float]:
        return _within(self, super().__call__())


class _Logarithmic(LogLocator):
    def __call__(self) -> Sequence[float]:
        return _within(self, super().__call__())


def _within(locator: Locator, places: Sequence[float]) -> Sequence[float]:
    """Those that the axis shows. Matplotlib's locators name some outside, too, and it then makes for each a tick that
    it does not draw, which takes half a millisecond."""
    low, high = sorted(cast(Axis, locator.axis).get_view_interval())
    room = 1e-9 * (high - low)  # what rounding does to one at an end, which matplotlib draws
    return [place for place in places if low - room <= place <= high + room]


def blank(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(axes: Axes, label: str) -> None:
    """White, dark on light whatever the user's rcParams say, and numbers without mathtext."""
    axes.set_facecolor("white")
    axes.grid(True, color=FAINT, lw=0.6, ls="-")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color="#888888")
    axes.set_ylabel(plain(label), color=INK, fontsize=10)
    aside = -0.068 if "\n" in label else -0.077  # clear of 0.0015, and within the figure with two lines
    axes.yaxis.set_label_coords(aside, 0.5)  # in line with the other panels' labels, however wide their numbers
    axes.margins(y=0.12)
    axes.yaxis.set_major_locator(_Linear(VALUE_NUMBERS, steps=(1, 2, 2.5, 5, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def step_axis(axes: Axes, numbered: bool = True) -> None:
    """An axis of steps. Its label stands in the line of the numbers, left of them, so that the line below is free: for
    the number of a cursor, which would else cover one of them. Where it is does not have to be found out either, which
    would lay out all numbers twice.

    Args:
        numbered: False: an axis below has the numbers.
    """
    axes.xaxis.set_major_locator(_Linear(STEP_NUMBERS, steps=(1, 2, 5, 10), integer=True))
    if not numbered:
        axes.tick_params(labelbottom=False)
        return
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("step", color=INK, ha="right")
    below = ScaledTranslation(0, -TICK_POINTS / 72, axes.figure.dpi_scale_trans)
    axes.xaxis.set_label_coords(-0.05, 0, transform=axes.transAxes + below)


def logarithmic(axes: Axes, positive: np.ndarray) -> None:
    """A logarithmic axis with room above for marks, and with labels even when it spans less than a decade."""
    low, high = float(positive.min()), float(positive.max())
    decades = max(math.log10(high) - math.log10(low), 0.2)
    axes.set_yscale("log")
    axes.set_ylim(low / 10 ** (0.1 * decades), high * 10 ** (0.16 * decades))
    subs = next((subs for limit, subs in LOG_TICKS if decades < limit), (1.0,))
    axes.yaxis.set_major_locator(_Logarithmic(subs=subs, numticks=8) if decades >= 0.4 else _Linear(4))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def begin_at_zero(axes: Axes, values: np.ndarray) -> None:
    """Lets the axis of values that hardly vary begin at 0: else numbers such as 0.001025 would stand at it, too wide
    for the margin, and a constant would look as if it were measured to so many digits."""
    finite = finite_only(values)
    if len(finite) and 0 < finite.max() < 1.2 * finite.min():
        axes.set_ylim(0, 1.25 * finite.max())


def number(value: float) -> str:
    """A tick label: 0.25, 1500, 3e-4; at most six digits, and plain text where matplotlib would typeset 10^-4."""
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.6g}"
    digits, exponent = f"{value:.5e}".split("e")
    return f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"


def mark_edge(axes: Axes, x: np.ndarray, height: float, marker: str, label: str) -> None:
    """Marks at a fixed height of the axis, for values that have no place on its scale."""
    style: dict[str, Any] = {"color": VERMILION, "ms": 7, "mew": 1.8, "ls": "none", "zorder": 4}
    axes.plot(x, np.full(len(x), height), marker, transform=axes.get_xaxis_transform(), label=label, **style)


def say_nothing(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=INK, fontsize=11)
    axes.set_yticks([])


def add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    """One legend for all panels, above the first, with each label once; sets where the panels begin."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    labels = [plain(_shortened(label.replace(r"\$", "$"), LEGEND)) for label in handles]
    columns = _legend_columns(labels)
    rows = math.ceil(len(labels) / columns)
    figure.subplots_adjust(top=1 - (0.36 + 0.21 * rows) / figure.get_figheight())
    if not handles:
        return
    figure.legend(
        list(handles.values()),
        labels,
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


def _legend_columns(labels: Sequence[str]) -> int:
    """As many as fit beside each other. They are filled one by one, and each is as wide as its widest label."""
    for columns in range(len(labels), 1, -1):
        parts = [part for part in np.array_split(np.array(labels, dtype=object), columns) if len(part)]
        if sum(52 + 6.3 * max(len(label) for label in part) for part in parts) <= LEGEND_PIXELS:  # about
            return columns
    return 1


def _shortened(text: str, letters: int) -> str:
    """Without its middle where it is longer: both ends tell a name apart."""
    return text if len(text) <= letters else f"{text[: letters // 2]}…{text[-letters // 2 + 1 :]}"


def add_title(figure: Figure, text: str) -> None:
    left = figure.subplotpars.left
    figure.text(
        left,
        1 - 0.1 / figure.get_figheight(),
        plain(_shortened(text, TITLE)),
        va="top",
        color=INK,
        fontsize=11,
        weight="bold",
    )


def plain(text: str) -> str:
    """A name out of a file, as it is drawn: two dollar signs would typeset it as mathematics, and no font has control
    characters."""
    shown = text if text.isprintable() else "".join(one if one.isprintable() or one == "\n" else "?" for one in text)
    if not shown.isascii():  # a sign for what the font lacks, which matplotlib would warn of each time
        known = _letters(tuple(rcParams["font.family"]), tuple(rcParams["font.sans-serif"]))
        shown = "".join(one if one == "\n" or ord(one) in known else "\N{WHITE SQUARE}" for one in shown)
    return shown.replace("$", r"\$")


@functools.cache
def _letters(family: tuple[str, ...], sans: tuple[str, ...]) -> frozenset[int]:
    """The code points that the fonts of the user's settings have, in which figures are drawn."""
    found: set[int] = set()
    for name in family:  # `sans` is what a generic one stands for
        with contextlib.suppress(ValueError):  # it is not there, and matplotlib takes the next
            path = findfont(FontProperties(family=[name]), fallback_to_default=False)
            found |= get_font(path).get_charmap().keys()
    return frozenset(found or get_font(findfont(FontProperties())).get_charmap())


def floats(frame: pd.DataFrame, name: str) -> np.ndarray:
    """A column as float64, NaN where it has nothing or is not there."""
    return frame[name].to_numpy(dtype=float, na_value=np.nan) if name in frame else np.full(len(frame), np.nan)


def finite_only(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def span(values: Iterable[float]) -> tuple[float, float]:
    """Least and greatest; never the same, for an axis needs a width."""
    array = np.asarray(list(values), dtype=float)
    low, high = (float(array.min()), float(array.max())) if len(array) else (0.0, 1.0)
    return (low, high) if low < high else (low - 1, high + 1)


def require(frame: pd.DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in frame]
    if missing:
        raise WorkbenchError(f"The frame has no column {missing[0]!r}; it has {list(frame.columns)}.")


def png(figure: Figure) -> bytes:
    """The figure as a PNG file. The same figure gives the same bytes: no date and no version is written into it."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # not savefig: it would obey the user's rcParams, such as savefig.bbox, and so change the size
    return _encoded(np.asarray(canvas.buffer_rgba()))


def _encoded(pixels: np.ndarray, most: int | None = None) -> bytes:
    """Pixels (height, width, 4) uint8, red, green, blue and opaque, as a PNG file: with a palette where 256 colours do,
    which is a third as large and made in half the time. Lines and text on white have some 70 colours, told apart by
    four bits a channel.

    Args:
        most: colours for pixels that have more; None: all that they have.
    """
    buffer = io.BytesIO()
    whole = pixels.view(np.dtype("<u4"))[:, :, 0] >> 4  # red in the lowest byte: all channels of a pixel at once
    codes = ((whole & 0xF) << 8 | (whole >> 4) & 0xF0 | (whole >> 16) & 0xF).astype(np.intp)  # as an index is
    there = np.zeros(4096, dtype=bool)
    there[codes.ravel()] = True
    used = np.flatnonzero(there)
    if len(used) > 256:
        picture = Image.fromarray(np.ascontiguousarray(pixels[:, :, :3]))
        (picture if most is None else picture.quantize(most, dither=Image.Dither.NONE)).save(buffer, "png")
        return buffer.getvalue()
    places = np.zeros(4096, dtype=np.uint8)
    places[used] = np.arange(len(used))
    image = Image.fromarray(places.take(codes))
    image.putpalette(_COLOURS[used].tobytes())
    image.save(buffer, "png")
    return buffer.getvalue()


def _colours() -> np.ndarray:
    """What stands for each of the 4096 colours of four bits a channel, (4096, 3): our own colours exactly."""
    steps = 17 * np.arange(16, dtype=np.uint8)
    table = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(4096, 3)
    for name in (BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE, INK, FAINT, BAND, "#FFFFFF"):
        red, green, blue = (int(name[start : start + 2], 16) for start in (1, 3, 5))
        table[(red >> 4) << 8 | (green >> 4) << 4 | blue >> 4] = red, green, blue
    return table


_COLOURS = _colours()


def stacked(figures: Sequence[Figure]) -> bytes:
    """Figures of one width below each other, as one small PNG file."""
    canvases = [FigureCanvasAgg(figure) for figure in figures]
    for canvas in canvases:
        canvas.draw()
    return _encoded(np.concatenate([np.asarray(canvas.buffer_rgba()) for canvas in canvases]), most=128)


def img(figure: Figure, alt: str, width: int | None = None) -> str:
    """An HTML img tag that holds the figure.

    Args:
        figure: any figure.
        alt: what a reader who can't see it should be told; escaped here.
        width: pixels on the page; the figure's own if None. The height follows. For a screen with two pixels where the
            page has one, see `picture`.
    """
    content = png(figure)
    pixels = [int.from_bytes(content[start : start + 4], "big") for start in (16, 20)]  # PNG: the IHDR chunk
    shown = pixels[0] if width is None else width
    height = round(pixels[1] * shown / pixels[0])
    source = base64.b64encode(content).decode("ascii")
    # decoding="sync": the new picture replaces the old one in one frame, without a flicker.
    size = f'width="{shown}" height="{height}" decoding="sync"'
    return f'<img alt="{html.escape(alt)}" {size} src="data:image/png;base64,{source}">'


def picture(figure: Figure, alt: str) -> str:
    """The same for a page: as sharp as screens with two pixels for one of the page show it, and never wider than it."""
    width = figure.canvas.get_width_height()[0]
    figure.set_dpi(SHARP)
    return img(figure, alt, width).replace("<img ", '<img style="max-width:100%;height:auto;display:block" ', 1)
