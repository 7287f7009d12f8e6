"""Files that are whole or absent: atomic writes, digests, strict JSON.

Knows bytes and paths; nothing of runs, checkpoints or MLX.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec


def sha256(chunks: bytes | Iterable[bytes | memoryview]) -> str:
    """SHA-256 of bytes, or of the concatenation of several buffers, in hexadecimal."""
    digest = hashlib.sha256()
    for chunk in (chunks,) if isinstance(chunks, (bytes, memoryview)) else chunks:
        digest.update(chunk)
    return digest.hexdigest()


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a temporary file beside `path`, flushes it to the disk, then renames it over `path`.

    A reader sees the old file or the new one, never a part; a failure leaves the old file and no temporary one.
    """
    temporary = temporary_beside(path)
    try:
        write_flushed(temporary, [content])
        commit(temporary, path)
    except BaseException:
        discard(temporary)
        raise


def write_flushed(path: Path, chunks: Iterable[bytes | memoryview]) -> tuple[int, str]:
    """Writes a file and flushes it to the disk; its name is durable only once its folder is synced.

    Returns:
        Its size in bytes, and its SHA-256 in hexadecimal.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            while len(chunk):
                chunk = chunk[os.write(descriptor, chunk) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return size, digest.hexdigest()


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
