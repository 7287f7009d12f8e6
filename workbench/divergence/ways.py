"""Ways of performing the steps of one experiment, and the first step at which two of them part.

A way is an experiment with its options, on a device. Two ways may share a model and an optimizer: each restores the
state that it starts from. Knows experiments and states; nothing of run folders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..environment import on_device
from ..errors import ReplayError
from ..experiment import Batch, Experiment, as_batch, read_cursor
from ..lines.line import Edits
from ..observe import edit
from ..snapshot import State, capture, restore
from ..step import Stepper, StepResult
from .tensors import Tensors, step_tensors


class Way:
    """One way of performing steps.

    Args:
        experiment: its state is overwritten.
        layers: layer paths in order of execution.
        backend: "cpu", or the name of a GPU's.
        edits: what the run's loop changed in the state before a step.
    """

    def __init__(
        self,
        experiment: Experiment,
        layers: Sequence[str],
        *,
        backend: str,
        edits: Callable[[int], Edits | None] = lambda step: None,
    ) -> None:
        self._backend, self._edits = backend, edits
        with on_device(backend):
            self._stepper = Stepper(experiment, layers)

    def perform(self, before: State) -> Tensors:
        """Performs the step after `before`, and returns all its tensors in order of execution.

        Raises:
            ReplayError: the sampler ran dry.
        """
        with on_device(self._backend):
            restore(self._stepper.experiment, before)
            batch, result = self._next(before.step + 1)
            after = self._state(before.step + 1)
            return step_tensors(self._stepper.layers, self._stepper.owned, batch, result, after)

    def roll(self, start: State, step: int) -> State:
        """The state after `step`. Nothing is measured on the way."""
        with on_device(self._backend):
            restore(self._stepper.experiment, start)
            for number in range(start.step + 1, step + 1):
                self._next(number)
            return self._state(step)

    def _next(self, step: int) -> tuple[Batch, StepResult]:
        experiment = self._stepper.experiment
        if (changed := self._edits(step)) is not None:
            edit(experiment, changed)
        try:
            batch = as_batch(next(experiment.sampler))
        except StopIteration:
            raise ReplayError(f"the sampler ran out before step {step}; rebuild it with the run's data") from None
        return batch, self._stepper(batch)

    def _state(self, step: int) -> State:
        return capture(self._stepper.experiment, step, read_cursor(self._stepper.experiment.sampler))


class Rolling(Protocol):
    """What `first_departing_step` needs of a way."""

    def roll(self, start: State, step: int) -> State: ...


@dataclass(frozen=True)
class Found:
    """Attributes:
    step: the first after which the states differ; None: none does.
    before: the state before it, or the last one: both ways have it.
    computed: steps performed, both ways together.
    """

    step: int | None
    before: State
    computed: int


def first_departing_step(
    left: Rolling, right: Rolling, start: State, stop: int, progress: Callable[[int], None] = lambda step: None
) -> Found:
    """The first step after which two ways that roll forward from one state have different states.

    Both roll 1, 2, 4, … steps on, until the fingerprints of their states differ, then the last stretch is halved again
    and again, each time from the last state that both have. For a departure d steps after the start that is fewer than
    6·d steps, both ways together, and 2·log2(d) + 2 comparisons; without one, one pass each.

    A difference that later left no trace in any lane of the state would be passed over; moments that decay by a factor
    do not forget one. Each way must repeat itself: for one that does not, the answer is a step at or after its first.

    Args:
        stop: the last step to look at, after `start.step`.
        progress: called with a step before both roll to it; an exception that it raises stops the search.

    Raises:
        ReplayError: `stop` is not after the start.
    """
    if stop <= start.step:
        raise ReplayError(f"step {stop} can't be reached from state {start.step}; expected a later step")
    agreed, stride, computed, departed = start, 1, 0, stop + 1
    while agreed.step < min(stop, departed - 1):
        halfway = (agreed.step + departed) // 2
        step = min(agreed.step + stride, stop) if departed > stop else halfway
        progress(step)
        mine, theirs = left.roll(agreed, step), right.roll(agreed, step)
        computed += 2 * (step - agreed.step)
        if mine.lanes() == theirs.lanes():
            agreed, stride = mine, 2 * stride
        else:
            departed = step
    return Found(None if departed > stop else departed, agreed, computed)
