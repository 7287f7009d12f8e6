"""Many lines of telemetry at once, as columns: what the strict reader would say of them, some thirty times as fast.

A block of lines is decoded into typed records with only the fields that occur, the arrays left as text. All arrays of a
block are then parsed in one call, and bits are compared with their numbers by whole columns. Whatever is odd in a block
(a damaged, blank or repeated thing, arrays with bits of their own) raises `Odd`, and the strict reader reads the block.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Raw, UnsetType

from .columns import Odd, Values, columns_of, values_of
from .line import ARRAYS, Edits, Line
from .numbers import count, flat_numbers

UNKNOWN_KEYS = 64  # of other writers; beyond it they are not counted one by one, and such a file is read strictly
UNREAD = {*ARRAYS, *(f"{name}_bits" for name in ARRAYS)}  # what `quick_columns` reads, of step lines alone
_RAW = UNREAD | {"before", "ranks"}
_TYPES = typing.get_type_hints(Line)
_EDITS = msgspec.json.Decoder(Edits)
_RANKS = msgspec.json.Decoder(list[dict[str, Any]])  # as in `Line`


class Block(NamedTuple):
    """Several lines.

    Attributes:
        starts: offset of each in the block, bytes, int64.
        values: of the fields of `Line` that occur; arrays and `before` as JSON text.
    """

    starts: np.ndarray
    values: dict[str, Values]

    def some(self, rows: Sequence[int]) -> dict[str, Values]:
        """The values of some of the lines."""
        found = {}
        for name, values in self.values.items():
            own = [values.entries[row] for row in rows]
            if (absent := own.count(UNSET)) < len(own):
                found[name] = Values(own, absent)
        return found


class QuickReader:
    """Reads blocks of one file; it learns which keys the file has."""

    def __init__(self) -> None:
        self._keys: list[str] = ["type"]
        self._decoder = _decoder(self._keys)

    def read(self, body: bytes) -> Block:
        """Decodes whole lines, each with its end.

        Raises:
            Odd: the strict reader has to say what these lines are.
        """
        starts = _starts(body)
        if not body.isascii():
            _refuse_other_bytes(body)
        lines = self._decode(body)
        if len(lines) != len(starts):  # two objects on a line
            raise Odd
        values = values_of(lines, _fields(self._keys))
        _refuse_repeated_keys(body, values)
        return Block(starts, values)

    def _decode(self, body: bytes) -> list[Any]:
        try:
            return self._decoder.decode_lines(body)
        except (msgspec.MsgspecError, RecursionError):
            pass
        try:
            keys = dict.fromkeys(self._keys)
            for line in msgspec.json.Decoder(dict[str, Raw]).decode_lines(body):
                keys |= dict.fromkeys(line)
            if len(keys) > len(_TYPES) + UNKNOWN_KEYS or list(keys) == self._keys:
                raise Odd
            decoder = _decoder(list(keys))
            found = decoder.decode_lines(body)
        except (ValueError, RecursionError):  # ValueError: also of a key that no record can have
            raise Odd from None
        self._keys, self._decoder = list(keys), decoder
        return found


def _refuse_repeated_keys(body: bytes, values: Mapping[str, Values]) -> None:
    """Of a key that stands twice in an object the decoder keeps one, so that there are more colons than keys."""
    colons = sum(len(own.entries) - own.absent for own in values.values())
    for state in values["state"].entries if "state" in values else ():
        colons += 0 if state is UNSET else len(state)
    for text in values["before"].entries if "before" in values else ():
        if text is not UNSET:
            edits = _typed(_EDITS, text)
            colons += (edits.rng is not None) + (edits.learning_rate is not None)
    for text in values["ranks"].entries if "ranks" in values else ():
        if text is not UNSET:
            _typed(_RANKS, text)
            colons += bytes(text).count(b":")  # a key in it that stands twice is `own_line`'s
    if count(body, b":") != colons:
        raise Odd


def _refuse_other_bytes(body: bytes) -> None:
    try:
        body.decode()
    except UnicodeDecodeError:
        raise Odd from None


def _typed(decoder: msgspec.json.Decoder, text: Raw) -> Any:
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, RecursionError):
        raise Odd from None


def _starts(body: bytes) -> np.ndarray:
    """Where each line starts. No JSON value holds the bytes } newline {, so that each line is whole objects."""
    characters = np.frombuffer(body, np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    last = characters[ends - 1]
    if (last == ord("\r")).all():
        last = characters[ends - 2]
    if characters[0] != ord("{") or (last != ord("}")).any() or (characters[ends[:-1] + 1] != ord("{")).any():
        raise Odd
    return np.concatenate([[0], ends[:-1] + 1])


def _fields(keys: Sequence[str]) -> list[str]:
    """The names of a record's fields: keys of other writers are no names."""
    return [key if key in _TYPES else f"unknown_{number}" for number, key in enumerate(keys)]


def _decoder(keys: Sequence[str]) -> msgspec.json.Decoder:
    fields = []
    for name in _fields(keys):
        kind = Raw | UnsetType if name in _RAW or name not in _TYPES else _TYPES[name]
        fields.append(("type", kind) if name == "type" else (name, kind | UnsetType, UNSET))
    renamed = dict(zip(_fields(keys), keys, strict=True))
    kind = msgspec.defstruct("Quick", fields, rename=renamed, kw_only=True, gc=False, forbid_unknown_fields=True)
    return msgspec.json.Decoder(kind)


def quick_columns(rows: int, values: Mapping[str, Values]) -> dict[str, np.ndarray]:
    """The columns of step lines, as `columns.columns_of`, and the arrays.

    Args:
        rows: how many lines.
        values: as in `Block`.

    Raises:
        Odd: an array with bits of its own, arrays of different lengths, or numbers that contradict their bits.
    """
    found = columns_of(rows, values)
    for name in ARRAYS:
        if f"{name}_bits" in values:
            raise Odd
        if name not in values:
            continue
        texts, absent = values[name].entries, values[name].absent
        numbers = flat_numbers([text for text in texts if text is not UNSET] if absent else texts)
        with np.errstate(over="ignore"):
            single = numbers.astype(np.float32)
        if absent:
            found[name] = np.full((rows, single.shape[1]), np.nan, np.float32)
            found[name][[text is not UNSET for text in texts]] = single
        else:
            found[name] = single
    return found
