"""Batches drawn ahead by a thread, each with the cursor that stands after it. Knows any sampler, no data."""

import copy
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

from ..errors import DataError
from .data import integer


class Sampler(Protocol):
    """What `Prefetcher` needs of a sampler: batches, and a cursor that can be read and set between two of them."""

    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Prefetcher:
    """Draws up to `depth` batches of a sampler ahead, in a thread; hands them out with the cursor that belongs to each.

    The stream and the cursors are those of the sampler alone, whatever the depth; depth 0 uses no thread. The thread
    starts with the first batch; from then on the sampler's own cursor runs ahead, so ask this object for it. An error
    while drawing is raised where that batch would have come, and again on every later call. Use as a context manager,
    or call `close`. Raises DataError for a depth that is no integer from 0, and for use after `close`.
    """

    def __init__(self, sampler: Sampler, depth: int):
        self.sampler = sampler
        self.depth = integer("depth", depth, 0, 2**31)
        self._cursor = self._sampler_cursor()  # after the batch last handed out
        self._drawn: deque[tuple[Any, dict[str, Any]]] = deque()  # batch, cursor after it
        self._error: BaseException | None = None
        self._changed = threading.Condition()  # guards the fields around it
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._closed = False

    def _sampler_cursor(self) -> dict[str, Any]:
        return copy.deepcopy(self.sampler.state_dict())  # a sampler may hand out the very dict that it goes on changing

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.depth == 0:
            self._check_open()
            batch = next(self.sampler)
            self._cursor = self._sampler_cursor()
            return batch
        with self._changed:
            self._check_open()
            if self._thread is None and self._error is None:
                self._thread = threading.Thread(target=self._draw_ahead, name="workbench-prefetch", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._drawn or self._error or self._closed)
            self._check_open()
            if self._drawn:
                batch, self._cursor = self._drawn.popleft()
                self._changed.notify_all()
                return batch
            assert self._error is not None
            raise self._error

    def _draw_ahead(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping or len(self._drawn) < self.depth)
                    if self._stopping:
                        return
                drawn = next(self.sampler), self._sampler_cursor()
                with self._changed:
                    self._drawn.append(drawn)
                    self._changed.notify_all()
        except BaseException as error:  # whatever it was: the caller must see it, or it would wait for ever
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _stop(self, timeout: float | None) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise DataError("The prefetcher is closed; expected an open one; make a new one from the sampler.")

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the batch last handed out, never after one that is only prefetched. Works after `close`."""
        return copy.deepcopy(self._cursor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, dropping what was prefetched. If the sampler refuses it, nothing is lost or moved."""
        self._check_open()
        self._stop(None)  # the sampler must not move under the thread; this waits for at most one batch
        try:
            self.sampler.load_state_dict(state)
            self._drawn.clear()
            self._error = None
            self._cursor = self._sampler_cursor()
        finally:
            self._stopping = False

    def close(self) -> None:
        """Stop the thread. May be called again. The sampler is left wherever prefetching had brought it."""
        with self._changed:
            self._closed = True
        # A sampler that never returns cannot be stopped: after the timeout its daemon thread is left to end by itself.
        self._stop(timeout=10)

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
