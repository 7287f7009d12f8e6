"""Between a person and the panel: one handler at a time, none for what the panel sets itself, and no exception lost.

Handlers may be called in any thread: which one runs a widget's callback depends on the version of ipykernel. An
exception in one would be lost to the person, and to tests; here it is shown.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import EnvironmentMismatch, FactoryNeeded
from .controls import Controls, show
from .markup import alert, for_python
from .performing import Cancelled

_OF_A_REPLAY = re.compile(r"\b(?:checkpoint|trace_dir)=\w*")  # what the panel has no field for


class Boundary:
    """
    Args:
        named: the line of Python that opens the panel with the code named that a run needs.

    Attributes:
        lock: held while the panel changes; work that ends shows its result while another thread may move the slider.
        last_error: the exception in the error box, or None.
    """

    def __init__(self, controls: Controls, named: Callable[[], str]) -> None:
        self.lock = threading.RLock()
        self.last_error: BaseException | None = None
        self._controls, self._named = controls, named
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
        if isinstance(error, FactoryNeeded):
            hint = f"Here: open the panel so, in a cell: {self._named()}"
        said = for_python(str(error))
        if not hint and (argument := _OF_A_REPLAY.search(said)):
            hint = f"Here: in a cell, as panel.replay({self._controls.step.value}, {argument[0]})."
        self._controls.error.value = alert(error, hint, said)

    def clear(self) -> None:
        self.last_error, self._controls.error.value = None, ""
