"""The states that a recorder holds, and what it has of them saved: when one is due, before a spike, to go back to.

Knows states, checkpoints and memory; nothing of loops or telemetry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from ..blackbox import BlackBox, Held
from ..checkpointer import Checkpointer, Key, committed
from ..experiment import Experiment
from ..journal import Journal
from ..manifest import Manifest
from ..recovery import Trail
from ..seams import state_segment
from . import failed_writes

UNFINISHED = 2  # checkpoints: one that is being written, and one that waits; each holds a state in memory


class Saves:
    """
    Args:
        path: the run's folder.

    Attributes:
        last: the last checkpoint, durable or about to be; None: it could not be saved, or there is none.
        box: the state before the next step.
        trail: states to go back to.
        checkpointer: of a run that has begun.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.last: Key | None = None
        self.box, self.trail = BlackBox(0), Trail(0)
        self.checkpointer: Checkpointer

    def open(
        self, experiment: Experiment, journal: Journal, method: str, keep: tuple[int | None, int | None], back: int
    ) -> None:
        """Shares out the memory that states may take beside the box's: checkpoints first, then what to go back to.

        Args:
            method: of the fingerprints.
            keep: `keep_last` and `keep_every` of a Recorder.
            back: the least number of steps to go back; 0: nothing is taken back.
        """
        room = self.box.room(experiment, UNFINISHED)
        if back and self.box.room(experiment, UNFINISHED + 2) == UNFINISHED + 2:
            self.trail = Trail(back)  # else checkpoints must do
        self.checkpointer = Checkpointer(self._path, journal, method, keep, room)

    def know(self, boxed: Collection[Key], finite: bool) -> None:
        """What a resumed run did before: the checkpoints before its spikes, and whether its last step was finite."""
        self.box.committed |= set(boxed)
        self.box.finite = finite

    def wants(self, step: int) -> bool:
        """Whether the state of a step is to be held."""
        return self.box.on or self.trail.wants(step)

    def hold(self, held: Held) -> None:
        self.box.hold(held)
        self.trail.hold(held)

    def save(self, held: Held, manifest: Manifest) -> None:
        """Has a state saved as the checkpoint of its step, while training goes on."""
        self._put(f"checkpoint {held.state.step}", held, manifest)
        self.last = (held.state.step, held.segment)

    def before_spike(
        self, manifest: Manifest, loss: float, grad_norm: float, rule: str | None, *, needed: bool
    ) -> None:
        """Has the state before the step just logged saved, if that is a spike. One that is saved already, because it
        was due, is kept from thinning.

        Args:
            rule: why it is one; None: it is none, unless it is the first that is not finite.
            needed: it is to be saved however many there are.
        """
        held = self.box.due(loss, grad_norm, rule, needed=needed)
        if held is None or held.state.step == 0:
            return
        step, own, there = held.state.step, (held.state.step, held.segment), committed(self._path)
        saved = own if self.last == own else (step, state_segment(manifest, there, step, held.segment))
        if saved == self.last or saved in there:  # maybe of another segment: after a resume
            self.box.committed.add(saved)
            return
        self.box.committed.add(own)
        self._put(f"state {step}, before a spike,", held, manifest)

    def go_back_to(self, held: Held, manifest: Manifest) -> None:
        """Has the state that training goes back to saved, unless it is."""
        key = (held.state.step, held.segment)
        if key not in committed(self._path) and self.last != key:
            self._put(f"state {held.state.step}, which training went back to,", held, manifest)

    def went_back(self, held: Held, segment: int) -> None:
        """Goes on from it in a segment, whose first state it is."""
        self.last = (held.state.step, segment)  # it has the state of another segment
        self.trail.forget_after(held.state.step)
        self.box.hold(held._replace(segment=segment))
        self.box.finite = True

    def failures(self) -> Iterator[str]:
        """What could not be saved since this was last asked, a sentence each."""
        for failure in self.checkpointer.failed():
            if self.last == failure.key:
                self.last = None
            self.box.committed.discard(failure.key)
            yield failed_writes.of_checkpoint(failure, self._path)

    def _put(self, what: str, held: Held, manifest: Manifest) -> None:
        self.checkpointer.put(what, held.state, manifest, held.segment, held.lanes, self.box.committed)
