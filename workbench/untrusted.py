"""Files that others wrote, or that were damaged: regular ones of bounded size, and JSON that says each thing once.

Knows bytes and paths; nothing of runs, checkpoints or MLX.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import msgspec

T = TypeVar("T")

# No file of ours comes near: a manifest has some 100 bytes a parameter, a trace some 20 a token of its batch.
DOCUMENT = 1 << 28  # bytes of a JSON file
LINE = 1 << 26  # bytes of a line of telemetry


class Malformed(ValueError):
    """JSON that parses, and still can't be what was written."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file for reading, if it is one: a pipe would keep the reader waiting, a device never end.

    Raises:
        OSError: it can't be opened, or is something else.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: Path, limit: int = DOCUMENT) -> bytes:
    """The content of a regular file.

    Args:
        limit: bytes that it may have; nothing is read of a longer one.

    Raises:
        OSError: it can't be read, is no regular file, or has more than `limit` bytes.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size} bytes; expected at most {limit}", str(path))
        return file.read(size)


def decode(content: bytes | memoryview, kind: type[T]) -> T:
    """Typed JSON in which no object says a key twice: of two values, no reader could know the right one.

    Raises:
        ValueError: it is not. The message has the place: the path of a value that is of another type, or the byte.
    """
    try:
        found = msgspec.json.decode(content, type=kind)
        refuse_ambiguous(content)
    except RecursionError:
        raise Malformed("it is nested too deeply") from None
    return found


_STRING = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?', re.DOTALL)


def refuse_ambiguous(content: bytes | memoryview) -> None:
    """Looks for what the parser lets pass in JSON.

    Raises:
        ValueError: an object has a key twice; or the content is not UTF-8, in a part that the parser skipped.
    """
    content = bytes(content)
    if not content.isascii():
        content.decode()
    parts = content.split(b'":')
    if b"\\" not in content and content.count(b":") == len(parts) - 1:  # as ours is: half the time of the pattern
        del parts[-1]
        keys = [part[part.rfind(b'"') + 1 :] for part in parts]
    else:
        keys = [key for key, colon in _STRING.findall(content) if colon]
        if any(b"\\" in key for key in keys):  # two spellings of one key
            keys = [b""] * 2
    if len(set(keys)) != len(keys):  # in one object, or in several
        json.loads(content, object_pairs_hook=_once, parse_float=_nothing, parse_int=_nothing)


def _nothing(number: str) -> None:
    return None


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        _refuse(next(name for name in names if names.count(name) > 1))


def _refuse(name: str) -> NoReturn:
    raise Malformed(f"the key {name[:80]!r} stands twice in one object")
