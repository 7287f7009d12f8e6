"""A trace's record as data frames: layers, parameters, updates, attention heads, rows of the batch. Imports no MLX.

What the command line prints of a trace is there as plain rows too: importing pandas takes longer than printing it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ..batches.row_targets import row_targets
from ..bits import array_bits, bits_float
from .measured import Row, Update

if TYPE_CHECKING:
    import pandas as pd

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
    import pandas as pd

    names = ["layer", "kind", "l2", "rms", "max_abs", "mean", "zero_fraction", "nonfinite", "recorded"]
    return pd.DataFrame(layer_rows(record), columns=names)


def layer_rows(record: TraceRecord) -> list[dict[str, Any]]:
    """The rows of `layers`, by column."""
    arrays = {name: _array(record, name) for name in _ARRAY_OF.values()}
    by_key = {(row.path, row.kind): row for row in record.rows}
    last_call = _last_calls(record.rows)
    rows = []
    for index, layer in enumerate(record.layers):
        for kind in KINDS:
            paths = [last_call.get(layer, layer)] if kind.startswith("activation") else record.owned[layer]
            members = [by_key[path, kind] for path in paths if (path, kind) in by_key]
            array = _ARRAY_OF.get(kind)
            own = None if array is None else arrays[array][index]
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
    return rows


def _last_calls(rows: Sequence[Row]) -> dict[str, str]:
    """The path of the last call of each layer, `layer#k` where it was called more than once: by its number, for rows of
    gradients are in the order of the backward pass, which comes to the last call first."""
    calls = sorted((row.path for row in rows if row.kind == "activation"), key=lambda path: (len(path), path))
    return {path.partition("#")[0]: path for path in calls}


def parameters(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.parameters`."""
    import pandas as pd

    names = ["path", "kind", "dtype", "size", "l2", "rms", "max_abs", "mean", "zero_fraction", "nonfinite"]
    rows = [
        (row.path, row.kind, row.dtype, row.size, row.norm())
        + (_nan(row.rms), _nan(row.max_abs), _nan(row.mean), _nan(row.zero_fraction), row.nonfinite)
        for row in record.rows
    ]
    return pd.DataFrame(rows, columns=names)


def updates(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.updates`."""
    import pandas as pd

    names = list(Update.__struct_fields__)
    frame = pd.DataFrame(msgspec.to_builtins(record.updates), columns=names)
    return frame.astype(dict.fromkeys(names[2:], "float64"))


def attention(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.attention`."""
    import pandas as pd

    rows = [
        (one.path, one.call, head, _nan(logit), _nan(entropy), one.source)
        for one in record.attention or []
        for head, (logit, entropy) in enumerate(zip(one.logit_max, one.entropy, strict=True))
    ]
    return pd.DataFrame(rows, columns=["path", "call", "head", "logit_max", "entropy", "source"])


def rows(record: TraceRecord) -> pd.DataFrame:
    """See `Trace.rows`."""
    import pandas as pd

    return pd.DataFrame(row_shares(record), columns=["row", "loss", "share", "targets"]).astype({"targets": "Int64"})


def row_shares(record: TraceRecord) -> list[tuple[int, float, float, int | None]]:
    """The rows of `rows`: row, loss, share, targets; NaN and None where not known. First those whose loss is not
    finite, without a share: a record does not say what it is, but where the step's own is inf, so is it."""
    sums = np.array([_nan(value) for value in record.row_loss or ()])
    targets = _row_targets(record, len(sums))
    with np.errstate(invalid="ignore", divide="ignore"):  # losses that are all 0 have no shares
        losses, shares = sums / targets, sums / np.nansum(sums)
    counts = [None if count != count else int(count) for count in targets.tolist()]
    if (whole := float(bits_float(record.loss_bits))) == np.inf:
        losses[np.isnan(sums)] = whole
    found = list(zip(range(len(sums)), losses.tolist(), shares.tolist(), counts, strict=True))
    broken = np.isnan(sums)
    return sorted(found, key=lambda row: (not broken[row[0]], -row[2] if row[2] == row[2] else 0.0))


def _row_targets(record: TraceRecord, rows: int) -> np.ndarray:
    """Float64 (rows,); NaN where not known. Of a trace without them what its losses tell."""
    if record.row_targets is not None and rows:
        return np.array([_nan(count) for count in record.row_targets], dtype=np.float64)
    if record.token_loss is None or not rows:
        return np.full(rows, np.nan)
    losses = np.array([[_nan(value) for value in row] for row in record.token_loss], dtype=np.float64)
    whole = record.ranks is msgspec.UNSET and record.options.get("accumulate") == 1
    mean = float(bits_float(record.loss_bits)) if whole else None
    return row_targets(losses.reshape(rows, -1), total=record.targets, mean=mean)


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
