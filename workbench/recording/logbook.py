"""The telemetry that a recorder writes: when each line was written, how fast the steps are, what can't be written.

Knows lines; nothing of states, checkpoints or MLX's arrays.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..environment import PROCESS
from ..files import sync_folder
from ..journal import Journal
from ..lines.line import Line
from ..lines.writer import Writer
from ..manifest import NAME, digest
from ..recorded.layout import TELEMETRY
from ..untrusted import read_file


class Logbook:
    """
    Args:
        path: the run's folder.
        copy: a second writer that receives each line too.
        began: Unix time in seconds, that elapsed time counts from.

    Attributes:
        journal: the open telemetry.
    """

    def __init__(self, path: Path, copy: Writer | None, began: float) -> None:
        self._path, self._began = path, began
        self.journal = Journal(path / TELEMETRY, copy)
        sync_folder(path)  # the name of the file
        self._step_ended = time.perf_counter()
        self._unsynced: OSError | None = None  # why the lines are not known to be durable, at the end
        self._telling = self._telling_of_copy = False  # the user knows that it can't be written just now

    def append(self, segment: int, **fields: Any) -> None:
        """Appends a line with the time."""
        now = time.time()
        when: dict[str, Any] = {"t": round(now, 3), "elapsed_s": round(now - self._began, 3), "segment": segment}
        self.journal.put(Line(**when, **fields))

    def open_process(self, segment: int, step: int, run: str, lanes: dict[str, str], **more: Any) -> None:
        """The first line that this process writes; the first step is timed from here."""
        torn = {"torn_bytes": self.journal.torn_bytes} if self.journal.torn_bytes else {}
        self.append_meta(segment, step, run, lanes, **torn, **more)
        self._step_ended = time.perf_counter()

    def append_meta(self, segment: int, step: int, run: str, lanes: dict[str, str], **more: Any) -> None:
        """Says which state a segment goes on from, and what the manifest says now."""
        with contextlib.suppress(OSError, ValueError):  # a vanished one ends no training
            more["manifest"] = digest(read_file(self._path / NAME))
        self.append(segment, type="meta", step=step, run=run, process=PROCESS, state=lanes, **more)

    def effort(self) -> dict[str, Any]:
        """What the step that has just ended took, as it is logged."""
        now = time.perf_counter()
        speed, self._step_ended = 1 / max(now - self._step_ended, 1e-9), now
        return {"step_per_s": round(speed, 4), "peak_rss_mb": _peak_mb()}

    def troubles(self, step: int) -> Iterator[str]:
        """A sentence on why telemetry can't be written, if the user does not know yet, or if that is for good; and on
        its copy, which is not waited for."""
        journal, telling, telling_of_copy = self.journal, self._telling, self._telling_of_copy
        self._telling, self._telling_of_copy = journal.failure is not None, journal.copy_failure is not None
        if journal.failure is not None and (journal.lost or not telling):
            lost = "Nothing more is recorded." if journal.lost else "Training goes on; its lines wait in memory."
            yield f"telemetry of step {step} can't be written to {self._path}: {journal.failure}. {lost}"
        if journal.copy_failure is not None and not telling_of_copy:
            yield (
                f"the copy of telemetry (copy_telemetry_to) can't be written at step {step}: {journal.copy_failure}. "
                f"Its lines wait in memory; {self._path} has them"
            )

    @property
    def seal(self) -> str | None:
        """The seal of the last line; see `lines.seal`."""
        return self.journal.seal

    def sync(self) -> bool:
        """Makes all lines durable. Returns whether they are known to be."""
        try:
            self.journal.sync()
        except FileNotFoundError:  # the folder has gone, of which checkpoints tell
            return False
        except OSError as error:
            self._unsynced = error
            return False
        return True

    def close(self) -> str | None:
        """Closes the files. Returns a sentence on lines that were not written, if there are any."""
        self.journal.close()
        failure = self.journal.failure
        if failure is not None:
            return f"the last lines of telemetry of {self._path} were not written: {failure}"
        if self._unsynced is not None:
            return (
                f"the last lines of telemetry of {self._path} were written, and are not known to be on the disk "
                f"({self._unsynced}): a power failure may take them, and the manifest does not say that the run ended"
            )
        return None

    def copy_left(self) -> str | None:
        """After `close`: a sentence, if the copy lacks lines. The run does not."""
        if self.journal.copy_failure is None and not self.journal.copy_lost:
            return None
        why = self.journal.copy_failure or "too many had to wait"
        return f"the last lines of the copy of telemetry (copy_telemetry_to) were not written: {why}"


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux, bytes on macOS
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)
