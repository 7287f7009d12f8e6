"""The open telemetry of a run: lines appended in order, and a second copy of them where that was asked for.

Knows lines and files; nothing of steps or MLX. A line that can't be written waits in memory, and so do those after it,
until there is room again: the file never has a gap, and half a line is completed before the next.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from .lines.line import Line
from .lines.writer import Writer

LIMIT = 1 << 26  # bytes of lines that may wait: 64 MiB, some 10,000 steps of 77 layers


class Journal:
    """The open telemetry of a run. `sync` may be called by another thread than the one that appends.

    Args:
        path: the run's telemetry file.
        copy: a second writer that receives each line too.

    Attributes:
        torn_bytes: length of what a crash left of a last line; 0 if nothing.
        failure: why lines are waiting; None while none is.
        copy_failure: the same of the copy, which nothing else waits for.
        lost: whether more lines had to wait than memory is given to, so that nothing more is recorded.
        copy_lost: the same of the copy.
    """

    def __init__(self, path: Path, copy: Writer | None = None) -> None:
        self._path, self._main, self._copy = path, Writer(path), copy
        self.torn_bytes = self._main.torn_bytes
        self.failure: OSError | None = None
        self.copy_failure: OSError | None = None
        self.lost = self.copy_lost = False
        self._lock = threading.Lock()

    @property
    def seal(self) -> str | None:
        """The seal of the last line that was put; see `lines.seal`."""
        return self._main.seal

    @property
    def logged(self) -> tuple[int, int] | None:
        """Segment and step of the last step line that was put; None: none."""
        return self._main.logged

    def put(self, line: Line) -> None:
        """Appends a line, or keeps it waiting: see `failure`."""
        with self._lock:
            if self.lost:
                return
            self._main.add(line)
            if self._copy is not None and not self.copy_lost:
                self._copy.add(line)
            self._flush()
            self.lost = self._main.waiting > LIMIT
            self.copy_lost = self.copy_lost or (self._copy is not None and self._copy.waiting > LIMIT)

    def sync(self) -> None:
        """Makes everything put so far durable.

        Raises:
            OSError: a line could not be written, or the file at this path is no longer the one that is written to.
        """
        with self._lock:
            self._flush()
            if self.failure is not None:
                raise self.failure
        if not os.path.samestat(os.fstat(self._main.descriptor), os.stat(self._path)):
            raise OSError(f"{self._path} was replaced by another file")
        self._main.sync()  # without the lock: the loop goes on logging meanwhile
        if self._copy is not None and self.copy_failure is None:
            with contextlib.suppress(OSError):
                self._copy.sync()

    def close(self) -> None:
        """Writes what waits, if it can be written now (else see `failure`), and closes the files."""
        with self._lock:
            self._flush()
            for writer in (self._main, self._copy):
                if writer is not None:
                    writer.close()

    def _flush(self) -> None:
        self.failure = _flushed(self._main)
        if self._copy is not None:
            self.copy_failure = _flushed(self._copy)


def _flushed(writer: Writer) -> OSError | None:
    """Why lines are still waiting."""
    try:
        writer.flush()
    except OSError as error:
        return error
    return None
