"""Which positions of a batch of tokens have a target that counts, and which are only padding.

Knows arrays of token ids; nothing of runs or models. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def counted_positions(batch: Sequence[np.ndarray]) -> np.ndarray | None:
    """Which positions of each row have a target that counts, where a batch says so: bool, (rows, length). None where it
    does not.

    It does by targets below 0, or by a second array (rows, 2) of where in each row what counts begins and ends, as
    `mlx_lm.tuner.trainer.default_loss` takes it: the tokens from the first place on and before the second one.
    """
    inputs, second = batch[0], batch[1] if len(batch) > 1 else None
    if second is None or second.dtype.kind not in "iu":
        return None
    if second.shape == inputs.shape:
        return np.asarray(second >= 0)
    if not has_ends(batch):
        return None
    places = np.arange(inputs.shape[1])
    return np.asarray((places >= second[:, :1]) & (places < second[:, 1:]))


def has_ends(batch: Sequence[np.ndarray]) -> bool:
    """Whether the second array says where in each row what counts begins and ends: integers, (rows, 2)."""
    if len(batch) < 2 or batch[0].ndim != 2 or batch[1].dtype.kind not in "iu":
        return False
    rows, length = batch[0].shape
    if batch[1].shape != (rows, 2) or length <= 2 or any(array.size for array in batch[2:]):
        return False
    first, end = batch[1].astype(np.int64).T
    return bool(((first >= 0) & (first <= end) & (end <= length)).all())


def extent(tokens: np.ndarray, counted: np.ndarray) -> slice:
    """Where a row is without its padding: without the stretch of one and the same token, two or more, at either end of
    it that has no target which counts. A row of which nothing counts stays as it is.

    Args:
        tokens: (length,) integers; counted: (length,) bool.
    """
    places = np.flatnonzero(counted)
    if not places.size:
        return slice(0, len(tokens))
    start, end = 0, len(tokens)
    while start < places[0] and tokens[start] == tokens[0]:
        start += 1
    while end > places[-1] + 1 and tokens[end - 1] == tokens[-1]:
        end -= 1
    # One token alone is a prompt's first, or the last of a row that is full, which has no target either.
    return slice(start if start > 1 else 0, end if end < len(tokens) - 1 else len(tokens))


def extents(batch: Sequence[np.ndarray]) -> list[slice]:
    """Where each row of a batch is without its padding; all of it where the batch does not say what counts.

    Args:
        batch: token ids, (rows, length), and what else it has.
    """
    counted = counted_positions(batch)
    if counted is None:
        return [slice(0, len(row)) for row in batch[0]]
    return [extent(row, one) for row, one in zip(batch[0], counted, strict=True)]
