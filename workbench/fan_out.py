"""Work spread over processes, or over an engine that the user has: any `concurrent.futures.Executor`.

The standard library's process pool is the engine unless one is given; what it lacks is added: no worker outlives what
started it, and one that dies takes only its own work along. Threads and environment of the workers are not touched,
for both may move bits. Knows functions and processes; nothing of runs or replays.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from .errors import ExperimentError

Job = TypeVar("Job")
Result = TypeVar("Result")


class WorkerLost(Exception):
    """The process that performed a piece of work ended before it was done."""


def processors() -> int:
    """How many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fan_out(
    perform: Callable[[Job], Result],
    jobs: Sequence[Job],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    done: Callable[[int, Result | Exception], None] = lambda number, result: None,
) -> list[Result | Exception]:
    """Performs each job, and returns what came of it, in the order of the jobs.

    Args:
        perform: a function of a module, which can be found by its name; it and the jobs must be picklable.
        workers: processes; None: as many as there are processors that this process may use; 0: none, each job is
            performed here. Never more than there are jobs.
        executor: where to perform them instead: `dask.distributed`'s `client.get_executor()`, loky's, a pool of
            threads. It is left open.
        done: called with a job's number and result as soon as there is one; what it raises stops all.

    Returns:
        For each job its result, or the exception that it raised; `WorkerLost` if its process died, alone, in a second
        attempt too: where one dies, all that had not ended is tried again.

    Raises:
        ExperimentError: `workers` is less than 0, or given with an executor, or that is none.
    """
    if workers is not None and (executor is not None or workers < 0):
        raise ExperimentError(
            f"workers is {workers}{' and an executor is given' if executor is not None else ''}; expected a number of "
            "processes from 0, or an executor, which has workers of its own"
        )
    if executor is not None and not callable(getattr(executor, "submit", None)):
        raise ExperimentError(
            f"executor is a {type(executor).__name__}; expected a concurrent.futures.Executor, such as client."
            "get_executor() of a dask.distributed client"
        )
    found: dict[int, Result | Exception] = {}

    def keep(number: int, result: Result | Exception) -> None:
        found[number] = result
        done(number, result)

    count = min(processors() if workers is None else workers, len(jobs))
    if executor is not None:
        for number in _submitted(executor, perform, jobs, range(len(jobs)), keep):
            keep(number, WorkerLost("the engine's worker ended before it was done"))
    elif count == 0:
        for number, job in enumerate(jobs):
            keep(number, _result(lambda job=job: perform(job)))  # type: ignore[misc]
    else:
        _in_processes(perform, jobs, count, keep)
    return [found[number] for number in range(len(jobs))]


def _in_processes(
    perform: Callable[[Job], Any], jobs: Sequence[Job], count: int, keep: Callable[[int, Any], None]
) -> None:
    """A pool breaks as a whole when one of its processes dies. It takes jobs in order, so the death is of one of the
    first that are left: each of these gets a process for itself, the others another pool."""
    waiting = list(range(len(jobs)))
    while waiting:
        with _pool(min(count, len(waiting))) as pool:
            lost = _submitted(pool, perform, jobs, waiting, keep)
        suspects = lost[: count + 1]  # the pool holds one job more than it has processes
        for number in suspects:
            with _pool(1) as alone:
                if _submitted(alone, perform, jobs, [number], keep):
                    keep(number, WorkerLost("its process ended before it was done, twice: killed, or out of memory"))
        waiting = lost[count + 1 :]


def _submitted(
    executor: Executor,
    perform: Callable[[Job], Any],
    jobs: Sequence[Job],
    numbers: Sequence[int],
    keep: Callable[[int, Any], None],
) -> list[int]:
    """Performs jobs; returns the numbers of those whose engine broke, in order."""
    futures: dict[Future[Any], int] = {}
    lost = []
    try:
        for number in numbers:
            try:
                futures[executor.submit(perform, jobs[number])] = number
            except BrokenExecutor:
                lost.append(number)
        for future in as_completed(futures):
            result = _result(future.result)
            if isinstance(result, (BrokenExecutor, CancelledError)):
                lost.append(futures[future])
            else:
                keep(futures[future], result)
    except BaseException:
        for future in futures:
            future.cancel()
        raise
    return sorted(lost)


def _result(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except Exception as error:  # of any kind: it is the answer
        return error


@contextlib.contextmanager
def _pool(count: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of new processes, which end when this ends, however it does: each waits for the end of a pipe."""
    context = multiprocessing.get_context("spawn")  # a fork would copy MLX's threads' locks, and not the threads
    ours, theirs = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(ours,))
    try:
        yield pool
        pool.shutdown()
    finally:
        theirs.close()
        pool.shutdown(cancel_futures=True)
        ours.close()


def _begin(alive: Connection) -> None:
    """In a worker: Ctrl-C is for the process that started it; when that has ended, so has this."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            alive.recv_bytes()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="workbench-alive").start()
