"""The self-check of the first steps of a process, and whether what was handed over is what loop and step still use.

Knows experiments, and where a recording stands; nothing of folders or loops.
"""

from __future__ import annotations

from typing import Any

from .. import snapshot
from ..errors import ExperimentError
from ..ranks.world import anywhere
from ..rebinding import Handed
from ..selfcheck import SelfCheck
from ..snapshot import State
from ..step import Stepper
from ..telemetry import Edits
from .dropped import Dropped
from .standing import Standing
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
        self.last: SelfCheck | None = None

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
        self.last = None
        if start is not None and self.check:
            handed, self._handed = self._handed, None
            self.last = SelfCheck(stepper, start, edits, anywhere, here.terms.ignore, handed)
        return self.last, second
