"""How a process begins to record: the state that its first step starts from, and what is written once that is done.

Nothing is written before, so that a step which is refused leaves no run. Knows where a recording stands, and its
folder; nothing of loops.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from .. import snapshot
from ..bits import json_float
from ..blackbox import Held
from ..experiment import Batch, put_kept, set_random_key
from ..hyperparameters import describe_optimizer
from ..selfcheck import SelfCheck
from ..snapshot import State
from ..step import Stepper
from ..trees import put_arrays
from .returned_loss import ReturnedLoss
from .standing import Standing

WITHOUT_CHECK = "it was recorded without a self-check (self_check=False)"


class Beginning(ABC):
    """
    Args:
        standing: of the experiment; has the place to begin at once this is made.
        copy_to: a file that receives each telemetry line, too.

    Attributes:
        stepper: performs the steps; to be set by whoever prepares the experiment.
        validated: validation losses that came before the first step.
        new: the run is.
        passing: whether a loop that begins its batches again has been handing over the run's, and nothing since.
        may_repeat: whether the next batch may be of such a loop.
    """

    stepper: Stepper
    new = False
    passing = False
    may_repeat = False

    def __init__(self, standing: Standing, copy_to: Path | None) -> None:
        self._standing, self._copy_to = standing, copy_to
        self.validated: list[float] = []

    def start(self) -> State:
        """The state from which the first step starts, in the form that a restored one has.

        Raises:
            ExperimentError: another rank starts otherwise.
        """
        here = self._standing
        state = self._state()
        if here.crew is None:
            return state
        return here.crew.begin(state, state.lanes(here.out.method), self._facts())

    @contextlib.contextmanager
    def put_back_if_cut_off(self, before: State | None) -> Iterator[None]:
        """Within it MLX traces a step, the second time to check it. If that is cut off, what is left in place of arrays
        holds nothing, and whoever asks for their numbers next gets an error of MLX's.

        Args:
            before: the state before the step; None: it is one of the later ones, which hold no such state.
        """
        experiment = self._standing.experiment
        try:
            yield
        except BaseException:
            if before is not None and experiment.options.compile:
                put_arrays(experiment.model, before.weights)
                put_kept(experiment, before.optimizer)
                set_random_key(before.rng)
            raise

    def write(self, stepper: Stepper, start: State, cursor: dict[str, Any], check: SelfCheck | None) -> None:
        """After the first step, which found the layers' order: manifest, checkpoint 0, the telemetry's first line.

        Args:
            stepper: has performed it.
            start: the state from which it started.
            cursor: after its batch.
            check: what checked it.

        Raises:
            RanksDiverged: it was another update in some rank.
            RunError: the folder holds a run already.
        """
        here, out = self._standing, self._standing.out
        if here.crew is not None:
            after = snapshot.capture(here.experiment, start.step + 1, cursor)
            here.crew.compare(after.lanes(out.method))
        lanes, logged = start.lanes(out.method), self.passing
        here.at = here.at._replace(lanes=lanes)
        out.remarks = [WITHOUT_CHECK] if check is None else check.remarks
        out.reads = [] if check is None else check.files
        self._write(stepper, start, lanes)
        for loss in () if logged else self.validated:  # of a loop that began again: the run's first, logged then
            out.append(type="val", step=start.step, val_loss=json_float(loss))
        self.validated = []
        out.saves.box.hold(Held(start, out.segment, lanes))

    @contextlib.contextmanager
    def told_of(self) -> Iterator[None]:
        """A refusal within it says what of the recording is on the disk already, if the user has to know."""
        yield

    def take(self, batch: Batch, *, asked: bool) -> ReturnedLoss | None:
        """The loss that the run logged for this batch, if the loop begins again; None: it is to be trained on."""
        return None

    def unfinished(self) -> str | None:
        """A sentence, if the loop ended before the state was reached that training goes on from."""
        return None

    @abstractmethod
    def _state(self) -> State: ...

    @abstractmethod
    def _write(self, stepper: Stepper, start: State, lanes: dict[str, str]) -> None: ...

    def _facts(self) -> dict[str, Any]:
        """What all ranks of a data-parallel run have to have in common."""
        experiment = self._standing.experiment
        return {
            "the optimizer": describe_optimizer(experiment.optimizer),
            "the step's options": msgspec.to_builtins(experiment.options),
        }

    def _captured(self) -> State:
        """The state as it is now, with the random state that it was left with."""
        here, drawn = self._standing, self._standing.draws.drawn
        if here.at.rng is not None:  # the random state is a thread's own, and this is the one that trains
            set_random_key(here.at.rng if drawn is None else drawn.key_after)
        place = here.draws.place(here.at.cursor)
        return snapshot.capture(here.experiment, here.at.step, place, here.draws.key())
