"""Slow work for a panel: one piece at a time, with progress and Cancel. Knows widgets, and nothing of what the work is.

All of it, from loading to the last number, is done in one thread, because MLX's arrays don't cross threads; what comes
back holds numbers only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .. import worker
from ..errors import ReplayError
from .controls import Controls
from .markup import paragraph

TOLD_EACH = 0.1  # seconds between two messages of progress

Result = TypeVar("Result")
Progress = Callable[[int, int, str], None]


class Cancelled(ReplayError):
    """The work was cancelled. Nothing of the run was changed."""


class Performer:
    """Performs work for one panel, and shows how far it is.

    Args:
        controls: whose `progress` and `status` are used.
        changed: called after work has begun, and after it has ended.

    Attributes:
        running: whether this panel's work is being performed.
    """

    def __init__(self, controls: Controls, changed: Callable[[], None]) -> None:
        self.running = False
        self._controls, self._changed = controls, changed
        self._cancel = threading.Event()
        self._told = 0.0
        self._work: Future[None] | None = None

    def begin(self) -> bool:
        """Whether work may begin now: only one piece is performed at a time, by this panel or any other."""
        if not worker.alone.acquire(blocking=False):
            return False
        self.running = True
        self._cancel.clear()
        self._changed()
        return True

    def end(self) -> None:
        self.running = False
        worker.alone.release()
        self._changed()

    def submit(self, job: Callable[[], None]) -> None:
        """Has the worker's thread do what was begun, and `end` it."""

        def work() -> None:
            try:
                job()
            finally:
                self.end()

        self._work = worker.submit(work)

    def wait(self, timeout: float | None) -> None:
        if self._work is not None:
            self._work.result(timeout)

    def perform(self, title: str, work: Callable[[Progress], Result]) -> tuple[Result, float]:
        """Does it, in the calling thread; returns the result and the seconds that it took.

        Raises:
            Cancelled: by `cancel`, or because the process ends.
        """
        began, controls = time.monotonic(), self._controls
        controls.progress.value, controls.progress.bar_style = 0, "info"
        self.say(f"{title}: starting …")
        try:
            result = work(self.progress)
        except BaseException as error:
            cancelled = isinstance(error, Cancelled | KeyboardInterrupt)
            controls.progress.bar_style = "warning"
            self.say(f"{title}: {'cancelled; nothing was changed' if cancelled else 'failed'}.")
            raise
        controls.progress.value, controls.progress.bar_style = controls.progress.max, "success"
        return result, time.monotonic() - began

    def progress(self, done: int, total: int, what: str) -> None:
        """What the work calls as it goes on."""
        if self._cancel.is_set() or worker.leaving.is_set():
            raise Cancelled("the work was cancelled; nothing was changed")
        now = time.monotonic()
        if now - self._told >= TOLD_EACH or done >= total:
            self._told = now
            self._controls.progress.max, self._controls.progress.value = max(total, 1), done
            self.say(f"{what[:1].upper()}{what[1:]} ({done} of {total} done)")

    def cancel(self) -> None:
        """Asks the work to stop. It does before its next pass."""
        if self.running:
            self._cancel.set()
            self.say("Cancelling, once the present pass has ended …")

    def say(self, text: str) -> None:
        self._controls.status.value = paragraph(text)
