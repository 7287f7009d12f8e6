"""The trace files of a run's steps: where they go, found, and checked to be of that very step. Imports no MLX."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from .errors import ReplayError, WorkbenchError
from .trace import Trace, TraceRecord, file_name, read, write

if TYPE_CHECKING:
    from .recorded.recorded_run import RecordedRun

FOLDER = "traces"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_IDENTITY = re.compile(r"[0-9A-Za-z-]{1,64}")  # as recorders give them; a manifest from elsewhere may hold a path


def traces_folder(run: RecordedRun, trace_dir: Path | None) -> tuple[Path, list[str]]:
    """Where traces go: `trace_dir` if given, else the run's own folder, or the user's cache if that can't be written;
    and what the user should know of it."""
    if trace_dir is not None:
        return trace_dir, []
    folder = run.path / FOLDER
    if os.access(folder if folder.exists() else run.path, os.W_OK):
        return folder, []
    cache = _cached(run)
    return cache, [f"{run.path} is read-only; the trace is in {cache}"]


def put(run: RecordedRun, trace_dir: Path | None, write: Callable[[Path, list[str]], Path]) -> tuple[Path, list[str]]:
    """Writes a file to the folder of `traces_folder`, or to the user's cache if there is no room in the run's own.

    Args:
        write: writes it to a folder, and gets what the user should know of that, too.

    Returns:
        Its path, and what the user should know of it.

    Raises:
        ReplayError: it can't be written.
    """
    folder, notices = traces_folder(run, trace_dir)
    with writing(folder):
        try:
            return write(folder, notices), notices
        except OSError as error:
            if error.errno not in _NO_ROOM or folder != run.path / FOLDER:
                raise
            cache = _cached(run)
            notices = [f"there is no room in {run.path} ({error.strerror}); the trace is in {cache}"]
            try:
                return write(cache, notices), notices
            except OSError:
                raise error from None  # what the user can mend


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Within it a file of the folder is written; that it can't be is a ReplayError."""
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        raise ReplayError(
            f"nothing can be written to {folder} ({place}{error.strerror}); name another folder with --trace-dir "
            "(trace_dir=)"
        ) from error


def folders(run: RecordedRun) -> list[Path]:
    """Where the traces of a run are looked for: first where new ones go, then the other of its own folder and cache."""
    first = traces_folder(run, None)[0]
    return [first, *({run.path / FOLDER, _cached(run)} - {first})]


def write_kept(record: TraceRecord, folder: Path, notices: list[str]) -> Path:
    """Writes a trace, unless a fuller one is there that found the same: repeated where this was not, or with a probe
    pass where this has none, of the same run, options and environment, and with all the bits and verdicts that this
    has. That one is kept, and a notice says so.

    Raises:
        OSError: the folder can't be written.
    """
    path = folder / file_name(record)
    if path.exists() and _keeps(path, record):
        notices.append(
            f"{path} is kept: a replay with the same bits wrote it, which was repeated or measured further. "
            "--trace-dir (trace_dir=) names another folder"
        )
        return path
    return write(record, folder)


_ALIKE = (
    *("run", "step", "segment", "exact", "first_difference", "batch_hash", "loss_bits", "grad_norm_bits", "state"),
    *("items", "checkpoint", "rolled", "environment", "environment_differences", "options", "layers"),
)


def _keeps(path: Path, record: TraceRecord) -> bool:
    try:
        there = read(path).record
    except WorkbenchError:
        return False
    fuller, ours = _measured(there), _measured(record)
    more = fuller != ours and all(one >= other for one, other in zip(fuller, ours, strict=True))
    return more and all(getattr(there, name) == getattr(record, name) for name in _ALIKE)


def _measured(record: TraceRecord) -> tuple[bool, bool]:
    """Whether it was repeated, and has a probe pass."""
    return record.gates.repeatable.verdict != "unverified", record.certified_probe is not None


def find(run: RecordedRun, name: str) -> Path | None:
    """The file of this name among the run's traces; None if there is none."""
    return next((path for folder in folders(run) if (path := folder / name).exists()), None)


def _cached(run: RecordedRun) -> Path:
    identity = run.manifest.run
    name = identity if _IDENTITY.fullmatch(identity) else hashlib.sha256(identity.encode()).hexdigest()
    return Path(platformdirs.user_cache_dir("spike-workbench")) / FOLDER / name


def refuse_other_step(trace: Trace, step: int) -> None:
    """Raises a ReplayError if the trace is of another step."""
    if trace.step != step:
        raise ReplayError(f"the trace is of step {trace.step}; expected one of step {step}")


def of_step(run: RecordedRun, step: int, segment: int, given: Trace | None, notices: list[str]) -> Trace | None:
    """The trace of a step: the given one if it is of this step, else the one among its files; None without either.

    Args:
        notices: receives why a file that is there is of no use.
    """
    if given is not None and given.step == step:
        return given
    performed = run.manifest.lineage(segment, step)
    path = find(run, f"{step:08d}{f'.s{performed}' if performed else ''}.json")
    if path is None:
        return None
    try:
        found = read(path)
    except WorkbenchError as error:
        notices.append(str(error))
        return None
    if found.record.run != run.manifest.run:
        notices.append(f"{path} is of another run, so its losses are not shown")
        return None
    recorded = run.evidence(step, segment).get("batch_hash")
    if recorded not in (None, found.record.batch_hash):
        notices.append(f"{path} is of another batch than the one that the run logged, so its losses are not shown")
        return None
    return found
