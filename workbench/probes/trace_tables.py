"""A trace's record as data frames: layers, parameters, updates, attention heads, rows of the batch. Imports no MLX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pandas as pd

from ..bits import array_bits, bits_float
from .measured import Row, Update

if TYPE_CHECKING:
    from ..trace import TraceRecord

KINDS = ("activation", "activation_gradient", "gradient", "weight", "adam_m", "adam_v", "update")
_ARRAY_OF = {
    "activation": "per_layer_act_norms",
    "gradient": "per_layer_grad_norms",
    "adam_m": "adam_m_norms",
    "adam_v": "adam_v_norms",
}


def layers(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.layers`."""
    by_key = {(row.path, row.kind): row for row in record.rows}
    last_call = {(row.path.partition("#")[0], row.kind): row for row in record.rows}
    rows = []
    for index, layer in enumerate(record.layers):
        for kind in KINDS:
            if kind.startswith("activation"):
                members = [last_call[layer, kind]] if (layer, kind) in last_call else []
            else:
                members = [by_key[path, kind] for path in record.owned[layer] if (path, kind) in by_key]
            array = _ARRAY_OF.get(kind)
            own = None if array is None else _array(record, array)[index]
            if own is None and not members:
                continue
            squares = sum(row.norm() ** 2 for row in members)
            size = sum(row.size for row in members)
            recorded = None if array is None else record.items[array].recorded
            logged = recorded[index] if isinstance(recorded, list) and index < len(recorded) else None
            rows.append(
                {
                    "layer": layer,
                    "kind": kind,
                    "l2": float(np.sqrt(squares)) if own is None else float(bits_float(own)),
                    "rms": float(np.sqrt(squares / size)) if size else float("nan"),
                    "max_abs": max((_nan(row.max_abs) for row in members), default=float("nan")),
                    "mean": _weighted([row.mean for row in members], members),
                    "zero_fraction": _weighted([row.zero_fraction for row in members], members),
                    "nonfinite": sum(row.nonfinite for row in members),
                    "recorded": float("nan") if logged is None else float(bits_float(logged)),
                }
            )
    names = ["layer", "kind", "l2", "rms", "max_abs", "mean", "zero_fraction", "nonfinite", "recorded"]
    return pd.DataFrame(rows, columns=names)


def parameters(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.parameters`."""
    names = ["path", "kind", "dtype", "size", "l2", "rms", "max_abs", "mean", "zero_fraction", "nonfinite"]
    rows = [
        (row.path, row.kind, row.dtype, row.size, row.norm())
        + (_nan(row.rms), _nan(row.max_abs), _nan(row.mean), _nan(row.zero_fraction), row.nonfinite)
        for row in record.rows
    ]
    return pd.DataFrame(rows, columns=names)


def updates(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.updates`."""
    names = list(Update.__struct_fields__)
    frame = pd.DataFrame(msgspec.to_builtins(record.updates), columns=names)
    return frame.astype(dict.fromkeys(names[2:], "float64"))


def attention(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.attention`."""
    rows = [
        (one.path, one.call, head, _nan(logit), _nan(entropy), one.source)
        for one in record.attention or []
        for head, (logit, entropy) in enumerate(zip(one.logit_max, one.entropy, strict=True))
    ]
    return pd.DataFrame(rows, columns=["path", "call", "head", "logit_max", "entropy", "source"])


def rows(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.rows`."""
    if record.row_loss is None:
        return pd.DataFrame({"row": [], "loss": [], "share": []})
    sums = np.array([_nan(value) for value in record.row_loss])
    tokens = [len(row) for row in record.token_loss or [[0]] * len(sums)]
    frame = pd.DataFrame(
        {"row": range(len(sums)), "loss": sums / np.maximum(tokens, 1), "share": sums / np.nansum(sums)}
    )
    return frame.sort_values("share", ascending=False, kind="stable", na_position="first", ignore_index=True)


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _weighted(values: Sequence[float | None], members: Sequence[Row]) -> float:
    """The mean over all elements of several tensors, from each one's own."""
    size = sum(row.size for row in members)
    sums = (_nan(value) * row.size for value, row in zip(values, members, strict=True) if row.size)
    return sum(sums) / size if size else float("nan")


def _array(record: TraceRecord, name: str) -> list[str | None]:
    bits = getattr(record, f"{name}_bits")
    return array_bits(getattr(record, name), None if bits is msgspec.UNSET else bits)
