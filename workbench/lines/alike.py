"""Many step lines of one form as columns: most of any file, and three times as fast as `quick`.

Of a block of such lines the bytes between what differs are compared with those of a line that was read strictly, and
blanked. What is left is a single JSON array of numbers, which one call parses. A mark that no line has stands wherever
a line or an array begins or ends, so that a number too many in one can't make up for one too few in the next. Lines of
another form are left to `quick`; whatever is odd in the others raises `Odd`, and `quick` reads them all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .columns import DOUBLES, Odd, characters_to_words
from .form import INTEGERS, MARK, Form, Part, Slot
from .line import ARRAYS, FIRST, SCALARS
from .numbers import parsed
from .table import NUMBER, fill_value

_HOPE = 8  # blocks in a row that are tried in vain; a file whose lines differ more is not tried any further
_TRIED = 4  # lines of a block that may show the form of the others
_EXACT = 2**53  # integers below it are doubles
_DIGITS = 16  # of such an integer
_SINGLES = (*SCALARS, *ARRAYS)
_COLUMNS = {*INTEGERS, *_SINGLES, *DOUBLES, "val_loss"}


class Alike(NamedTuple):
    """The lines of a block that have one form, and the rest.

    Attributes:
        starts: offset of each in the block, bytes, int64.
        columns: of them, as `quick.quick_columns`; and `spike_rule`, which none of them has.
        rest: the other lines.
        rest_starts: their offsets in the block.
    """

    starts: np.ndarray
    columns: dict[str, np.ndarray]
    rest: bytes
    rest_starts: np.ndarray


class AlikeReader:
    """Reads blocks of one file; it learns which form most of its lines have."""

    def __init__(self) -> None:
        self._form: Form | None = None
        self._mixed = False  # the last block had lines of other forms, too
        self._hope = _HOPE

    def read(self, body: bytes) -> Alike:
        """Reads whole lines, each with its end.

        Raises:
            Odd: too few have one form, or something in them can only be read otherwise.
        """
        if not self._hope:
            raise Odd
        for form in self._forms(body):
            try:
                found = _split(form, body, self._mixed)
            except Odd:
                continue
            self._form, self._mixed, self._hope = form, bool(found.rest), _HOPE
            return found
        self._hope -= 1
        raise Odd

    def _forms(self, body: bytes) -> Iterator[Form]:
        if self._form is not None:
            yield self._form
        start, tried = 0, [] if self._form is None else [self._form.parts]
        for _ in range(_TRIED):
            end = body.find(b"\n", start) + 1
            try:
                form = Form(body[start:end])
            except Odd:
                pass
            else:
                if form.parts not in tried:
                    tried.append(form.parts)
                    yield form
            start = end
            if start == len(body):
                return


def _split(form: Form, body: bytes, mixed: bool) -> Alike:
    """Args:
    mixed: lines of other forms are to be expected; else it is tried without looking for them.
    """
    if not mixed:
        with contextlib.suppress(Odd):
            return Alike(*read(form, body), b"", np.array([], np.int64))
    ends = np.flatnonzero(np.frombuffer(body, np.uint8) == ord("\n")) + 1
    starts = np.append(0, ends[:-1])
    alike = _of_form(form, body, ends)
    count = int(np.count_nonzero(alike))
    if 2 * count < len(alike) or (count == len(alike) and not mixed):
        raise Odd
    turns = np.flatnonzero(np.diff(alike)) + 1
    cuts = [0, *starts[turns].tolist(), len(body)]
    runs = [body[start:end] for start, end in zip(cuts, cuts[1:], strict=False)]
    first = 0 if alike[0] else 1
    _, columns = read(form, b"".join(runs[first::2]))
    return Alike(starts[alike], columns, b"".join(runs[1 - first :: 2]), starts[~alike])


def _of_form(form: Form, body: bytes, ends: np.ndarray) -> np.ndarray:
    """Which lines have all parts of the form: bool, shape (lines,)."""
    colons = np.flatnonzero(np.frombuffer(body, np.uint8) == ord(":"))
    up_to = np.searchsorted(colons, ends)
    before = np.append(0, up_to[:-1])
    rows = np.flatnonzero(up_to - before == form.colons)
    for part in form.parts:
        text, (passed, offset) = part.text, part.colon
        if part is form.parts[0]:
            text, offset = text[len(form.tail) :], offset - len(form.tail)
        if not len(rows):
            break
        starts = colons[before[rows] + passed] - offset
        fits = (starts >= 0) & (starts + len(text) <= len(body))
        rows, starts = rows[fits], starts[fits]
        rows = rows[_windows(body, len(text))[starts] == text]
    found = np.zeros(len(ends), bool)
    found[rows] = True
    return found


def _windows(text: bytes | bytearray, length: int) -> np.ndarray:
    """All stretches of so many bytes, one for each byte where one begins."""
    if length > len(text):
        raise Odd
    return np.ndarray((len(text) - length + 1,), f"S{length}", text, 0, (1,))


def read(form: Form, body: bytes) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Reads whole lines, each with its end.

    Returns:
        Offset of each in the body, int64; and their columns, see `Alike`.

    Raises:
        Odd: they are not all of this form.
    """
    if not body.endswith(form.tail):
        raise Odd
    # What ends a line stands before the first one, too, and not behind the last.
    text = bytearray(b"".join((form.tail, body)))
    loose = form.slots[-1].kind == "text"  # no number stands last, but a comma
    text[len(body) :] = (b"0]" if loose else b"]").ljust(len(form.tail))
    characters = np.frombuffer(text, np.uint8)
    colons = np.flatnonzero(characters == ord(":"))
    rows, rest = divmod(len(colons), form.colons)
    if rest or not rows:
        raise Odd
    colons = np.ascontiguousarray(colons.reshape(rows, form.colons).T)
    starts = []
    for part in form.parts:
        starts.append(colons[part.colon[0]] - part.colon[1])
        _blank_part(text, part, starts[-1], len(body))
    bits = {}
    for slot, part, start, end in zip(form.slots, form.parts, starts, [*starts[1:], None], strict=True):
        end = np.append(starts[0][1:], len(body)) if end is None else end
        start = start + len(part.text)
        if slot.kind == "text":
            found = _taken_text(text, slot, start, end)
            if (name := slot.name.removesuffix("_bits")) in SCALARS:
                bits[name] = characters_to_words(found)
        elif slot.name in INTEGERS:
            _refuse_other_integers(characters, start, end)
    if starts[0][0] != 0 or b"[" in text or b"\n" in text:
        raise Odd
    text[0] = ord("[")
    values = parsed(text)
    return starts[0], _columns(form, values[:-1] if loose else values, rows, bits)


def _blank_part(text: bytearray, part: Part, starts: np.ndarray, end: int) -> None:
    if starts[0] < 0 or starts[-1] + len(part.text) > end:  # they rise
        raise Odd
    windows = _windows(text, len(part.text))
    if (windows[starts] != part.text).any():
        raise Odd
    windows[starts] = part.blank


def _taken_text(text: bytearray, slot: Slot, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Blanks texts.

    Returns:
        uint8, shape (lines, length): their characters, none of which ends a string or needs to be decoded.
    """
    if (ends - starts != slot.length).any():
        raise Odd
    if not slot.length:
        return np.empty((len(starts), 0), np.uint8)
    windows = _windows(text, slot.length)
    found = windows[starts].view(np.uint8).reshape(len(starts), slot.length)
    if ((found < ord(" ")) | (found > ord("~")) | (found == ord('"')) | (found == ord("\\"))).any():
        raise Odd
    windows[starts] = b" " * slot.length
    return found


def _refuse_other_integers(characters: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
    """Whatever is not written in digits alone: 1e2 and 5.0 are no integers."""
    lengths = ends - starts
    longest = int(lengths.max())
    if lengths.min() < 1 or longest > _DIGITS:
        raise Odd
    for place in range(longest):
        if (characters[np.minimum(starts + place, ends - 1)] - np.uint8(ord("0")) > 9).any():
            raise Odd


def _columns(form: Form, values: np.ndarray, rows: int, bits: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    width, rest = divmod(len(values), rows)
    if rest:
        raise Odd
    table, mark = values.reshape(rows, width), float(MARK)
    marks = np.flatnonzero(table[0] == mark)
    if not len(marks) or (table[:, marks] != mark).any() or np.count_nonzero(values == mark) != rows * len(marks):
        raise Odd
    found: dict[str, np.ndarray] = {}
    for name, (start, end) in _places(form, marks.tolist(), width).items():
        if name in _COLUMNS:  # other writers have other numbers, too
            found |= _named(name, table[:, start:end], bits.get(name))
    found.setdefault("segment", np.zeros(rows, np.int64))
    if (found["step"] < FIRST["step"]).any():
        raise Odd
    if "spike" in form.words:
        found["spike"] = np.full(rows, form.words["spike"] is True)
    if "spike_rule" in form.words:
        found["spike_rule"] = np.full(rows, fill_value(np.dtype(np.int32)), np.int32)
    return found


def _places(form: Form, marks: list[int], width: int) -> dict[str, tuple[int, int]]:
    """Where among the numbers of a line those of each name begin and end, given where its marks are."""
    found, column, passed, marks = {}, 0, 0, [*marks, width]
    for part, slot in zip(form.parts, form.slots, strict=True):
        if passed == len(marks):
            raise Odd
        if part.marked:
            if column != marks[passed]:  # more numbers than names
                raise Odd
            passed, column = passed + 1, column + 1
        if slot.kind == "text":
            continue
        if passed == len(marks):
            raise Odd
        end = marks[passed] if slot.kind == "array" else column + 1
        found[slot.name], column = (column, end), end
    if passed != len(marks) - 1 or column != width:
        raise Odd
    return found


def _named(name: str, values: np.ndarray, bits: np.ndarray | None) -> dict[str, np.ndarray]:
    if name in INTEGERS:
        if not (values < _EXACT).all():
            raise Odd
        return {name: values[:, 0].astype(np.int64)}
    with np.errstate(over="ignore"):
        numbers = values.astype(np.float32 if name in _SINGLES else np.float64)
    if name in ARRAYS:
        return {name: numbers}
    if bits is not None and not (np.isfinite(numbers[:, 0]) & (numbers[:, 0].view(np.uint32) == bits)).all():
        raise Odd
    return {name: numbers[:, 0], f"{name}.kind": np.full(len(values), NUMBER, np.uint8)}
