"""Slow work for a panel: one piece at a time, with progress and Cancel. Knows widgets, and nothing of what the work is.

Work in another process is ended at once by Cancel. Work in this one, which needs an object that exists only here, goes
on to the end of a pass, for a step can't be interrupted within a thread; all of it is done in one thread, because MLX's
arrays don't cross threads.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from .. import worker
from ..errors import ReplayError
from ..recorded.plan import duration
from ..work import child
from .controls import Controls
from .markup import paragraph, printed

TOLD_EACH = 0.1  # seconds between two messages of progress
GUESSED_AFTER = 0.5  # seconds of work from which the rest is estimated

Result = TypeVar("Result")
Progress = Callable[[int, int, str], None]


class Cancelled(ReplayError):
    """The work was cancelled. Nothing of the run was changed."""


class Performer:
    """Performs work for one panel, and shows how far it is.

    Args:
        controls: whose `progress`, `status` and `output` are used.
        changed: called after work has begun, and after it has ended.

    Attributes:
        running: whether this panel's work is being performed.
    """

    def __init__(self, controls: Controls, changed: Callable[[], None]) -> None:
        self.running = False
        self._controls, self._changed = controls, changed
        self._cancel = threading.Event()
        self._told, self._local, self._why = 0.0, False, ""
        self._first: tuple[int, int, float] | None = None  # done, total, when: where the present stretch began
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

    def perform(
        self, title: str, work: Callable[[Progress], Result], *, local: bool = False, why: str = ""
    ) -> tuple[Result, float]:
        """Does it; returns the result and the seconds that it took.

        Args:
            work: asks the other process, or with `local` does it in the calling thread.
            why: what it is done for; said before how far it is.

        Raises:
            Cancelled: by `cancel`, or because this process ends.
        """
        began, controls = time.monotonic(), self._controls
        self._local, self._first, self._told, self._why = local, None, 0.0, why
        controls.progress.value, controls.progress.bar_style = 0, "info"
        controls.progress.layout.visibility = "visible"
        controls.output.value = ""
        self.say(f"{why}{title}: starting …")
        try:
            self._refuse_cancelled()
            result = self._here(work) if local else self._there(work)
        except BaseException as error:
            cancelled = isinstance(error, Cancelled | KeyboardInterrupt)
            controls.progress.bar_style = "warning"
            self.say(f"{why}{title}: {'cancelled; nothing was changed' if cancelled else 'failed'}.")
            raise
        controls.progress.value, controls.progress.bar_style = controls.progress.max, "success"
        return result, time.monotonic() - began

    def _there(self, work: Callable[[Progress], Result]) -> Result:
        other = child.present()
        try:
            return work(self.progress)
        except child.Ended:
            self._refuse_cancelled()
            raise
        finally:
            self._controls.output.value = printed(other.said())

    def _here(self, work: Callable[[Progress], Result]) -> Result:
        if threading.current_thread() is threading.main_thread():
            return work(self.progress)  # what it prints belongs to the cell
        with _heard() as said:
            try:
                return work(self.progress)
            finally:
                self._controls.output.value = printed(said.getvalue())

    def _refuse_cancelled(self) -> None:
        if self._cancel.is_set() or worker.leaving.is_set():
            raise Cancelled("the work was cancelled; nothing was changed")

    def progress(self, done: int, total: int, what: str) -> None:
        """What the work calls as it goes on."""
        self._refuse_cancelled()
        now = time.monotonic()
        if self._first is None or total != self._first[1] or done < self._first[0]:
            self._first = done, total, now
        if now - self._told >= TOLD_EACH or done >= total:
            self._told = now
            self._controls.progress.max, self._controls.progress.value = max(total, 1), done
            said = f"{self._why}{what}" if self._why else f"{what[:1].upper()}{what[1:]}"
            self.say(f"{said} ({done} of {total} done{self._left(done, now)})")

    def _left(self, done: int, now: float) -> str:
        """How long the rest will take, as the part that is done did."""
        assert self._first is not None
        start, total, since = self._first
        if done <= start or done >= total or now - since < GUESSED_AFTER:
            return ""
        return f", about {duration((now - since) / (done - start) * (total - done))} left"

    def cancel(self) -> None:
        """Ends the work: at once where another process does it, else before its next pass."""
        if not self.running:
            return
        self._cancel.set()
        if self._local:
            self.say("Cancelling, once the present pass has ended: this experiment exists only in the notebook …")
        else:
            self.say("Cancelling …")
            child.end()

    def forget(self) -> None:
        """Shows no work, as before the first."""
        self._controls.status.value, self._controls.progress.value = "", 0
        self._controls.progress.layout.visibility = "hidden"  # its place stays

    def say(self, text: str) -> None:
        self._controls.status.value = f'<div role="status" aria-live="polite">{paragraph(text)}</div>'


@contextlib.contextmanager
def _heard() -> Iterator[io.StringIO]:
    """Keeps what this thread prints from landing in some cell; that of other threads goes where it always does."""
    said, thread = io.StringIO(), threading.get_ident()
    before = sys.stdout, sys.stderr
    ears = tuple(_Ear(stream, said, thread) for stream in before)
    sys.stdout, sys.stderr = ears
    try:
        yield said
    finally:
        if sys.stdout is ears[0]:
            sys.stdout = before[0]
        if sys.stderr is ears[1]:
            sys.stderr = before[1]


class _Ear:
    """A stream that hears one thread, and lets all others through."""

    def __init__(self, stream: Any, said: io.StringIO, thread: int) -> None:
        self._stream, self._said, self._thread = stream, said, thread

    def write(self, text: str) -> int:
        own = threading.get_ident() == self._thread
        return (self._said if own else self._stream).write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
