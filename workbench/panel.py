"""The panel: choose a run and a step, press Replay, see what happened. State and wiring only.

Handlers may be called in any thread: which one runs a widget's callback depends on the version of ipykernel. A replay
runs in one thread of its own, from loading to the last number, because MLX's arrays don't cross threads; what comes
back is a `Trace`, which holds numbers only. MLX is not imported before the first replay.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ipywidgets as W
import pandas as pd
from matplotlib.figure import Figure

from . import figures, plots, views, worker
from . import manifest as manifests
from .batch import batch_table
from .controls import UNCHOSEN, Controls, set_range, show
from .errors import EnvironmentMismatch, ReplayError, RunError, WorkbenchError
from .run import Run
from .share import shared
from .telemetry import Telemetry
from .trace import Trace

VARIABLE = "WORKBENCH_RUN"  # set by `workbench lab RUN`
EXAMPLE = "demo-run"
TOLD_EACH = 0.1  # seconds between two messages of progress
KEPT = 32  # traces, so that coming back to a step shows its replay again
LISTED = 500  # spikes


class Cancelled(ReplayError):
    """The replay was cancelled. Nothing on disk was changed."""


def guarded(method: Callable[..., Any]) -> Callable[..., None]:
    """A handler whose exceptions appear in the panel: a callback's would be lost to the person, and to tests."""

    @functools.wraps(method)
    def handler(self: Panel, *arguments: Any) -> None:
        try:
            method(self, *arguments)
        except Exception as error:  # the boundary of the user interface
            self.fail(error)

    return handler


class _Snapshot(Run):
    """A run as it was when it was opened: a running job appends lines, and reading them all again takes seconds."""

    @property
    def telemetry(self) -> Telemetry:
        return super().telemetry if self._telemetry is None else self._telemetry[1]


class Panel(Controls):
    """An instrument for one run at a time.

    Args:
        folder: the folder that holds the runs.
        run: the name of a run in `folder`, or the path of a run's folder. Without one, none is chosen.
        factory: for runs of your own loop, the "module:function" that rebuilds them: your consent to import it.
        example: with neither folder nor run given, open the small run that comes with the package.

    Where neither folder nor run is given, the run that `workbench lab RUN` named is opened.

    Attributes:
        opened: the chosen `Run`, as it was when it was chosen, or None.
        trace: the replay of the chosen step, or None.
        last_error: the exception in the error box, or None.
        step, run, …: the widgets, see `Controls`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        run: str | os.PathLike[str] | None = None,
        *,
        factory: str | None = None,
        example: bool = False,
    ) -> None:
        self.opened: Run | None = None
        self.last_error: BaseException | None = None
        self._factory = factory
        self._steps = pd.DataFrame()
        self._spikes = pd.DataFrame()
        self._timeline: views.Timeline | None = None
        self._traces: OrderedDict[tuple[str, int, int], Trace] = OrderedDict()
        self._shown: int | None = None  # segment in which the chosen step is shown
        self._lock = threading.RLock()  # a replay that ends shows its trace while another thread may move the slider
        self._setting = False  # controls are being set by the panel itself, not by a person; guarded by the lock
        self._running = False
        self._cancel = threading.Event()
        self._told = 0.0
        self._work: Future[None] | None = None
        super().__init__()
        self._wire()
        self._start(folder, run, example)

    # ---- beginning

    def _wire(self) -> None:
        W.link((self.step, "value"), (self.slider, "value"))
        self.folder.observe(lambda change: self.on_folder(), "value")
        self.run.observe(lambda change: self.on_run(), "value")
        self.refresh.on_click(lambda button: self.on_refresh())
        self.spikes.observe(lambda change: self.on_spike(), "value")
        self.step.observe(lambda change: self.on_step(), "value")
        self.segment.observe(lambda change: self.on_segment(), "value")
        self.replay_button.on_click(lambda button: self.on_replay())
        self.cancel_button.on_click(lambda button: self.on_cancel())

    @guarded
    def _start(self, folder: str | os.PathLike[str] | None, run: str | os.PathLike[str] | None, example: bool) -> None:
        if folder is None and run is None:
            if os.environ.get(VARIABLE):
                run = Path(os.environ[VARIABLE])
            elif example:
                run = shared("data") / EXAMPLE
        if run is not None and (not isinstance(run, str) or os.sep in run):
            folder, run = Path(run).parent, Path(run).name
        with self._lock:
            with self._by_itself():
                self.folder.value = str("runs" if folder is None else folder)
            self._list_runs(run)

    # ---- what a reader without a kernel sees, and what nbval compares

    def __repr__(self) -> str:
        if self.opened is None:
            return f"Panel(folder={Path(self.folder.value).name!r}, no run chosen)"
        replayed = ", replayed" if self.trace else ""
        return f"Panel(run={self.opened.name!r}, step={self.step.value}{replayed})"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        still = self.still()
        if not isinstance(bundle, dict) or still is None:
            return bundle
        return {**bundle, "image/png": still}

    def still(self) -> bytes | None:
        """The timeline and, once the step is replayed, its layers, as a PNG file; None without a run."""
        with self._lock:
            if self.opened is None or not len(self._steps):
                return None
            drawn = [self._draw_timeline(self.step.value)]
            if self.trace is not None:
                drawn.append(self._draw_layers(*self._layer_frames()))
            return figures.stacked(drawn)

    # ---- choosing

    @guarded
    def on_folder(self) -> None:
        """Lists the runs of the folder; the path of a run itself chooses that run."""
        with self._lock:
            if self._setting:
                return
            place = Path(self.folder.value).expanduser()
            if not (place / manifests.NAME).exists():
                self._list_runs(None)
                return
            with self._by_itself():
                self.folder.value = str(place.parent)
            self._list_runs(place.name)

    @guarded
    def on_refresh(self) -> None:
        """Reads folder and run again: runs appear, and a running job writes on."""
        with self._lock:
            name = self.run.value if self.run.value != UNCHOSEN else None
            self._list_runs(name, self.step.value if self.opened else None)

    @guarded
    def on_run(self) -> None:
        """Opens the chosen run."""
        with self._lock:
            if self._setting:
                return
            self._close()
            self._clear_error()
            if self.run.value != UNCHOSEN:
                self._open(Path(self.folder.value).expanduser() / self.run.value)

    def _list_runs(self, wanted: str | None, step: int | None = None) -> None:
        """Offers the runs of the folder, and opens the wanted one. None is chosen in its place."""
        folder = Path(self.folder.value).expanduser()
        self._close()
        self._clear_error()
        self._offer([], "choose a run")
        try:
            names = sorted(entry.name for entry in folder.iterdir() if (entry / manifests.NAME).exists())
        except OSError as error:
            raise RunError(
                f"{folder} can't be read ({error.strerror}); expected a folder that holds runs. "
                "Type another one into the field Folder."
            ) from error
        self._offer(names, "choose a run" if names else "no runs in this folder", wanted)
        if wanted in names:
            self._open(folder / wanted, step)
        elif wanted is not None:
            raise RunError(f"{wanted} is not a run in {folder}; it has {', '.join(names) or 'no runs'}")
        else:
            runs = f"{len(names)} run{'' if len(names) == 1 else 's'} in {folder}"
            self.facts.value = views.paragraph(f"{runs}: {'choose one' if names else 'type another folder'}.")

    def _offer(self, names: list[str], otherwise: str, chosen: str | None = None) -> None:
        with self._by_itself():
            self.run.options = [(otherwise, UNCHOSEN), *((name, name) for name in names)]
            self.run.value = chosen if chosen in names else UNCHOSEN

    def _close(self) -> None:
        self.opened, self._timeline, self._shown = None, None, None
        self._steps = self._spikes = pd.DataFrame()
        with self._by_itself():
            self.spikes.options = []
            for control in (self.step, self.slider):
                set_range(control, 0, 0)
            self.anyway.value = False
        for view in (self.facts, self.timeline, self.step_facts, self.estimate, self.badges, self.layers, self.batch):
            view.value = ""
        show(self.segment, False)
        show(self.anyway, False)
        if not self._running:
            self.status.value, self.progress.value = "", 0
        self._enable()

    def _open(self, path: Path, step: int | None = None) -> None:
        """Opens a run and shows a step: the given one, else the last spike, else the last step."""
        self.facts.value = views.paragraph(f"Reading {path.name} …")
        try:
            run = _Snapshot(path)
            steps, spikes = run.steps, run.spikes()
        except BaseException:
            self.facts.value = ""
            raise
        self.opened, self._steps, self._spikes = run, steps, spikes
        self.facts.value = views.run_facts(run, steps, spikes)
        if not len(steps):
            return
        alt = f"Loss, gradient norm and learning rate of {run.name} over {run.last_step} steps, with its spikes marked"
        self._timeline = views.Timeline(self._draw_timeline(None), alt)
        first, last = int(steps["step"].min()), int(steps["step"].max())
        options = self._spike_options()
        segment = None
        if step is None or not first <= step <= last:
            step, segment = options[-1][1] or (last, None)
        with self._by_itself():
            self.spikes.options = options
            for control in (self.step, self.slider):
                set_range(control, first, last)
            self.step.value = step
        self._enable()
        self._show_step(segment)

    def _spike_options(self) -> list[tuple[str, tuple[int, int] | None]]:
        """A line a spike; a stretch of non-finite steps is one."""
        several = self._steps["segment"].nunique() > 1
        lines: list[tuple[Any, int]] = []
        for row in self._spikes.itertuples():
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
        return options or [("none found", None)]

    # ---- looking at a step

    @guarded
    def on_spike(self) -> None:
        """Moves to the chosen spike, in its own segment."""
        with self._lock:
            if self._setting or self.spikes.value is None:
                return
            step, segment = self.spikes.value
            with self._by_itself():
                self.step.value = step
            self._show_step(segment)

    @guarded
    def on_step(self) -> None:
        """Shows what is known of the step. Replays are only ever started by the button or by `replay`."""
        with self._lock:
            if not self._setting:
                self._show_step()

    @guarded
    def on_segment(self) -> None:
        """Shows the step in the chosen segment."""
        with self._lock:
            if not self._setting:
                self._show_step(None if self.segment.value == UNCHOSEN else self.segment.value)

    @property
    def trace(self) -> Trace | None:
        """The replay of the chosen step, or None."""
        if self.opened is None or self._shown is None:
            return None
        return self._traces.get((self.opened.manifest.run, self.step.value, self._shown))

    def _show_step(self, segment: int | None = None) -> None:
        """Shows the chosen step, in this segment if it stands there."""
        run, step = self.opened, self.step.value
        if run is None or self._timeline is None:
            return
        self._clear_error()
        self.timeline.value = self._timeline.at(step)
        having = run.telemetry.segments_with(step)
        with self._by_itself():
            self._shown = self._choose_segment(run, step, having, segment)
            spike = (step, self._shown)
            self.spikes.value = spike if any(value == spike for _, value in self.spikes.options) else None
        if self._shown is None:
            self.step_facts.value = views.paragraph(
                f"Step {step:,} stands in segments {', '.join(map(str, having))}, and they differ: choose one."
                if having
                else f"Step {step:,} is not in the telemetry."
            )
            for view in (self.estimate, self.badges, self.layers, self.batch):
                view.value = ""
            return
        where = (self._steps["step"] == step) & (self._steps["segment"] == self._shown)
        why = self._spikes.loc[(self._spikes["step"] == step) & (self._spikes["segment"] == self._shown), "explanation"]
        self.step_facts.value = views.step_facts(self._steps[where].iloc[0], why)
        self.estimate.value = views.paragraph(self._plan(run, step))
        self.badges.value = "" if self.trace is None else views.badges(self.trace)
        self._show_batch(run, step)
        self._show_layers(step)

    def _choose_segment(self, run: Run, step: int, having: list[int], wanted: int | None) -> int | None:
        """The segment to show, or None; offers the choice where the step stands in several that differ."""
        try:
            usual = run.segment_of(step)[0]
        except ReplayError:
            usual = None
        show(self.segment, usual is None and bool(having))
        if usual is None:
            names = [(f"segment {number}", number) for number in having]
            self.segment.options = [("choose a segment", UNCHOSEN), *names]
            self.segment.value = wanted if wanted in having else UNCHOSEN
        return wanted if wanted in having else usual

    def _plan(self, run: Run, step: int) -> str:
        try:
            return f"A replay: {run.plan(step, self._shown).sentence()}."
        except ReplayError as error:
            return f"No replay: {error}."

    def _show_batch(self, run: Run, step: int) -> None:
        title = views.heading(f"Batch of step {step:,}")
        try:
            table = batch_table(run, step, self.trace, segment=self._shown)
        except WorkbenchError as error:
            self.batch.value = title + views.paragraph(f"Not shown: {error}.")
            return
        self.batch.value = title + views.batch(table)

    def _show_layers(self, step: int) -> None:
        layers, nearby = self._layer_frames()
        if not len(layers):
            self.layers.value = views.paragraph("No per-layer norms are recorded at this step.")
            return
        source = "from the telemetry" if self.trace is None else "replayed"
        alt = f"Norms of each layer at step {step}, {source}, and the range of the steps nearby"
        figure = views.picture(self._draw_layers(layers, nearby), alt)
        self.layers.value = figure + views.layer_table(layers, nearby, step, self.trace)

    def _layer_frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Layer rows of the chosen step, and the logged ones of the steps around it."""
        assert self.opened is not None and self._shown is not None
        step, trace = self.step.value, self.trace
        nearby = self.opened.norms(step, self._shown, views.AROUND)
        line = self.opened.line(step, self._shown)
        layers = views.telemetry_layers(self.opened, line) if trace is None else trace.layers
        return layers, nearby

    def _draw_layers(self, layers: pd.DataFrame, nearby: pd.DataFrame) -> Figure:
        step = self.step.value
        neighbours = nearby[nearby["step"] != step]
        return plots.layer_norms(layers, step=step, neighbours=neighbours if len(neighbours) else None)

    def _draw_timeline(self, step: int | None) -> Figure:
        assert self.opened is not None
        saved = [number for number, _ in self.opened.checkpoints]
        return plots.timeline(self._steps, self._spikes, step=step, checkpoints=saved, title=self.opened.name)

    # ---- replaying

    def replay(self, step: int, *, segment: int | None = None, **options: Any) -> Trace:
        """Replays a step in the calling thread, shows it, and returns its trace.

        Args:
            step: counted from 1.
            segment: where the step stands in several segments that disagree.
            options: further arguments of `Run.replay`, such as `experiment` or `other_environment`.

        Raises:
            WorkbenchError: as `Run.replay`; also if no run is chosen, or a replay is running already.
        """
        try:
            run = self._chosen_run()
            segment = run.plan(step, segment).segment  # says so if there is no such step
            if not self._begin():
                raise ReplayError(f"step {step} was not replayed: another replay is running; cancel it, or wait for it")
            try:
                with self._lock:
                    with self._by_itself():
                        self.step.value = step
                    self._show_step(segment)
                return self._perform(run, step, segment, options)
            finally:
                self._end()
        except BaseException as error:
            self.fail(error)
            raise

    @guarded
    def on_replay(self) -> None:
        """Starts a replay of the chosen step, and returns at once; `wait` waits for its end."""
        with self._lock:
            run, step, segment = self._chosen_run(), self.step.value, self._shown
            if segment is None and run.telemetry.segments_with(step):
                raise ReplayError(
                    f"step {step} stands in several segments that differ; choose one in the field Segment"
                )
            segment = run.plan(step, segment).segment
            options = {"other_environment": self.anyway.value}
        if not self._begin():
            self.status.value = views.paragraph("A replay is running. Cancel it first, or wait for its end.")
            return
        self._work = worker.submit(self._replay_in_worker, run, step, segment, options)

    def _replay_in_worker(self, run: Run, step: int, segment: int, options: dict[str, Any]) -> None:
        try:
            self._perform(run, step, segment, options)
        except Exception as error:  # as in `guarded`
            self.fail(error)
        finally:
            self._end()

    def _begin(self) -> bool:
        """Whether a replay may begin now: only one runs at a time, in this panel or any other of the process."""
        if not worker.alone.acquire(blocking=False):
            return False
        with self._lock:
            self._running = True
            self._cancel.clear()
            self._clear_error()
            self._enable()
        return True

    def _end(self) -> None:
        worker.alone.release()
        with self._lock:
            self._running = False
            self._enable()

    def _enable(self) -> None:
        self.replay_button.disabled = self._running or self._timeline is None
        self.cancel_button.disabled = not self._running

    def _perform(self, run: Run, step: int, segment: int, options: dict[str, Any]) -> Trace:
        began, options = time.monotonic(), {"factory": self._factory} | options
        self.progress.value, self.progress.bar_style = 0, "info"
        self.status.value = views.paragraph(f"Step {step:,}: starting …")
        try:
            trace: Trace = run.replay(step, segment=segment, progress=self._on_progress, **options)
        except BaseException as error:
            cancelled = isinstance(error, Cancelled | KeyboardInterrupt)
            self.progress.bar_style = "warning"
            self.status.value = views.paragraph(
                f"Step {step:,}: {'cancelled; nothing was changed' if cancelled else 'not replayed'}."
            )
            raise
        with self._lock:
            self._traces[run.manifest.run, step, trace.record.segment] = trace
            while len(self._traces) > KEPT:
                self._traces.popitem(last=False)
            here = self.opened is not None and self.opened.path == run.path and self.step.value == step
            if here:
                self._show_step(segment)
        self.progress.value, self.progress.bar_style = self.progress.max, "success"
        done = f"Step {step:,}{'' if here else f' of {run.name}'} replayed in {time.monotonic() - began:.1f} s."
        self.status.value = views.paragraph(done + ("" if here else " Go to that step to see it."))
        return trace

    def _on_progress(self, done: int, total: int, what: str) -> None:
        if self._cancel.is_set() or worker.leaving.is_set():
            raise Cancelled("the replay was cancelled; nothing was changed")
        now = time.monotonic()
        if now - self._told >= TOLD_EACH or done >= total:
            self._told = now
            self.progress.max, self.progress.value = max(total, 1), done
            self.status.value = views.paragraph(f"{what[:1].upper()}{what[1:]} ({done} of {total} passes done)")

    @guarded
    def on_cancel(self) -> None:
        """Asks the running replay to stop. It does before its next pass."""
        if self._running:
            self._cancel.set()
            self.status.value = views.paragraph("Cancelling, once the present pass has ended …")

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end of a replay that the button started.

        Raises:
            TimeoutError: it still runs.
        """
        if self._work is not None:
            self._work.result(timeout)

    def _chosen_run(self) -> Run:
        if self.opened is None:
            raise RunError("no run is chosen; choose one in the field Run")
        return self.opened

    # ---- errors

    def fail(self, error: BaseException) -> None:
        """Shows an error."""
        self.last_error = error
        if isinstance(error, Cancelled | KeyboardInterrupt):
            return  # the status says so
        hint = ""
        if isinstance(error, EnvironmentMismatch):
            show(self.anyway, True)
            hint = "Here: tick “Replay here anyway”, then press Replay again."
        self.error.value = views.alert(error, hint)

    def _clear_error(self) -> None:
        self.last_error, self.error.value = None, ""

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Inside, handlers ignore changes of controls: the panel makes them, not a person."""
        with self._lock:
            before, self._setting = self._setting, True
            try:
                yield
            finally:
                self._setting = before
