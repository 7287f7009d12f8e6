"""Which states of a recording are held in memory and saved, and when; and what is said of those that could not be.

Knows where a recording stands, and what saves its states (`saves`); nothing of loops or batches.
"""

from __future__ import annotations

from ..blackbox import Held
from ..errors import ExperimentError
from ..observe import Observation
from ..snapshot import State
from . import failed_writes
from .judgement import Judgement
from .standing import Standing
from .users_line import warn


class Keeper:
    """
    Attributes:
        was_due: a checkpoint was due after the last step that was settled.
    """

    def __init__(self, standing: Standing) -> None:
        self._standing, self._out = standing, standing.out
        self.was_due = False

    def due(self, step: int) -> bool:
        """Whether a checkpoint of a step is."""
        every = self._standing.terms.save_every
        return bool(every) and step % every == 0

    def settle(self, due: bool, seen: Observation | None = None) -> None:
        """Holds the state of the last step, and has it saved if that is due; `seen` found its arrays."""
        here, saves = self._standing, self._out.saves
        self.was_due = due
        if due or saves.wants(here.at.step):  # one capture for both
            state = here.as_left() if seen is None else here.captured(seen)
            held = Held(state, self._out.segment, here.at.lanes)
            saves.hold(held)
            said = here.draws.sync(here.at.step) if due else None
            if due and here.crew is not None:
                said = here.crew.stored(said, here.at.step)
            if said:
                warn(said)
            elif due:
                saves.save(held, self._out.manifest)
        here.unsettled = None

    def settle_late(self, *, changed: bool) -> None:
        """Before the next step, after one that was cut off between its line and the end.

        Args:
            changed: the loop has changed the state meanwhile.
        """
        here = self._standing
        if here.unsettled is None or here.crew is not None:
            return
        due = self.due(here.at.step)
        if not changed and here.unsettled == here.segment:
            self.settle(due)
        elif due:
            warn(failed_writes.of_cut_off_step(here.at.step, self._out.path))
        here.unsettled = None

    def save_before(self, seen: Observation, judged: Judgement) -> None:
        """Saves the state before the step just logged, if that is a spike. Training goes on if it can't be saved."""
        rule = judged.unstable if judged.reading is None else judged.reading.rule or judged.unstable
        needed = judged.unstable is not None and self._standing.terms.recovery.mode == "on"
        norm = float(seen.grad_norm) if seen.has_gradients else 0.0  # where there is none, none is not finite
        self._out.saves.before_spike(self._out.manifest, float(seen.loss), norm, rule, needed=needed)

    def save(self, state: State, lanes: dict[str, str]) -> bool:
        """Has a state saved as the checkpoint of the last step, and waits until it is durable. Returns whether it is.

        Args:
            lanes: its fingerprints.
        """
        saves = self._out.saves
        saves.save(Held(state, self._out.segment, lanes), self._out.manifest)
        saves.checkpointer.wait()
        self.tell()
        return saves.last == (state.step, self._out.segment)

    def checkpoint(self) -> bool:
        """Saves the state that the last step left, as `save`.

        Raises:
            ExperimentError: it was changed since that step.
        """
        here, path = self._standing, self._out.path
        state = here.as_left()
        if unlike := here.unlike(state.lanes(self._out.method)):
            raise ExperimentError(
                f"no checkpoint of step {here.at.step} was saved to {path}: {', '.join(unlike)} changed after the "
                "step, so this is not its state; save it before changing it (recorder.checkpoint())"
            )
        return self.save(state, here.at.lanes)

    def end(self) -> None:
        """Saves the last state, unless it is saved or half of a step that was cut off."""
        here, saves = self._standing, self._out.saves
        if (said := here.draws.lacking()) is not None:
            warn(said)
        saves.checkpointer.wait()
        self.tell()
        if here.whole and saves.last != (here.at.step, here.segment):
            try:
                self.checkpoint()
            except ExperimentError as error:
                warn(str(error))

    def tell(self) -> None:
        """Warns of what could not be written meanwhile."""
        for said in self._out.troubles(self._standing.at.step):
            warn(said)
