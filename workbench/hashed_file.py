"""A file that is read once, from its start to its end, and hashed on the way: what is handed out has been hashed.

A stretch is hashed while it is in the core's cache, and all pieces pass through the same memory: memory that is new for
each piece takes longer to touch for the first time than the file to read. Knows bytes and files; nothing of arrays,
checkpoints or runs, and imports no MLX.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from .digests import STRETCH, Digests
from .untrusted import open_regular


def fill(memory: memoryview, file: BinaryIO, start: int, digests: Digests) -> int:
    """Reads a file from `start` on into memory, and hashes what it read.

    Returns:
        The number of bytes; the file may end before the memory does.

    Raises:
        OSError: it can't be read.
    """
    done, raw = 0, cast(io.FileIO, cast(io.BufferedReader, file).raw)
    raw.seek(start)
    while done < len(memory):
        stretch = memory[done : done + STRETCH]
        if not (count := raw.readinto(stretch)):
            break
        digests.update(stretch[:count])
        done += count
    return done


class Room:
    """Memory that is filled from files again and again, as large as the largest piece so far."""

    def __init__(self) -> None:
        self._memory = memoryview(b"")

    def filled(self, file: BinaryIO, start: int, size: int, digests: Digests) -> memoryview:
        """The bytes of a file from `start` on, hashed, and valid until the next call; fewer if it ends before.

        Raises:
            OSError: it can't be read.
            MemoryError: they do not fit.
        """
        if len(self._memory) < size:
            self._memory = memoryview(b"")  # let go before there is another
            self._memory = np.empty(size, np.uint8).data
        return self._memory[: fill(self._memory[:size], file, start, digests)]


class HashedFile:
    """A file of a known size, handed out piece by piece; a context manager, which closes it.

    Args:
        kinds: of digests.

    Attributes:
        size: in bytes; `there`: how many it really has.

    Raises:
        OSError: it can't be opened, or is no regular file.
    """

    def __init__(self, path: Path, size: int, kinds: tuple[str, ...]) -> None:
        self._file = open_regular(path)
        self._digests, self._room, self._at = Digests(kinds), Room(), 0
        self.size, self.there = size, os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> HashedFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def taken(self, start: int, end: int) -> bytes | memoryview:
        """The bytes from `start` to `end`, valid until the next call.

        Raises:
            OSError: they can't be read.
            MemoryError: they do not fit.
            ValueError: they are not the next ones, or not there.
        """
        if start == end:
            return b""
        if start != self._at or not start < end <= self.size:
            raise ValueError(f"bytes {start} to {end} of {self.size} are not those that follow byte {self._at}")
        found = self._next(end - start)
        if self._at != end:
            raise ValueError(f"it ends at byte {self._at} of {self.size}")
        return found

    def found(self) -> dict[str, str]:
        """The digests of all of it, in hexadecimal, by kind: what was not handed out is read now."""
        while self._at < self.size and self._next(min(STRETCH, self.size - self._at)):
            pass
        return self._digests.found()

    def _next(self, size: int) -> memoryview:
        found = self._room.filled(self._file, self._at, size, self._digests)
        self._at += len(found)
        return found
