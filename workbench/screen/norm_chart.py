"""The norms of a step's layers as a chart in the page: replay, telemetry, and the range of the steps nearby.

The same picture as `plots.layer_norms`, as SVG: made in a hundredth of the time, so that it follows the slider; sharp
at any size; in the page's own colours, light or dark; and each layer tells its numbers on hover.
Knows columns; nothing of files, runs, widgets or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd

from ..figures import floats
from ..figures import number as tick
from ..plots import KIND_NAMES, LABELLED_LAYERS, short_names
from .markup import escaped, number

KINDS = ("activation", "gradient", "adam_m", "adam_v")
WIDTH, PANEL, GAP, LEFT, RIGHT, TOP = 900, 118, 14, 92, 12, 8
LETTER = 4.3  # pixels that a letter of a slanted name takes downwards
CROSS, WEDGE = "l8 8m0 -8l-8 8", "l4 7l4 -7"  # for what has no place on the axis: not finite, and zero
# Okabe and Ito's blue and orange, lighter where the page is dark; JupyterLab says which on its body.
STYLE = (
    ".wb-norms{--wb-dot:#0072B2;--wb-ring:#B87A00;--wb-bad:#D55E00;font:11px sans-serif;font-family:inherit}"
    "[data-jp-theme-light=false] .wb-norms{--wb-dot:#56B4E9;--wb-ring:#E69F00;--wb-bad:#FF8A3D}"
    ".wb-norms text{fill:currentColor}.wb-norms .g{stroke:currentColor;opacity:.16}"
    ".wb-norms .band{fill:currentColor;opacity:.17}.wb-norms .mid{stroke:currentColor;opacity:.55;stroke-width:1.3}"
    ".wb-norms .ring{fill:none;stroke:var(--wb-ring);stroke-width:1.8}.wb-norms .dot{fill:var(--wb-dot)}"
    ".wb-norms .bad{fill:none;stroke:var(--wb-bad);stroke-width:2}"
    ".wb-norms .on{fill:transparent}.wb-norms .on:hover{fill:currentColor;fill-opacity:.08}"
)


def norm_chart(
    layers: pd.DataFrame, nearby: pd.DataFrame, *, step: int, alt: str, names: Mapping[str, str] | None = None
) -> str:
    """A panel a kind, a column a layer, a logarithmic axis each.

    Args:
        layers: rows `layer`, `kind`, `l2` (of the replay, pandas.NA where there is none) and `recorded` (telemetry).
        nearby: telemetry of the steps around, rows `step`, `layer`, `kind`, `recorded`; the step's own are left out.
        step: the step.
        alt: what a reader who can't see it should be told.
        names: of kinds that are not what they are called (see `kind_names`).
    """
    called = KIND_NAMES | dict(names or {})
    paths = list(dict.fromkeys(layers["layer"]))
    labels = short_names(paths)
    every = math.ceil(len(paths) / LABELLED_LAYERS) or 1
    shown = range(0, len(paths), every)
    foot = 16 + LETTER * max((len(labels[place]) for place in shown), default=0)
    height = TOP + len(KINDS) * (PANEL + GAP) + foot
    each = (WIDTH - LEFT - RIGHT) / max(len(paths), 1)
    near = nearby[nearby["step"] != step]
    parts = []
    for place, kind in enumerate(KINDS):
        top = TOP + place * (PANEL + GAP)
        own = layers[layers["kind"] == kind]
        parts.append(_panel(own, near[near["kind"] == kind], paths, called.get(kind, kind), top, each))
    base = TOP + len(KINDS) * (PANEL + GAP) - GAP + 12
    parts += [_name(labels[place], LEFT + (place + 0.5) * each, base) for place in shown]
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" style="max-width:100%;height:auto;display:block"'
    picture = f'<svg class="wb-norms" role="img" aria-label="{escaped(alt)}" {size}>{"".join(parts)}</svg>'
    return f"<style>{STYLE}</style>{_legend(layers, near, picture)}{picture}"


def _panel(rows: pd.DataFrame, near: pd.DataFrame, names: Sequence[str], called: str, top: float, each: float) -> str:
    middle, right = top + PANEL / 2, WIDTH - RIGHT
    turned = f'x="14" y="{middle:.0f}" text-anchor="middle" transform="rotate(-90 14 {middle:.0f})"'
    parts = [f"<text {turned}>{escaped(called)}, L2</text>"]
    parts.append(f'<path class="g" d="M{LEFT} {top}V{top + PANEL}H{right}" fill="none"/>')
    if rows.empty:
        where = f'x="{(LEFT + right) / 2:.0f}" y="{middle:.0f}" text-anchor="middle"'
        return "".join([*parts, f"<text {where}>not recorded</text>"])
    place = {name: number for number, name in enumerate(names)}
    ours, theirs = floats(rows, "l2"), floats(rows, "recorded")
    values = near.assign(at=near["layer"].map(place), value=floats(near, "recorded")).dropna(subset=["at"])
    usual = values[np.isfinite(values["value"])].groupby("at")["value"].agg(["min", "median", "max"])
    everything = np.concatenate([ours, theirs, usual.to_numpy(float).ravel()])
    scale = _Scale(everything[np.isfinite(everything) & (everything > 0)], top)
    parts.append(scale.grid(right))
    ranges = {int(at): found for at, found in zip(usual.index, usual.to_numpy(float).tolist(), strict=True)}
    parts += [_band(scale, LEFT + at * each, each, *found) for at, found in ranges.items()]
    for row, (layer, replayed, logged) in enumerate(zip(rows["layer"], ours.tolist(), theirs.tolist(), strict=True)):
        at = place[layer]
        parts += _marks(scale, LEFT + (at + 0.5) * each, each, replayed, logged)
        parts += _edge_marks(LEFT + (at + 0.5) * each, top, replayed, logged, rows["l2"].iloc[row] is not pd.NA)
        told = [f"replay {number(replayed)}"] if math.isfinite(replayed) else []
        told += [f"telemetry {number(logged)}"]
        told += [f"nearby {number(ranges[at][0])} to {number(ranges[at][2])}"] if at in ranges else []
        text = f"{layer or '(model)'}, {called}: {', '.join(told)}"
        box = f'x="{LEFT + at * each:.1f}" y="{top}" width="{each:.1f}" height="{PANEL}"'
        parts.append(f'<rect class="on" {box}><title>{escaped(text)}</title></rect>')
    return "".join(parts)


def _band(scale: _Scale, x: float, each: float, low: float, middle: float, high: float) -> str:
    top, bottom = scale.at(high), scale.at(low)
    size = f'width="{each:.1f}" height="{max(bottom - top, 1.5):.1f}"'
    line = f'<path class="mid" d="M{x:.1f} {scale.at(middle):.1f}h{each:.1f}"/>'
    return f'<rect class="band" x="{x:.1f}" y="{top:.1f}" {size}/>{line}'


def _marks(scale: _Scale, x: float, each: float, replayed: float, logged: float) -> Iterable[str]:
    """A ring for the telemetry, and the replay's dot, in it where they agree."""
    for value, kind, radius in ((logged, "ring", min(4.6, 0.42 * each)), (replayed, "dot", 2.6)):
        if math.isfinite(value) and value > 0:
            yield f'<circle class="{kind}" r="{radius:.1f}" cx="{x:.1f}" cy="{scale.at(value):.1f}"/>'


def _edge_marks(x: float, top: float, ours: float, theirs: float, known: bool) -> Iterable[str]:
    """A cross at the top for what is not finite, a wedge at the bottom for what is zero.

    Args:
        known: whether `ours` is a number at all, NaN counted; else it is one that nobody has.
    """
    if np.isinf(theirs) or (known and not np.isfinite(ours)):
        yield f'<path class="bad" d="M{x - 4:.1f} {top + 3}{CROSS}"/>'
    if 0 in (ours, theirs):
        yield f'<path class="bad" d="M{x - 4:.1f} {top + PANEL - 9}{WEDGE}"/>'


class _Scale:
    """A logarithmic axis of one panel."""

    def __init__(self, positive: np.ndarray, top: float) -> None:
        low, high = (math.log10(positive.min()), math.log10(positive.max())) if len(positive) else (0.0, 1.0)
        room = max(0.12 * (high - low), 0.06)
        self._low, self._high, self._top = low - room, high + room, top

    def at(self, value: float) -> float:
        """Pixels from the top of the chart; a value of 0 stands at the bottom."""
        if value <= 0:
            return self._top + PANEL
        return self._top + PANEL * (self._high - math.log10(value)) / (self._high - self._low)

    def grid(self, right: float) -> str:
        parts = []
        for value in self._ticks():
            y = self.at(value)
            parts.append(f'<path class="g" d="M{LEFT} {y:.1f}H{right}"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{tick(value)}</text>')
        return "".join(parts)

    def _ticks(self) -> list[float]:
        """Powers of ten, or round numbers between them where less than two decades are seen; at most six."""
        decades = self._high - self._low
        first, last = math.floor(self._low), math.ceil(self._high)
        digits = (1,) if decades > 2.2 else (1, 3) if decades > 1.1 else (1, 2, 5) if decades > 0.6 else range(1, 10)
        found = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        inside = [value for value in found if self._low <= math.log10(value) <= self._high]
        if len(inside) < 2:
            inside = [float(f"{10**x:.3g}") for x in (self._low + 0.2 * decades, self._high - 0.2 * decades)]
        return inside[:: math.ceil(len(inside) / 6)]


def _name(label: str, x: float, y: float) -> str:
    turned = f'text-anchor="end" transform="rotate(-45 {x:.1f} {y:.0f})"'
    return f'<text x="{x:.1f}" y="{y:.0f}" {turned}>{escaped(label)}</text>'


def _legend(layers: pd.DataFrame, near: pd.DataFrame, picture: str) -> str:
    marks = []
    if layers["l2"].notna().any():
        marks.append('<svg width="14" height="12"><circle class="dot" cx="7" cy="6" r="2.6"/></svg> replay')
    if np.isfinite(floats(layers, "recorded")).any():
        marks.append('<svg width="14" height="12"><circle class="ring" cx="7" cy="6" r="4.6"/></svg> telemetry')
    if len(near):
        span = f"steps {near['step'].min():,} to {near['step'].max():,}"
        band = '<rect class="band" width="16" height="12"/><path class="mid" d="M0 6h16"/>'
        marks.append(f'<svg width="16" height="12">{band}</svg> range and median of {span} around it')
    for shape, start, meaning in ((CROSS, "M3 2", "not finite"), (WEDGE, "M3 3", "zero")):
        if f'{shape}"' in picture:
            marks.append(f'<svg width="14" height="12"><path class="bad" d="{start}{shape}"/></svg> {meaning}')
    inner = "".join(f'<span style="margin-right:16px;white-space:nowrap">{mark}</span>' for mark in marks)
    return f'<div class="wb-norms" style="padding-left:{LEFT}px;line-height:1.6">{inner}</div>'
