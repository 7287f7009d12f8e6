"""A run as it was when it was opened: its tables, its spikes as a list to choose from, its timeline. No widgets."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from msgspec import UNSET

from ..errors import ReplayError
from ..foreign.logged_run import LoggedRun, LoggedTelemetry
from ..manifest import NAME
from ..ranks.carrier import carried_in
from ..run import Run
from ..telemetry import Telemetry
from . import timeline_figure, views
from .timeline_view import Timeline

LISTED = 500  # spikes
KEPT_TIMELINES = 8


class _Snapshot(Run):
    """A running job appends lines, and reading them all again takes seconds."""

    @property
    def telemetry(self) -> Telemetry:
        return super().telemetry if self._telemetry is None else self._telemetry[1]


class _LoggedSnapshot(LoggedRun):
    """The same of a log of another program."""

    @property
    def telemetry(self) -> LoggedTelemetry:  # type: ignore[override]
        return super().telemetry if self._read is None else self._read[1]


class Opened:
    """A run's folder, or a log of another program, read once.

    Attributes:
        run: does not see what is recorded from now on.
        steps, spikes: as `Run.steps` and `Run.spikes()`.
        first, last: steps that can be looked at; both 0 where there is none.
        spike_options: what a list of the spikes offers: (label, (step, segment)).

    Raises:
        RunError, TelemetryError: it can't be read.
    """

    def __init__(self, path: Path) -> None:
        self.run: Run = _Snapshot(path) if (path / NAME).exists() or not path.exists() else _LoggedSnapshot(path)
        self.steps, self.spikes = self.run.steps, self.run.spikes()
        self.first, self.last = (int(self.steps["step"].min()), int(self.steps["step"].max())) if len(self) else (0, 0)
        self.spike_options = self._spike_options()
        self._timelines: dict[tuple[int, int] | None, Timeline] = {}

    def __len__(self) -> int:
        """Lines of telemetry that are steps."""
        return len(self.steps)

    @property
    def facts(self) -> str:
        return views.run_facts(self.run, self.steps, self.spikes)

    @property
    def unexplained(self) -> str | None:
        """Why no cause of a spike can be looked for; None: it can be."""
        if (ranks := self.run.manifest.ranks) is UNSET:
            return self.run.unverifiable()
        return (
            f"Recorded by {ranks.size} ranks together: causes are not looked for, since experiments are made of steps "
            "of one process. Replay proves a step on all ranks, and says whose batch carried it"
        )

    def timeline(self, shown: tuple[int, int] | None = None) -> Timeline:
        """Of all steps, or of a range of them; the last few are kept."""
        if shown not in self._timelines:
            while len(self._timelines) >= KEPT_TIMELINES:
                self._timelines.pop(next(other for other in self._timelines if other is not None))
            first, last = shown or (self.first, self.last)
            alt = f"Loss, gradient norm and learning rate of {self.run.name}, steps {first:,} to {last:,}, with its "
            alt += "spikes and checkpoints marked"
            self._timelines[shown] = Timeline(self.draw(None, shown), alt, first, last)
        return self._timelines[shown]

    def draw(self, step: int | None, shown: tuple[int, int] | None = None) -> Figure:
        steps, spikes, saved = self.steps, self.spikes, [number for number, _ in self.run.checkpoints]
        title = self.run.name
        if shown is not None:
            steps, spikes = (frame[frame["step"].between(*shown)] for frame in (steps, spikes))
            saved = [number for number in saved if shown[0] <= number <= shown[1]]
            title += f", steps {shown[0]:,} to {shown[1]:,} of {self.last:,}"
        return timeline_figure.timeline(steps, spikes, step=step, checkpoints=saved, title=title)

    def where_to_begin(self, step: int | None) -> tuple[int, int | None]:
        """A step and its segment: the given one if the run has it, else the last spike, else the last step."""
        if step is not None and self.first <= step <= self.last:
            return step, None
        return self.spike_options[-1][1] or (self.last, None)

    def segments(self, step: int) -> tuple[int | None, list[int]]:
        """The segment in which a step is looked at, None where a person must choose; and all that have it."""
        try:
            usual = self.run.segment_of(step)[0]
        except ReplayError:
            usual = None
        return usual, self.run.telemetry.segments_with(step)

    def row(self, step: int, segment: int) -> pd.Series:
        """Of `steps`."""
        return self.steps[(self.steps["step"] == step) & (self.steps["segment"] == segment)].iloc[0]

    def flagged(self, first: int, last: int) -> list[int]:
        """Steps of a range that a rule of spike detection names."""
        return self.spikes.loc[self.spikes["step"].between(first, last), "step"].unique().tolist()

    def explanations(self, step: int, segment: int) -> list[str]:
        """Why a step is a spike; nothing if it is none."""
        own = (self.spikes["step"] == step) & (self.spikes["segment"] == segment)
        return self.spikes.loc[own, "explanation"].tolist()

    def unjudged(self, step: int, segment: int) -> list[str]:
        """That no rule could judge the step, if so: it may stand out all the same."""
        if segment != self.run.manifest.segments[0].segment or step > self._judged_after:
            return []
        return [] if self.explanations(step, segment) else [f"Not judged whether it is a spike. {self.run.unjudged()}"]

    @functools.cached_property
    def _judged_after(self) -> float:
        return self.run.judged_after()

    def carried(self, step: int, segment: int) -> list[str]:
        """Whose batch carried the step, where several ranks trained together; else nothing."""
        if self.run.manifest.ranks is UNSET:
            return []
        found = carried_in(self.run, step, segment)
        return [] if found is None else [found.sentence(step)]

    def _spike_options(self) -> list[tuple[str, tuple[int, int] | None]]:
        """A line a spike; a stretch of non-finite steps is one."""
        several = self.steps["segment"].nunique() > 1
        lines: list[tuple[Any, int]] = []
        for row in self.spikes.itertuples():
            if lines and row.rule == "non_finite":
                start, last = lines[-1]
                if (start.rule, start.segment, last) == (row.rule, row.segment, row.step - 1):
                    lines[-1] = (start, row.step)
                    continue
            lines.append((row, row.step))
        options: list[tuple[str, tuple[int, int] | None]] = [
            (views.spike_label(row, last, several), (int(row.step), int(row.segment))) for row, last in lines[:LISTED]
        ]
        if len(lines) > LISTED:
            options.insert(0, (f"the first {LISTED} of {len(lines)}; type the step of a later one", None))
        return options or [("no step was judged" if self._judged_after == math.inf else "none found", None)]
