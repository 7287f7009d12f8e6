"""Scratch copies of files that code of the user's writes to while it is run for a replay: his own stay as they are.

A file that was there before, or is in the run's folder, is written to a copy that lies in a temporary folder, and read
from there afterwards. Knows how Python and MLX open files.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .guard import Guard

EVIDENCE = ("run.json", "telemetry.jsonl", "checkpoints", "traces", "batches")  # of a run's folder: never diverted
MOST = 1 << 30  # bytes of a file that is copied to be added to
_SAVING = ("save", "savez", "savez_compressed", "save_safetensors", "save_gguf")  # of mlx.core
_ENDINGS = {"save": ".npy", "savez": ".npz", "savez_compressed": ".npz"}  # that MLX adds to a name that lacks it
_ENDINGS |= {"save_safetensors": ".safetensors", "save_gguf": ".gguf"}


_lock = threading.Lock()
_users = 0  # threads that are within
_originals: list[tuple[Any, str, Any]] = []


@contextlib.contextmanager
def diverting(guards: Mapping[int, Guard]) -> Iterator[None]:
    """Within, what a thread that has a guard opens to write is a scratch copy where the guard protects the file."""
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            owners: list[tuple[Any, str]] = [(builtins, "open"), (io, "open")]
            if (mlx := sys.modules.get("mlx.core")) is not None:
                owners += [(mlx, name) for name in (*_SAVING, "load") if hasattr(mlx, name)]
            _originals[:] = [(owner, name, getattr(owner, name)) for owner, name in owners]
            for owner, name, original in _originals:
                setattr(owner, name, _diverted(original, name, guards))
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            for owner, name, original in _originals if not _users else ():
                setattr(owner, name, original)


def _diverted(original: Callable[..., Any], name: str, guards: Mapping[int, Guard]) -> Callable[..., Any]:
    def opening(file: Any, *args: Any, **kwargs: Any) -> Any:
        guard = guards.get(threading.get_ident())
        if guard is None or not isinstance(file, (str, bytes, os.PathLike)):
            return original(file, *args, **kwargs)
        if name == "open":
            mode = args[0] if args else kwargs.get("mode", "r")
            own = kwargs.get("opener") is not None or len(args) > 6
            return original(file if own else _instead(guard, file, mode), *args, **kwargs)
        if name == "load":
            return original(_instead(guard, file, "r"), *args, **kwargs)
        given, ending = os.fsdecode(file), _ENDINGS[name]
        whole = given if given.endswith(ending) else given + ending
        return original(_instead(guard, whole, "w"), *args, **kwargs)

    return opening


def _instead(guard: Guard, file: Any, mode: Any) -> Any:
    """The file to open: the one that was asked for, or its scratch copy."""
    place = os.path.realpath(os.fsdecode(file))
    if place in guard.diverted:
        return guard.diverted[place]
    if not isinstance(mode, str) or not set(mode) & set("wax+") or guard.made(place):
        return file
    if os.path.lexists(place) and not os.path.isfile(place):
        return file  # a device, a pipe, a folder: as it would be
    inside = guard.within(place)
    if inside and guard.part(place) in EVIDENCE:
        raise guard.refusal("write to", place)
    if not inside and not guard.is_of_others(place):
        if not os.path.lexists(place):
            guard.makes(place)
        return file
    if "x" in mode and os.path.exists(place):
        return file  # which fails, as it should
    return _scratch(guard, place, copied="w" not in mode)


def _scratch(guard: Guard, place: str, *, copied: bool) -> str:
    there = os.path.isfile(place)
    if copied and there and os.path.getsize(place) > MOST:
        raise guard.refusal("add to", place)
    with guard.off():
        name = f"{len(guard.diverted)}-{os.path.basename(place)}"
        copy = os.path.join(guard.scratch_folder(), name)
        if copied and there:
            shutil.copyfile(place, copy)
    guard.diverted[place] = copy
    left = "the file is as it was" if there else "no file was made there"
    guard.notices.append(
        f"{guard.script} writes to {guard.shown(place)}{guard.where(text=False)}: in a replay that goes to a scratch "
        f"copy, and {left}"
    )
    return copy
