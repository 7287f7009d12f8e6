"""Where a run went on: the state from which each of its segments started, and whether it is the one that was left.

An ordinary resume goes on from a checkpoint that an earlier segment wrote. A segment may also start from a state of
its own, which it committed under its own name: the loop had changed the state, or lost a part of it. Knows a run's
manifest, telemetry and the names of its checkpoints; imports no MLX.
"""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, Any

from .manifest import Manifest

if TYPE_CHECKING:
    from .recorded.recorded_run import RecordedRun


def state_segment(manifest: Manifest, committed: Container[tuple[int, int]], step: int, segment: int) -> int:
    """The segment whose checkpoint of `step` would be the state from which the way to `segment` went on.

    That of the segment that performed the step; or of a later one, if it committed the state that it started from.

    Args:
        committed: step and segment of each checkpoint.

    Raises:
        RunError: there is no such segment.
    """
    performed = manifest.lineage(segment, step)
    entry = manifest.segments[segment]
    while entry.segment != performed and (step != entry.start or (step, entry.segment) not in committed):
        assert entry.parent is not None  # or the segment that performed the step would not be on the way
        entry = manifest.segments[entry.parent]
    return entry.segment


def state_evidence(run: RecordedRun, step: int, segment: int) -> dict[str, Any]:
    """What the run logged, as bits, of the state that checkpoint `step` of a segment holds: what its step left, or
    where the segment started with it the lanes of its meta line."""
    began = step == run.manifest.segments[segment].start
    line = run.telemetry.meta(segment) if began else run.telemetry.at(step, segment)
    return {} if line is None else line.evidence()


def restarted(run: RecordedRun, step: int, segment: int) -> int | None:
    """The segment that committed the state from which `step` started, where that is not the state which the step before
    had left on the way to `segment`; otherwise None."""
    entry = run.manifest.segments[run.manifest.lineage(segment, step)]
    if entry.parent is None or step - 1 != entry.start:
        return None
    holder = state_segment(run.manifest, run.checkpoints, step - 1, segment)
    return None if holder == run.manifest.lineage(segment, step - 1) else holder


def seam(run: RecordedRun, segment: int) -> list[str]:
    """The lanes in which the state that a segment started from differs from what was logged when its step ended.

    Empty for an ordinary resume, and where either was not recorded. One that is not empty means that something happened
    to the state outside of any step: a damaged checkpoint, a resume that lost a part, an edit.
    """
    entry, meta = run.manifest.segments[segment], run.telemetry.meta(segment)
    if entry.parent is None or meta is None:
        return []
    holder = state_segment(run.manifest, run.checkpoints, entry.start, entry.parent)
    left, began = state_evidence(run, entry.start, holder), meta.evidence()
    return [name.removeprefix("state.") for name in began if left.get(name, began[name]) != began[name]]


def notices(run: RecordedRun, segment: int, first: int, last: int) -> list[str]:
    """Sentences on the seams from state `first` to step `last` on the way to a segment."""
    committed = run.checkpoints
    return [
        f"segment {entry.segment} went on from another state than step {entry.start} had left: "
        f"{', '.join(lanes)} differ{'s' if len(lanes) == 1 else ''}"
        + ("" if (entry.start, entry.segment) in committed else ", and that segment has no checkpoint of it")
        for entry in run.manifest.segments
        if first <= entry.start < last
        and run.manifest.lineage(segment, entry.start + 1) == entry.segment
        and (lanes := seam(run, entry.segment))
    ]
