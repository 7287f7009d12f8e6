"""The run's JSONL stream: one line a step, read as evidence and never rewritten.

Knows files of lines (what a line is, `lines.line` says, and how one is appended, `lines.writer`); nothing of
checkpoints, replay or MLX.
"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import msgspec
import numpy as np
from msgspec import UNSET

from .errors import TelemetryError
from .lines import column_cache
from .lines.line import LIMIT, SCALARS, Line
from .lines.scan import Scan
from .lines.strict import StrictReader, decode
from .lines.table import MISSING, NON_FINITE, NUMBER
from .untrusted import LINE, open_regular

if TYPE_CHECKING:
    import pandas as pd


class Telemetry:
    """What one file says, and what the reader had to tolerate.

    Numbers of all steps are columns (see `lines.columns`), as they were when the file was read; a single line is read
    from the file again whenever it is asked for, exactly as it stands there. `read(path, since=...)` sees any edit
    since; `Run.telemetry` does that whenever the file has another inode, size or time.

    Attributes:
        path: the file.
        notices: sentences.
        rules: what the codes in the column `spike_rule` mean.
    """

    def __init__(self, path: Path, scan: Scan, base: Scan) -> None:
        self.path, self.notices, self.rules = path, scan.notices, scan.rules
        self._scan, self._base = scan, base

    def __len__(self) -> int:
        """Number of step lines."""
        return self._scan.steps.rows

    @property
    def lines(self) -> list[Line]:
        """All lines, in file order, read anew."""
        reader, found = StrictReader(self.path), []
        with _open(self.path) as file:
            for raw in iter(lambda: file.readline(self._scan.end - file.tell()), b""):
                if (line := reader.feed(raw)) is not None:
                    found.append(line)
        return found

    @property
    def metas(self) -> list[Line]:
        """The meta lines, in file order."""
        return [line for _, line in self._scan.others if line.type == "meta"]

    @property
    def rollbacks(self) -> list[Line]:
        """The rollback lines, in file order."""
        return [line for _, line in self._scan.others if line.type == "rollback"]

    def column(self, name: str) -> np.ndarray | None:
        """A column of all step lines, in file order, read-only; None if no line has it. See `lines.columns`.

        "val_loss" stands in lines of its own: here it is float64, NaN at steps without one.

        Raises:
            TelemetryError: it is an array that has another length in some lines, and is no column.
        """
        if name in self._scan.steps.ragged:
            raise TelemetryError(f"{self.path}: {name} has not the same length in all lines; read them one by one")
        return self._validation() if name == "val_loss" else self._scan.steps.column(name)

    def at(self, step: int, segment: int) -> Line | None:
        """The step line of `step` in `segment`, or None.

        Raises:
            TelemetryError: the file is not the one any more that was read.
        """
        row = self._row(step, segment)
        if row is None:
            return None
        with _open(self.path) as file:
            file.seek(int(self._scan.steps.column("offset")[row]))  # type: ignore[index]
            raw = file.readline(LINE + 1)
        try:
            line = decode(raw)
            if (line.type, line.step, line.segment) == ("step", step, segment):
                return line
        except (msgspec.MsgspecError, ValueError, RecursionError):
            pass
        raise TelemetryError(
            f"{self.path} was changed after it was read: the line of step {step} is not where it was. "
            "Telemetry is only ever appended to; open the run again."
        )

    @cached_property
    def _places(self) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Of each segment its steps in rising order, and their rows."""
        step, segment = self._scan.steps.column("step"), self._scan.steps.column("segment")
        if step is None or segment is None:
            return {}
        order = None
        if (np.diff(segment) < 0).any() or ((np.diff(step) < 0) & (np.diff(segment) == 0)).any():
            order = np.lexsort((step, segment))
            step, segment = step[order], segment[order]
        numbers, starts = np.unique(segment, return_index=True)
        ends = [*starts[1:], len(step)]
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        for number, start, end in zip(numbers.tolist(), starts.tolist(), ends, strict=True):
            found[number] = step[start:end], np.arange(start, end) if order is None else order[start:end]
        return found

    def _row(self, step: int, segment: int) -> int | None:
        steps, rows = self._places.get(segment, (None, None))
        if steps is None or rows is None or not -LIMIT <= step < LIMIT:
            return None
        place = int(np.searchsorted(steps, step))
        return int(rows[place]) if place < len(steps) and steps[place] == step else None

    def segments_with(self, step: int) -> list[int]:
        """Every segment that has a line for this step, in order."""
        return [segment for segment in self._places if self._row(step, segment) is not None]

    def last_step(self, segment: int | None = None) -> int:
        """The highest step that any segment, or this one, reached; 0 before the first."""
        return max((int(own[-1]) for number, (own, _) in self._places.items() if segment in (None, number)), default=0)

    def meta(self, segment: int) -> Line | None:
        """The line that opened the segment: of the process that performed its first step; or None.

        A process that ended before that may have left one too, with a state from which nothing went on.
        """
        rows = self._places.get(segment, (None, None))[1]
        steps = np.array([], np.int64) if rows is None else np.sort(self._scan.steps.column("offset")[rows])  # type: ignore[index]
        found, begun = None, 0
        for offset, line in self._scan.others:
            if line.type != "meta" or line.segment != segment:
                continue
            before = int(np.searchsorted(steps, offset))
            if found is not None and before > begun:
                break
            found, begun = line, before
        return found

    def meta_before(self, step: int, segment: int) -> Line | None:
        """The meta line of the process that performed the step: a segment may be written by several in turn."""
        mine = [line for line in self.metas if line.segment == segment]
        return next((line for line in reversed(mine) if line.step is not UNSET and line.step < step), None)

    def frame(self) -> pd.DataFrame:
        """One row a step line: segment, step, loss, grad_norm, lr, ma, spike, spike_rule, step_per_s, val_loss.

        A non-finite value is NaN or inf as its bits say; a value that was not recorded is NaN, and its column
        `<name>_recorded` is False.
        """
        import pandas as pd

        rows = len(self)
        found: dict[str, np.ndarray] = {}
        for name in ("segment", "step"):
            found[name] = self._or(name, np.zeros(rows, np.int64))
        for name in SCALARS:
            kinds = self._or(f"{name}.kind", np.full(rows, MISSING, np.uint8))
            found[name] = self._or(name, np.full(rows, np.nan)).astype(np.float64)
            found[f"{name}_recorded"] = (kinds == NUMBER) | (kinds == NON_FINITE)
        for name in ("lr", "ma", "step_per_s"):
            found[name] = self._or(name, np.full(rows, np.nan))
        found["spike"] = self._or("spike", np.zeros(rows, bool))
        codes = self._or("spike_rule", np.full(rows, -1, np.int32))
        found["spike_rule"] = np.array([*self.rules, None], object)[codes]
        found["val_loss"] = self._validation()
        return pd.DataFrame({name: found[name] for name in FRAME})

    def validations(self) -> pd.DataFrame:
        """One row a validation line, in file order: segment, step (whose state it is of; 0: before the first step),
        val_loss (float64; NaN: not finite), also of steps that have no line of their own in that segment."""
        import pandas as pd

        found = self._scan.validations
        otherwise = {
            "segment": np.zeros(0, np.int64),
            "step": np.zeros(0, np.int64),
            "val_loss": np.full(found.rows, np.nan),
        }
        columns = {name: found.column(name) for name in otherwise}
        return pd.DataFrame({name: otherwise[name] if own is None else own for name, own in columns.items()})

    def _or(self, name: str, otherwise: np.ndarray) -> np.ndarray:
        found = self._scan.steps.column(name)
        return otherwise if found is None else found

    def _validation(self) -> np.ndarray:
        found = np.full(len(self), np.nan)
        validations = self._scan.validations
        values = validations.column("val_loss")
        if values is None:
            return found
        steps, segments = (np.asarray(validations.column(name)) for name in ("step", "segment"))
        for segment, (own, rows) in self._places.items():
            mine = np.flatnonzero(segments == segment)
            place = np.minimum(np.searchsorted(own, steps[mine]), len(own) - 1)
            there = own[place] == steps[mine]
            found[rows[place[there]]] = values[mine[there]]  # of several the last
        return found


FRAME = (
    *("segment", "step", "loss", "loss_recorded", "grad_norm", "grad_norm_recorded", "lr", "ma"),
    *("step_per_s", "spike", "spike_rule", "val_loss"),
)


def read(path: Path, since: Telemetry | None = None) -> Telemetry:
    """Reads a telemetry file.

    A torn last line (a crash while writing) is tolerated with a notice, and so is one that a later segment's meta
    line declares; any other damaged line is an error. Columns of a large file come from the user's cache folder if the
    file is still the one that they were made of; see `lines.column_cache`.

    Args:
        since: what was read of the file before; if it only grew since then, as a digest of all bytes that were read
            says, what is new is read.

    Raises:
        TelemetryError: the file is missing or not UTF-8, or a line is damaged; the message has the line's number.
    """
    try:
        with _open(path) as file:
            status = os.fstat(file.fileno())
            base = _known(path, file, status, since)
            stored = base.consumed
            whole = base.read(file)
            if base.consumed - stored >= column_cache.WORTH and column_cache.store(path, file, base, status):
                digest, known = base.hash, base.consumed
                del whole, base  # their memory: the columns are in the file now
                base = column_cache.load(path, file, written=True) or Scan(path)
                if base.hash is None and base.consumed == known:
                    base.hash = digest
                whole = base.read(file)
            return Telemetry(path, whole, base)
    except OSError as error:
        raise _unreadable(path, error) from error


def _known(path: Path, file: BinaryIO, status: os.stat_result, since: Telemetry | None) -> Scan:
    """What need not be read again."""
    if since is not None and status.st_size >= since._base.consumed and (digest := since._base.hash) is not None:
        # All of them: 27 ms for a million lines, of 207 MB (measured); to read these anew takes 16 times as long.
        if column_cache.digest_of(file, since._base.consumed).digest() == digest.digest():
            return since._base.copy()
    found = column_cache.load(path, file) if status.st_size >= column_cache.WORTH else None
    return Scan(path) if found is None else found


def _open(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> TelemetryError:
    return TelemetryError(f"{path} can't be read ({error.strerror}); expected the run's telemetry.jsonl")
