"""Saving off the training thread: one thing is written, another may wait, and a third makes the loop wait.

The thread lives only while there is something to write, and the interpreter waits for it at its end. What failed is
kept until it is asked for: a failure to save stops no training. Knows functions and threads; nothing of states.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Save:
    """Something to save.

    Attributes:
        key: tells its owner what it was.
        perform: writes it, in the saving thread; durable when it returns.
    """

    key: Any
    perform: Callable[[], object]


class Saver:
    """
    Args:
        limit: how many may be unfinished, the one that is being written included; 0: each is waited for.
    """

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self._unfinished: deque[Save] = deque()
        self._failed: list[tuple[Any, Exception]] = []
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, save: Save) -> None:
        """Hands it over; waits only while `limit` others are unfinished."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._unfinished) < max(self.limit, 1))
            self._unfinished.append(save)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="workbench-saver")
                try:
                    self._thread.start()
                except BaseException:  # no thread can be had, or a Ctrl-C came: nothing was handed over
                    self._unfinished.pop()
                    self._thread = None
                    raise
        if self.limit == 0:
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is unfinished."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished)

    @property
    def idle(self) -> bool:
        """Whether nothing is unfinished."""
        with self._changed:
            return not self._unfinished

    def failed(self) -> list[tuple[Any, Exception]]:
        """The keys of what could not be saved, and why; each is told once."""
        with self._changed:
            found, self._failed = self._failed, []
        return found

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._thread is not threading.current_thread():
                    return  # it was taken back while it started
                if not self._unfinished:
                    self._thread = None
                    return
                save = self._unfinished[0]
            failed: list[tuple[Any, Exception]] = []
            try:
                save.perform()
            except Exception as error:  # of any kind: it is told where the loop can hear it
                failed.append((save.key, error))
            del save  # and with it the state that it holds
            with self._changed:
                self._failed += failed
                self._unfinished.popleft()
                self._changed.notify_all()
