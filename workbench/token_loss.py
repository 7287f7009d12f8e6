"""The loss of each row or token, as a loss function's extras give it. Knows arrays; nothing of steps or traces."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .batch_arrays import Batch


def of_rows(given: Any) -> mx.array | None:
    """What a loss function gave as `token_loss`, (rows, ...), if it tells of rows at all: not a number, nor a list."""
    return given if isinstance(given, mx.array) and given.ndim else None


def not_of_rows(given: Any, batch: Batch) -> str | None:
    """A sentence, if it does not tell of the rows of this batch; None: it does, or nothing was given."""
    if given is None:
        return None
    expected = "expected an array whose first axis is the batch's, (rows, …): the loss of each row or token"
    if (losses := of_rows(given)) is None:
        what = f"an array of shape {given.shape}" if isinstance(given, mx.array) else f"a {type(given).__name__}"
        return f'the loss function gives {what} as "token_loss", of which a replay tells no row; {expected}'
    rows = sorted({array.shape[0] for array in batch if getattr(array, "ndim", 0)})
    if not rows or losses.shape[0] in rows:
        return None
    return (
        f'the loss function gives an array of shape {losses.shape} as "token_loss", and the batch has '
        f"{' or '.join(map(str, rows))} rows: a replay takes each entry of its first axis for a row; {expected}"
    )
