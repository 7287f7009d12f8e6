"""Records of telemetry as columns: numbers, what was found in place of a number, and arrays as rows.

Column (a name of `Line`, or that with a suffix) and dtype, one entry a step line:

    step, segment, offset     int64; offset in bytes of the line in its file
    loss, grad_norm           float32, as their bits say; NaN where there is none
    lr, ma, step_per_s, t, elapsed_s, peak_rss_mb
                              float64; NaN where there is none
    <each of these>.kind      uint8: NUMBER, NULL, MISSING or NON_FINITE (by its bits)
    spike                     bool: the line says true
    spike_rule                int32, a number of `rules`; -1: none
    per_layer_act_norms, per_layer_grad_norms, adam_m_norms, adam_v_norms
                              float32, shape (steps, layers); NaN also where there is none
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import UNSET

from ..bits import bits_float
from .line import ARRAYS, FIRST, SCALARS, Line
from .table import MISSING, NON_FINITE, NULL, NUMBER

DOUBLES = ("lr", "ma", "step_per_s", "t", "elapsed_s", "peak_rss_mb")


class Odd(Exception):
    """Lines that have to be read one by one, by the strict reader."""


_KINDS = dict.fromkeys(("step", "segment"), np.int64) | dict.fromkeys((*SCALARS, *DOUBLES, "val_loss"), np.float64)


class Values(NamedTuple):
    """What a field is in each of several lines: a list, and how many of its entries are `UNSET`; and the entries as an
    array, if there was one to be had at once, for all are numbers."""

    entries: list[Any]
    absent: int
    numbers: np.ndarray | None = None


def values_of(lines: Sequence[Any], names: Iterable[str]) -> dict[str, Values]:
    """The values of fields, of those that occur in at least one of the lines."""
    found = {}
    for name in names:
        entries = list(map(operator.attrgetter(name), lines))
        if name in _KINDS:
            try:
                numbers = np.fromiter(entries, _KINDS[name], len(entries))
                if not np.isnan(numbers).any():  # null becomes NaN, and no JSON number is one
                    found[name] = Values(entries, 0, numbers)
                    continue
            except (TypeError, OverflowError):  # some are missing, or of more than 64 bits
                pass
        absent = entries.count(UNSET)
        if absent < len(entries):
            found[name] = Values(entries, absent)
    return found


def columns_of(rows: int, values: Mapping[str, Values], kind: str = "step") -> dict[str, np.ndarray]:
    """All columns but `offset`, `spike_rule` and the arrays; and `val_loss`.

    Args:
        rows: number of lines.
        values: of the fields of `Line` that occur in them, as `values_of`.
        kind: type of all of them, "step" or "val".

    Raises:
        Odd: a step that is missing or less than the first there can be, bits that are malformed or contradict the
            number beside them.
    """
    found = {"step": _integers(rows, values.get("step"), None), "segment": _integers(rows, values.get("segment"), 0)}
    if (found["step"] < FIRST[kind]).any():
        raise Odd
    for name in (*SCALARS, *DOUBLES, "val_loss"):
        given, bits = values.get(name), values.get(f"{name}_bits")
        if given is None and bits is None:
            continue
        numbers, kinds = _numbers(rows, given)
        if name in SCALARS:
            numbers, kinds = _with_bits(numbers, kinds, bits)
        found[name], found[f"{name}.kind"] = numbers, kinds
    if "spike" in values:
        found["spike"] = np.array([value is True for value in values["spike"].entries])
    return found


def _integers(rows: int, values: Values | None, default: int | None) -> np.ndarray:
    if values is None and default is not None:
        return np.full(rows, default)
    if values is None or (values.absent and default is None):
        raise Odd
    if values.numbers is not None:
        return values.numbers
    entries = values.entries
    if values.absent:
        entries = [default if value is UNSET else value for value in entries]
    try:
        return np.array(entries, np.int64)
    except OverflowError:
        raise Odd from None


def _numbers(rows: int, values: Values | None) -> tuple[np.ndarray, np.ndarray]:
    if values is None:
        return np.full(rows, np.nan), np.full(rows, MISSING, np.uint8)
    if values.numbers is not None:
        return values.numbers, np.full(rows, NUMBER, np.uint8)
    kinds, entries = np.full(rows, NUMBER, np.uint8), values.entries
    if values.absent:
        kinds[[value is UNSET for value in entries]] = MISSING
        entries = [None if value is UNSET else value for value in entries]
    numbers = np.array(entries, np.float64)  # None becomes NaN, and no JSON number is one
    kinds[np.isnan(numbers) & (kinds == NUMBER)] = NULL
    return numbers, kinds


def _with_bits(numbers: np.ndarray, kinds: np.ndarray, bits: Values | None) -> tuple[np.ndarray, np.ndarray]:
    """Numbers as float32, and where there are bits those that the bits mean."""
    with np.errstate(over="ignore"):
        single = numbers.astype(np.float32)
    if bits is None:
        return single, kinds
    rows = np.array([pattern is not UNSET for pattern in bits.entries])
    words = texts_to_words([pattern for pattern in bits.entries if pattern is not UNSET])
    meant = words.view(np.float32)
    finite = np.isfinite(meant)
    given, beside = single[rows].view(np.uint32), kinds[rows]
    agrees = np.where(finite, (beside == NUMBER) & (given == words), beside == NULL) | (beside == MISSING)
    if not agrees.all():
        raise Odd
    single[rows] = meant
    kinds[rows] = np.where(finite, NUMBER, NON_FINITE).astype(np.uint8)
    return single, kinds


_NIBBLE = np.full(256, 255, np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def texts_to_words(texts: Sequence[str]) -> np.ndarray:
    """Many bit patterns such as "0x4013c28f" as uint32.

    Raises:
        Odd: one is something else.
    """
    if set(map(len, texts)) != {10}:
        raise Odd
    try:
        return characters_to_words(np.frombuffer("".join(texts).encode("ascii"), np.uint8).reshape(-1, 10))
    except UnicodeEncodeError:
        raise Odd from None


def characters_to_words(characters: np.ndarray) -> np.ndarray:
    """The same of their characters: uint8, shape (texts, 10)."""
    if characters.shape[1] != 10:
        raise Odd
    digits = _NIBBLE[characters[:, 2:]].astype(np.uint32)
    if (characters[:, 0] != ord("0")).any() or (characters[:, 1] != ord("x")).any() or (digits > 15).any():
        raise Odd
    return np.ascontiguousarray((digits << np.arange(28, -4, -4, dtype=np.uint32)).sum(axis=1, dtype=np.uint32))


def array_columns(lines: Sequence[Line]) -> dict[str, list[np.ndarray | None]]:
    """The arrays of lines that the strict reader has read: by name, for each line float32, or None if missing."""
    found = {}
    for name in ARRAYS:
        entries = [_array(line, name) for line in lines]
        if any(entry is not None for entry in entries):
            found[name] = entries
    return found


def _array(line: Line, name: str) -> np.ndarray | None:
    numbers, bits = getattr(line, name), getattr(line, f"{name}_bits")
    if numbers is UNSET:
        return None
    with np.errstate(over="ignore"):
        values = np.array(numbers, np.float64).astype(np.float32)
    for position, pattern in enumerate([] if bits is UNSET else bits):
        if pattern is not None:
            values[position] = bits_float(pattern)
    return values
