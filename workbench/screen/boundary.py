"""Between a person and the panel: one handler at a time, none for what the panel sets itself, and no exception lost.

Handlers may be called in any thread: which one runs a widget's callback depends on the version of ipykernel. An
exception in one would be lost to the person, and to tests; here it is shown.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import EnvironmentMismatch
from .controls import Controls, show
from .markup import alert
from .performing import Cancelled


class Boundary:
    """Attributes:
    lock: held while the panel changes; work that ends shows its result while another thread may move the slider.
    last_error: the exception in the error box, or None.
    """

    def __init__(self, controls: Controls) -> None:
        self.lock = threading.RLock()
        self.last_error: BaseException | None = None
        self._controls = controls
        self._setting = False  # guarded by the lock

    def on_change(self, control: Any, handle: Callable[[], None]) -> None:
        """Calls `handle()` when a person changes the value of a control."""
        control.observe(lambda change: self.guard(handle), "value")

    def on_press(self, button: Any, handle: Callable[[], None]) -> None:
        button.on_click(lambda pressed: self.guard(handle))

    def guard(self, handle: Callable[[], None]) -> None:
        try:
            with self.lock:
                if not self._setting:
                    handle()
        except Exception as error:  # the boundary of the user interface
            self.fail(error)

    @contextmanager
    def by_itself(self) -> Iterator[None]:
        """Inside, nothing handles changes of controls: the panel makes them, not a person."""
        with self.lock:
            before, self._setting = self._setting, True
            try:
                yield
            finally:
                self._setting = before

    def fail(self, error: BaseException) -> None:
        """Shows an error."""
        self.last_error = error
        if isinstance(error, Cancelled | KeyboardInterrupt):
            return  # the status says so
        hint = ""
        if isinstance(error, EnvironmentMismatch):
            show(self._controls.anyway, True)
            hint = "Here: tick “Replay here anyway”, then press the button again."
        self._controls.error.value = alert(error, hint)

    def clear(self) -> None:
        self.last_error, self._controls.error.value = None, ""
