"""Files read and hashed by threads ahead of their use: neither needs the interpreter, so that both are done by the time
MLX is imported.

A file is held in memory of its own, of which each part is let go when the next is taken: its contents are never in
memory twice. Knows bytes and files; nothing of arrays, checkpoints or runs, and imports no MLX.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TypeAlias

import msgspec

from .checkpoints.checkpoint_names import stem
from .digests import SHA256, XXH3, Digests
from .hashed_file import HashedFile, fill
from .tensor_places import ends_at
from .untrusted import DOCUMENT, open_regular, read_file

_GRAIN = 1 << 21  # bytes let go at a time: a large page of x86-64 and arm64

_begun: dict[Path, Future[Content | None]] = {}
_lock = threading.Lock()

Source: TypeAlias = "Content | HashedFile"


class Content:
    """The bytes of a file that are held, and their digests; as a context manager, it lets go of them.

    Attributes:
        size: in bytes.
    """

    def __init__(self, memory: bytes | bytearray | mmap.mmap, digests: Mapping[str, str] | None = None) -> None:
        self._view, self._memory = memoryview(memory), memory
        self.size, self._digests, self._gone = len(memory), dict(digests or {}), 0

    def __enter__(self) -> Content:
        return self

    def __exit__(self, *exception: object) -> None:
        self._view, self._memory = memoryview(b""), b""

    def found(self) -> dict[str, str]:
        """The digests of the very bytes that were held, in hexadecimal, by kind."""
        return self._digests

    def taken(self, start: int, end: int) -> memoryview:
        """The bytes from `start` to `end`, valid until the next call; those before `start` are not held any longer.

        Raises:
            ValueError: they are not there, or not any longer.
        """
        if not self._gone <= start <= end <= self.size:
            raise ValueError(f"bytes {start} to {end} are not among those from {self._gone} to {self.size}")
        whole = start - start % _GRAIN
        if isinstance(self._memory, mmap.mmap) and whole > self._gone:
            self._memory.madvise(mmap.MADV_DONTNEED, self._gone, whole - self._gone)
            self._gone = whole
        return self._view[start:end]


def read(path: Path, size: int, kinds: tuple[str, ...]) -> Content | None:
    """Reads and hashes a file; None: it is not of this size, or large and not of tensors, and was not read.

    Args:
        kinds: of digests.

    Raises:
        OSError: it can't be read, or is no regular file.
        MemoryError: it does not fit.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size or size > DOCUMENT and not _says_its_size(path, size):
            return None
        memory, digests = _memory(size), Digests(kinds)
        whole = fill(memoryview(memory), file, 0, digests) == size
    return Content(memory, digests.found()) if whole else None


def _says_its_size(path: Path, size: int) -> bool:
    """Whether a large file holds tensors that end where it does: any other one is read piece by piece, if at all."""
    try:
        return ends_at(path) == size
    except (ValueError, OverflowError, KeyError):
        return False


def _memory(size: int) -> mmap.mmap | bytearray:
    """In large pages where the system has them: they are touched for the first time in a quarter of the time."""
    if size < _GRAIN:
        return bytearray(size)
    try:
        found = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise MemoryError from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            found.madvise(mmap.MADV_HUGEPAGE)
    return found


def begin(files: Mapping[Path, tuple[int, tuple[str, ...]]]) -> None:
    """Has threads read files, of which the sizes and the kinds of digests are given, for `content` to hand out."""
    for path, (size, kinds) in files.items():
        future: Future[Content | None] = Future()
        with _lock:
            if path in _begun:
                continue
            _begun[path] = future
        threading.Thread(target=_fulfil, args=(future, path, size, kinds), daemon=True).start()


def begin_checkpoint(folder: Path, step: int, segment: int) -> None:
    """Begins with the files of tensors that a commit record lists. Whatever is odd about it, or them, is left to those
    who read them for good: they get nothing from here then."""
    try:
        record = read_file(folder / f"{stem(step, segment)}.json")
        listed = msgspec.json.decode(record, type=_Record).files
    except (OSError, ValueError):
        return
    begin({folder / name: (one.bytes, one.kinds) for name, one in listed.items() if Path(name).name == name})


class _Entry(msgspec.Struct):
    bytes: int
    xxh3: str | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        return (SHA256,) if self.xxh3 is None else (XXH3,)


class _Record(msgspec.Struct):
    files: dict[str, _Entry]


def _fulfil(future: Future[Content | None], path: Path, size: int, kinds: tuple[str, ...]) -> None:
    try:
        future.set_result(read(path, size, kinds))
    except BaseException as error:  # belongs to whoever asks for the result
        future.set_exception(error)


def content(path: Path, size: int, kinds: tuple[str, ...]) -> Source | None:
    """A file's bytes, to be used as a context manager: those that threads have read, or the file itself, which is read
    as they are taken. None: it is not of this size.

    Args:
        kinds: the digests that it must give.

    Raises:
        OSError: it can't be read, or is no regular file.
        MemoryError: it does not fit.
    """
    with _lock:
        future = _begun.pop(path, None)
    found = None if future is None else future.result()
    if found is not None and found.size == size and found.found().keys() >= set(kinds):
        return found
    file = HashedFile(path, size, kinds)
    if file.there == size:
        return file
    file.close()
    return None
