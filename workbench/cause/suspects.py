"""Which rows of a batch are unlike the run's other rows, by what they hold, and by the loss that they carry.

Knows arrays of token ids and losses; nothing of runs, models or MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..batches import rowfacts
from ..batches.padding import extents
from ..detection.window import NORMAL_SIGMA_PER_MAD
from ..spikes import LOSS_SIGMA_FLOOR

ODD_Z = 6.0  # robust standard deviations at which a row's contents are odd: as the rules of spike detection
LOSS_Z = 3.0  # at which its loss is high: Leys et al. 2013 call it very conservative (`spikes` has the reference)
# Share of targets that follow the inputs by which a row must fall short of every usual one. Ordinary text is at 1, rows
# with shifted or shuffled targets at the chance that two tokens agree, 0.03 to 0.2 in text.
FOLLOW_GAP = 0.25
NOTHING_COUNTS = "no target counts"


# Of the rows with odd contents those count whose loss (or oddness) rises at least this far towards the worst one's: a
# batch of eight has a natural oddity now and then, and garbage beside it is farther off.
HALF = 0.5


@dataclass(frozen=True)
class Suspect:
    """A row, and what is odd in it.

    Attributes:
        row: from 0.
        why: one phrase each; empty: only its loss is high.
        wrong: not merely unlike other rows: targets that are not the next tokens, a row that repeats itself, a number
            that is not finite.
        oddness: the largest robust z of its contents.
        loss: mean of a target; None: not known, or the row has no target.
        z: of the loss, robust standard deviations above that of usual rows; None: not known.
    """

    row: int
    why: list[str] = field(default_factory=list)
    wrong: bool = False
    oddness: float = 0.0
    loss: float | None = None
    z: float | None = None


def is_tokens(batch: Sequence[np.ndarray]) -> bool:
    """Whether the first array of a batch holds rows of token ids."""
    first = batch[0]
    return first.dtype.kind in "iu" and first.ndim == 2 and first.size > 0 and int(first.min()) >= 0


def odd_rows(batch: Sequence[np.ndarray], past: Sequence[Sequence[np.ndarray]]) -> dict[int, Suspect]:
    """Rows of token ids whose contents are odd, against those of earlier batches, by row. Padding is no part of a row.

    Args:
        batch, past: arrays as a step takes them: inputs, then targets if there are any; each (rows, length).
    """
    inputs, *before = ([row[where] for row, where in zip(one[0], extents(one), strict=True)] for one in (batch, *past))
    highest = max(int(row.max(initial=0)) for one in (inputs, *before) for row in one)
    counts = np.bincount(np.concatenate([row for one in before for row in one]), minlength=highest + 1)
    facts = rowfacts.unlike(inputs, before, counts)
    targets = dict(_odd_targets(batch, past))
    found: dict[int, Suspect] = {}
    for row, real in enumerate(inputs):
        why = []
        if (repeated := rowfacts.repetition(real)) is not None:
            what = "one token" if repeated.period == 1 else f"{repeated.period} tokens"
            why.append(f"{what} repeated {repeated.repeats} times")
        elif len(np.unique(real)) == 1 < real.size:
            why.append("one token throughout")
        if row in targets:
            why.append(targets[row])
        wrong, oddness = bool(why), 0.0
        for name, high, low in _WORDS:
            z = float(facts[f"{name}_z"][row])
            if abs(z) >= ODD_Z:
                why.append(high if z > 0 else low)
                oddness = max(oddness, abs(z))
        if why:
            found[row] = Suspect(row, why, wrong, oddness)
    return found


_WORDS = (
    ("distinct", "many different tokens", "few different tokens"),
    ("compressed", "hard to compress", "easy to compress"),
    ("log_likelihood", "common tokens", "rare tokens"),
)


def _odd_targets(batch: Sequence[np.ndarray], past: Sequence[Sequence[np.ndarray]]) -> Iterator[tuple[int, str]]:
    if len(batch) < 2 or batch[1].shape != batch[0].shape or batch[1].dtype.kind not in "iu":
        return
    usual = [rowfacts.follow(*other[:2]) for other in past]
    least = min((float(np.min(one)) for one in usual if len(one)), default=1.0)
    for row, share in enumerate(rowfacts.follow(*batch[:2])):
        if np.all(batch[1][row] < 0):
            yield row, NOTHING_COUNTS
        elif least - share > FOLLOW_GAP:
            yield row, f"only {share:.0%} of the targets follow the inputs"


def _not_finite(batch: Sequence[np.ndarray], past: Sequence[Sequence[np.ndarray]]) -> dict[int, list[str]]:
    """What each row holds that is no finite number, where that array of no earlier batch held the like: -inf may be a
    mask, and NaN stand for what is not known."""
    found: dict[int, list[str]] = {}
    for place, array in enumerate(batch):
        if array.dtype.kind != "f" or not array.ndim:
            continue
        for name, test in (("NaN", np.isnan), ("inf", np.isposinf), ("-inf", np.isneginf)):
            rows = np.flatnonzero(test(array).reshape(len(array), -1).any(axis=1))
            if len(rows) and not any(len(one) > place and test(one[place]).any() for one in past):
                for row in rows.tolist():
                    found.setdefault(row, []).append(f"{name} in array {place} of the batch")
    return found


def high_losses(losses: np.ndarray, usual: np.ndarray) -> np.ndarray:
    """How many robust standard deviations each row's loss is above that of usual rows, on the same state.

    Args:
        losses: (rows,) float64; inf: not finite, NaN: not known, and so is what is returned of it. usual: the same of
            other batches.
    """
    known = usual[np.isfinite(usual)]
    if len(known) < rowfacts.FEWEST_ROWS:
        return np.full(len(losses), np.nan)
    median = float(np.median(known))
    sigma = NORMAL_SIGMA_PER_MAD * float(np.median(np.abs(known - median)))
    sigma = max(sigma, LOSS_SIGMA_FLOOR * abs(median))
    with np.errstate(divide="ignore", invalid="ignore"):
        z = (losses - median) / np.float64(sigma)
    return np.where(np.isinf(losses), np.inf, z)


def suspects(
    batch: Sequence[np.ndarray],
    past: Sequence[Sequence[np.ndarray]],
    losses: np.ndarray | None,
    usual: np.ndarray | None,
    *,
    by_loss: bool = True,
) -> list[list[Suspect]]:
    """Sets of rows that may be to blame, the likeliest first: those that are wrong; those whose contents are odd; those
    whose loss is by far the highest; those whose loss is high. None is empty, and within each the highest loss comes
    first.

    Args:
        losses: (rows,) mean loss of a row's own targets, as `Shot.row_losses`; None: not known. usual: the same of
            usual rows, on the same state.
        by_loss: whether what is to be explained is a loss. Otherwise odd rows are weighed by how odd they are.
    """
    rows = len(batch[0])
    known = losses is not None and len(losses) == rows
    z = high_losses(losses, usual) if known and losses is not None and usual is not None else np.full(rows, np.nan)
    odd = odd_rows(batch, past) if is_tokens(batch) and past and all(map(is_tokens, past)) else {}
    for row, why in _not_finite(batch, past).items():
        one = odd.get(row, Suspect(row))
        odd[row] = replace(one, why=[*why, *one.why], wrong=True, oddness=np.inf)

    def suspect(row: int) -> Suspect:
        one = odd.get(row, Suspect(row))
        if not known or losses is None or np.isnan(losses[row]) or NOTHING_COUNTS in one.why:
            return one
        return replace(one, loss=float(losses[row]), z=None if np.isnan(z[row]) else float(z[row]))

    every = [suspect(row) for row in range(rows)]
    told = by_loss and not np.isinf(z).any() and not np.isnan(z[list(odd)]).any()
    weigh = (lambda one: one.z or 0.0) if told else (lambda one: one.oddness)
    heaviest = max((weigh(one) for one in every if one.row in odd), default=0.0)
    highest = max((one.z for one in every if one.z is not None), default=0.0)
    highest = min(highest, np.finfo(np.float64).max)  # inf is above it
    sets = [
        [one for one in every if one.wrong],
        [one for one in every if one.row in odd and weigh(one) >= HALF * heaviest],
        [one for one in every if (one.z or 0.0) > max(LOSS_Z, HALF * highest)],
        [one for one in every if (one.z or 0.0) > LOSS_Z],
    ]
    found: list[list[Suspect]] = []
    for some in sets:
        some.sort(key=lambda one: -np.inf if one.loss is None else -np.nan_to_num(one.loss, nan=np.inf))
        if some and [one.row for one in some] not in [[one.row for one in other] for other in found]:
            found.append(some)
    return found
