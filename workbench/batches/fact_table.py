"""The table of what is known of the rows of batches: its columns, what can be read off tokens, and the losses beside.

Knows arrays and traces; nothing of where a batch came from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from . import rowfacts
from .padding import extents

if TYPE_CHECKING:
    from ..trace import Trace

COLUMNS = {
    **{"step": "int64", "row": "int64", "loss": "float64", "share": "float64"},
    **{"source": "string", "line": "Int64", "offset": "Int64", "epoch": "Int64"},
    **{"period": "Int64", "repeats": "Int64", "position": "Int64"},
    **{f"{name}{suffix}": "float64" for name in rowfacts.MEASURES for suffix in ("", "_z")},
    **{"outlier": "float64", "follow": "float64", "copy_of": "Int64", "seen_at": "Int64", "text": "string"},
}


@dataclass(frozen=True)
class Contents:
    """A batch of tokens, row by row.

    Attributes:
        rows: token ids of each row without padding, (length,), of any length.
        keys: equal where all of a row is, across the arrays of a batch.
        inputs, targets: (rows, length), with padding, where each row has as many targets as inputs; None: not known.
        starts: how many tokens of padding stand before each row; empty: none.
    """

    rows: rowfacts.Rows
    keys: Sequence[bytes]
    inputs: np.ndarray | None = None
    targets: np.ndarray | None = None
    starts: Sequence[int] = ()

    @classmethod
    def of(cls, batch: Sequence[np.ndarray]) -> Contents:
        """Of a batch whose first array is the inputs, (rows, length), and whose second may be the targets."""
        paired = len(batch) == 2 and batch[1].shape == batch[0].shape
        where = extents(batch)
        return cls(
            [row[one] for row, one in zip(batch[0], where, strict=True)],
            rowfacts.row_keys(batch),
            inputs=batch[0] if paired else None,
            targets=batch[1] if paired else None,
            starts=[one.start for one in where],
        )


def facts(step: int, own: Contents, past: Mapping[int, Contents], counts: np.ndarray | None = None) -> pd.DataFrame:
    """What can be read off the rows of a step: some of `COLUMNS`.

    Args:
        past: batches of earlier steps, to compare with.
        counts: (vocabulary,) how often each token stands in the corpus; None: not known, and nothing is said of how
            usual a row's tokens are.
    """
    found: dict[str, Any] = {"step": step, "row": range(len(own.rows))}
    largest = max((int(row.max(initial=0)) for one in (own, *past.values()) for row in one.rows), default=0)
    known = np.zeros(largest + 1, np.int64) if counts is None else counts
    found |= rowfacts.unlike(own.rows, [other.rows for other in past.values()], known)
    repeated = [rowfacts.repetition(row) for row in own.rows]
    for name in ("period", "repeats", "position"):
        found[name] = pd.array([None if one is None else getattr(one, name) for one in repeated], dtype="Int64")
    if own.starts:
        found["position"] = found["position"] + pd.array(own.starts, dtype="Int64")
    if own.inputs is not None and own.targets is not None:
        found["follow"] = rowfacts.follow(own.inputs, own.targets)
    found["copy_of"] = pd.array(rowfacts.alike(own.keys), dtype="Int64")
    found["seen_at"] = last_seen(own.keys, {step: other.keys for step, other in past.items()})
    frame = pd.DataFrame(found)
    return frame if counts is not None else frame.drop(columns=["log_likelihood", "log_likelihood_z"])


def last_seen(keys: Sequence[bytes], past: Mapping[int, Sequence[bytes]]) -> Any:
    """For each row the last of the earlier steps that had it: Int64."""
    seen = {key: other for other in sorted(past) for key in past[other]}
    return pd.array([seen.get(key) for key in keys], dtype="Int64")


def with_losses(frame: pd.DataFrame, trace: Trace | None) -> pd.DataFrame:
    """With the losses of a trace, if it has one of each row; in the order that `batch_facts` promises."""
    if trace is not None and len(trace.rows) == len(frame):
        return trace.rows.astype({"row": "int64"}).merge(frame, on="row", how="left")
    if "outlier" in frame:
        return frame.sort_values("outlier", ascending=False, kind="stable")
    return frame


def complete(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Several batches in one table with all `COLUMNS`."""
    columns = list(COLUMNS)
    return pd.concat([part.reindex(columns=columns).astype(COLUMNS) for part in parts], ignore_index=True)
