"""The form of a step line: its keys and words in their order, and between them places for what differs from line to
line: numbers, arrays of numbers, and texts of a fixed length. Knows single lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from .columns import DOUBLES, Odd
from .line import ARRAYS, SCALARS, Line
from .strict import decode

INTEGERS = ("step", "segment")
MARK = b"-9e307"  # where a line or an array begins or ends; if lines have it too, counting shows it
LONGEST = 1 << 16  # bytes of a line that is worth it
_NUMBERS = {*INTEGERS, *SCALARS, *DOUBLES, "val_loss", "rate_factor"}
_TEXTS = {"batch_hash", "run", "process", "manifest", "unstable", "reason", *(f"{name}_bits" for name in SCALARS)}
_KEY = re.compile(rb'[ \t]*"([^"\\:\x00-\x1f]*)"[ \t]*:[ \t]*')
_NUMBER = rb"-?[0-9][0-9.eE+-]*"
_TEXT = rb'[^"\\:\x00-\x1f]*'
# A number, an array of numbers, a text, an object of texts, or a word.
_VALUE = re.compile(
    rb'(?P<number>%s)|\[[ \t]*(?P<array>%s(?:[ \t]*,[ \t]*%s)*)[ \t]*\]|"(?P<text>%s)"'
    rb'|\{(?P<object>"%s":"%s"(?:,"%s":"%s")*)\}|(?P<word>true|false|null)' % (_NUMBER, _NUMBER, _NUMBER, *[_TEXT] * 5)
)
_ENTRY = re.compile(rb':"(%s)"' % _TEXT)
_BETWEEN = re.compile(rb"[ \t]*([,}])")


class Slot(NamedTuple):
    """What stands between two parts: kind "number", "array" or "text"; the key, "" within an object; and the length of
    a text, bytes."""

    kind: str
    name: str
    length: int


class Part(NamedTuple):
    """Bytes that every line of a form has before a slot; before the first one also those that end the line before.

    Attributes:
        text: as they stand there.
        blank: what a parser is given instead, of the same length: the numbers of all lines are then one array.
        marked: there is a `MARK` in `blank`.
        colon: how many colons of a line come before it, and where in it its own first one is.
    """

    text: bytes
    blank: bytes
    marked: bool
    colon: tuple[int, int]


class Form:
    """Args:
        line: one that the others are compared with, with its end.

    Attributes:
        parts, slots: as many of each, in turn.
        tail: what ends a line, behind its last slot.
        colons: in a line, none of them within a slot.
        words: the values that are no slots, by key: true, false or null.

    Raises:
        Odd: it is no step line, or its lines may differ in more.
    """

    def __init__(self, line: bytes) -> None:
        if not line.isascii() or b"\\" in line or len(line) > LONGEST:
            raise Odd
        try:
            kind = decode(line).type
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise Odd from None
        if kind != "step":
            raise Odd
        self.words: dict[str, bool | None] = {}
        self.slots, texts, end = list[Slot](), list[bytes](), 0
        for slot, start, stop in self._slots(line):
            self.slots.append(slot)
            texts.append(line[end:start])
            end = stop
        self.tail = line[end:]
        if "step" not in (names := [slot.name for slot in self.slots]) or any(
            f"{name}_bits" in names and name not in names for name in SCALARS
        ):
            raise Odd
        self.parts = _parts(self.tail, texts, self.slots)
        self.colons = sum(part.text.count(b":") for part in self.parts)

    def _slots(self, line: bytes) -> Iterator[tuple[Slot, int, int]]:
        """Each with where it begins and ends."""
        place = 0
        while line[place : place + 2] != b"}\n":
            key = _KEY.match(line, place + 1)  # behind a brace or comma, which `decode` has seen there
            value = key and _VALUE.match(line, key.end())
            after = value and _BETWEEN.match(line, value.end())
            if not key or not value or not after:
                raise Odd
            name, kind = key[1].decode(), str(value.lastgroup)
            if kind == "word":
                self.words[name] = {b"true": True, b"false": False}.get(value[0])
            elif kind == "object":
                for entry in _ENTRY.finditer(line, *value.span()):
                    yield Slot("text", "", len(entry[1])), *entry.span(1)
            elif name != "type":
                yield Slot(kind, name, len(value[kind])), *value.span(kind)
            if name in _FIELDS and name not in _MAY_BE[kind]:
                raise Odd
            place = after.start(1)


_FIELDS = {*Line.__struct_fields__}
_MAY_BE: dict[str, Any] = {
    "number": _NUMBERS,
    "array": ARRAYS,
    "text": {"type", *_TEXTS},
    "object": {"state"},
    "word": {"spike", "spike_rule"},
}


def _parts(tail: bytes, texts: Sequence[bytes], slots: Sequence[Slot]) -> list[Part]:
    found, colons = [], 0
    for place, (text, slot) in enumerate(zip(texts, slots, strict=True)):
        before = slots[place - 1]  # of the first one: the last slot of the line before
        text = text if place else tail + text
        marked = not place or "array" in (before.kind, slot.kind)
        blank = b" " if before.kind == "text" else b","
        blank = (blank + (MARK + b"," if marked else b"")).ljust(len(text))
        if len(blank) > len(text):
            raise Odd
        found.append(Part(text, blank, marked, (colons, text.index(b":"))))
        colons += text.count(b":")
    return found
