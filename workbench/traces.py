"""The trace files of a run's steps: found, and checked to be of that very step. Imports no MLX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .errors import ReplayError, WorkbenchError
from .trace import Trace, read

if TYPE_CHECKING:
    from .recorded.recorded_run import RecordedRun

FOLDER = "traces"


def refuse_other_step(trace: Trace, step: int) -> None:
    """Raises a ReplayError if the trace is of another step."""
    if trace.step != step:
        raise ReplayError(f"the trace is of step {trace.step}; expected one of step {step}")


def of_step(run: RecordedRun, step: int, segment: int, given: Trace | None, notices: list[str]) -> Trace | None:
    """The trace of a step: the given one if it is of this step, else the one in the run's folder; None without either.

    Args:
        notices: receives why a file that is there is of no use.
    """
    if given is not None and given.step == step:
        return given
    performed = run.manifest.lineage(segment, step)
    path = run.path / FOLDER / f"{step:08d}{f'.s{performed}' if performed else ''}.json"
    if not path.exists():
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
