"""Files that are whole or absent: atomic writes, digests, strict JSON.

Knows bytes and paths; nothing of runs, checkpoints or MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from . import early_flush
from .digests import Beside, started
from .reserving import reserve

LARGE = 1 << 20  # bytes of a file that is flushed beside the writing of the next


def sha256(chunks: bytes | Iterable[bytes | memoryview]) -> str:
    """SHA-256 of bytes, or of the concatenation of several buffers, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in (chunks,) if isinstance(chunks, (bytes, memoryview)) else chunks:
        digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: Path, content: bytes, first: Callable[[], object] = lambda: None) -> None:
    """Writes a temporary file beside `path`, flushes it to the disk, then renames it over `path`.

    A reader sees the old file or the new one, never a part; a failure leaves the old file and no temporary one.

    Args:
        first: called when the content is on the disk, before it gets its name.

    Raises:
        OSError: it can't be written; it names `path`, not the temporary file.
    """
    temporary = temporary_beside(path)
    try:
        write_flushed(temporary, [content])
        first()
        commit(temporary, path)
    except BaseException as error:
        discard(temporary)
        if isinstance(error, OSError) and error.filename in (None, str(temporary), temporary):
            error.filename, error.filename2 = str(path), None  # nobody has heard of the temporary one
        raise


@dataclass(frozen=True)
class Chunks:
    """The bytes of a file to be written, a stretch at a time, of which it is known how many they are."""

    size: int
    made: Callable[[], Iterator[bytes | memoryview]]

    def __iter__(self) -> Iterator[bytes | memoryview]:
        return self.made()


class Written(NamedTuple):
    """A file that was written: its size in bytes and its digests in hexadecimal."""

    bytes: int
    sha256: str
    xxh3: str


def write_flushed(path: Path, chunks: Iterable[bytes | memoryview]) -> Written:
    """Writes a file and flushes it to the disk; its name is durable only once its folder is synced.

    Args:
        chunks: each unchanged until this returns.
    """
    return write_together({path: chunks})[path]


def write_together(files: Mapping[Path, Iterable[bytes | memoryview]]) -> dict[Path, Written]:
    """Writes files, in their order, and flushes all of them to the disk: a large one while the next is written, small
    ones at the end, when a journal takes them together. Large ones are also hashed meanwhile. Their names are durable
    only once their folders are synced.

    Args:
        files: the chunks of each, which must not change until this returns.

    Raises:
        OSError: one can't be written or flushed. What there is of them is left.
    """
    written: dict[Path, tuple[int, Beside]] = {}
    with contextlib.ExitStack() as stack:
        flushes = []
        for path, chunks in files.items():
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
            stack.callback(os.close, descriptor)
            expected = chunks.size if isinstance(chunks, Chunks) else 0
            if expected >= LARGE:
                reserve(descriptor, expected)
            digests, size = stack.enter_context(Beside(expected)), 0
            for chunk in chunks:
                digests.update(chunk)
                start, size = size, size + len(chunk)
                while len(chunk):
                    chunk = chunk[os.write(descriptor, chunk) :]
                if size - start >= LARGE:
                    early_flush.begin(descriptor, start, size - start)
            if size < LARGE:
                early_flush.begin(descriptor, 0, size)
            written[path] = size, digests
            flushes.append(stack.enter_context(_Flush(descriptor, size)))
        for flush in sorted(flushes, key=lambda one: one.begun):
            flush.wait()
        return {path: Written(size, **digests.found()) for path, (size, digests) in written.items()}


class _Flush:
    """The flushing of a file, done once it was waited for: that of a large one is begun by a thread, which has ended
    when this is left."""

    def __init__(self, descriptor: int, size: int) -> None:
        self._descriptor = descriptor
        self._error: BaseException | None = None
        self._thread = started(self._run) if size >= LARGE else None

    def __enter__(self) -> _Flush:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._thread is not None:
            self._thread.join()

    @property
    def begun(self) -> bool:
        return self._thread is not None

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        else:
            os.fsync(self._descriptor)
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            os.fsync(self._descriptor)
        except BaseException as error:
            self._error = error


def discard(temporary: Path) -> None:
    """Removes what a failure left, if the folder still lets it be removed: the failure is what is to be reported."""
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def temporary_beside(path: Path) -> Path:
    """A name in the same folder (a rename across file systems is not atomic) that no reader takes for a finished file.

    The suffix is kept: `mx.save_safetensors` appends its own to any other.
    """
    return path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")


def commit(temporary: Path, path: Path) -> None:
    """Renames a flushed temporary file to its name and makes the rename itself durable."""
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Makes renames in `folder` durable."""
    sync_file(folder)


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it that are missing, each durable in the one above."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(new)
        sync_folder(new.parent)


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def pretty_json(value: Any) -> bytes:
    """Indented JSON for files that people read; strict (a non-finite number becomes null)."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
