"""Lines appended to a run's telemetry, each with its seal: in one call, so that no reader sees half of one.

Knows files of lines; nothing of checkpoints, replay or MLX.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import deque
from pathlib import Path
from typing import BinaryIO

import msgspec

from .line import Line
from .seal import Chain
from .strict import decode

KEPT = 1 << 26  # bytes that may be held until they are durable: 64 MiB


class Writer:
    """Appends lines, each with its seal (see `lines.seal`). Each line is one `write` call, so a reader never sees half
    of one unless the machine fails.

    What was written is held in memory until it is durable: where `fsync` fails, the kernel may drop it, and say of the
    next call that all is well (https://wiki.postgresql.org/wiki/Fsync_Errors). It is then written again.

    Attributes:
        torn_bytes: length of what a crash left of a last line; 0 if nothing.
        descriptor: of the open file.
        logged: segment and step of the last step line that was added; None: none.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.torn_bytes, ended = _torn_tail(path)
        self._chain = _chain_of(path)
        self.descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        # The unfinished line stays as it is, and the first of ours ends it: in one write, or a crash between two
        # would leave it without the line that declares it.
        self._waiting = b"" if ended else b"\n"
        self.logged: tuple[int, int] | None = None
        self._size, self._writing = os.fstat(self.descriptor).st_size, False
        self._durable, self._doubtful = self._size, False  # bytes; and whether the last attempt to make more so failed
        # What was written since, with its place: added to by one thread, taken from by another. Of what lies before
        # `_unheld` there may be none, for there was too much of it.
        self._since, self._unheld, self._lock = deque[tuple[int, bytes]](), 0, threading.Lock()
        if not ended:
            self._chain.end_line()

    @property
    def seal(self) -> str | None:
        """The seal of the last line; None: it has none."""
        return None if self._chain.last is None else self._chain.last.decode()

    @property
    def waiting(self) -> int:
        """Bytes of lines that could not be written yet."""
        return len(self._waiting)

    def append(self, line: Line) -> None:
        """Writes one line, and those that are waiting before it.

        Raises:
            OSError: the disk is full or the file is gone. What was not written waits.
        """
        self.add(line)
        self.flush()

    def add(self, line: Line) -> None:
        """Has a line wait for `flush`."""
        raw, seal = self._chain.next(msgspec.json.encode(line))
        chain, waiting = Chain.after(seal), self._waiting + raw + b"\n"
        logged = (line.segment, line.step) if line.type == "step" else self.logged
        # No call between these, where an interrupt could part them.
        self._chain, self._waiting, self.logged = chain, waiting, logged  # type: ignore[assignment]

    def flush(self) -> None:
        """Writes what waits; half a line that was written before is completed.

        Raises:
            OSError: as `append`.
        """
        if self._writing and stat.S_ISREG((found := os.fstat(self.descriptor)).st_mode):
            # An interrupt came between a write and its count.
            self._count(min(max(found.st_size - self._size, 0), len(self._waiting)))
        while len(self._waiting) > 1:  # a lone end of line is no line
            self._writing = True
            try:
                written = os.write(self.descriptor, self._waiting)
            except OSError:
                self._writing = False
                raise
            self._count(written)

    def _count(self, written: int) -> None:
        with self._lock:
            self._since.append((self._size, self._waiting[:written]))
            if self._size + written - self._durable > KEPT:
                self._since.clear()
                self._unheld = self._size + written
        self._waiting, self._size, self._writing = self._waiting[written:], self._size + written, False

    def sync(self) -> None:
        """Makes everything written so far durable.

        Raises:
            OSError: it can't be made so, or can't be known to be.
        """
        size = self._size
        try:
            if self._doubtful:
                self._write_again()
            else:
                os.fsync(self.descriptor)
        except OSError:
            self._doubtful = True
            raise
        self._durable, self._doubtful = size, False
        with self._lock:
            while self._since and self._since[0][0] + len(self._since[0][1]) <= size:
                self._since.popleft()

    def _write_again(self) -> None:
        """The same bytes in the same places: whoever reads the file meanwhile sees no other."""
        if self._unheld > self._durable:
            raise OSError(errno.EIO, f"what was written since byte {self._durable} may be lost", str(self._path))
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)  # not to append
        try:
            if not os.path.samestat(os.fstat(descriptor), os.fstat(self.descriptor)):
                raise OSError(errno.ESTALE, "another file is in its place", str(self._path))
            with self._lock:
                held = list(self._since)
            for start, content in held:
                while content:
                    written = os.pwrite(descriptor, content, start)
                    start, content = start + written, content[written:]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        os.close(self.descriptor)


def _torn_tail(path: Path) -> tuple[int, bool]:
    """Length in bytes of what crashes left of the last lines, and whether the file ends with the end of a line.

    Several in a row, if the process that went on was killed while it wrote its first line.
    """
    if not path.exists():
        return 0, True
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        torn, ended = 0, True
        while end:
            start, line = _last_line(file, end)
            if line.endswith(b"\n") and _is_line(line):
                break
            if not torn:
                ended = line.endswith(b"\n")
            torn, end = torn + len(line), start
    return torn - (1 if torn and ended else 0), ended


def _chain_of(path: Path) -> Chain:
    """The chain of seals up to the end of a file; a new one where its last whole line has none."""
    chain, after = Chain(), list[bytes]()
    if not path.exists():
        return chain
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            end, line = _last_line(file, end)
            if chain.follow(line) is not None:
                for raw in reversed(after):
                    chain.skip(raw)
                return chain
            if line.strip() and _is_line(line):
                break
            after.append(line)
    return Chain()


def _last_line(file: BinaryIO, end: int) -> tuple[int, bytes]:
    """Where the last line before `end` begins, and the line."""
    start, tail = end, b""
    while start and b"\n" not in tail[:-1]:
        step = min(start, 65536)
        start -= step
        file.seek(start)
        tail = file.read(step) + tail
    line = tail[tail.rfind(b"\n", 0, len(tail) - 1) + 1 :]
    return end - len(line), line


def _is_line(line: bytes) -> bool:
    try:
        decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return not line.strip()
    return True
