"""What a panel does with work: who does it, where the result is kept, and that a person sees it.

Another process does it (`work`), so that it can be ended at once; or this one, where an experiment exists only here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..work import child, messages
from . import tasks
from .boundary import Boundary
from .controls import ENVIRONMENT, TIMELINE, Controls
from .here import Here
from .performing import Performer, Progress
from .results import Made, Results
from .stored import read_stored
from .tasks import Task
from .viewing import Viewer

if TYPE_CHECKING:
    from ..examination.diagnosis import Report
    from ..experiment import Experiment
    from ..run import Run


@dataclass(frozen=True)
class Desk:
    """The parts of one panel that work has to do with."""

    controls: Controls
    boundary: Boundary
    performer: Performer
    viewer: Viewer
    results: Results
    here: Here


class Doer:
    """Args:
    desk: of the panel.
    factory, experiment: as `Panel`.
    """

    def __init__(
        self, desk: Desk, factory: str | None, experiment: Experiment | Callable[[], Experiment] | None
    ) -> None:
        self._desk, self._factory, self._experiment = desk, factory, experiment

    def perform(
        self, task: Task, run: Run, step: int, segment: int, options: dict[str, Any], further: bool = False
    ) -> Any:
        """Does it, keeps the result, and shows it to a person who is still at that step.

        Args:
            further: it follows on something else that was asked for, and the progress says what for.
        """
        desk, title = self._desk, f"Step {step:,}"
        key = run.manifest.run, step, segment, child.surroundings()
        work, local = self._work(task, run, step, segment, options)
        result, seconds = desk.performer.perform(title, work, local=local, why=task.why if further else "")
        with desk.boundary.lock:
            known = any(made.file for made in desk.results.of(key).made.values())
            self._learn_from(run, result)
            if known:  # what the run's files hold of this environment stays beside the result
                desk.results.look_up(key, partial(read_stored, run, step, segment, desk.here.environment(run)))
            found = desk.results.change(key)
            task.keep(found, result)
            found.made |= dict.fromkeys(task.kept, Made(time.time(), seconds, fresh=True))
            there = desk.viewer.shows(run.path, step)
            if there:
                if desk.controls.view.value in (TIMELINE, ENVIRONMENT) or task is tasks.AUTOPSY:
                    desk.viewer.turn_to(task.view)
                desk.viewer.show(segment)
        where = "" if there else f" of {run.name}"
        then = "" if there else " Go to that step to see it."
        desk.performer.say(f"{title}{where} {task.done} in {seconds:.1f} s.{then}")
        return result

    def _work(
        self, task: Task, run: Run, step: int, segment: int, given: dict[str, Any]
    ) -> tuple[Callable[[Progress], Any], bool]:
        """What does it, and whether that is in this process: where an experiment, or a factory, exists only here."""
        options = {"factory": self._factory, "experiment": self._experiment} | given
        experiment = options.pop("experiment")
        if experiment is None and not str(options["factory"]).startswith("__main__:"):
            request = _request(task.method, run) | {"step": step, "segment": segment, "options": options}
            return lambda progress: child.present().ask(request, progress), False

        def here(progress: Progress) -> Any:
            built = experiment() if callable(experiment) else experiment
            method = getattr(run, task.method)
            return method(step, segment=segment, progress=progress, experiment=built, **options)

        return here, True

    def look_around(self, run: Run) -> None:
        """Finds out which machine this is, for a run."""
        desk, request = self._desk, _request(messages.ENVIRONMENT, run)
        found, _ = desk.performer.perform("This machine", lambda tell: child.present().ask(request, tell))
        with desk.boundary.lock:
            self._learn(run, found)
            desk.viewer.show(None if desk.viewer.look is None else desk.viewer.look.segment)
        desk.performer.forget()

    def examine(self, run: Run | None) -> Report:
        """Has the doctor examine a step of the run, or without one the machine."""
        desk, request = self._desk, _request(messages.DOCTOR, run) | {"options": {"factory": self._factory}}
        title = "This machine" if run is None else f"A step of {run.name}"
        report, seconds = desk.performer.perform(title, lambda tell: child.present().ask(request, tell))
        with desk.boundary.lock:
            desk.here.report = report, time.time()
            desk.viewer.turn_to(ENVIRONMENT)
            desk.viewer.draw()
        desk.performer.say(f"{title} examined in {seconds:.1f} s.")
        return report

    def _learn_from(self, run: Run, result: Any) -> None:
        """A trace, context or verdict knows the environment that it was computed in."""
        record = getattr(getattr(result, "trace", result), "record", result)
        environment = getattr(record, "environment", None)
        if environment and environment.get("backend") == run.manifest.segments[-1].environment.get("backend"):
            self._learn(run, environment)

    def _learn(self, run: Run, environment: dict[str, Any]) -> None:
        if self._desk.here.learn(run, environment):
            self._desk.results.forget_files()


def _request(do: str, run: Run | None) -> dict[str, Any]:
    return {"do": do, "run": None if run is None else str(run.path)}
