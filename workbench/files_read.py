"""Files that a step reads by itself: which they are, what is in them, and whether that is another later.

They are seen where Python or MLX is asked to open one, in the thread that performs the step, and only meanwhile.
(An audit hook would see them as well, but stays for the life of a process, and is called at each `id()` too. What a
library written in another language opens by itself, neither sees.) Knows files; nothing of experiments or runs.
"""

from __future__ import annotations

import builtins
import hashlib
import io
import itertools
import os
import stat
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

SMALL = 64 << 20  # bytes up to which a digest is made: 0.04 s
_MOST = 32  # files that are looked at
_SYSTEM = ("/proc/", "/dev/", "/sys/", "/etc/", "/usr/", "/lib", "/System/", "/Library/")
_CODE = (".py", ".pyc", ".pyi", ".so", ".dylib", ".pyd", ".pth", ".metallib", ".ttf", ".otf", ".afm")


class ReadFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file as it was when a step had read it.

    Attributes:
        bytes: its size.
        changed: when it was last changed, in nanoseconds since 1970.
        sha256: of its content, where that is small.
    """

    path: str
    bytes: int
    changed: int
    sha256: str | None = None


@contextmanager
def reads() -> Iterator[list[str]]:
    """Meanwhile the files that this thread opens for reading are added to the list that it gives."""
    found: dict[str, None] = {}
    paths: list[str] = []
    thread = threading.get_ident()

    def note(path: Any, mode: Any) -> None:
        if threading.get_ident() != thread or not isinstance(mode, str) or set(mode) & set("wax+"):
            return
        if isinstance(path, (str, bytes, os.PathLike)):
            found[os.path.abspath(os.fsdecode(path))] = None

    owners: list[tuple[Any, str]] = [(builtins, "open"), (io, "open"), (os, "open")]
    if (mlx := sys.modules.get("mlx.core")) is not None:
        owners.append((mlx, "load"))
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    for owner, name, original in before:
        setattr(owner, name, _noting(original, note, name, owner))
    try:
        yield paths
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        paths += [path for path in found if _of_the_users(path)][:_MOST]


def _noting(original: Any, note: Any, name: str, owner: Any) -> Any:
    def opening(*args: Any, **kwargs: Any) -> Any:
        opened = original(*args, **kwargs)
        path = args[0] if args else kwargs.get("file", kwargs.get("path"))
        if owner is os:
            flags = args[1] if len(args) > 1 else kwargs.get("flags", 0)
            note(path, "w" if flags & (os.O_WRONLY | os.O_RDWR) else "r")
        else:
            note(path, "r" if name == "load" else args[1] if len(args) > 1 else kwargs.get("mode", "r"))
        return opened

    return opening


def _of_the_users(path: str) -> bool:
    """Whether it is a file of data, and none of Python, of a package, or of the system."""
    installed = {sys.prefix, sys.base_prefix, *sysconfig.get_paths().values()}
    inside = any(path.startswith(str(Path(folder)) + os.sep) for folder in installed)
    return not inside and not path.startswith(_SYSTEM) and not path.endswith(_CODE) and os.path.isfile(path)


def described(paths: Iterable[str]) -> list[ReadFile]:
    """Each as it is now; those that can't be read are left out."""
    return [found for path in paths if (found := _described(path)) is not None]


def _described(path: str) -> ReadFile | None:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            return None
        digest = hashlib.sha256(Path(path).read_bytes()).hexdigest() if status.st_size <= SMALL else None
    except OSError:
        return None
    return ReadFile(path, status.st_size, status.st_mtime_ns, digest)


def of_file(file: ReadFile) -> str:
    """A sentence without its full stop."""
    known = "size and digest" if file.sha256 is not None else "size and time of change"
    return (
        f"the step reads {file.path} by itself, and a replay reads what is in it then (its {known} are noted; those of "
        "files that only later steps read are not)"
    )


def differences(files: Iterable[ReadFile]) -> list[str]:
    """A sentence on each that is another now than it was, or can't be read; those too large for a digest are told
    apart by size and time of change."""
    said = []
    for then in itertools.islice(files, _MOST):
        now = _described(then.path)
        if now is None:
            said.append(f"the step reads {then.path} by itself, and that can't be read any more")
        elif now.bytes != then.bytes or now.sha256 != then.sha256:
            said.append(
                f"the step reads {then.path} by itself, and its content is another than when the run was recorded "
                f"({then.bytes} bytes then, {now.bytes} now)"
            )
        elif then.sha256 is None and now.changed != then.changed:
            said.append(
                f"the step reads {then.path} by itself, which has been changed, or copied, since the run was recorded "
                "(it is too large for a digest)"
            )
    return said
