"""Stopping a training loop where nothing is half done. Knows signals; nothing of steps or runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and did so after a whole step. A notebook stops at the cell, as after any Ctrl-C."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number  # of the signal


FINISHING = b"\ninterrupted: finishing this step and saving it; once more stops at once\n"


class Deferral:
    """`with Deferral():` has a Ctrl-C (or SIGTERM) wait for the end of the block; a second one does not wait.

    It is given to the handler that was there, which raises KeyboardInterrupt, or does what the user's own does. A
    signal without a handler in Python acts as ever. On a thread other than the main one, where no handler runs, this
    does nothing. Handlers are set anew each time, which takes some microseconds: notebooks and users set theirs, too.

    Args:
        told: of a block that may be long. The user reads that it is waited for, and only a signal waits whose handler
            is Python's own, which raises KeyboardInterrupt: a handler of the user's may do what can't wait.
    """

    def __init__(self, *, told: bool = False) -> None:
        self._told = told
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._came: list[int] = []

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            before = signal.getsignal(number)
            if not callable(before) or (self._told and before is not signal.default_int_handler):
                continue
            self._before[number] = before
            try:
                signal.signal(number, self._handle)
            except ValueError:  # not the main thread
                self._before.clear()
                return

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in reversed(self._before):  # Ctrl-C last: until then it waits
            now = signal.signal(number, self._before[number])
            if now != self._handle:  # somebody set another within the block
                signal.signal(number, now)
        self._deliver(None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._came.append(number)
        if len(self._came) > 1:
            self._deliver(frame)
        elif self._told:
            os.write(2, FINISHING)  # safe in a handler

    def _deliver(self, frame: FrameType | None) -> None:
        while self._came:
            number = self._came.pop(0)
            self._before[number](number, frame)


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], int]]:
    """The first Ctrl-C (or SIGTERM) asks for a stop after the present step; a second one stops at once.

    Yields:
        A function that returns the number of the signal that came, or 0.
    """
    asked = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = number
        os.write(2, FINISHING)  # safe in a handler

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: a notebook's worker, say
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
