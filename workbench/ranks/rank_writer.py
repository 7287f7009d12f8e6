"""Who of several ranks writes a run's folder: rank 0, for all of them. The others keep its time, and write nothing.

Knows a run's writer and the world; nothing of loops or steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .. import manifest as manifests
from ..blackbox import BlackBox, Held
from ..checkpointer import Failure
from ..errors import RunError, WorkbenchError
from ..experiment import Experiment
from ..fingerprint import known_method
from ..manifest import Manifest
from ..recording.run_writer import RunWriter
from ..recording.saves import Saves
from ..recording.terms import Terms
from ..run import Run
from ..snapshot import State
from ..step import Stepper
from .attendance import attended
from .crew import Crew, setup_here
from .world import barrier, world


def writer(path: Path, terms: Terms, black_box: int, began: float, crew: Crew | None) -> RunWriter:
    """What writes the run's folder in this process. Arguments as of `RunWriter`.

    Args:
        crew: the link to the other ranks; None: there are none.
    """
    if crew is None:
        return RunWriter(path, terms, black_box, began)
    return (LeadWriter if crew.leads else Follower)(path, terms, black_box, began, crew)


class LeadWriter(RunWriter):
    """Rank 0's."""

    def __init__(self, path: Path, terms: Terms, black_box: int, began: float, crew: Crew) -> None:
        super().__init__(path, terms, black_box, began)
        self._crew = crew

    def about(self) -> dict[str, Any]:
        return {"ranks": self._crew.meta}

    def create(self, experiment: Experiment, stepper: Stepper, start: State, rate_factor: float) -> None:
        self.ranks = setup_here()
        super().create(experiment, stepper, start, rate_factor)
        barrier()  # now the others may look

    def go_on(self, experiment: Experiment, start: State, *, edited: bool) -> None:
        super().go_on(experiment, start, edited=edited)
        barrier()

    def add_segment(self, start: int) -> None:
        super().add_segment(start)
        barrier()


class Follower(RunWriter):
    """Of any other rank: writes nothing, and knows what rank 0 has written."""

    def __init__(self, path: Path, terms: Terms, black_box: int, began: float, crew: Crew) -> None:
        super().__init__(path, terms, black_box, began)
        self.saves = NoSaves(path)

    def lock(self) -> None:
        pass  # rank 0 has it

    def open_copy(self, path: Path | None, *, new: bool) -> None:
        pass

    def reopen(self) -> Run:
        run = attended(Run(self.path))
        self.manifest, self.method = run.manifest, known_method(run.manifest.fingerprint, self.path)
        return run

    def create(self, experiment: Experiment, stepper: Stepper, start: State, rate_factor: float) -> None:
        setup_here()
        self._await()

    def go_on(self, experiment: Experiment, start: State, *, edited: bool) -> None:
        self._await()

    def add_segment(self, start: int) -> None:
        self._await()

    def append(self, **fields: Any) -> None:
        if self.logbook is None:
            raise RunError(f"nothing can be logged to {self.path} before its first step or after its end")

    @property
    def logged(self) -> None:
        return None

    def append_meta(self, step: int, lanes: dict[str, str]) -> None:
        pass

    def close(self) -> str | None:
        self.logbook = None
        return None

    def _await(self) -> None:
        """Until rank 0 has written the manifest; then reads it.

        Raises:
            RunError: it is not to be seen from here.
        """
        barrier()
        try:
            self.enter(manifests.read(self.path))
        except WorkbenchError as error:
            raise RunError(
                f"rank {world().rank} does not see {self.path.absolute()}, which rank 0 has made: {error}. Ranks on "
                "several hosts record in a folder on a file system that all of them see"
            ) from error
        self.logbook = Silence()  # type: ignore[assignment]


class Silence:
    """A logbook in which nothing is written."""

    def effort(self) -> dict[str, Any]:
        return {}

    def troubles(self, step: int) -> Iterator[str]:
        return iter(())


class NoSaves(Saves):
    """Holds and saves nothing: rank 0 does, for all."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.box = BlackBox(0)
        self.checkpointer = NoCheckpointer()  # type: ignore[assignment]

    def save(self, held: Held, manifest: Manifest) -> None:
        self.last = (held.state.step, held.segment)

    def before_spike(self, *given: Any, **more: Any) -> None:
        pass


class NoCheckpointer:
    idle = True

    def wait(self) -> None:
        pass

    def failed(self) -> list[Failure]:
        return []
