"""The layers of a step as HTML: every norm of a replay, or of the telemetry, beside the run's neighbouring steps.

Pure functions from data to text; they know nothing of widgets, files or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from ..plots import KIND_NAMES
from ..probes.logged_norms import LOGGED, of_line
from .markup import CELL, cell, cell_html, escaped, number, small, table
from .nearby import beside_neighbours

if TYPE_CHECKING:
    from ..lines.line import Line
    from ..run import Run
    from ..trace import Trace

AROUND = 3  # neighbouring steps on each side
LONG = 36  # letters of a layer's name from which it is broken
NOTABLE = 2.0  # a norm that is so many times its neighbours' median, or as small a part of it, stands out in bold


def telemetry_layers(run: Run, line: Line | None) -> pd.DataFrame:
    """The layer rows of a step that was not replayed: `l2` is missing, or not finite as the telemetry's number."""
    rows = [
        (layer, kind, pd.NA if math.isfinite(value) else value, value)
        for layer, kind, value in of_line(run.manifest.layers, line)
    ]
    return pd.DataFrame(rows, columns=["layer", "kind", "l2", "recorded"])


def layer_table(
    layers: pd.DataFrame, nearby: pd.DataFrame, step: int, trace: Trace | None, names: Mapping[str, str] | None = None
) -> str:
    """Every layer's norms: the replay (or, without one, the telemetry) beside telemetry and neighbouring steps.

    Args:
        layers: of the trace, or of `telemetry_layers`.
        nearby: telemetry of the steps around, as `Run.norms`.
        trace: the replay, if there is one.
    """
    beside = beside_neighbours(layers, nearby, step)
    values = {
        (row.layer, row.kind): (row.recorded if trace is None else row.l2, row.ratio) for row in beside.itertuples()
    }
    marks, ratios = ({}, {}) if trace is None else (_agreement(trace), update_ratios(trace))
    broken = pd.Series(dtype="int64") if trace is None else layers.groupby("layer")["nonfinite"].sum()
    lines = []
    for name in dict.fromkeys(layers["layer"]):
        cells = [_name(name)]
        cells += [
            cell_html(_norm(*values.get((name, kind), (None, 0)), marks.get((name, kind), ""))) for kind in LOGGED
        ]
        if trace is not None:
            cells.append(cell(number(values.get((name, "weight"), (None,))[0], 3)))
            cells.append(cell(number(ratios.get(name), 2)))
        if broken.any():
            cells.append(cell(f"{broken[name]:,}"))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    called = KIND_NAMES | dict(names or {})
    head = ["layer", *(called.get(kind, kind) for kind in LOGGED)]
    head += ["weight", "update|ratio"] if trace is not None else []
    head += ["non-finite"] if broken.any() else []
    return table(head, "".join(lines), height=34) + _legend(sorted(set(nearby["step"]) - {step}), trace)


def _name(layer: str) -> str:
    """The head of a row. A long name goes on in a second line: else it would push the numbers out of sight."""
    shown, wrapped = escaped(layer or "(model)"), "white-space:nowrap"
    if len(layer) > LONG:
        shown, wrapped = shown.replace(".", ".<wbr>"), f"overflow-wrap:anywhere;min-width:{LONG // 2}em"
    return f'<th style="text-align:left;{wrapped};{CELL}">{shown}</th>'


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
    return small(" ".join(texts))
