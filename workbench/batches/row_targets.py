"""How many targets each row of a batch has, by which its summed loss is to be divided for a mean.

A loss function that masks gives what is no target a loss of 0, and a target that was certain has a loss of 0 too. So a
count is taken only from what tells the two apart; where nothing does it is NaN. Knows arrays; nothing of runs or MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .padding import has_ends

# Rounding of a float32 mean and of the sum that it is of: a few units of 6e-8 each. A total that has to be told from
# the next whole number must be below half the inverse.
ROUNDING = 4e-6


def row_targets(
    losses: np.ndarray,
    batch: Sequence[np.ndarray] = (),
    *,
    kind: str | None = None,
    total: int | None = None,
    mean: float | None = None,
) -> np.ndarray:
    """The targets of each row, float64 (rows,); NaN where they can't be known.

    Known they are, in this order: by what the built-in trainer or mlx-lm takes for a target; by a mask that has as many
    targets as the step, where that number is known from the loss function or from its mean; by a mask of the batch that
    is exactly where a row's losses are not 0; and in a row without a loss of 0, whose every position is a target.

    Args:
        losses: of each token, (rows, tokens); 0 for what is no target. One column: the loss of each row.
        batch: its arrays as the step took them; empty: not known.
        kind: of the run's rebuild: "trainer", "mlx-lm", or another.
        total: targets in the batch, as the loss function says.
        mean: the step's loss, if it may be the sum of `losses` over the number of targets; None: it is not.
    """
    with np.errstate(invalid="ignore"):
        nonzero = losses != 0
    contained = nonzero & np.isfinite(losses)  # 0 · inf, of a masked position, is NaN
    masks = [mask for mask in _masks(batch, kind) if mask.shape == losses.shape and not (contained & ~mask).any()]
    if masks and kind in ("trainer", "mlx-lm"):
        return _count(masks[0])
    whole = np.ones(losses.shape, bool)
    every = [*masks, nonzero, whole]
    for number in (total, _total(losses, mean)):
        agreeing = {tuple(_count(mask)) for mask in every if number is not None and mask.sum() == number}
        if len(agreeing) == 1:
            return np.array(agreeing.pop())
    found = np.full(len(losses), np.nan)
    for mask in (*masks, whole):
        same = (mask == nonzero).all(axis=1)
        found[same] = _count(mask)[same]
    return found


def _count(mask: np.ndarray) -> np.ndarray:
    return mask.sum(axis=1).astype(np.float64)


def _total(losses: np.ndarray, mean: float | None) -> int | None:
    """The whole number by which the sum was divided for the mean, if there is one and it can be told from the next."""
    summed = float(losses.sum(dtype=np.float64))
    if mean is None or mean == 0 or not np.isfinite([summed, mean]).all():
        return None
    number = round(summed / mean)
    told = 1 <= number <= 0.5 / ROUNDING and abs(summed / mean / number - 1) <= ROUNDING
    return number if told else None


def _masks(batch: Sequence[np.ndarray], kind: str | None) -> Iterator[np.ndarray]:
    """Which positions may be the targets, by what stands in the batch: bool, (rows, tokens) each."""
    if kind == "mlx-lm":
        yield _between(*batch) if len(batch) > 1 else np.zeros((0, 0), bool)
        return
    if len(batch) > 1 and has_ends(batch):
        yield _between(*batch[:2])
    for number, array in enumerate(batch):
        if array.ndim != 2:
            continue
        if number and array.dtype.kind in "iu":
            yield array >= 0
        if number and ((array == 0) | (array == 1)).all():
            yield array != 0


def _between(tokens: np.ndarray, ends: np.ndarray, widths: np.ndarray | None = None) -> np.ndarray:
    """The targets of `mlx_lm.tuner.trainer.default_loss`: target j is token j, from 1 on, and those from the first
    place to the second one count, both included. (The second one is the number of tokens, so that one of the padding
    counts as well.)

    Args:
        tokens: (rows, width); ends: (rows, 2).
        widths: of micro-batches, as shape: see `finetune.examples.ExampleSampler`.
    """
    places, each = np.arange(1, tokens.shape[1]), np.array([tokens.shape[1]])
    if widths is not None:
        each = np.array(widths.shape[2:])
    wide = np.repeat(each, max(len(tokens) // len(each), 1))[: len(tokens), None]
    return np.asarray((places >= ends[:, :1]) & (places <= ends[:, 1:]) & (places < wide))
