"""The segments of telemetry that start from a state which the loop has changed by hand, or that a cut-off step left.

A replay performs steps, and would not make the change; so the changed state is saved, and a segment starts from it.
Knows where a recording stands, and its folder; nothing of loops.
"""

from __future__ import annotations

from .. import snapshot
from ..blackbox import Held
from ..errors import ExperimentError
from ..experiment import read_cursor
from ..interrupts import Deferral
from ..ranks.world import everywhere
from . import failed_writes
from .by_hand import Change
from .cut_off import half_done
from .keeper import Keeper
from .standing import Place, Standing
from .users_line import warn


class Segments:
    """
    Args:
        keeper: saves the states that segments start from.
    """

    def __init__(self, standing: Standing, keeper: Keeper) -> None:
        self._standing, self._keeper = standing, keeper

    def look(self, *, checked: bool) -> Change | None:
        """Before a step: whether the loop has changed the state since the last one; then goes on from it in a segment.

        Args:
            checked: the last step was the first of a process that checks itself.

        Returns:
            What was changed, if no checkpoint holds it.

        Raises:
            ExperimentError: something was, and the last step was `checked`.
        """
        here, by_hand = self._standing, self._standing.by_hand
        step, change = here.at.step, by_hand.changed(here.experiment)
        cut_off = change is None and self._cut_off()
        if cut_off and (half := half_done(here)) is not None:
            change = Change(half)  # a step was cut off, and the loop goes on all the same
        if change is None and here.unsaved is not None and here.crew is None:
            self._save_late()
        if not everywhere(change is not None) or change is None:  # what one rank changed alone is named after the step
            return None
        if checked and not cut_off:
            here.whole = False  # the state of no step
            raise ExperimentError(by_hand.refusal(change, step))
        if not change.kept:
            self._tell_of_lost(change.name)
            return change
        saved = self._saved(step)
        said = by_hand.saved(change.name, step, here.segment) if saved else by_hand.not_saved(change.name, step)
        if said is not None and here.leads:
            warn(said)
        return None if saved else change

    def begin(self) -> None:
        """After a change, where the loop says that it made one: goes on from the state as it is now."""
        here = self._standing
        if not here.whole:
            here.draws.take_back(here.at.cursor)
        if (change := here.by_hand.changed(here.experiment)) is not None and not change.kept:
            self._tell_of_lost(change.name)
        if not self.open():
            here.unsaved = "the state" if change is None else change.name

    def open(self) -> bool:
        """Returns whether the state from which it starts is on the disk."""
        with Deferral():
            return self._open()

    def end(self) -> None:
        """Of one whose opening was cut off: else it would start from a state that is nowhere."""
        opening = self._standing.opening
        if opening is not None and opening != self._standing.segment:
            self.open()

    def _cut_off(self) -> bool:
        """Whether a step was, or the opening of a segment, or the drawing of a batch."""
        here = self._standing
        return not here.whole or here.opening is not None or here.draws.passed_over(here.at.cursor)

    def _saved(self, step: int) -> bool:
        """Opens a segment if its state is to be saved. Returns whether that is on the disk."""
        here = self._standing
        try:
            due = here.opening is not None or here.by_hand.save_due(step, cut_off=not here.whole)
            return due and self.open()
        except OSError:  # the manifest can't be written: that is no reason to end a training
            if here.crew is not None:
                raise
            return False

    def _save_late(self) -> None:
        """The state that a segment starts from, which could not be saved when the loop had changed it."""
        here = self._standing
        if self._keeper.save(here.as_left(), here.at.lanes):
            here.unsaved = None
        else:
            warn(failed_writes.of_start(here.at.step, here.segment, here.out.path))

    def _open(self) -> bool:
        here, out, draws = self._standing, self._standing.out, self._standing.draws
        # The batch of the next step may have been drawn already: a replay draws it after it has restored this state.
        drawn = draws.drawn
        cursor = read_cursor(here.experiment.sampler) if drawn is None else drawn.cursor
        state = snapshot.capture(here.experiment, here.at.step, cursor, draws.key())
        lanes = state.lanes(out.method)
        if here.crew is not None:
            state = here.crew.moved(state, lanes)
        if here.opening is None:
            here.opening = out.segment
        again = here.empty == out.segment and not here.whole  # its first step was cut off
        if out.segment == here.opening and not again:  # else an attempt was cut off, and no step is in it yet
            try:
                out.add_segment(here.at.step)
            except OSError:
                here.opening = None
                raise
        out.append_meta(state.step, lanes)
        saved = self._keeper.save(state, lanes)
        out.saves.box.hold(Held(state, out.segment, lanes))
        here.by_hand.keep(here.experiment)
        here.left.keep_rates(here.experiment)
        place = Place(here.at.step, cursor, state.rng, lanes)
        # No call between these, as in `Standing.follow`.
        here.at, here.whole, here.opening, here.empty, here.unsaved = place, True, None, out.segment, None
        return saved

    def _tell_of_lost(self, name: str) -> None:
        """Of a change that no checkpoint can hold."""
        here = self._standing
        if (said := here.by_hand.lost(name, here.at.step)) is None:
            return
        here.remarks.add(said, here.at.step)
        if here.leads:
            warn(said)
