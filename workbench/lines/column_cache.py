"""Columns of a telemetry file kept in the user's cache folder, so that it opens at once the next time.

The file is the evidence; the cache only saves reading it. A cache is used if the file is the very one that was read
(the same inode, size, times, and bytes at both ends), or if it begins with the very bytes that were read: then the rest
is read on. Whatever else is found, an older format or a damaged cache, is as if there were none. A cache is one file:
the columns, a JSON index, its digest and length. Nothing is ever written beside the telemetry.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import platformdirs
import xxhash

from .line import Line
from .scan import Scan
from .strict import decode
from .table import Table

VERSION = 1  # of what is written here, and of what the readers say
WORTH = 1 << 22  # bytes of telemetry that are worth a cache; fewer are read in some milliseconds
LIMIT = 1 << 32  # bytes of all caches; the ones that were not used for longest go first
EDGE = 1 << 16  # bytes at both ends by which a file is known again
_ALIGNMENT = 64
_TRAILER = 16 + 8  # digest of the index, and its length


class Column(msgspec.Struct, kw_only=True):
    name: str
    dtype: str
    shape: list[int]
    offset: int  # bytes
    digest: str  # xxh3_128 of its bytes


class Index(msgspec.Struct, kw_only=True):
    version: int
    path: str
    inode: int
    size: int
    modified: int  # ns
    changed: int  # ns
    edges: str  # digest of the bytes at both ends of the consumed ones
    consumed: int
    number: int
    notices: list[str]
    rules: list[str]
    digest: str  # of the consumed bytes
    others: list[int]
    tables: list[tuple[int, list[Column], list[str]]]  # steps, validations: rows, columns, the ragged ones


def folder() -> Path:
    return Path(platformdirs.user_cache_dir("spike-workbench")) / "telemetry"


def load(path: Path, file: BinaryIO, written: bool = False) -> Scan | None:
    """What the cache has of a file, as if it had just been read; None if it has nothing that is true.

    Args:
        file: the file, open for reading.
        written: `store` has just written it, so that its bytes need not be compared with their digests.
    """
    place = _place(path)
    try:
        with open(place, "rb") as cache:
            content = mmap.mmap(cache.fileno(), 0, access=mmap.ACCESS_READ)
        end = len(content) - _TRAILER
        text = content[end - int.from_bytes(content[-8:], "little") : end]
        if content[end:-8] != xxhash.xxh3_128_digest(text):
            return None
        index = msgspec.json.decode(text, type=Index)
        scan = Scan(path)
        if index.version != VERSION or not _same(index, file, scan):
            return None
        scan.consumed, scan.number, scan.notices, scan.rules = index.consumed, index.number, index.notices, index.rules
        scan.steps, scan.validations = (_table(content, *table, written) for table in index.tables)
        scan.others = [(offset, _line(file, offset)) for offset in index.others]
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError, TypeError):
        return None
    with contextlib.suppress(OSError):
        os.utime(place)
    return scan


def store(path: Path, file: BinaryIO, scan: Scan, status: os.stat_result) -> bool:
    """Keeps what a scan has read for good. A cache that can't be written is no error: the file is read again.

    Args:
        status: of the file, before it was read.

    Returns:
        Whether it was written.
    """
    place = _place(path)
    temporary = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(temporary, "wb") as cache:
            tables = [
                (table.rows, [_write(cache, table, name) for name in table.names], sorted(table.ragged))
                for table in (scan.steps, scan.validations)
            ]
            index = Index(
                version=VERSION,
                path=str(path.resolve()),
                inode=status.st_ino,
                size=status.st_size,
                modified=status.st_mtime_ns,
                changed=status.st_ctime_ns,
                edges=edges(file, scan.consumed),
                consumed=scan.consumed,
                number=scan.number,
                notices=scan.notices,
                rules=scan.rules,
                digest=(digest_of(file, scan.consumed) if scan.hash is None else scan.hash).hexdigest(),
                others=[offset for offset, _ in scan.others],
                tables=tables,
            )
            text = msgspec.json.encode(index)
            cache.write(text + xxhash.xxh3_128_digest(text) + len(text).to_bytes(8, "little"))
        os.replace(temporary, place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        return False
    with contextlib.suppress(OSError):
        _prune(place)
    return True


def edges(file: BinaryIO, consumed: int) -> str:
    """A digest of the bytes at both ends of the first `consumed` ones of a file: a glance that knows it again."""
    digest = xxhash.xxh3_128()
    for start in (0, max(0, consumed - EDGE)):
        file.seek(start)
        digest.update(file.read(min(EDGE, consumed - start)))
    return digest.hexdigest()


def _place(path: Path) -> Path:
    return folder() / xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve()))


def _same(index: Index, file: BinaryIO, scan: Scan) -> bool:
    """Whether the file begins with the bytes that were read. Where they all were read again, the scan has the hash."""
    status = os.fstat(file.fileno())
    if status.st_size < index.consumed or edges(file, index.consumed) != index.edges:
        return False
    unchanged = (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if unchanged == (index.inode, index.size, index.modified, index.changed):
        scan.hash = None
        return True
    scan.hash = digest_of(file, index.consumed)
    return scan.hash.hexdigest() == index.digest


def digest_of(file: BinaryIO, size: int) -> xxhash.xxh3_128:
    """Of the first `size` bytes of a file."""
    digest = xxhash.xxh3_128()
    file.seek(0)
    while size and (block := file.read(min(size, 1 << 20))):
        digest.update(block)
        size -= len(block)
    return digest


def _write(cache: BinaryIO, table: Table, name: str) -> Column:
    cache.write(b"\0" * (-cache.tell() % _ALIGNMENT))
    offset, digest, shape = cache.tell(), xxhash.xxh3_128(), [table.rows]
    for part in table.parts(name):
        shape[1:], kind = part.shape[1:], part.dtype
        content = np.ascontiguousarray(part).view(np.uint8).data
        digest.update(content)
        cache.write(content)
    return Column(name=name, dtype=kind.str, shape=shape, offset=offset, digest=digest.hexdigest())


def _table(content: mmap.mmap, rows: int, columns: list[Column], ragged: list[str], written: bool) -> Table:
    found: dict[str, Any] = {}
    for column in columns:
        kind = np.dtype(column.dtype)
        count = int(np.prod(column.shape, dtype=np.int64))
        array = np.frombuffer(content, kind, count, column.offset)
        if column.shape[0] != rows or not written and xxhash.xxh3_128_hexdigest(array.data) != column.digest:
            raise ValueError(f"{column.name} is damaged")
        found[column.name] = array.reshape(column.shape)
    table = Table(rows, found)
    for name in ragged:
        table.give_up(name)
    return table


def _line(file: BinaryIO, offset: int) -> Line:
    file.seek(offset)
    return decode(file.readline())


def _prune(newest: Path) -> None:
    entries = sorted((entry.stat().st_mtime, entry.stat().st_size, entry) for entry in newest.parent.iterdir())
    total = sum(size for _, size, _ in entries)
    for _, size, entry in entries:
        if total <= LIMIT:
            break
        if entry != newest:
            entry.unlink(missing_ok=True)
            total -= size
