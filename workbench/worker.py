"""One thread for work in the background, for as long as the process lives: it waits for the process that does the work
(`work`), or does it where an object is needed that exists only here.

MLX gives every thread streams of its own and frees them late: a thread a replay leaks one each, and a thread that ends
while the process does can bring it down (measured with mlx 0.32.4). So one daemon thread serves all, and a process that
ends while it works first asks it to stop. Knows nothing of what it runs.
"""

from __future__ import annotations

import atexit
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

alone = threading.Lock()  # held during a replay, in whatever thread: two at a time would only slow each other down
leaving = threading.Event()  # the process ends: long work should too
endings: list[Callable[[], None]] = []  # what ends long work at once, where something can
PATIENCE = 10.0  # seconds that an ending process waits for it

_jobs: queue.SimpleQueue[tuple[Future[None], Callable[..., None], tuple[Any, ...]]] = queue.SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def submit(function: Callable[..., None], *arguments: Any) -> Future[None]:
    """Has the thread call `function(*arguments)`."""
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="workbench-replay", daemon=True)
            _thread.start()
            atexit.register(_leave)
    job: Future[None] = Future()
    _jobs.put((job, function, arguments))
    return job


def _serve() -> None:
    while True:
        job, function, arguments = _jobs.get()
        try:
            job.set_result(function(*arguments))
        except BaseException as error:  # belongs to whoever asks for the result
            job.set_exception(error)
        del job, function, arguments  # or the last replay's arrays would live until the next one


def _leave() -> None:
    leaving.set()
    for end in endings:
        end()
    if alone.acquire(timeout=PATIENCE):
        alone.release()
