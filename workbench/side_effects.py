"""What a step does to the world outside of Python's memory: files that it writes, processes and connections.

Nothing of that can be put back, and a step that reads it again would find another world if it were performed twice. It
is seen where Python is asked for it, in the thread that performs the step, and only meanwhile: what a library written
in another language does by itself is not. Knows Python's modules; nothing of experiments.
"""

from __future__ import annotations

import builtins
import io
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_CHANGING = ("utime", "remove", "unlink", "rename", "replace", "mkdir", "rmdir", "truncate", "symlink", "link", "chmod")
_PROCESSES = ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system", "kill")
_SAVING = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")
_STANDARD = (1, 2)  # descriptors of what is printed


@contextmanager
def side_effects() -> Iterator[list[str]]:
    """Meanwhile what this thread does to files, processes and connections is added to the list that it gives, in
    words: "it opens /tmp/count for writing"."""
    found: dict[str, None] = {}
    said: list[str] = []
    thread = threading.get_ident()

    def note(sentence: str | None) -> None:
        if sentence is not None and threading.get_ident() == thread:
            found[sentence] = None

    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _places()]
    for owner, name, what in _places():
        setattr(owner, name, _noting(getattr(owner, name), what, note))
    try:
        yield said
    finally:
        for owner, name, original in before:
            setattr(owner, name, original)
        said += found


def _places() -> list[tuple[Any, str, Callable[..., str | None]]]:
    found: list[tuple[Any, str, Callable[..., str | None]]] = [
        *((owner, "open", _of_open) for owner in (builtins, io)),
        (os, "open", _of_descriptor),
        (os, "read", lambda at, *_: f"it reads from file descriptor {at}"),
        (os, "write", lambda at, *_: None if at in _STANDARD else f"it writes to file descriptor {at}"),
        (subprocess.Popen, "__init__", lambda self, *args, **_: "it starts a process (subprocess.Popen)"),
        (socket.socket, "__init__", lambda self, *args, **_: "it opens a connection (socket.socket)"),
    ]
    found += [(os, name, _of_path(name)) for name in _CHANGING if hasattr(os, name)]
    found += [(os, name, lambda *_, name=name, **__: f"it calls os.{name}") for name in _PROCESSES if hasattr(os, name)]
    if (mlx := sys.modules.get("mlx.core")) is not None:
        found += [(mlx, name, lambda file, *_, **__: _written(file)) for name in _SAVING if hasattr(mlx, name)]
    return found


def _noting(original: Any, what: Callable[..., str | None], note: Callable[[str | None], None]) -> Any:
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            sentence = what(*args, **kwargs)
        except TypeError:  # of arguments that the function does not take either
            sentence = None
        note(sentence)
        return original(*args, **kwargs)

    return called


def _written(file: Any) -> str | None:
    if isinstance(file, (str, bytes, os.PathLike)):
        path = os.fsdecode(file)
        return None if path == os.devnull else f"it opens {path} for writing"
    return None


def _of_open(file: Any, mode: Any = "r", *_: Any, **__: Any) -> str | None:
    return _written(file) if isinstance(mode, str) and set(mode) & set("wax+") else None


def _of_descriptor(path: Any, flags: Any = 0, *_: Any, **__: Any) -> str | None:
    return _written(path) if flags & (os.O_WRONLY | os.O_RDWR) else None


def _of_path(name: str) -> Callable[..., str | None]:
    def said(path: Any, *_: Any, **__: Any) -> str | None:
        where = f" of {os.fsdecode(path)}" if isinstance(path, (str, bytes, os.PathLike)) else ""
        return f"it calls os.{name}{where}"

    return said
