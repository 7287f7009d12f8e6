"""What stands for an object that can't be put back while a step is tried: it tells when the step uses it.

A stand-in raises as soon as the thread that tries the step asks anything of it; other threads get the object itself.
What is only given to a file or a queue is given to nobody: a log has one line of a step that is performed twice.
Caches (`functools.lru_cache`) get an empty one like them. Knows Python objects; nothing of experiments.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from .bare_objects import is_a
from .deep_snapshot import DeepSnapshot, Opaque
from .enumeration import some
from .errors import ExperimentError
from .redrawing import Generators
from .shared_settings import ProcessSettings


class Touched(BaseException):
    """The step uses something that can't be put back. No error: a step that catches those must not go on."""

    def __init__(self, what: Opaque) -> None:
        super().__init__(str(what))
        self.what = what


def _used(self: Any) -> Any:
    what, thread, touched = object.__getattribute__(self, "_stands_for")
    if threading.get_ident() != thread or what.what == "sink":
        return what.value
    touched.append(what)
    raise Touched(what)


class _StandIn:
    __slots__ = ("_stands_for",)

    def __init__(self, what: Opaque, touched: list[Opaque]) -> None:
        object.__setattr__(self, "_stands_for", (what, threading.get_ident(), touched))

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(object.__getattribute__(self, "_stands_for")[0].value)

    def __getattr__(self, name: str) -> Any:
        what, thread, _ = object.__getattribute__(self, "_stands_for")
        if name in _GIVING and what.what in ("stream", "sink") and threading.get_ident() == thread:
            return _take_no_notice
        return getattr(_used(self), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(_used(self), name, value)


_GIVING = {"write", "writelines", "flush", "writerow", "writerows", "put", "put_nowait"}


def _take_no_notice(*given: Any, **options: Any) -> int | None:
    """What `write` returns: the number of characters or bytes."""
    return len(given[0]) if given and is_a(given[0], (str, bytes)) else None


def _forwarding(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(_used(self), name)(*args, **kwargs)

    return method


_NAMES = "next iter call len bool getitem setitem delitem contains enter exit str int float index add radd sub rsub mul"
_NAMES += " rmul truediv rtruediv eq lt le gt ge iadd isub imul neg reversed await aiter anext"
for _name in _NAMES.split():
    setattr(_StandIn, f"__{_name}__", _forwarding(f"__{_name}__"))
_StandIn.__hash__ = lambda self: hash(_used(self))  # type: ignore[method-assign]


@contextmanager
def without_counting(
    around: DeepSnapshot,
    found: Iterable[Opaque],
    *,
    keep: bool = False,
    begin: Callable[[], object] = lambda: None,
) -> Iterator[list[Opaque]]:
    """Meanwhile a step can be performed that is not to count: afterwards everything is as `around` has it.

    Args:
        found: what stand-ins are put in the place of.
        keep: only these are put back; what else has changed, other threads have changed.
        begin: called first.

    Returns:
        A list that those which are used are added to.

    Raises:
        ExperimentError: something could not be put back.
    """
    generators, settings, found = Generators(), ProcessSettings(), list(found)
    try:
        begin()
        with around.read_only():
            yield _put_in_place(found)
    finally:
        failed = [] if keep else around.put_back()
        for one in found if keep else ():
            for place in one.places:
                place.put(one.value)
        if not keep:
            generators.put_back()
            settings.put_back()
        if failed:
            raise ExperimentError(
                f"it changes {some(failed)}, which could not be put back after the step was performed twice, so the "
                "training would be another from here on. Nothing has been recorded; keep that in a list, a dict or an "
                "array, or pass self_check=False"
            )


def _put_in_place(found: Iterable[Opaque]) -> list[Opaque]:
    touched: list[Opaque] = []
    for one in found:
        fresh: Any = _fresh(one.value) if one.what == "cache" else _StandIn(one, touched)
        for place in one.places:
            place.put(fresh)
    return touched


def _fresh(cached: Any) -> Any:
    return functools.lru_cache(**cached.cache_parameters())(cached.__wrapped__)


_WAITING = {
    *("threading", "queue", "concurrent", "asyncio", "selectors", "multiprocessing", "logging", "socket"),
    *("socketserver", "ipykernel", "IPython", "zmq", "tornado", "traitlets", "jupyter_client", "debugpy", "pydevd"),
    *("_pydevd_bundle", "tqdm", "workbench", "sqlite3", "decorator", "rich", "time", "subprocess", "weakref"),
    *("contextlib", "contextvars", "ctypes"),
}


def other_threads() -> list[str]:
    """Names of the other threads that run code of a program's own just now, and so may change what it holds."""
    found = []
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if thread is threading.current_thread() or frame is None:
            continue
        while frame is not None:
            if str(frame.f_globals.get("__name__")).partition(".")[0] not in _WAITING:
                found.append(thread.name)
                break
            frame = frame.f_back
    return found
