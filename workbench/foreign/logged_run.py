"""A run of which only a log is there: its steps, spikes and segments, and for all else a sentence on what is missing.

It stands where a `Run` stands, in panel and commands. Its manifest is made up of what a log can say, which is next to
nothing: no layers, no parameters, no environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import xxhash

from .. import __version__
from ..enumeration import counted, some
from ..errors import ReplayError
from ..lines.line import Line
from ..manifest import NAME, Manifest, Segment
from ..recorded.layout import TELEMETRY
from ..run import Run
from .entries import Entries, gathered
from .naming import quoted
from .recognise import FORMATS, entries_of, log_of, recognised


@dataclass(frozen=True)
class Logged:
    """What a log says of a step.

    Attributes:
        first, last: the steps whose mean it is; the same where it is one step's own.
        loss: float64.
        decimals: to which it was printed; None: all.
    """

    first: int
    last: int
    loss: float
    decimals: int | None = None

    def agrees(self, losses: Mapping[int, float]) -> bool:
        """Whether the mean of these losses is what the log says, as far as it was printed.

        Args:
            losses: by step, of a replay of the window or of a recorded run.

        Raises:
            ReplayError: a step of the window is missing.
        """
        missing = [step for step in range(self.first, self.last + 1) if step not in losses]
        if missing:
            raise ReplayError(
                f"steps [{some(missing)}] of {self.first} to {self.last} have no loss; all of them are needed"
            )
        mean = math.fsum(losses[step] for step in range(self.first, self.last + 1)) / (self.last + 1 - self.first)
        if not math.isfinite(mean) or not math.isfinite(self.loss):
            return math.isnan(mean) == math.isnan(self.loss) and (math.isnan(mean) or mean == self.loss)
        # Half a unit of the last printed place; else what summing in float32 may have moved.
        room = 0.5 * 10.0**-self.decimals if self.decimals is not None else abs(mean) * 2.0**-22
        return abs(mean - self.loss) <= room * (1 + 1e-9)


class LoggedRun(Run):
    """A log of another program, opened as a run.

    Attributes:
        path: the log.
        format: a key of `recognise.FORMATS`.
        mapping: the workbench's names, and what the log calls them.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str | None = None,
        columns: Mapping[str, str | None] | None = None,
        previous: bool = False,
    ) -> None:
        self.path = log_of(Path(path))
        self.format = recognised(self.path) if format is None else format
        self._set, self._columns, self._previous = format, columns, previous
        self._read: tuple[Any, LoggedTelemetry] | None = None
        self.manifest = _manifest(self.path, self.telemetry.frame())

    @property
    def mapping(self) -> dict[str, str]:
        return self.telemetry.entries.mapping

    @property
    def telemetry(self) -> LoggedTelemetry:  # type: ignore[override]
        """The log, read again when it has grown."""
        status = self.path.stat() if self.path.exists() else None
        key = None if status is None else (status.st_size, status.st_mtime_ns)
        if self._read is None or self._read[0] != key:
            entries = entries_of(self.path, self.format, self._columns, self._previous)
            self._read = (key, LoggedTelemetry(self.path, self.format, self._set is not None, entries))
            self.manifest = _manifest(self.path, self._read[1].frame())
        return self._read[1]

    @property
    def steps(self) -> pd.DataFrame:
        """One row a step: the columns of `Run.steps`; and first_step: the logged loss is the mean from it to `step`."""
        return self.telemetry.frame()

    @property
    def checkpoints(self) -> list[tuple[int, int]]:
        return []

    def logged(self, step: int, segment: int | None = None) -> Logged:
        """The loss that the log has at a step, and the steps that it is the mean of.

        Raises:
            ReplayError: the log has no loss there.
        """
        chosen = self.segment_of(step, segment)[0]
        row = self.telemetry.row(step, chosen)
        if row is None or not row["loss_recorded"]:
            raise ReplayError(f"{self.path} has no loss at step {step}")
        return Logged(int(row["first_step"]), step, float(row["loss"]), self.telemetry.entries.decimals)

    def unverifiable(self) -> str:
        """What can't be verified, and why: a sentence."""
        folder = self.path.parent
        if self.path.name == TELEMETRY and (folder / NAME).exists():
            return (
                f"{self.path} alone is read as a log, and it is the telemetry of the run {folder}: name the folder, "
                f"{folder}, to replay, verify or explain its steps"
            )
        return (
            f"{self.path} is only a log ({FORMATS[self.format]}): it has no checkpoints, no batches and no "
            "fingerprints, so that no step of it can be replayed, verified or explained. Record the training with "
            "workbench.Recorder to be able to"
        )

    def unstable(self) -> pd.DataFrame:
        """Nothing: only this package's recorder calls steps so."""
        return pd.DataFrame({"step": [], "segment": [], "explanation": []}).astype(
            {"step": "int64", "segment": "int64"}
        )

    def unjudged(self, window: int | None = None) -> str:
        entries = self.telemetry.entries
        if not without_loss(self):
            return super().unjudged(window)
        norms = ". Its gradient norms are judged with --rule grad_norm_median" if "grad_norm" in entries.mapping else ""
        return (
            f"No loss was judged: no key of {self.path} was taken for it; set it with --columns loss=KEY, "
            f"columns={{'loss': …}} (its keys: {quoted(entries.keys)}){norms}."
        )

    def _refuse(self, *arguments: Any, **options: Any) -> NoReturn:
        raise ReplayError(self.unverifiable())

    plan = replay = context = diverge = whatif = autopsy = batch_facts = verify = _refuse

    def verdict(self, step: int, segment: int | None = None) -> None:
        return None

    def seam(self, segment: int) -> list[str]:
        return []

    def edits(self, step: int, segment: int) -> None:
        return None

    def __repr__(self) -> str:
        return f"LoggedRun({str(self.path)!r}, format={self.format!r}, steps={self.last_step})"

    def _facts(self) -> dict[str, Any]:
        return {
            "log": self.name,
            "recognised as": FORMATS[self.format],
            "read as": ", ".join(f"{name} = {key}" for name, key in self.mapping.items()),
            "steps": self.last_step,
            "segments": len(self.manifest.segments),
            "spikes": some(self.spikes()["step"], 12) or "none",
            "not verified": self.unverifiable(),
        }


def without_loss(run: Run) -> bool:
    """Whether a run is a log in which no key was taken for the loss."""
    if not isinstance(run, LoggedRun):
        return False
    entries = run.telemetry.entries
    return bool(entries.keys) and "loss" not in entries.mapping


class LoggedTelemetry:
    """The entries of a log, where a run has its `Telemetry`.

    Attributes:
        notices: what was recognised, how it was read, and what had to be tolerated.
    """

    def __init__(self, path: Path, kind: str, given: bool, entries: Entries) -> None:
        self.path, self.entries = path, entries
        self._frame = gathered(entries)
        names = ", ".join(f"{name} = {key!r}" for name, key in entries.mapping.items())
        self.notices = [f"{'Read' if given else 'Recognised'} as {FORMATS[kind]}: {names}."]
        if entries.windows:
            self.notices.append(
                "Each logged loss is the mean of the steps since the one logged before, and no step's own."
            )
        if empty := len(entries.step) - int(np.count_nonzero(entries.useful())):
            having = counted(empty, "entry has", "entries have")
            self.notices.append(
                f"{having} a step and none of these values; {'it is no row' if empty == 1 else 'they are no rows'}."
            )
        self.notices += entries.notices
        self._places = {
            int(segment): rows["step"].to_numpy() for segment, rows in self._frame.groupby("segment", sort=True)
        }
        self._starts = {segment: int(np.argmax(self._frame["segment"] == segment)) for segment in self._places}

    def __len__(self) -> int:
        return len(self._frame)

    def frame(self) -> pd.DataFrame:
        return self._frame.copy()

    def validations(self) -> pd.DataFrame:
        """As `Telemetry.validations`; one before the first step is among the notices."""
        frame = self._frame
        return frame.loc[frame["val_loss"].notna(), ["segment", "step", "val_loss"]].reset_index(drop=True)

    def row(self, step: int, segment: int) -> pd.Series | None:
        """A row of the frame, or None."""
        steps = self._places.get(segment)
        place = -1 if steps is None else int(np.searchsorted(steps, step))
        if steps is None or place >= len(steps) or steps[place] != step:
            return None
        return self._frame.iloc[self._starts[segment] + place]

    def at(self, step: int, segment: int) -> Line | None:
        """The step as a line of telemetry. A mean over several steps is no loss of this one, and is left out."""
        row = self.row(step, segment)
        return None if row is None else _line(row)

    @property
    def lines(self) -> list[Line]:
        return [_line(row) for _, row in self._frame.iterrows()]

    @property
    def metas(self) -> list[Line]:
        return []

    @property
    def rollbacks(self) -> list[Line]:
        return []

    def meta(self, segment: int) -> None:
        return None

    def meta_before(self, step: int, segment: int) -> None:
        return None

    def segments_with(self, step: int) -> list[int]:
        return [segment for segment in self._places if self.row(step, segment) is not None]

    def last_step(self, segment: int | None = None) -> int:
        return max((int(own[-1]) for number, own in self._places.items() if segment in (None, number)), default=0)

    def column(self, name: str) -> np.ndarray | None:
        return self._frame[name].to_numpy() if name in self._frame else None


def _line(row: pd.Series) -> Line:
    fields: dict[str, Any] = {"step": int(row["step"]), "segment": int(row["segment"])}
    for name in ("loss", "grad_norm"):
        if row[f"{name}_recorded"] and (name != "loss" or row["first_step"] == row["step"]):
            fields[name] = float(row[name]) if math.isfinite(row[name]) else None
    if math.isfinite(row["lr"]):
        fields["lr"] = float(row["lr"])
    return Line(type="step", **fields)


def _manifest(path: Path, frame: pd.DataFrame) -> Manifest:
    numbers = sorted(frame["segment"].unique().tolist()) or [0]
    starts = frame.groupby("segment")["first_step"].min() - 1
    segments = []
    for number in numbers:
        start, parent = (0, None) if number == 0 else (max(0, int(starts[number])), number - 1)
        segments.append(Segment(segment=number, start=start, parent=parent, t=0.0, environment={}))
    return Manifest(
        run=xxhash.xxh3_128_hexdigest(os.fsencode(path.resolve())),
        created=0.0,
        workbench=__version__,
        rebuild={"kind": "none"},
        options={},
        optimizer={},
        data=[],
        layers=[],
        owned={},
        parameters=[],
        fingerprint="none",
        save_every=0,
        spikes=None,
        segments=segments,
    )
