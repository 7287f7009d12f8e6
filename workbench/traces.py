"""The trace files of a run's steps: where they go, found, and checked to be of that very step. Imports no MLX."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from .errors import ReplayError, WorkbenchError
from .trace import Trace, read

if TYPE_CHECKING:
    from .recorded.recorded_run import RecordedRun

FOLDER = "traces"
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
