"""SpikeBench: planted spikes of known cause and healthy steps, and what the autopsy says of them.

    from workbench.bench.spikebench import run_bench
    bench = run_bench(out="bench")          # unseen seeds; goes on where it was interrupted
    bench.scores.top1, bench.confusion, bench.table

Each case is performed in a process of its own (`trial`), so that one that crashes takes no other with it: it is a wrong
answer, never a missing one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import msgspec

from .. import files
from ..errors import ExperimentError, RunError
from . import casebook
from .casebook import Case
from .outcome import CASE, LABEL, OUTCOME, RUN, Outcome, hopeless

_Record = TypeVar("_Record", Case, Outcome)

if TYPE_CHECKING:
    from .spikebench_report import Bench

PATIENCE = 900  # seconds after which a case counts as failed; the longest took a tenth of it
LOCK = "bench.lock"
MOST_SEEDS = 1000

Progress = Callable[[int, int, str], None]


def run_bench(
    *,
    seeds: Sequence[int] = casebook.DEFAULT_SEEDS,
    sizes: Sequence[str] | None = None,
    faults: Sequence[str] = (),
    quick: bool = False,
    out: str | os.PathLike[str] | None = None,
    again: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Bench:
    """Performs the cases of `casebook.plan`, and scores what came of them.

    Args:
        seeds, sizes, faults, quick: see `casebook.plan`.
        out: folder that keeps the runs, one folder a case. Cases that are finished there are not repeated.
        again: ask about the runs in `out` once more, as after a change of the autopsy.
        processes: cases at a time; None: one for each core.
        progress: called as `progress(done, total, case)`.

    Raises:
        ExperimentError: a fault, size or seed is unknown.
        RunError: `out` holds a case of the same name that was made in another way, or another process is at it.
    """
    from .spikebench_report import Bench

    cases = casebook.plan(seeds, sizes, faults, quick)
    with _folder(out) as folder:
        found = _finished(cases, folder, again)
        reused = len(found)
        if progress is not None:
            progress(len(found), len(cases), "")
        todo = [case for case in cases if case.name not in found]
        for case, outcome in _perform(todo, folder, processes or os.cpu_count() or 1, keep=out is not None):
            found[case.name] = outcome
            if progress is not None:
                progress(len(found), len(cases), case.name)
    return Bench([found[case.name] for case in cases], list(dict.fromkeys(case.seed for case in cases)), reused)


def parse_seeds(text: str) -> list[int]:
    """Parses `1000..1003`, `1,2` or both together.

    Raises:
        ExperimentError: it is malformed.
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        if not all(number.isascii() and number.isdecimal() and len(number) < 11 for number in (first, last or first)):
            raise ExperimentError(f"the seeds {text!r} are malformed; expected numbers, as in 1000..1003 or 1,2")
        numbers = range(int(first), int(last) + 1) if dots and last else [int(first)]
        if (dots and not last) or not 0 < len(numbers) <= MOST_SEEDS:
            raise ExperimentError(
                f"the seeds {text!r} are malformed; expected first..last with first <= last, at most {MOST_SEEDS} seeds"
            )
        seeds += numbers
    return seeds


@contextlib.contextmanager
def _folder(out: str | os.PathLike[str] | None) -> Iterator[Path]:
    if out is None:
        with tempfile.TemporaryDirectory(prefix="workbench-spikes-") as temporary:
            yield Path(temporary)
        return
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the kernel lets go of it when the process ends
    except BlockingIOError:
        os.close(held)
        raise RunError(f"{folder} is in use by another bench; wait for it to end, or choose another folder") from None
    try:
        yield folder
    finally:
        os.close(held)


def _finished(cases: Sequence[Case], folder: Path, again: bool) -> dict[str, Outcome]:
    """Outcomes that are there already. Leftovers of a case that was interrupted are removed, for they are no record."""
    found = {}
    for case in cases:
        own = folder / case.name
        if not (own / CASE).exists():
            continue
        made = _read(own / CASE, Case)
        if made != case:
            raise RunError(f"{own} holds another case of this name ({made}; expected {case}); choose another folder")
        if (own / OUTCOME).exists() and not again:
            found[case.name] = _read(own / OUTCOME, Outcome)
            continue
        (own / OUTCOME).unlink(missing_ok=True)
        if not (own / LABEL).exists() and (own / RUN).exists():
            shutil.rmtree(own / RUN)
    return found


def _read(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise RunError(
            f"{path} is damaged, or of another version of the workbench ({error}); remove the folder {path.parent} to "
            "have it made again"
        ) from None


def _perform(cases: Sequence[Case], folder: Path, processes: int, keep: bool) -> Iterator[tuple[Case, Outcome]]:
    """The outcomes as they come."""
    running: set[subprocess.Popen[str]] = set()
    stopped = threading.Event()

    def perform(case: Case) -> tuple[Case, Outcome] | None:
        own = folder / case.name
        own.mkdir(exist_ok=True)
        files.write_atomic(own / CASE, files.pretty_json(case))
        outcome = None if stopped.is_set() else _trial(case, own, running)
        if stopped.is_set() or outcome is None:
            return None
        if not keep:
            shutil.rmtree(own)
        return case, outcome

    with ThreadPoolExecutor(processes) as pool:
        pending = [pool.submit(perform, case) for case in cases]
        try:
            for done in as_completed(pending):
                if (result := done.result()) is not None:
                    yield result
        finally:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                process.kill()


def _trial(case: Case, own: Path, running: set[subprocess.Popen[str]]) -> Outcome:
    """Performs a case in a new process, and waits for it."""
    command = [sys.executable, "-m", "workbench.bench.trial", str(own)]
    nothing = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, text=True) as process:
        running.add(process)
        try:
            said = process.communicate(timeout=PATIENCE)[1].strip().splitlines()
            why = said[-1] if said else f"it said nothing, and ended with code {process.returncode}"
        except subprocess.TimeoutExpired:
            why = f"it was not done after {PATIENCE} s"
        finally:
            process.kill()
            running.discard(process)
    if process.returncode == 0 and (own / OUTCOME).exists():
        return _read(own / OUTCOME, Outcome)
    return hopeless(case, why)
