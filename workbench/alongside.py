"""Work that a thread does beside its caller's, who asks for what came of it later.

The threads are few and stay: MLX keeps a thread of its own for each one that ever evaluated anything. Knows threads and
MLX's devices; nothing of what is done.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import mlx.core as mx

T = TypeVar("T")

_THREADS = 2


class Alongside(Generic[T]):
    """Begins some work, which should mostly wait for memory or files: then it costs the caller little.

    What it needs is let go of when it is done, not when somebody asks. Where no thread is free by the time that
    somebody does, or the system gives none, it is done then, by who asks: so work may wait for other such work.

    Args:
        here: it is done at once, by the caller. So it is wherever MLX has a GPU, which both would share.
    """

    def __init__(self, work: Callable[[], T], *, here: bool = False) -> None:
        self._waiting = [work]
        self._done = threading.Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        if here or _has_gpu():
            self._perform()
            if isinstance(self._error, KeyboardInterrupt):  # it stops the caller, who may have much else to do first
                raise self._error
        else:
            with contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is about to end
                _pool().submit(self._perform)

    def result(self) -> T:
        """What came of it; it is waited for. Raises what the work raised."""
        self._perform()
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._found[0]

    def _perform(self) -> None:
        try:
            work = self._waiting.pop()
        except IndexError:  # another thread does it, or has done it
            return
        try:
            self._found.append(work())
        except BaseException as error:  # belongs to whoever asks for the result
            self._error = error
        finally:
            del work
            self._done.set()


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_THREADS, thread_name_prefix="workbench-alongside")


@functools.cache
def _has_gpu() -> bool:
    return mx.is_available(mx.Device(mx.DeviceType.gpu))
