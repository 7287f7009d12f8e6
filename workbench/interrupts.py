"""Stopping a training loop after a whole step. Knows signals; nothing of steps or runs."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Interrupted(KeyboardInterrupt):
    """Training was asked to stop, and did so after a whole step. A notebook stops at the cell, as after any Ctrl-C."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number  # of the signal


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
        os.write(2, b"\ninterrupted: finishing this step and saving it; once more stops at once\n")  # safe in a handler

    try:
        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: a notebook's worker, say
        before = {}
    try:
        yield lambda: asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
