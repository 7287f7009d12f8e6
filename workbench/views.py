"""The panel's views as HTML: facts, badges, the timeline with its cursor, the layer table, the batch.

Pure functions from data to text; they know nothing of widgets, files or MLX. Whatever comes from outside (names,
corpora, error messages) is escaped here. Text has the page's own colour, to be readable in a light and a dark theme.
"""

from __future__ import annotations

import base64
import html
import math
import re
import traceback
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import figures, plots
from .bits import bits_float
from .errors import WorkbenchError
from .nearby import beside_neighbours
from .telemetry import ARRAYS
from .trace import BADGE_COLOURS, BADGE_MARKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from .run import Run
    from .telemetry import Line
    from .trace import Trace

LOGGED = dict(zip(("activation", "gradient", "adam_m", "adam_v"), ARRAYS, strict=True))  # kind: telemetry's name
AROUND = 3  # neighbouring steps on each side
NOTABLE = 2.0  # a norm that is so many times its neighbours' median, or as small a part of it, stands out in bold
SHOWN_ROWS = 32  # of a batch
_LINES = "line-height:1.45;overflow-wrap:anywhere"
# Width 0 that grows to all there is: a wide table then scrolls by itself and does not widen the panel.
_SCROLL = "width:0;min-width:100%;max-height:{height}em;overflow:auto;margin:2px 0"
_SHARP = 200  # dots an inch, twice what is shown: for screens with two pixels where the page has one


def escaped(text: Any) -> str:
    return html.escape(str(text), quote=True)


def number(value: Any, digits: int = 4) -> str:
    """A float for people: so many digits, NaN and inf by name, nothing where there is nothing."""
    if value is None or value is pd.NA:
        return ""
    if not math.isfinite(value):
        return str(value).replace("nan", "NaN")
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


# ---- sentences


def alert(error: BaseException, hint: str = "") -> str:
    """The red box. An error that a person can act on is its sentence; of any other the details are folded away."""
    text, details = escaped(error), ""
    if not isinstance(error, WorkbenchError):
        trace = escaped("".join(traceback.format_exception(error)))
        text = f"<b>{escaped(type(error).__name__)}</b>: {text}"
        details = f'<details><summary>details</summary><pre style="white-space:pre-wrap">{trace}</pre></details>'
    more = f"<br>{escaped(hint)}" if hint else ""
    style = "border-left:4px solid #D55E00;background:rgba(213,94,0,.13);padding:6px 10px"
    style += f";{_LINES}"
    return f'<div role="alert" style="{style}"><b>✗</b> {text}{more}{details}</div>'


def paragraph(text: str, *more: str) -> str:
    """Sentences, one a line."""
    return f'<div style="{_LINES}">{"<br>".join(escaped(line) for line in (text, *more) if line)}</div>'


def heading(text: str) -> str:
    return f'<div style="font-weight:600;margin:10px 0 2px" role="heading" aria-level="4">{escaped(text)}</div>'


def run_facts(run: Run, steps: pd.DataFrame, spikes: pd.DataFrame) -> str:
    """What is known of a run before any step is looked at."""
    manifest = run.manifest
    saved = [str(step) for step, _ in run.checkpoints]
    kept = ", ".join(saved if len(saved) <= 6 else [*saved[:2], "…", *saved[-2:]])
    parameters = sum(math.prod(parameter.shape) for parameter in manifest.parameters)
    dtypes = sorted({parameter.dtype for parameter in manifest.parameters})
    last = manifest.segments[-1].environment
    facts = [
        _count(int(steps["step"].max()) if len(steps) else 0, "step"),
        _count(len(spikes), "spike"),
        f"checkpoints {kept or 'none'}",
        _count(len(manifest.segments), "segment") if len(manifest.segments) > 1 else "",
        f"{parameters:,} parameters ({', '.join(dtypes)})",
        str(manifest.optimizer.get("class", "")),
        f"recorded on {last.get('backend')} with MLX {last.get('mlx')}",
    ]
    parent = manifest.parent
    origin = f"Forked from step {parent.step} of {parent.path}." if parent is not None else ""
    return paragraph(" · ".join(fact for fact in facts if fact), origin, *run.telemetry.notices)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def step_facts(row: pd.Series, explanations: Iterable[str]) -> str:
    """The scalars of a step, and why it is a spike if it is one."""
    facts = []
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        there = bool(row.get(f"{name}_recorded", True))
        facts.append(f"{label} {number(row[name])}" if there else f"{label} not recorded")
    facts += [f"{label} {number(row[name])}" for name, label in (("lr", "lr"), ("val_loss", "validation loss")) if
              not math.isnan(row[name])]  # fmt: skip
    return paragraph(f"Step {row['step']:,}: {', '.join(facts)}.", *(f"Spike: {text}." for text in explanations))


def spike_label(row: Any, last: int, segments: bool) -> str:
    """A line of the spike list. `last` is the end of a stretch of non-finite steps, or the step itself."""
    where = f"{row.step:,}" if last == row.step else f"{row.step:,} to {last:,}"
    what = "gradient norm" if row.rule.startswith("grad_norm") else "loss"
    value = row.explanation if row.rule == "non_finite" else f"{what} {number(row.value)}"
    return f"{where} · {row.rule} · {value}" + (f" · segment {row.segment}" if segments else "")


# ---- badges


def badges(trace: Trace) -> str:
    """The answer, the three badges with their reasons, and each item that differs."""
    rows = "".join(_badge(name, verdict, why) for name, verdict, why in trace.badges())
    bad = trace.items[trace.items["verdict"].isin(("mismatch", "within tolerance"))]
    silent = [_word(name) for name in trace.items.loc[trace.items["verdict"] == "unverified", "item"]]
    table, missing = "", f"Not recorded, so not compared: {', '.join(silent)}." if silent else ""
    if len(bad):
        lines = [
            _cell(_word(row.item), left=True) + _cell(row.verdict, left=True) + _cell(row.detail, left=True, wrap=True)
            for row in bad.itertuples()
        ]
        table = _table(["item", "verdict", "detail"], "".join(f"<tr>{line}</tr>" for line in lines), height=16)
    probe = {
        True: "Probe pass certified: its loss and gradients have the exact pass's bits.",
        False: "Probe pass not certified: activation gradients below are of a computation with other bits.",
        None: "",
    }[trace.record.certified_probe]
    notices = paragraph(probe, missing, *trace.notices)
    return f"<div><b>{escaped(trace.sentence())}</b>{rows}{notices}{table}</div>"


def _badge(name: str, verdict: str, why: str) -> str:
    back, front = BADGE_COLOURS[verdict]
    chip = f"background:{back};color:{front};border-radius:4px;padding:1px 8px;font-weight:600;white-space:nowrap"
    chip += ";flex:none;min-width:12em;text-align:center;margin-right:8px"
    label = (
        f'<span style="{chip}" title="{escaped(why)}">{BADGE_MARKS[verdict]} {escaped(name)}: {escaped(verdict)}</span>'
    )
    row = f"display:flex;align-items:baseline;margin:3px 0;{_LINES}"
    return f'<div style="{row}">{label}<small style="font-size:.92em">{escaped(why)}</small></div>'


# ---- timeline


class Timeline:
    """The drawn timeline of a run, on which a cursor can be set without drawing it again."""

    def __init__(self, figure: Figure, alt: str) -> None:
        width, height = figure.canvas.get_width_height()
        upper, lower = figure.axes[0], figure.axes[-1]
        left, right = (upper.transData.transform((step, 1.0))[0] / width for step in (0, 1))
        self._left, self._each = left, right - left  # where step 0 is, and the width of a step, in widths of the figure
        self._top, self._bottom = 1 - upper.get_position().y1, 1 - lower.get_position().y0
        figure.set_dpi(_SHARP)
        source = base64.b64encode(figures.png(figure)).decode("ascii")
        self._image = (
            f'<img alt="{escaped(alt)}" width="{width}" height="{height}" decoding="sync" '
            f'style="max-width:100%;height:auto;display:block" src="data:image/png;base64,{source}">'
        )

    def at(self, step: int | None) -> str:
        """The picture, with a dashed line at the step and its number where the line meets the axis."""
        cursor = ""
        if step is not None:
            left = f"left:{100 * (self._left + self._each * step):.3f}%"
            line = f"position:absolute;{left};top:{100 * self._top:.2f}%;height:{100 * (self._bottom - self._top):.2f}%"
            chip = (
                f"position:absolute;{left};top:{100 * self._bottom:.2f}%;transform:translateX(-50%);background:#222222"
            )
            chip += ";color:white;border-radius:3px;padding:0 5px;font-size:12px;line-height:17px;white-space:nowrap"
            cursor = f'<div style="{line};border-left:1.5px dashed #222222"></div><div style="{chip}">{step:,}</div>'
        return f'<div style="position:relative;display:inline-block;max-width:100%">{self._image}{cursor}</div>'


def picture(figure: Figure, alt: str) -> str:
    width = figure.canvas.get_width_height()[0]
    figure.set_dpi(_SHARP)
    return figures.img(figure, alt, width).replace("<img ", '<img style="max-width:100%;height:auto;display:block" ', 1)


# ---- layers


def telemetry_layers(run: Run, line: Line | None) -> pd.DataFrame:
    """The layer rows of a step that was not replayed: `l2` is missing, or not finite as the telemetry's number."""
    evidence = {} if line is None else line.evidence()
    rows = []
    for kind, name in LOGGED.items():
        for layer, bits in zip(run.manifest.layers, evidence.get(name, ()), strict=False):
            if bits is not None:  # None: the quantity is undefined
                value = float(bits_float(bits))
                rows.append((layer, kind, pd.NA if math.isfinite(value) else value, value))
    return pd.DataFrame(rows, columns=["layer", "kind", "l2", "recorded"])


def layer_table(layers: pd.DataFrame, nearby: pd.DataFrame, step: int, trace: Trace | None) -> str:
    """Every layer's norms: the replay (or, without one, the telemetry) beside telemetry and neighbouring steps.

    Args:
        layers: of the trace, or of `telemetry_layers`.
        nearby: telemetry of the steps around, as `Run.norms`.
        trace: the replay, if there is one.
    """
    table = beside_neighbours(layers, nearby, step)
    values = {
        (row.layer, row.kind): (row.recorded if trace is None else row.l2, row.ratio) for row in table.itertuples()
    }
    marks, ratios = ({}, {}) if trace is None else (_agreement(trace), update_ratios(trace))
    broken = pd.Series(dtype="int64") if trace is None else layers.groupby("layer")["nonfinite"].sum()
    lines = []
    for name in dict.fromkeys(layers["layer"]):
        cells = [f'<th style="text-align:left;white-space:nowrap;padding:3px 6px">{escaped(name or "(model)")}</th>']
        cells += [
            _cell_html(_norm(*values.get((name, kind), (None, 0)), marks.get((name, kind), ""))) for kind in LOGGED
        ]
        if trace is not None:
            cells.append(_cell(number(values.get((name, "weight"), (None,))[0], 3)))
            cells.append(_cell(number(ratios.get(name), 2)))
        if broken.any():
            cells.append(_cell(f"{broken[name]:,}"))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = ["layer", *(plots.KIND_NAMES.get(kind, kind) for kind in LOGGED)]
    head += ["weight", "update ratio"] if trace is not None else []
    head += ["non-finite"] if broken.any() else []
    return _table(head, "".join(lines), height=34) + _legend(sorted(set(nearby["step"]) - {step}), trace)


def update_ratios(trace: Trace) -> dict[str, float]:
    """‖update‖ / ‖weight before the step‖ of each layer that was probed."""
    squares: dict[tuple[str, str], float] = {}
    owner = {path: layer for layer, paths in trace.record.owned.items() for path in paths}
    for row in trace.record.rows:
        if row.kind in ("update", "weight_before") and row.path in owner:
            key = owner[row.path], row.kind
            squares[key] = squares.get(key, 0.0) + row.norm() ** 2
    return {
        layer: math.sqrt(square / squares[layer, "weight_before"])
        for (layer, kind), square in squares.items()
        if kind == "update" and squares.get((layer, "weight_before"), 0) > 0
    }


def _norm(value: Any, ratio: float, mark: str) -> str:
    if value is None or value is pd.NA:
        return ""
    text = number(value, 3)
    if ratio > 0:
        shown = f"×{number(ratio, 2 if ratio < 100 else 3)}"
        weight = "font-weight:700" if ratio >= NOTABLE or ratio <= 1 / NOTABLE else "opacity:.75"
        text += f' <small style="{weight}">{shown}</small>'
    return f"{text} {mark}".rstrip()


def _agreement(trace: Trace) -> dict[tuple[str, str], str]:
    """✓ where replay and telemetry have the same bits, ≠ where not, nothing where the run recorded none."""
    marks = {}
    for kind, name in LOGGED.items():
        item = trace.record.items[name]
        if not isinstance(item.recorded, list) or not isinstance(item.replayed, list):
            continue
        for layer, recorded, replayed in zip(trace.record.layers, item.recorded, item.replayed, strict=False):
            if recorded is not None or replayed is not None:
                marks[layer, kind] = "✓" if recorded == replayed else "≠"
    return marks


def _legend(neighbours: Sequence[int], trace: Trace | None) -> str:
    texts = ["L2 norms as logged."]
    if trace is not None:
        texts = ["L2 norms of the replay; ✓ has the telemetry's bits, ≠ has not."]
    if neighbours:
        texts.append(f"× is the ratio to the median of the steps {neighbours[0]:,} to {neighbours[-1]:,} around it.")
    if trace is not None and trace.record.rows and not any(row.nonfinite for row in trace.record.rows):
        texts.append("Nothing that was measured is NaN or infinite.")
    return f'<div style="{_LINES}"><small style="opacity:.85">{escaped(" ".join(texts))}</small></div>'


# ---- batch


def batch(table: pd.DataFrame) -> str:
    """The rows of a batch, with their losses if those are known."""
    losses, places = "loss" in table, bool(table["source"].notna().any())
    shown = table.head(SHOWN_ROWS)
    head = [
        "row",
        *(["share of the loss", "loss"] if losses else []),
        *(["source", "offset"] if places else []),
        "text",
    ]
    widest = shown["share"].max() if losses else 0.0
    lines = []
    for row in shown.itertuples():
        cells = [_cell(row.row)]
        if losses:
            cells += [_share(row.share, widest, len(table)), _cell(number(row.loss))]
        if places:
            offset = "" if pd.isna(row.offset) else f"{row.offset:,}"
            source = "" if pd.isna(row.source) else row.source
            cells += [_cell(source, left=True, wrap=len(source) > 28), _cell(offset)]
        style = "text-align:left;white-space:pre-wrap;overflow-wrap:anywhere;max-width:none"
        font = "font-family:var(--jp-code-font-family,monospace)"
        cells.append(f'<td style="{style};{font}"><bdi>{_visible(row.text)}</bdi></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    more = (
        f"{len(shown)} of {len(table)} rows; batch_table(run, step, trace) has all." if len(shown) < len(table) else ""
    )
    return _table(head, "".join(lines), height=32) + (paragraph(more) if more else "")


def _visible(text: str) -> str:
    """Control characters, which `Corpus.decode` shows as symbols that few fonts have, as dimmed escapes."""
    return _CONTROL.sub(lambda match: f'<span style="opacity:.5">{_escape(match[0])}</span>', escaped(text))


def _escape(symbol: str) -> str:
    code = ord(symbol) - 0x2400
    return {9: r"\t", 10: r"\n", 13: r"\r", 0x21: r"\x7f"}.get(code, f"\\x{code:02x}")


_CONTROL = re.compile("[\u2400-\u241f\u2421]")


def _share(share: Any, widest: float, rows: int) -> str:
    """A bar as long as the share; in bold from twice an equal share."""
    if not np.isfinite(share):
        return _cell("")
    width = 100 * max(share, 0) / widest if widest > 0 else 0
    style = f"background:linear-gradient(to right,rgba(86,180,233,.5) {width:.1f}%,transparent {width:.1f}%)"
    weight = ";font-weight:700" if share > 2 / rows else ""
    return f'<td style="min-width:8em;text-align:left;{style}{weight}">{100 * share:.1f} %</td>'


# ---- what the tables share

_LEFT = ("layer", "item", "verdict", "detail", "share of the loss", "source", "text")  # columns that are not numbers


def _word(name: str) -> str:
    return name.replace("_", " ")


def _cell(value: Any, left: bool = False, wrap: bool = False) -> str:
    return _cell_html(escaped(value), left, wrap)


def _cell_html(value: str, left: bool = False, wrap: bool = False) -> str:
    lines = "overflow-wrap:anywhere;max-width:none" if wrap else "white-space:nowrap"
    return f'<td style="text-align:{"left" if left else "right"};{lines};padding:3px 6px">{value}</td>'


def _heading(title: str) -> str:
    return "update<br>ratio" if title == "update ratio" else escaped(title).replace(" ", "&nbsp;")


def _table(head: Sequence[str], lines: str, height: int) -> str:
    """In Lab's own table style; scrolls by itself where it would be taller than `height` lines."""
    titles = "".join(
        f'<th style="text-align:{"left" if title in _LEFT else "right"};padding:3px 6px">{_heading(title)}</th>'
        for title in head
    )
    table = f'<table style="margin:0"><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>'
    return f'<div class="jp-RenderedHTMLCommon" style="{_SCROLL.format(height=height)}">{table}</div>'
