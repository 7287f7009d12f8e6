"""The dashboard: runs over each other in one picture, finished ones and those that are still training."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from . import figures
from .detection.shared_spikes import NEAR, SpikeComparison, compare_spikes, different
from .errors import WorkbenchError
from .run import Run, open_run
from .screen import curves, markup
from .screen.curve import GRAD_NORM, LABELS, LOSS, MARKS, NOISY, RATE, VALIDATION
from .screen.curves import RunCurves
from .screen.curves_figure import SCALES, Drawn, overlay
from .screen.dashboard_controls import DashboardControls, list_rows
from .screen.timeline_view import Timeline

EVERY = 1.0  # seconds between two looks at the logs while following
SHORTEST = 0.2
NO_RUNS = "No run is given: expected runs, their folders, logs, or a folder that holds runs."


class Dashboard(DashboardControls):
    """Loss, validation loss, gradient norm, learning rate and speed of several runs, over each other.

    Nothing is computed but what is shown, and no run is written to. A log of a million steps is drawn from the lowest
    and highest value of each column of pixels, so that no spike is lost (see `screen.thinning`).

    Args:
        runs: opened runs, folders of runs, or logs of other programs; a mapping gives them names; a single folder that
            holds runs stands for all of them.
        quantities: panels: some of "loss", "val_loss" (in the panel of the loss), "grad_norm", "lr", "step_per_s".
        scale: of loss and gradient norm: "auto", "linear" or "log".
        smooth: the curve is the mean of so many values, the last of them at its step, over the values themselves.
        spikes: whose spikes are marked: "recorded" (as each log names them), "all" rules of `detect_spikes` or one of
            them, or "none". None: as recorded if every log names them, else all.
        follow: read on while the runs are training.
        every: seconds between two looks at their logs; 0.2 or more.

    Attributes:
        names: of the runs.
        unread: why a run of the folder is not shown, by its name: it can't be read.
        last_error: the exception in the red box, or None.
        chosen, shown, scale, smooth, marked, zoom, step, follow: the widgets.

    Raises:
        WorkbenchError: there is no run, or an argument is out of range; and as `open_run`, but where other runs of a
            folder can be read.
    """

    _stop: threading.Event | None = None  # of the thread that follows; a widget that could not be made is closed, too

    def __init__(
        self,
        runs: Any,
        *,
        quantities: Sequence[str] = (LOSS, VALIDATION, GRAD_NORM, RATE),
        scale: str = "auto",
        smooth: int = 1,
        spikes: str | None = None,
        follow: bool = False,
        every: float = EVERY,
    ) -> None:
        if unknown := [name for name in quantities if name not in LABELS]:
            raise WorkbenchError(f"{unknown[0]!r} is no quantity; expected some of {', '.join(LABELS)}.")
        if scale not in SCALES:
            raise WorkbenchError(f"scale is {scale!r}; expected one of {', '.join(SCALES)}.")
        if type(smooth) is not int or smooth < 1:
            raise WorkbenchError(f"smooth is {smooth!r}; expected a whole number of values, 1 or more.")
        if not every >= SHORTEST:
            raise WorkbenchError(f"every is {every!r}; expected seconds, {SHORTEST} or more.")
        self._every = every
        self.last_error: Exception | None = None
        self._lock = threading.RLock()
        self._opened, self.unread = _opened(runs)
        recorded = all(run.names_spikes for run in self._opened)
        known = [value for _, value in curves.rules_to_choose()]
        spikes = (curves.RECORDED if recorded else curves.ALL) if spikes is None else spikes
        if spikes not in known:
            raise WorkbenchError(f"spikes is {spikes!r}; expected one of {', '.join(known)}.")
        super().__init__(self.names, quantities, scale, smooth, spikes)
        for control in (self.chosen, *self.shown.values(), self.scale, self.smooth, self.marked, self.zoom, self.step):
            control.observe(lambda change: self._guard(self._draw), "value")
        self.follow.observe(lambda change: self._guard(self._switch), "value")
        self._guard(self._draw)
        if follow:
            self.follow.value = True

    # ---- what a reader without a kernel sees, and what nbval compares

    def __repr__(self) -> str:
        steps = max((run.span[1] for run in self._opened), default=0)
        error = "" if self.last_error is None else f", error={type(self.last_error).__name__}"
        return f"Dashboard(runs={self.names}, steps={steps}{error})"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        return {**bundle, "image/png": self.still()} if isinstance(bundle, dict) else bundle

    def still(self) -> bytes:
        """What is shown, as a PNG file."""
        return figures.stacked([self.figure()])

    # ---- from Python

    @property
    def names(self) -> list[str]:
        return [run.name for run in self._opened]

    def refresh(self) -> bool:
        """Reads what the logs have got since the last time, and draws it; whether there was anything.

        Raises:
            TelemetryError: a log is gone or damaged.
        """
        with self._lock:
            grown = [run.read() for run in self._opened]
            if any(grown):
                self._draw()
            return any(grown)

    def add(self, run: Run | str | os.PathLike[str], name: str | None = None) -> None:
        """Adds a run, and shows it.

        Raises:
            RunError, TelemetryError: it can't be read.
        """
        opened = run if isinstance(run, Run) else open_run(run)
        with self._lock:
            unique = different([*self.names, opened.name if name is None else name])[-1]
            self._opened.append(RunCurves(opened, unique))
            chosen = (*self.chosen.value, unique)
            self.chosen.options, self.chosen.rows = self.names, list_rows(self.names)
            self.chosen.value = chosen

    def figure(self) -> Figure:
        """What is shown, as a figure of matplotlib.

        Raises:
            WorkbenchError: nothing is chosen, or the steps to show are none.
        """
        with self._lock:
            low, high = self._range()
            drawn = [self._drawn(place) for place, run in enumerate(self._opened) if run.name in self.chosen.value]
            panels = [quantity for quantity, box in self.shown.items() if box.value]
            if not drawn:
                raise WorkbenchError("No run is chosen; choose one or more in the field Runs.")
            smooth = self.smooth.value
            title = ", ".join(run.name for run in drawn)
            return overlay(drawn, panels, low, high, scale=self.scale.value, smooth=smooth, title=title)

    @property
    def table(self) -> pd.DataFrame:
        """One row a chosen run: run, step, loss, val_loss, grad_norm, lr, step_per_s, segments, spikes,
        not_finite_since.

        The values are the last that were logged, NaN and infinite ones too; where a step is chosen, what was logged at
        it; NaN where nothing was. `spikes` counts those that are marked. `not_finite_since`: the step from which on the
        loss was NaN or infinite, to the end; NA: it ends finite.
        """
        with self._lock:
            rows = []
            for run in self._chosen_runs():
                step = self.step.value or run.span[1]
                at = run.at(step) if self.step.value else {name: run.last(name) for name in LABELS}
                values = [at.get(name, float("nan")) for name in LABELS]
                counts = len(run.segments), len(run.marks(self.marked.value))
                rows.append((run.name, step, *values, *counts, run.broken_since(LOSS)))
            frame = pd.DataFrame(rows, columns=["run", "step", *LABELS, "segments", "spikes", "not_finite_since"])
            return frame.astype({"not_finite_since": "Int64"})

    def spikes(self) -> pd.DataFrame:
        """The marked spikes of the chosen runs: run, segment, onset, step, rule, quantity, value."""
        with self._lock:
            tables = [run.marks(self.marked.value).assign(run=run.name) for run in self._chosen_runs()]
            names = ["run", *MARKS]
            filled = [table for table in tables if len(table)]
            return pd.concat(filled, ignore_index=True)[names] if filled else pd.DataFrame(columns=names)

    def compare(self, rules: Sequence[str] | None = None, near: int = NEAR) -> SpikeComparison:
        """The spikes of the chosen runs beside each other, as `compare_spikes`."""
        return compare_spikes([run.run for run in self._chosen_runs()], rules, near=near)

    def close(self) -> None:
        """Stops following, and takes the widgets out of the page."""
        self._end()
        super().close()

    # ---- drawing

    def _draw(self) -> None:
        figure = self.figure()
        low, high = self._range()
        chosen = ", ".join(self._chosen_names())
        panels = ", ".join(LABELS[name] for name, box in self.shown.items() if box.value)
        alt = (
            f"{panels[:1].upper()}{panels[1:]} of {chosen}, steps {low:,} to {high:,}, with spikes and segments marked"
        )
        self.picture.value = Timeline(figure, alt, low, high).at(self.step.value or None, live=True)
        self.numbers.value = self._numbers()
        self.status.value = markup.small(self._remark())

    def _drawn(self, place: int) -> Drawn:
        run, smooth = self._opened[place], self.smooth.value
        names = [name for name, box in self.shown.items() if box.value]
        every = {name: run.curves(name) for name in names}
        smoothed = {name: run.smoothed(name, smooth) for name in names if name in NOISY and smooth > 1}
        marks = run.marks(self.marked.value)
        return Drawn(run.name, place, every, smoothed, marks, run.segments[1:])

    def _range(self) -> tuple[int, int]:
        spans = [run.span for run in self._chosen_runs() if run.span[1]]
        low, high = (min(a for a, _ in spans), max(b for _, b in spans)) if spans else (0, 0)
        text = self.zoom.value.strip().replace(" ", "").replace(",", "")
        if not text or text == "all":
            return low, high
        first, dash, last = text.partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)) or (dash and int(first) > int(last)):
            raise WorkbenchError(f"The steps to show are {text!r}; expected such as 90-110, or nothing for all.")
        return int(first), int(last or first)

    def _numbers(self) -> str:
        frame = self.table
        runs = dict(zip(frame["run"], self._chosen_runs(), strict=True))
        columns: dict[str, list[str]] = {
            name: [self._number(row, name, runs[row["run"]]) for row in frame.to_dict("records")] for name in LABELS
        }
        columns = {name: numbers for name, numbers in columns.items() if any(numbers)}
        head = ["run", "step", *(LABELS[name] for name in columns), "segments", "spikes"]
        lines = []
        for place, row in enumerate(frame.to_dict("records")):
            numbers = [column[place] for column in columns.values()]
            counts = [f"{row['step']:,}", *numbers, f"{row['segments']}", f"{row['spikes']}"]
            cells = [markup.cell(row["run"], left=True, wrap=True), *map(markup.cell, counts)]
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return markup.table(head, "".join(lines), 20)

    def _number(self, row: dict[str, Any], name: str, run: RunCurves) -> str:
        """A value as it stands in a cell; of a loss that went, also since when. Nothing where nothing was logged."""
        if np.isfinite(row[name]):
            return markup.number(row[name], 5)
        if not run.is_broken(name, self.step.value or None):
            return ""
        since = run.broken_since(name)
        told = since is not None and (not self.step.value or self.step.value >= since)
        return f"{markup.number(row[name])}{f' since step {since:,}' if told else ''}"

    def _remark(self) -> str:
        said = [f"{name} can't be read, so it is not shown: {why}" for name, why in self.unread.items()]
        if self.smooth.value > 1:
            said.append(
                f"Each point of a strong line is the mean of {self.smooth.value:,} values, the last at its step."
            )
        if self.marked.value == curves.RECORDED:
            silent = [run.name for run in self._chosen_runs() if not run.names_spikes]
            if silent:
                said.append(f"The log of {', '.join(silent)} names no spikes; choose a rule to find them.")
        if logs := [run.name for run in self._chosen_runs() if run.run.unverifiable() is not None]:
            said.append(f"Only a log, in which nothing can be replayed or verified: {', '.join(logs)}.")
        for run in self._chosen_runs():
            if (looked := run.looked_up_to(self.marked.value)) < run.span[1]:
                said.append(f"Spikes of {run.name} were looked for up to step {looked:,}.")
        if self.follow.value:
            said.append(f"Following: looked at every {self._every:g} s.")
        return " ".join(said)

    def _chosen_runs(self) -> list[RunCurves]:
        return [run for run in self._opened if run.name in self.chosen.value]

    def _chosen_names(self) -> list[str]:
        return [run.name for run in self._chosen_runs()]

    # ---- following

    def _switch(self) -> None:
        self._end()
        if self.follow.value:
            self._stop = threading.Event()
            # A daemon: it ends with the kernel.
            threading.Thread(target=self._watch, args=(self._stop,), name="workbench-dashboard", daemon=True).start()
        self._draw()

    def _watch(self, stop: threading.Event) -> None:
        while not stop.wait(self._every):
            self._guard(functools.partial(self._look, stop))

    def _look(self, stop: threading.Event) -> None:
        if not stop.is_set():
            self.refresh()

    def _end(self) -> None:
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _guard(self, handle: Callable[[], Any]) -> None:
        """An exception in a handler or thread would be lost to the person; here it is shown."""
        try:
            with self._lock:
                handle()
                if self.last_error is not None:
                    self.last_error, self.error.value = None, ""
        except Exception as error:  # the boundary of the user interface
            self.last_error = error
            self.error.value = markup.alert(error)


def _opened(given: Any) -> tuple[list[RunCurves], dict[str, str]]:
    """The runs, and those of a folder that can't be read, by name with the reason."""
    unread: dict[str, str] = {}
    if isinstance(given, Mapping):
        pairs = [(str(name), _run(one)) for name, one in given.items()]
        return _curves(pairs), unread
    if isinstance(given, str | os.PathLike) and (folder := Path(given)).is_dir() and _holds_runs(folder):
        curves = []
        for path in sorted(path for path in folder.iterdir() if (path / "run.json").exists()):
            try:
                curves.append(RunCurves(_run(path), path.name))
            except WorkbenchError as error:
                unread[path.name] = str(error)
                failed = error
        if not curves:
            raise failed
        return curves, unread
    one = isinstance(given, Run | str | os.PathLike)
    opened = [_run(run) for run in ([given] if one else list(given))]
    return _curves(list(zip(different([run.name for run in opened]), opened, strict=True))), unread


def _curves(pairs: Sequence[tuple[str, Run]]) -> list[RunCurves]:
    if not pairs:
        raise WorkbenchError(NO_RUNS)
    return [RunCurves(run, name) for name, run in pairs]


def _run(given: Any) -> Run:
    return given if isinstance(given, Run) else open_run(given)


def _holds_runs(folder: Path) -> bool:
    """Whether a folder is no run itself, but one of runs."""
    return not (folder / "run.json").exists() and any((path / "run.json").exists() for path in folder.iterdir())
