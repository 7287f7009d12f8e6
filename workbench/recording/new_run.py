"""The beginning of a new run: from the experiment as it is handed over, or from a state of another run (a fork).

Knows where a recording stands, and its folder; nothing of loops.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .. import snapshot
from ..errors import ExperimentError
from ..experiment import read_cursor
from ..hyperparameters import describe_optimizer
from ..observe import measure_alongside
from ..recorded.layout import refuse_existing
from ..snapshot import State
from ..step import Stepper
from . import failed_writes
from .beginning import Beginning
from .retreat import Retreat
from .standing import Place, Standing

if TYPE_CHECKING:
    from ..forks import ForkPoint


class NewRun(Beginning):
    """Prepares the experiment.

    Args:
        retreat: which a fork goes on with where its parent has it.
        fork: where it starts; None: from the experiment as it is.

    Raises:
        RunError: the folder holds a run.
    """

    new = True

    def __init__(self, standing: Standing, retreat: Retreat, copy_to: Path | None, fork: ForkPoint | None) -> None:
        super().__init__(standing, copy_to)
        self._retreat, experiment = retreat, standing.experiment
        refuse_existing(standing.out.path)
        self.stepper = measure_alongside(Stepper(experiment), hold=True)  # prepares it
        step, key = 0, None
        if fork is not None:
            snapshot.restore(experiment, fork.state)
            for _ in range(fork.skip):
                next(experiment.sampler)
            step, key = fork.state.step, fork.state.rng
            retreat.scale(fork.rate_factor)
        standing.begin_at(Place(step, read_cursor(experiment.sampler), key, {}))

    @contextlib.contextmanager
    def told_of(self) -> Iterator[None]:
        """A refusal at the second step says that the first is in the folder."""
        here = self._standing
        try:
            yield
        except ExperimentError as error:
            if here.out.logbook is None or here.at.step > here.began_at + 1:
                raise
            raise ExperimentError(f"{error}. {failed_writes.of_one_step(here.out.path)}") from error

    def _state(self) -> State:
        out = self._standing.out
        out.open_copy(self._copy_to, new=True)  # first: if that fails, there is no run yet
        refuse_existing(out.path)  # another process may have begun it meanwhile
        experiment = self._standing.experiment
        experiment.prepare()  # again: weights may have been loaded since
        out.optimizer = describe_optimizer(experiment.optimizer)  # before its own code changes what it is described by
        return self._captured()

    def _write(self, stepper: Stepper, start: State, lanes: dict[str, str]) -> None:
        self._standing.out.create(self._standing.experiment, stepper, start, self._retreat.rate_factor)
