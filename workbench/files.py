"""Files that are whole or absent: atomic writes, digests, strict JSON.

Knows bytes and paths; nothing of runs, checkpoints or MLX.
"""

from __future__ import annotations

import fcntl
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
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        commit(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


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


def lock(path: Path) -> int:
    """Takes an existing file for this process alone, until the returned descriptor is closed or the process ends.

    Raises:
        BlockingIOError: another process, or another descriptor of this one, has it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        pass
    return descriptor


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no spaces: equal values give equal bytes."""
    return msgspec.json.encode(value, order="sorted")


def pretty_json(value: Any) -> bytes:
    """Indented JSON for files that people read; strict (a non-finite number becomes null)."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"
