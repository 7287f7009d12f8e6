"""What can be said of the rows of a batch by looking at their tokens: repetition, variety, compressibility, likelihood,
copies; and how unlike the run's other rows each is.

Knows arrays of token ids; nothing of corpora, models or runs. Needs numpy alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# OLMo 2 (arXiv:2501.00656) leaves out data in which a sequence of 1 to 13 tokens repeats 32 times or more, as it found
# at its spikes; OLMo-core's InstanceFilterConfig has the same three numbers.
LONGEST_PERIOD, FEWEST_REPEATS = 13, 32

MEASURES = ("distinct", "compressed", "log_likelihood")
NORMAL_SIGMA_PER_MAD = 1.4826  # see `spikes`
SIGMA_FLOOR = 0.01  # of |median|: where nearly all rows agree the MAD is 0 or rounding, and then any z would be large
FEWEST_ROWS = 8  # the median and MAD of fewer say nothing


Rows = Sequence[np.ndarray] | np.ndarray


@dataclass(frozen=True)
class Repetition:
    """A stretch of a row that repeats itself."""

    period: int  # tokens
    repeats: int  # whole periods in the stretch
    position: int  # of its first token in the row


def repetition(tokens: np.ndarray) -> Repetition | None:
    """The longest stretch with the smallest period from 1 to `LONGEST_PERIOD` that repeats `FEWEST_REPEATS` times or
    more; None if there is none.

    Args:
        tokens: (length,) integers.
    """
    for period in range(1, LONGEST_PERIOD + 1):
        same = np.concatenate([[False], tokens[period:] == tokens[:-period], [False]])
        starts, ends = np.flatnonzero(~same[:-1] & same[1:]), np.flatnonzero(same[:-1] & ~same[1:])
        if not starts.size:
            continue
        longest = int(np.argmax(ends - starts))
        repeats = int(ends[longest] - starts[longest] + period) // period
        if repeats >= FEWEST_REPEATS:
            return Repetition(period, repeats, int(starts[longest]))
    return None


def distinct(tokens: np.ndarray) -> float:
    """Different tokens over tokens: near 0 for one token repeated, high for noise."""
    return len(np.unique(tokens)) / max(tokens.size, 1)


def compressed(tokens: np.ndarray, vocabulary: int) -> float:
    """Bytes after DEFLATE (zlib, level 9) over bytes before: low for repetition, above 1 for noise in a short row.

    Args:
        vocabulary: number of token ids; up to 256 take a byte each, up to 65,536 two, more take four.
    """
    kind = np.uint8 if vocabulary <= 256 else "<u2" if vocabulary <= 65536 else "<u4"
    raw = tokens.astype(kind).tobytes()
    return len(zlib.compress(raw, 9)) / max(len(raw), 1)


def log_likelihood(tokens: np.ndarray, counts: np.ndarray) -> float:
    """Mean natural logarithm of the tokens' frequencies: low where rare tokens are many. Half a count is added to each
    token (Krichevsky & Trofimov 1981, doi:10.1109/TIT.1981.1056331), so that one never seen has a likelihood too.

    Args:
        counts: (vocabulary,) how often each token stands in the corpus.
    """
    smoothed = counts + 0.5
    return float(np.mean(np.log(smoothed[tokens] / smoothed.sum()))) if tokens.size else float("nan")


def measures(rows: Rows, counts: np.ndarray) -> dict[str, np.ndarray]:
    """`MEASURES` of each row.

    Args:
        rows: token ids of each row, (length,), of any length.
        counts: (vocabulary,) how often each token stands in the corpus.

    Returns:
        By name, float64 of shape (rows,).
    """
    found = [(distinct(row), compressed(row, len(counts)), log_likelihood(row, counts)) for row in rows]
    table = np.array(found, dtype=np.float64).reshape(len(rows), len(MEASURES))
    return dict(zip(MEASURES, table.T, strict=True))


def robust_z(values: np.ndarray, past: np.ndarray) -> np.ndarray:
    """How many robust standard deviations values are from the median of past ones: (x - median) / (1.4826 MAD), with a
    floor of `SIGMA_FLOOR` of the median (Iglewicz & Hoaglin 1993: see `spikes`). NaN for fewer than `FEWEST_ROWS`.

    Args:
        values: (n,) float64; past: (m,) float64.
    """
    if len(past) < FEWEST_ROWS:
        return np.full(len(values), np.nan)
    median = float(np.median(past))
    sigma = max(NORMAL_SIGMA_PER_MAD * float(np.median(np.abs(past - median))), SIGMA_FLOOR * abs(median))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray((values - median) / np.float64(sigma))


def unlike(rows: Rows, past: Sequence[Rows], counts: np.ndarray) -> dict[str, np.ndarray]:
    """`measures` of rows, the robust z of each against the rows of earlier batches (`<name>_z`), and `outlier`: the
    largest |z| of a row.

    Args:
        rows: token ids of each row, (length,), of any length; past: the same of other batches.
    """
    own = measures(rows, counts)
    before = [measures(batch, counts) for batch in past]
    found = dict(own)
    for name in MEASURES:
        values = np.concatenate([one[name] for one in before]) if before else np.empty(0)
        found[f"{name}_z"] = robust_z(own[name], values)
    found["outlier"] = np.max(np.abs([found[f"{name}_z"] for name in MEASURES]), axis=0)
    return found


def copies(batch: Sequence[np.ndarray]) -> list[int | None]:
    """For each row the first other row of the same contents, in every array of the batch; None if there is none."""
    return alike(row_keys(batch))


def alike(keys: Sequence[bytes]) -> list[int | None]:
    """For each key the place of the first other that equals it; None if there is none."""
    first: dict[bytes, list[int]] = {}
    for number, key in enumerate(keys):
        first.setdefault(key, []).append(number)
    return [next((other for other in first[key] if other != number), None) for number, key in enumerate(keys)]


def row_keys(batch: Sequence[np.ndarray]) -> list[bytes]:
    """The contents of each row, across the arrays of a batch: equal where all of a row is."""
    return [b"\0".join(np.ascontiguousarray(array[row]).tobytes() for array in batch) for row in range(len(batch[0]))]


def follow(inputs: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The share of each row's targets that are the token that comes next in its inputs: 1 in ordinary language-model
    data. The last target has nothing to be compared with. A target below 0 does not count; 0 where none does.

    Args:
        inputs, targets: (rows, length) token ids.
    """
    if inputs.shape[1] < 2:
        return np.full(len(inputs), np.nan)
    counted = targets[:, :-1] >= 0
    same = counted & (targets[:, :-1] == inputs[:, 1:])
    return np.asarray(same.sum(axis=1) / np.maximum(counted.sum(axis=1), 1))
