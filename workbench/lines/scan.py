"""A telemetry file as a table of its steps: read in blocks, quickly where nothing is odd, and on from where it was."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import xxhash

from ..errors import TelemetryError
from ..untrusted import LINE
from .alike import AlikeReader
from .columns import Odd, Values, array_columns, columns_of, values_of
from .line import Line
from .quick import UNREAD, QuickReader, quick_columns
from .strict import StrictReader, decode, refuse_other_encodings
from .table import Table, merged

BLOCK = 1 << 20  # bytes: what a block's records need stays in the processor's cache


class Scan:
    """What the whole lines of a file say, up to a byte.

    Attributes:
        consumed: bytes read for good: what follows is blank, unfinished, or not there yet.
        number: lines in them.
        end: bytes looked at, the unfinished ones too; 0 before `read`.
        notices: what had to be tolerated in them.
        steps: the columns of `columns`, and `offset` and `spike_rule`, one row a step line in file order.
        validations: step, segment, val_loss, val_loss.kind: one row a val line.
        others: every other line, and its offset in bytes.
        rules: what the codes in `spike_rule` mean.
        hash: xxh3_128 of the consumed bytes; None if some of them were not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.consumed = self.number = self.end = 0
        self.notices: list[str] = []
        self.steps, self.validations = Table(), Table()
        self.others: list[tuple[int, Line]] = []
        self.rules: list[str] = []
        self.hash: xxhash.xxh3_128 | None = xxhash.xxh3_128()
        self._strict = StrictReader(path)
        self._quick: QuickReader | None = QuickReader()
        self._alike = AlikeReader()

    def copy(self) -> Scan:
        """One that can be read on; nothing that it reads is seen here."""
        other = Scan(self.path)
        other.consumed, other.number, other.notices = self.consumed, self.number, list(self.notices)
        other.steps, other.validations = self.steps.copy(), self.validations.copy()
        other.others, other.rules = list(self.others), list(self.rules)
        other._quick, other._alike = self._quick, self._alike
        other.hash = None if self.hash is None else self.hash.copy()
        other._strict = StrictReader(self.path, self.number)
        return other

    @classmethod
    def strictly(cls, path: Path) -> Scan:
        """One that reads line by line only: slow, and what every other way of reading is measured against."""
        scan = cls(path)
        scan._quick = None
        return scan

    def read(self, file: BinaryIO) -> Scan:
        """Reads on to the end of the file.

        Returns:
            What the file says as a whole: this scan, and an unfinished or unended last line. This scan itself holds
            only what will not change if the file grows.

        Raises:
            TelemetryError: a line is damaged, or a step stands twice in a segment; the message has its number.
            OSError: the file can't be read.
        """
        start, rest, withheld = self.consumed, b"", b""
        file.seek(start)
        if not start:
            refuse_other_encodings(self.path, file.read(4))
            file.seek(0)
        while block := file.read(BLOCK):
            cut = block.rfind(b"\n") + 1
            if cut:
                body = b"".join((rest, memoryview(block)[:cut]))  # the block is copied once
                rest = block[cut:]
                withheld = self._take(body, start, withheld)
                start += len(body)
            else:
                rest += block
            if len(rest) > LINE:
                self._strict.feed(rest)
        whole = self.copy()
        whole.end = start + len(rest)
        for raw in io.BytesIO(withheld + rest):
            line = whole._strict.feed(raw)
            if line is not None:
                whole._keep([start - len(withheld)], [line])
        whole._strict.finish()
        whole.notices += whole._strict.notices
        whole._refuse_duplicates()
        return whole

    def _take(self, body: bytes, start: int, withheld: bytes) -> bytes:
        """Reads whole lines.

        Returns:
            Those at the end, with what was withheld before, that only a later line can excuse.
        """
        if self._quick is not None and not withheld:
            try:
                number = self._keep_quickly(self._quick, body, start)
            except Odd:
                pass
            else:
                self._strict.number += number
                self._settle(body, number)
                return b""
        lines: list[Line] = []
        offsets, end, settled = [], start, 0
        for raw in io.BytesIO(body):
            line = self._strict.feed(raw)
            if line is not None:
                lines.append(line)
                offsets.append(end)
            end += len(raw)
            if not self._strict.pending:
                settled = len(withheld) + end - start
        self._keep(offsets, lines)
        self.notices += self._strict.notices
        self._strict.notices = []
        text = withheld + body
        self._settle(text[:settled], text[:settled].count(b"\n"))
        return text[settled:]

    def _settle(self, text: bytes, number: int) -> None:
        self.consumed += len(text)
        self.number += number
        if self.hash is not None:
            self.hash.update(text)

    def _keep_quickly(self, reader: QuickReader, body: bytes, start: int) -> int:
        """Returns the number of lines."""
        alike, rest = None, body
        try:
            alike = self._alike.read(body)
            rest = alike.rest
        except Odd:
            pass
        if alike is not None and not rest:
            self._keep_steps(alike.starts + start, alike.columns, {})
            return len(alike.starts)
        block = reader.read(rest)
        types = block.values["type"].entries
        offsets = (block.starts if alike is None else alike.rest_starts) + start
        if alike is None and types.count("step") == len(types):
            self._keep_steps(offsets, quick_columns(len(types), block.values), block.values)
            return len(types)
        steps, validations, others = (
            [row for row, kind in enumerate(types) if kind in kinds]
            for kinds in (("step",), ("val",), ("meta", "done", "rollback"))
        )
        own = block.some(steps)
        columns = quick_columns(len(steps), own) if steps else {}
        measured = block.some(validations)
        kept = columns_of(len(validations), measured, "val") if validations else {}
        ends = np.append(block.starts[1:], len(rest))
        decoded = [(int(offsets[row]), _decoded(rest[block.starts[row] : ends[row]])) for row in others]
        for row in validations if UNREAD & measured.keys() else ():
            _decoded(rest[block.starts[row] : ends[row]])  # is it an error? Such lines have no arrays, as a rule
        more = {} if alike is None else alike.columns | {"offset": alike.starts + start}
        if any(columns[name].shape[1:] != more[name].shape[1:] for name in columns.keys() & more.keys()):
            raise Odd
        if steps:
            self._keep_steps(offsets[steps], columns, own, more)
        elif more:
            self._keep_steps(more["offset"], more, {})
        self._keep_validations(kept)
        self.others += decoded
        return len(types) + (0 if alike is None else len(alike.starts))

    def _keep(self, offsets: Sequence[int], lines: Sequence[Line]) -> None:
        """Lines that the strict reader has read."""
        rows = {kind: [row for row, line in enumerate(lines) if line.type == kind] for kind in ("step", "val")}
        steps, validations = ([lines[row] for row in rows[kind]] for kind in ("step", "val"))
        if steps:
            own = values_of(steps, Line.__struct_fields__)
            columns = columns_of(len(steps), own)
            for name, entries in array_columns(steps).items():
                shapes = {entry.shape for entry in entries if entry is not None}
                if len(shapes) > 1:
                    self.steps.give_up(name)
                    continue
                absent = np.full(shapes.pop(), np.nan, np.float32)
                columns[name] = np.stack([absent if entry is None else entry for entry in entries])
            self._keep_steps(np.array([offsets[row] for row in rows["step"]]), columns, own)
        if validations:
            self._keep_validations(columns_of(len(validations), values_of(validations, Line.__struct_fields__), "val"))
        self.others += [
            (offset, line) for offset, line in zip(offsets, lines, strict=True) if line.type not in ("step", "val")
        ]

    def _keep_steps(
        self,
        offsets: np.ndarray,
        columns: dict[str, np.ndarray],
        values: Mapping[str, Values],
        more: Mapping[str, np.ndarray] | None = None,
    ) -> None:
        """Args:
        values: of `spike_rule`, if the lines have it.
        more: columns of other lines, `offset` with them, that stand between these.
        """
        columns["offset"] = offsets.astype(np.int64)
        if "spike_rule" in values:
            named = values["spike_rule"].entries
            rules = {rule for rule in named if isinstance(rule, str)}
            self.rules += sorted(rules.difference(self.rules))
            codes = {rule: code for code, rule in enumerate(self.rules)}
            columns["spike_rule"] = np.array([codes.get(rule, -1) for rule in named], np.int32)
        if more:
            columns = merged([columns, more], "offset")
        self.steps.append(len(columns["offset"]), columns)

    def _keep_validations(self, columns: dict[str, np.ndarray]) -> None:
        if columns:
            wanted = {name: columns[name] for name in VALIDATION if name in columns}
            self.validations.append(len(columns["step"]), wanted)

    def _refuse_duplicates(self) -> None:
        step, segment = self.steps.column("step"), self.steps.column("segment")
        if step is None or segment is None or (np.diff(segment) >= 0).all() and self._rising(step, segment):
            return
        order = np.lexsort((step, segment))  # stable: of equal ones the earlier row comes first
        step, segment = step[order], segment[order]
        again = order[1:][(step[1:] == step[:-1]) & (segment[1:] == segment[:-1])]
        if len(again):
            row = int(again.min())
            step, segment = (self.steps.column(name)[row] for name in ("step", "segment"))  # type: ignore[index]
            raise TelemetryError(
                f"{self.path}: step {step} stands twice in segment {segment}; expected once. "
                "Two processes may have written to this file; keep the lines of one."
            )

    def _rising(self, step: np.ndarray, segment: np.ndarray) -> bool:
        """Whether steps rise within each segment, given that segments never fall."""
        return bool(((step[1:] > step[:-1]) | (segment[1:] > segment[:-1])).all())


VALIDATION = ("step", "segment", "val_loss", "val_loss.kind")


def _decoded(raw: bytes) -> Line:
    try:
        return decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Odd from None
