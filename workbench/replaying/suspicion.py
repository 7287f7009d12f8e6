"""Why a replay may not be exact, as the recorder itself suspected it: what its self-check could not rule out.

Knows run folders; performs nothing.
"""

from __future__ import annotations

from msgspec import UNSET

from ..run import Run


def suspicion(run: Run, segment: int, step: int) -> str | None:
    """A sentence on what the processes that led to a step of a segment noted of themselves; None: nothing.

    Args:
        step: at which a replay departed from the run, or after that.
    """
    ways = {number: high for number, _, high in run.manifest.ways(segment)}
    said = [
        one
        for line in run.telemetry.metas
        if line.remarks is not UNSET and line.segment in ways and (line.step is UNSET or line.step < step)
        for one in line.remarks
    ]
    if not said:
        return None
    return f"When it was recorded, the workbench noted: {'; '.join(dict.fromkeys(said))}. That is the likely reason."
