"""Where a path leads, whatever way it is written: relative to a descriptor, through links, in another spelling."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

AS_GIVEN = -1  # no dir_fd, in an audit event


def real(path: Any, folder: Any = AS_GIVEN, *, followed: bool = True) -> str | None:
    """The place that a path leads to; a last link is followed only if what is asked for follows it. None: no path."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        return None
    given = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(given):
        base = of_descriptor(folder)
        if base is None:
            return None
        given = os.path.join(base, given)
    given = os.path.abspath(given)
    if followed:
        return os.path.realpath(given)
    return os.path.join(os.path.realpath(os.path.dirname(given)), os.path.basename(given))


def of_descriptor(number: int) -> str | None:
    """The folder that a descriptor is open on."""
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/self/fd/{number}")
    with contextlib.suppress(OSError, ImportError, AttributeError):
        import fcntl

        found = fcntl.fcntl(number, fcntl.F_GETPATH, b"\0" * 1024)  # type: ignore[attr-defined]  # macOS
        return os.fsdecode(found.rstrip(b"\0"))
    return None


def inside(place: str, folder: str) -> bool:
    return place == folder or place.startswith(folder.rstrip(os.sep) + os.sep)


def identity(place: str) -> tuple[int, int] | None:
    """By which a folder is known however its name is spelled: some file systems don't tell A from a."""
    try:
        found = os.lstat(place)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def identities(place: str) -> set[tuple[int, int]]:
    """Of a place and all the folders that hold it."""
    found = set()
    while True:
        if (one := identity(place)) is not None:
            found.add(one)
        above = os.path.dirname(place)
        if above == place:
            return found
        place = above


def is_cache(place: str) -> bool:
    """Of Python, of the system, or a folder that says of itself that it is one."""
    homes = [os.environ.get(name) for name in ("XDG_CACHE_HOME", "HF_HOME")]
    homes += [os.path.expanduser("~/.cache"), os.path.expanduser("~/Library/Caches"), sys.prefix, "/dev", "/proc"]
    return "__pycache__" in place.split(os.sep) or any(inside(place, os.path.realpath(one)) for one in homes if one)
