"""The self-check of the first steps of a process, and whether what was handed over is what loop and step still use.

Knows experiments, and where a recording stands; nothing of folders or loops.
"""

from __future__ import annotations

from typing import Any

from .. import snapshot
from ..errors import ExperimentError
from ..experiment import Batch, put_arrays, put_kept
from ..lines.line import Edits
from ..numbered_batch import lent, put_back, without_numpy
from ..outside_state import everything_outside
from ..ranks.world import anywhere
from ..rebinding import Handed
from ..redrawing import Generators
from ..selfcheck import SelfCheck
from ..side_effects import side_effects
from ..snapshot import State
from ..step import Stepper, StepResult
from .dropped import Dropped
from .standing import Standing
from .untied import Shared
from .users_line import warn


class FirstSteps:
    """
    Args:
        standing: of an experiment whose arrays are not laid out yet.
        dropped: made from it before anything else referred to its parts.
        check: whether the first step is checked; also an attribute.

    Attributes:
        last: what checked the step before, or will check the one that is being performed; None: nothing.
    """

    def __init__(self, standing: Standing, dropped: Dropped, *, check: bool) -> None:
        self._standing, self._dropped, self.check = standing, dropped, check
        self._handed = Handed(standing.experiment) if check else None
        self._shared: Shared | None = Shared(standing.experiment.model)
        self._steps = 0
        self.last: SelfCheck | None = None
        self._second: SelfCheck | None = None  # what checks the one after the first

    def look(self, *, due: bool) -> None:
        """Between two steps: warns where the loop has put something else in the place of what it handed over.

        Args:
            due: look also if the first steps are over.

        Raises:
            ExperimentError: at the start, if it can be proven that it has.
        """
        here, handed, check = self._standing, self._handed, self.last
        if handed is not None and check is None:  # the first step is next
            handed.refuse_replaced("before the first step the loop put")
            handed.laid_out()
        if check is not None:
            try:
                check.refuse_replaced()
            except ExperimentError:
                here.whole = False
                raise

        def own(part: Any) -> int:
            return here.by_hand.holds(part) + (0 if check is None else check.holds(part))

        if self._shared is not None and self._steps:
            for sentence in self._shared.parted():
                warn(sentence)
            self._shared = None
        for sentence in self._dropped.look(due=due, own=own):
            here.remarks.add(sentence, here.began_at)
            warn(sentence)

    def of_next(
        self, stepper: Stepper, start: State | None, edits: Edits | None, cursor: dict[str, Any]
    ) -> tuple[SelfCheck | None, tuple[SelfCheck, State] | None]:
        """Before a step is performed: what checks it.

        Args:
            start: the state from which the first one starts; None: it is a later one.
            edits: what the loop changed in that.
            cursor: after its batch.

        Returns:
            What checks it as the first step; and as the one after the first, with the state that it starts from.
        """
        here, last, second = self._standing, self.last, None
        if last is not None and last.outside and here.crew is None:
            second = last, snapshot.capture(here.experiment, here.at.step, cursor)
        self.last, self._second = None, None if second is None else second[0]
        if start is not None and self.check:
            handed, self._handed = self._handed, None
            self.last = SelfCheck(stepper, start, edits, anywhere, here.terms.ignore, handed)
        return self.last, second

    def perform(self, stepper: Stepper, batch: Batch, parts: Any, cursor: dict[str, Any]) -> tuple[Batch, StepResult]:
        """Performs the next step. Arrays of numpy reach a step of the user's own as such, as they do without a
        recorder: the very arrays of the loop, which it may change. MLX takes none in most of its functions. A first
        step that fails with them can't be one of a loop without a recorder: it gets arrays of MLX instead, as do all
        that follow, and what it had changed is put back before.

        Args:
            parts: what the batch was made of.
            cursor: after it.

        Returns:
            The batch as the step got it, and what it returned.
        """
        check, own = self.last or self._second, lent(batch, parts)
        self._steps += 1
        if check is not None:
            with side_effects() as did:
                found = self._tried(stepper, batch, own, cursor)
            check.did += did
            return found
        return self._tried(stepper, batch, own, cursor)

    def _tried(self, stepper: Stepper, batch: Batch, own: Batch, cursor: dict[str, Any]) -> tuple[Batch, StepResult]:
        here, experiment = self._standing, self._standing.experiment
        if experiment.numpy is not None or own is batch or here.out.logbook is not None:
            return batch, stepper(own)
        around = (everything_outside(experiment), Generators()) if self.last is None else (self.last,)
        left = snapshot.capture(experiment, here.at.step + 1, cursor)
        try:
            result = stepper(own)
        except (TypeError, ValueError, AttributeError):
            put_arrays(experiment.model, left.weights)  # first: where a dtype changed `restore` would refuse
            put_kept(experiment, left.optimizer)
            snapshot.restore(experiment, left)
            for one in around:
                one.put_back()
            put_back(own)
            experiment.numpy = False
            batch = without_numpy(batch)
            return batch, stepper(batch)
        experiment.numpy = True
        return batch, result
