"""The panel: choose a run and a step, press a button, see what happened. What it is made of is put together here.

A person chooses a run (`choosing`) and a step and view of it (`viewing`); slow work (`tasks`) is done by another
process (`work`), or here where it needs an object of this notebook (`doing`), and its results are kept (`results`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import figures, worker
from .errors import ExperimentError, ReplayError, RunError
from .interventions.changes import parse_change
from .run import Run
from .screen import tasks
from .screen.boundary import Boundary
from .screen.choosing import Chooser
from .screen.code_view import naming
from .screen.controls import BADGES, ENVIRONMENT, Controls, keep_room
from .screen.doing import Desk, Doer
from .screen.here import Here
from .screen.performing import Performer
from .screen.results import Found, Results
from .screen.tasks import Task
from .screen.viewing import Viewer
from .share import shared

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

    from .examination.diagnosis import Report
    from .experiment import Experiment
    from .probes.neighbours import Context
    from .trace import Trace
    from .verdict import Verdict

VARIABLE = "WORKBENCH_RUN"  # set by `workbench lab RUN`
EXAMPLE = "demo-run"
ONLY_HERE = "The experiment exists only in this notebook, so it is replayed here: Cancel waits for the end of a step."
BUSY = "Work is being done already. Cancel it first, or wait for its end."
BUSY_ELSEWHERE = (
    "Work is being done already, by another panel of this notebook. Cancel it there first, or wait for its end."
)


class Panel(Controls):
    """An instrument for one run at a time.

    Args:
        folder: the folder that holds the runs.
        run: the name of a run in `folder` ("runs", if none is given), or the path of a run's folder. Without one, none
            is chosen.
        factory: for runs of your own loop, the "module:function" that rebuilds them, or the path of the script that
            recorded them ("train.py"), which is run up to its Recorder: naming it is your consent to run it.
        experiment: instead of it, the experiment or a function that builds it, where it exists only in this notebook.
            The work is then done in this process, in which a step can't be interrupted: Cancel waits for its end.
        example: with neither folder nor run given, open the small run that comes with the package.

    Where neither folder nor run is given, the run that `workbench lab RUN` named is opened.

    Attributes:
        opened: the chosen `Run`, as it was when it was chosen, or None.
        found: what was computed of the chosen step: `trace`, `context`, `verdict`, `experiments`; each may be None.
        trace: the one in `found`.
        last_error: the exception in the error box, or None.
        step, run, …: the widgets, see `Controls`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        run: str | os.PathLike[str] | None = None,
        *,
        factory: str | None = None,
        experiment: Experiment | Callable[[], Experiment] | None = None,
        example: bool = False,
    ) -> None:
        super().__init__()
        self._here, results = Here(), Results()
        self._boundary = Boundary(self, self._named)
        self._performer = Performer(self, self._enable)
        remark = "" if experiment is None else ONLY_HERE
        self._viewer = Viewer(self, self._boundary, results, self._here, factory, remark)
        desk = Desk(self, self._boundary, self._performer, self._viewer, results, self._here)
        self._doer = Doer(desk, factory, experiment)
        self._chooser = Chooser(self, self._boundary, self._show_run)
        press = self._boundary.on_press
        press(self.replay_button, lambda: self._ask(tasks.REPLAY))
        press(self.cause_button, self._find_cause)
        press(self.measure_button, lambda: self._ask(tasks.CONTEXT))
        press(self.doctor_button, lambda: self._examine(self._chosen_run()))
        press(self.machine_button, lambda: self._examine(None))
        self._boundary.on_change(self.view, self._look_around)
        press(self.cancel_button, self._performer.cancel)
        for place in range(len(self.try_buttons)):
            press(self.try_buttons[place], functools.partial(self._try_one, place))
        press(self.try_all, self._try_all)
        press(self.try_button, lambda: self._try(self.change.value.split()))
        self._boundary.guard(lambda: self._chooser.start(*_begin_with(folder, run, example)))

    # ---- what a reader without a kernel sees, and what nbval compares

    def __repr__(self) -> str:
        # What a callback raised is in the red box, and nothing of a cell that CI compares would change but for this.
        error = "" if self.last_error is None else f", error={type(self.last_error).__name__}"
        if self.opened is None:
            return f"Panel(folder={Path(self.folder.value).name!r}, no run chosen{error})"
        # What the run's files hold from before is left out: a notebook that is run again would show something else.
        own = {name for name, made in self.found.made.items() if made.file is None}
        done = ", replayed" if "trace" in own else ""
        done += f", verdict={self.found.verdict.verdict!r}" if self.found.verdict and "verdict" in own else ""
        return f"Panel(run={self.opened.name!r}, step={self.step.value}{done}{error})"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        bundle = super()._repr_mimebundle_(**options)
        still = self.still()
        if not isinstance(bundle, dict) or still is None:
            return bundle
        return {**bundle, "image/png": still}

    def still(self) -> bytes | None:
        """The timeline and, of what was computed of the step, layers and onset, as a PNG file; None without a run."""
        with self._boundary.lock:
            opened, look = self._chooser.opened, self._viewer.look
            if opened is None or not len(opened):
                return None
            return figures.stacked([opened.draw(self.step.value)] if look is None else look.figures())

    @property
    def opened(self) -> Run | None:
        return None if self._chooser.opened is None else self._chooser.opened.run

    @property
    def found(self) -> Found:
        return Found() if self._viewer.look is None else self._viewer.look.found

    @property
    def trace(self) -> Trace | None:
        return self.found.trace

    @property
    def last_error(self) -> BaseException | None:
        return self._boundary.last_error

    # ---- from Python

    def examine(self, *, machine: bool = False) -> Report:
        """What the doctor says of a step of the chosen run on this machine, or of the machine; shows it, returns it.

        Raises:
            WorkbenchError: no run is chosen, its step can't be rebuilt here, or other work is being done.
        """
        with self._shown_errors():
            run = None if machine else self._chosen_run()
            with self._alone("the doctor"):
                return self._doer.examine(run)

    def replay(self, step: int, *, segment: int | None = None, **options: Any) -> Trace:
        """Replays a step in another process, shows it, and returns its trace.

        Args:
            step: counted from 1.
            segment: where the step stands in several segments that disagree.
            options: further arguments of `Run.replay`, such as `other_environment`. With `experiment`, which exists
                only here, it is replayed in the calling thread.

        Raises:
            WorkbenchError: as `Run.replay`; also if no run is chosen, or other work is being done already.
        """
        return self._do_now(tasks.REPLAY, step, segment, options)

    def autopsy(self, step: int, *, segment: int | None = None, **options: Any) -> Verdict:
        """What made the loss spike, as `Run.autopsy`; otherwise as `replay`."""
        return self._do_now(tasks.AUTOPSY, step, segment, options)

    def context(self, step: int, *, segment: int | None = None, **options: Any) -> Context:
        """The step and those before it, as `Run.context`; otherwise as `replay`."""
        return self._do_now(tasks.CONTEXT, step, segment, options)

    def whatif(
        self, step: int, changes: str | Sequence[str], *, segment: int | None = None, **options: Any
    ) -> pd.DataFrame:
        """Experiments on a step, as `Run.whatif`; otherwise as `replay`. Returns those that were just made."""
        return self._do_now(tasks.WHATIF, step, segment, {"changes": changes} | options)

    def wait(self, timeout: float | None = None) -> None:
        """Waits for the end of work that a button started.

        Raises:
            TimeoutError: it is still being done.
        """
        self._performer.wait(timeout)

    # ---- work

    def _do_now(self, task: Task, step: int, segment: int | None, options: dict[str, Any]) -> Any:
        with self._shown_errors():
            run = self._chosen_run()
            segment = run.plan(step, segment).segment  # says so if there is no such step
            with self._alone(f"step {step}"):
                with self._boundary.lock:
                    self._viewer.go(step, segment)
                return self._doer.perform(task, run, step, segment, options)

    @contextmanager
    def _shown_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._boundary.fail(error)
            raise

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        if not self._performer.begin():
            raise ReplayError(f"{what} was left alone: other work is being done; cancel it, or wait for it")
        try:
            yield
        finally:
            self._performer.end()

    def _find_cause(self) -> None:
        """Also measures the steps before, unless that is known: a verdict is read beside them."""
        self._ask(tasks.AUTOPSY, *([] if self.found.context else [tasks.CONTEXT]))

    def _try_one(self, place: int) -> None:
        self._try([self.try_buttons[place].description])

    def _try_all(self) -> None:
        self._try([button.description for button in self.try_buttons if button.description])

    def _try(self, changes: Sequence[str]) -> None:
        if not changes:
            raise ExperimentError("no change is given; expected one in the field Change, such as lr=0.5x")
        self._ask(tasks.WHATIF, changes=[str(parse_change(change)) for change in changes])

    def _ask(self, *asked: Task, **options: Any) -> None:
        """Has the worker do one thing after another with the step that is looked at, and returns at once."""
        run, step, look = self._chosen_run(), self.step.value, self._viewer.look
        if look is None and run.telemetry.segments_with(step):
            raise ReplayError(f"step {step} stands in several segments that differ; choose one in the field Segment")
        segment = run.plan(step, None if look is None else look.segment).segment
        options["other_environment"] = self.anyway.value

        def work() -> None:
            for task in asked:
                self._doer.perform(task, run, step, segment, options, further=task is not asked[0])

        self._in_background(work)

    def _in_background(self, work: Callable[[], object]) -> None:
        """Has the worker's thread do it, unless something else is being done. An exception in it is shown."""
        if not self._performer.begin():
            self._performer.say(BUSY if self._performer.running else BUSY_ELSEWHERE)
            return
        self._boundary.clear()

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # as in `Boundary.guard`; of a user's code even SystemExit
                self._boundary.fail(error)

        self._performer.submit(guarded)

    def _look_around(self) -> None:
        """On first sight of Environment: which machine is this? Asking takes a second and computes nothing."""
        run = self.opened
        if self.view.value != ENVIRONMENT or run is None or run.unverifiable():
            return
        if self._here.environment(run) is None and not worker.alone.locked():  # else the work will say so
            self._in_background(functools.partial(self._doer.look_around, run))

    def _examine(self, run: Run | None) -> None:
        self._in_background(lambda: self._doer.examine(run))

    def _show_run(self, step: int | None) -> None:
        if not self._performer.running:
            self._performer.forget()
        self._viewer.begin(self._chooser.opened, step)
        self._enable()

    def _enable(self) -> None:
        opened = self._chooser.opened
        idle = not self._performer.running and opened is not None and len(opened) > 0
        replayable = opened is not None and opened.run.unverifiable() is None  # of a log no step can be performed
        keep_room(self.badges, BADGES if replayable else None)
        self.replay_button.disabled = not (idle and replayable)
        explained = idle and opened is not None and opened.unexplained is None
        for button in (self.cause_button, self.measure_button, self.doctor_button):
            button.disabled = not explained
        for button in (*self.try_buttons, self.try_all, self.try_button):
            button.disabled = not explained
        self.machine_button.disabled = self._performer.running
        self.cancel_button.disabled = not self._performer.running

    def _named(self) -> str:
        return "" if self.opened is None else naming(self.opened)

    def _chosen_run(self) -> Run:
        if self.opened is None:
            raise RunError("no run is chosen; choose one in the field Run")
        return self.opened


def _begin_with(
    folder: str | os.PathLike[str] | None, run: str | os.PathLike[str] | None, example: bool
) -> tuple[Path, str | None]:
    """The folder, and the name of the run in it to open."""
    if folder is None and run is None:
        if os.environ.get(VARIABLE):
            run = Path(os.environ[VARIABLE])
        elif example:
            run = shared("data") / EXAMPLE
    if run is not None and (not isinstance(run, str) or os.sep in run):
        return Path(run).parent, Path(run).name
    return Path("runs" if folder is None else folder), run
