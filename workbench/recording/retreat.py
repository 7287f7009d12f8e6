"""The way back from unstable steps: taken where that is asked for, and remembered, for too many in a row end a run.

Knows where a recording stands, and what a rollback is (`rollback`); nothing of loops.
"""

from __future__ import annotations

from .. import manifest as manifests
from .. import snapshot
from ..errors import WorkbenchError
from ..rate_scale import scale_constants, scale_schedules
from ..recovery import Row
from ..run import Run
from . import failed_writes
from .judgement import Judge
from .keeper import Keeper
from .rollback import Rollback, rollback
from .standing import Place, Standing
from .users_line import warn


class Retreat:
    """
    Args:
        judge: of the steps, to whom those that are taken back have not happened.
        keeper: of the states.

    Attributes:
        row: of rollbacks.
        rate_factor: what they have multiplied the learning rate by.
        rolled_back: the last step, if it was taken back; else None.
    """

    def __init__(self, standing: Standing, judge: Judge, keeper: Keeper) -> None:
        self._standing, self._judge, self._keeper = standing, judge, keeper
        self.row, self.rate_factor = Row(), 1.0
        self.rolled_back: int | None = None

    def scale(self, factor: float) -> None:
        """Has schedules of learning rates be what they were made as, times `factor`."""
        self.rate_factor = factor
        scale_schedules(self._standing.experiment.optimizer, factor)

    def take(self) -> bool:
        """Goes back from the step just logged, if it is unstable and that is asked for. Returns whether: training goes
        on where that can't be written.

        Raises:
            TrainingUnstable: it was done, and was the last of too many in a row.
        """
        reason, here, recovery = self._judge.last.unstable, self._standing, self._standing.terms.recovery
        if reason is None or recovery.mode != "on":
            return False
        out, step = here.out, here.at.step
        try:
            out.saves.checkpointer.wait()
            run, trail = out.run(), out.saves.trail
            back = rollback(run, out.segment, step, reason, recovery=recovery, trail=trail, factor=self.rate_factor)
            manifests.write(back.manifest, out.path)
        except (OSError, WorkbenchError) as error:
            warn(failed_writes.of_rollback(step, error))
            return False
        count = self.row.add(step, recovery.back)
        self._go(back, count)
        self.rolled_back = step
        back.say()
        self._keeper.tell()
        if count >= recovery.limit:
            raise back.too_many(count, out.path)
        return True

    def _go(self, back: Rollback, count: int) -> None:
        here, out, state = self._standing, self._standing.out, back.held.state
        here.whole = False
        out.saves.go_back_to(back.held, out.manifest)
        out.enter(back.manifest)
        here.unsettled = None  # not before: a second Ctrl-C, which does not wait, may leave the step as it is
        snapshot.restore(here.experiment, state)
        # Still with the lanes of the step that is taken back: if this is cut off, they tell that the state is another.
        here.at = Place(state.step, state.cursor, state.rng, here.at.lanes)
        out.append(**back.fields(count))
        out.append_meta(state.step, back.held.lanes)
        here.left.keep_rates(here.experiment)
        scale_constants(here.experiment.optimizer, back.rate_change)
        self.scale(back.rate_factor)
        here.by_hand.keep(here.experiment)
        here.at, here.whole = here.at._replace(lanes=back.held.lanes), True
        out.saves.went_back(back.held, out.segment)
        if back.skip_batch:
            here.draws.left_out.add(back.step)
        self._judge.warm_up(Run(out.path), out.segment, state.step)
