"""What the run's own files hold of a step: what replays, autopsies and experiments wrote before, here or elsewhere.

Reads files; computes nothing and knows no widgets.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import traces, verdict
from ..errors import WorkbenchError
from ..interventions import whatif
from ..surroundings import differences
from .results import Found, Made

if TYPE_CHECKING:
    from ..run import Run


def read_stored(run: Run, step: int, segment: int, here: dict[str, Any] | None) -> Found:
    """What the traces of a run hold of a step.

    Args:
        here: the numeric environment of this machine; None: not known, so that nothing is left out.
    """
    found = Found()
    performed = run.manifest.lineage(segment, step)
    stem = f"{step:08d}{f'.s{performed}' if performed else ''}"
    trace = traces.of_step(run, step, segment, None, found.notices)
    if trace is not None and trace.path is not None and _of_here(trace.record.environment, here, "a replay", found):
        found.trace = trace
        found.made["trace"] = _read(trace.path)
    path = traces.find(run, verdict.file_name(step, performed))
    if path is not None:
        try:
            said = verdict.read(path)
        except WorkbenchError as error:
            found.notices.append(str(error))
        else:
            if said.run == run.manifest.run and _of_here(said.environment, here, "a verdict", found):
                found.verdict, found.made["verdict"] = said, _read(path)
    _stored_experiments(run, stem, here, found)
    return found


def _stored_experiments(run: Run, stem: str, here: dict[str, Any] | None, found: Found) -> None:
    records, files = [], []
    written = {
        path.name: path for folder in reversed(traces.folders(run)) for path in folder.glob(f"{stem}.whatif-*.json")
    }
    for _, path in sorted(written.items()):
        try:
            record = whatif.read(path)
        except WorkbenchError as error:
            found.notices.append(str(error))
            continue
        if record.run == run.manifest.run and _of_here(record.environment, here, "an experiment", found):
            records.append(record)
            files.append(path)
    if not records:
        return
    # Beside one untouched replay: the latest's, so that only experiments which have the same are shown.
    latest = max(range(len(files)), key=lambda place: files[place].stat().st_mtime)
    alike = [place for place, one in enumerate(records) if one.untouched == records[latest].untouched]
    frame = whatif.table([records[place] for place in alike])
    frame.attrs |= {"notices": [], "files": [str(files[place]) for place in alike]}
    found.experiments, found.made["experiments"] = frame, _read(files[latest])


def _read(path: Path) -> Made:
    return Made(path.stat().st_mtime, None, path)


def _of_here(recorded: dict[str, Any], here: dict[str, Any] | None, what: str, found: Found) -> bool:
    unlike = [] if here is None else differences(recorded, here)
    if unlike:
        found.notices.append(f"{what} among the run's files is of another environment than this one: {unlike[0]}")
    return not unlike
