"""Where a data stream departs from the ordinary one: rows from elsewhere, other targets, batches repeated or skipped.

They are part of what the data of a run is: its manifest holds them, and a replay rebuilds them. Batches have the
numbers of the ordinary stream, so that an alteration stays with its batch when one before it is skipped; where none is
skipped, batch N is that of step N. Knows rows and arrays; nothing of corpora, models or runs.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from ..errors import DataError

SAMPLE_LIMIT = 2**62  # sample numbers stay exact in 64-bit arithmetic, with room for the rows of one batch
IGNORED = -1  # a target that the loss does not count

How = Literal["shift", "shuffle", "ignore"]


def integer(name: str, value: object, low: int, high: int) -> int:
    """`value` as an int, if it is an integer (a bool is none) with low <= value < high; otherwise DataError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not low <= value < high:
        raise DataError(f"{name} is {value!r}; expected an integer from {low} to {high - 1}; correct it.")
    return int(value)


@dataclass(frozen=True)
class Substitution:
    """In batch `step`, rows `rows[i]` are the windows at `sources[source].tokens[offsets[i]:]`, not the ordinary."""

    step: int  # number of the batch, from 1
    rows: tuple[int, ...]
    source: int  # index into the sampler's sources
    offsets: tuple[int, ...]  # tokens, one a row


@dataclass(frozen=True)
class Relabelling:
    """In batch `step`, the targets of `rows` are a function of the ordinary ones, row by row:

    `shift`: rotated to the left by `amount`, so that each position is asked for a token so much further on.
    `shuffle`: put in another order, drawn by the seed `amount` and the row's number.
    `ignore`: `IGNORED`, all of them.
    """

    step: int
    rows: tuple[int, ...]
    how: How
    amount: int = 0


@dataclass(frozen=True)
class Repetition:
    """Batch `step` is batch `of` once more, with what `of` itself has of substitutions and relabellings."""

    step: int
    of: int


class Alterations:
    """The alterations of a stream, checked.

    Args:
        lengths: tokens in each of the sampler's sources, and how an error names it.
        batch, ctx: rows of a batch, tokens of a row.

    Raises:
        DataError: a number is out of range, or two alterations want the same.
    """

    def __init__(
        self,
        substitutions: Sequence[Substitution],
        relabellings: Sequence[Relabelling],
        repetitions: Sequence[Repetition],
        skipped: Sequence[int],
        *,
        lengths: Sequence[tuple[int, Any]],
        batch: int,
        ctx: int,
    ) -> None:
        self._batch, self._ctx = batch, ctx
        self._substituted = self._check_substitutions(substitutions, lengths)
        self._relabelled = self._check_relabellings(relabellings)
        self._repeated = self._check_repetitions(repetitions)
        self._skipped = sorted({self._number(f"skipped[{i}]", number) for i, number in enumerate(skipped)})

    def number_of(self, step: int) -> int:
        """The number of the batch that a step consumes."""
        for number in self._skipped:
            step += number <= step
        return step

    def step_of(self, number: int) -> int:
        """The step that consumes batch `number`, or where that is skipped the next one."""
        return number - sum(skipped < number for skipped in self._skipped)

    def origin_of(self, number: int) -> int:
        """The batch whose ordinary rows a batch has: its own, unless it is a repetition."""
        return self._repeated.get(number, number)

    def substituted(self, number: int) -> dict[int, tuple[int, int]]:
        """{row: (source, offset)} of a batch."""
        return self._substituted.get(self.origin_of(number), {}) | self._substituted.get(number, {})

    def relabel(self, number: int, targets: np.ndarray) -> None:
        """Changes the targets of a batch, int32 (batch, ctx), in place."""
        for one in dict.fromkeys((self.origin_of(number), number)):
            for row, (how, amount) in self._relabelled.get(one, {}).items():
                if how == "ignore":
                    targets[row] = IGNORED
                elif how == "shift":
                    targets[row] = np.roll(targets[row], -amount)
                else:  # not numpy's own shuffle: only the bit generator's integers are guaranteed to stay
                    words = np.random.Philox(key=np.array([amount, row], np.uint64)).random_raw(self._ctx)
                    targets[row] = targets[row][np.argsort(words, kind="stable")]

    # ---- checks

    def _number(self, name: str, value: object) -> int:
        return integer(name, value, 1, SAMPLE_LIMIT // self._batch)

    def _row(self, name: str, value: object) -> int:
        return integer(f"A row of {name}", value, 0, self._batch)

    def _check_substitutions(
        self, substitutions: Sequence[Substitution], lengths: Sequence[tuple[int, Any]]
    ) -> dict[int, dict[int, tuple[int, int]]]:
        """{batch: {row: (source, offset)}}"""
        placed: dict[int, dict[int, tuple[int, int]]] = {}
        for name, substitution in _named("substitutions", substitutions):
            step = self._number(f"{name}.step", substitution.step)
            source = integer(f"{name}.source", substitution.source, 0, len(lengths))
            if len(substitution.rows) != len(substitution.offsets) or not substitution.rows:
                raise DataError(
                    f"{name} has {len(substitution.rows)} rows and {len(substitution.offsets)} offsets; expected one "
                    "offset a row, and at least one row; correct it."
                )
            length, where = lengths[source]
            last = length - self._ctx - 1
            if last < 0:
                raise DataError(
                    f"{name}.source is {source}, {where}, which has {length} tokens; expected at least "
                    f"{self._ctx + 1}, one window; use a longer corpus or a smaller ctx."
                )
            for row, offset in zip(substitution.rows, substitution.offsets, strict=True):
                row = self._row(name, row)
                offset = integer(f"The offset of {name} for row {row}", offset, 0, last + 1)
                _place(placed.setdefault(step, {}), row, (source, offset), f"{name} takes row {row} of step {step}")
        return placed

    def _check_relabellings(self, relabellings: Sequence[Relabelling]) -> dict[int, dict[int, tuple[How, int]]]:
        """{batch: {row: (how, amount)}}"""
        placed: dict[int, dict[int, tuple[How, int]]] = {}
        for name, entry in _named("relabellings", relabellings):
            step = self._number(f"{name}.step", entry.step)
            if entry.how not in get_args(How):
                raise DataError(f"{name}.how is {entry.how!r}; expected one of {', '.join(get_args(How))}; correct it.")
            high = self._ctx if entry.how == "shift" else 2**64
            amount = integer(f"{name}.amount", entry.amount, int(entry.how == "shift"), high)
            for row in entry.rows:
                row = self._row(name, row)
                what = f"{name} changes the targets of row {row} of step {step}"
                _place(placed.setdefault(step, {}), row, (entry.how, amount), what)
        return placed

    def _check_repetitions(self, repetitions: Sequence[Repetition]) -> dict[int, int]:
        """{batch: the batch that it repeats}"""
        placed: dict[int, int] = {}
        for name, entry in _named("repetitions", repetitions):
            step, of = self._number(f"{name}.step", entry.step), self._number(f"{name}.of", entry.of)
            _place(placed, step, of, f"{name} replaces the batch of step {step}")
        for step, of in placed.items():
            if of in placed:
                raise DataError(
                    f"Batch {step} repeats batch {of}, which is itself a repetition or the same; expected an ordinary "
                    "batch; name that one."
                )
        return placed


def _named(name: str, entries: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    return ((f"{name}[{number}]", entry) for number, entry in enumerate(entries))


def _place(table: dict[int, Any], key: int, value: Any, what: str) -> None:
    if key in table:
        raise DataError(f"{what} a second time; expected once; remove one.")
    table[key] = value
