"""The log of a recording's steps: after each, what is seen of it, judged and written as a line of telemetry.

With that line the recording stands at the state that the step left. Knows where it stands; nothing of loops, or of what
is saved.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import WorkbenchError
from ..experiment import Batch, random_key
from ..lines.line import Edits
from ..observe import Observation, observe
from ..step import Stepper, StepResult
from .judgement import Judge
from .standing import Place, Standing
from .unkept import Unkept
from .users_line import warn


class StepLog:
    """
    Args:
        judge: of the steps.
        unkept: what they read and no checkpoint holds.
    """

    def __init__(self, standing: Standing, judge: Judge, unkept: Unkept) -> None:
        self._standing, self._judge, self._unkept = standing, judge, unkept

    def write(
        self,
        stepper: Stepper,
        batch: Batch,
        result: StepResult,
        cursor: dict[str, Any],
        before: Edits | None,
        *,
        due: bool,
    ) -> Observation:
        """Of the step just performed; Ctrl-C is to wait until its state is saved, if it is to be.

        Args:
            stepper: has performed it.
            result: what that returned.
            cursor: after its batch.
            before: what the loop changed before it.
            due: a checkpoint is.

        Returns:
            What was seen of it.

        Raises:
            RanksDiverged: the state that it left is another one in some rank.
        """
        here, number, key = self._standing, self._standing.at.step + 1, random_key()
        here.left.keep_rates(here.experiment)
        seen = observe(stepper, batch, result, cursor, here.out.method)
        here.by_hand.keep(here.experiment, seen.arrays)
        if said := here.draws.store(seen.batch_hash, batch, number):  # before the line that names it
            warn(said)
        if here.unsaved is not None and (before is None or before.by_hand is None):
            before = msgspec.structs.replace(before or Edits(), by_hand=here.unsaved)
        more = {} if before is None else {"before": before}
        if here.crew is not None:
            seen = here.crew.share(seen, cursor, key, more)
        noticed = self._unkept.notice(number, due=due)
        here.line = Place(number, cursor, key, seen.state)
        self.append(number, seen, more)
        here.follow(here.line)
        for sentence in noticed:
            warn(sentence)
        if here.crew is not None:
            try:
                here.crew.refuse_diverged(number)
            except WorkbenchError:
                here.whole = False  # the state of no run, not to be saved
                raise
        return seen

    def end(self) -> None:
        """Writes the line that says that the run is done."""
        here = self._standing
        noticed = self._unkept.notice(here.at.step, due=True)
        here.out.append(type="done", step=here.at.step, **here.remarks.fields())
        for sentence in noticed:
            warn(sentence)

    def append(self, step: int, seen: Observation, edits: dict[str, Any]) -> None:
        """Judges a step, and writes its line.

        Args:
            edits: further fields: what the loop changed before it.
        """
        here = self._standing
        assert here.out.logbook is not None
        effort = here.out.logbook.effort()
        judged = self._judge.judge(step, float(seen.loss), float(seen.grad_norm) if seen.has_gradients else None)
        here.out.append(
            type="step",
            step=step,
            **effort,
            **judged.fields(),
            **edits,
            **seen.fields(),
            **here.remarks.fields(),
        )
