"""Files read and hashed, if wished by threads that do it ahead: neither needs the interpreter, so that both are done by
the time MLX is imported.

A file of tensors is held in the pieces that these are, so that each can be let go when its array is made: its contents
are never in memory twice. Knows bytes and files; nothing of arrays, checkpoints or runs, and imports no MLX.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO

import msgspec

from .tensor_places import header
from .untrusted import open_regular, read_file

TENSORS = ".safetensors"  # the end of the name of a file that is held in pieces

_begun: dict[Path, Future[Content | None]] = {}
_lock = threading.Lock()


class Content:
    """The bytes of a file, and their digest.

    Attributes:
        size: in bytes.
        sha256: in hexadecimal, of the very bytes that are held.
    """

    def __init__(self, pieces: list[bytes], sha256: str = "") -> None:
        self._pieces, start = dict[int, bytes](), 0
        for piece in filter(None, pieces):
            self._pieces[start] = piece
            start += len(piece)
        self.size, self.sha256 = start, sha256

    def whole(self) -> bytes:
        """All that is held, in one piece."""
        return b"".join(self._pieces.values())

    def taken(self, start: int, end: int) -> bytes | memoryview:
        """The bytes from `start` to `end`; what is just one piece is not held any longer.

        Raises:
            ValueError: they are not in one piece.
        """
        if start == end:
            return b""
        if len(self._pieces.get(start, b"")) == end - start:
            return self._pieces.pop(start)
        for first, piece in self._pieces.items():
            if first <= start and end <= first + len(piece):
                return memoryview(piece)[start - first : end - first]
        raise ValueError(f"bytes {start} to {end} of {self.size} are not the contents of a tensor")


def read(path: Path, size: int) -> Content | None:
    """Reads and hashes a file; None: it is not of this size, and was not read.

    Raises:
        OSError: it can't be read, or is no regular file.
        MemoryError: it does not fit.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size != size:
            return None
        digest, pieces = hashlib.sha256(), []
        for length in _lengths(file, size) if path.name.endswith(TENSORS) else [size]:
            pieces.append(file.read(length))
            digest.update(pieces[-1])
    content = Content(pieces, digest.hexdigest())
    return content if content.size == size else None


def _lengths(file: BinaryIO, size: int) -> list[int]:
    """Of the pieces of a safetensors file: its header's size, the header, each tensor. A damaged one is one piece."""
    start = 8 + int.from_bytes(file.read(8), "little")
    try:
        found = header(file.read(start - 8)) if start <= size else {}
    except ValueError:
        found = {}
    finally:
        file.seek(0)
    ends = sorted({start + one.data_offsets[1] for one in found.values()})
    if not ends or ends[-1] != size or ends[0] < start:
        return [size]
    return [8, start - 8, *(end - before for before, end in zip([start, *ends], ends, strict=False))]


def begin(files: Mapping[Path, int]) -> None:
    """Has threads read files, of which the sizes are given, for `content` to hand out."""
    for path, size in files.items():
        future: Future[Content | None] = Future()
        with _lock:
            if path in _begun:
                continue
            _begun[path] = future
        threading.Thread(target=_fulfil, args=(future, path, size), daemon=True).start()


def begin_checkpoint(folder: Path, step: int, segment: int) -> None:
    """Begins with the files of tensors that a commit record lists. Whatever is odd about it, or them, is left to those
    who read them for good: they get nothing from here then."""
    try:
        record = read_file(folder / f"{step:08d}{f'.s{segment}' if segment else ''}.json")
        listed = msgspec.json.decode(record, type=_Record).files
    except (OSError, ValueError):
        return
    begin({folder / name: one.bytes for name, one in listed.items() if Path(name).name == name})


class _Size(msgspec.Struct):
    bytes: int


class _Record(msgspec.Struct):
    files: dict[str, _Size]


def _fulfil(future: Future[Content | None], path: Path, size: int) -> None:
    try:
        future.set_result(read(path, size))
    except BaseException as error:  # belongs to whoever asks for the result
        future.set_exception(error)


def content(path: Path, size: int) -> Content | None:
    """As `read`, which may have begun already."""
    with _lock:
        future = _begun.pop(path, None)
    found = None if future is None else future.result()
    return found if found is not None and found.size == size else read(path, size)
