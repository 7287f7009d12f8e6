"""Where a recording stands: the state that its last whole step left, and how far it has got with what comes next.

An exception may cut a call of a recorder off anywhere, and the next call goes by this. Knows the experiment and the
parts that follow each step of it; nothing of loops.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .. import snapshot
from ..experiment import Experiment
from ..observe import Observation
from ..ranks.crew import Crew
from ..snapshot import State
from .by_hand import ByHand
from .draws import Draws
from .remarks import Remarks
from .remembered import Remembered
from .run_writer import RunWriter
from .terms import Terms


class Place(NamedTuple):
    """The state that a step left, or the one to start from.

    Attributes:
        step: the number of the step.
        cursor: the place in the data after it.
        rng: the random state after it; None: of a run that begins with whatever there is.
        lanes: the fingerprints of its state; empty before the first step of a new run.
    """

    step: int
    cursor: dict[str, Any]
    rng: tuple[int, int] | None
    lanes: dict[str, str]


class Standing:
    """
    Args:
        experiment: what is recorded.
        terms: what it is recorded with.
        out: the run's folder.
        draws: the batches.
        crew: the link to the other ranks of a data-parallel run; None: there are none.

    Attributes:
        left: what the last step left beside this, to be compared with before the next one.
        by_hand: likewise, of weights and optimizer state.
        remarks: what the next line is to say.
        at: the place where the last whole step left off.
        began_at: the step before the first one of this process.
        whole: the state in memory is that of `at`, not of a step cut off half-way.
        drawing: a step has begun to take its batch.
        line: where the recording stands once the line that is being written is there.
        unsettled: the segment of the last step, whose state is not held or saved yet.
        opening: the segment from which another one is being opened.
        empty: the segment that was opened and has no step yet.
        unsaved: what was changed in the state that it starts from, if that could not be saved.
    """

    def __init__(self, experiment: Experiment, terms: Terms, out: RunWriter, draws: Draws, crew: Crew | None) -> None:
        self.experiment, self.terms, self.out, self.draws, self.crew = experiment, terms, out, draws, crew
        self.left, self.by_hand, self.remarks = Remembered(), ByHand(terms.save_every), Remarks()
        self.at, self.began_at, self.whole = Place(0, {}, None, {}), 0, True
        self.drawing = False
        self.line: Place | None = None
        self.unsettled: int | None = None
        self.opening: int | None = None
        self.empty: int | None = None
        self.unsaved: str | None = None

    @property
    def segment(self) -> int:
        return self.out.segment

    @property
    def leads(self) -> bool:
        """Whether this process tells the user, for all ranks."""
        return self.crew is None or self.crew.leads

    def begin_at(self, place: Place) -> None:
        """Before the first step of this process."""
        self.at, self.began_at = place, place.step

    def follow(self, line: Place) -> None:
        """The state is now that of this line, which is in the telemetry."""
        # No call between these, where an exception out of a signal's handler could part them.
        self.at, self.whole, self.unsettled = line, True, self.out.segment
        self.remarks.pending, self.line, self.empty, self.unsaved = [], None, None, None

    def captured(self, seen: Observation | None = None) -> State:
        """The state that the last step left, if nothing has changed it since; `seen` found its arrays."""
        at, found = self.at, None if seen is None else seen.arrays
        state = snapshot.capture(self.experiment, at.step, at.cursor, at.rng, found)
        return state if self.crew is None else self.crew.whole(state)

    def as_left(self) -> State:
        """As `captured`, with the learning rates that the step left: the loop may have set others since."""
        return self.left.as_left(self.captured())

    def unlike(self, lanes: dict[str, str]) -> list[str]:
        """The lanes in which a state is another one than the last step left."""
        return [lane for lane, value in self.at.lanes.items() if lanes[lane] != value]
