"""The black box: the state before each step, held in memory, to be committed when that step turns out to be a spike.

MLX's arrays are immutable, so holding a state is holding references: no copy, but its buffers can't be used again for
the next one, so that a recorded run needs memory for one state more. Knows states; nothing of folders or telemetry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from .experiment import Experiment
from .memory import memory, state_size
from .snapshot import State

SHARE = 0.25  # of the device's memory: a larger state is not held
LIMIT = 8  # states committed a run: a run that spikes all the time must not fill the disk


class Held(NamedTuple):
    """A state, the segment that it is of, and its fingerprints."""

    state: State
    segment: int
    lanes: dict[str, str]


@dataclass
class BlackBox:
    """
    Attributes:
        limit: how many states a run commits; 0: none, and nothing is held.
        bytes: memory that the held state takes.
        committed: step and segment of each checkpoint that was saved for the sake of the step after it.
        finite: whether loss and gradient norm of the last step were.
    """

    limit: int = LIMIT
    bytes: int = 0
    committed: set[tuple[int, int]] = field(default_factory=set)
    finite: bool = True
    _held: Held | None = None

    @classmethod
    def for_experiment(cls, experiment: Experiment, limit: int) -> BlackBox:
        """One that holds states only if each takes at most a quarter of the device's memory."""
        size = state_size(experiment)
        return cls(limit, size) if size <= SHARE * memory() else cls(0)

    @property
    def on(self) -> bool:
        return self.limit > 0

    def room(self, experiment: Experiment, most: int) -> int:
        """How many states more, at most `most`, may be held beside it with as much of the memory in all."""
        fit = int(SHARE * memory() // max(1, state_size(experiment)))
        return max(0, min(most, fit - int(self.on)))

    def hold(self, held: Held) -> None:
        """Holds the state that the last step left, in place of the one before."""
        if self.on:
            self._held = held

    def due(self, loss: float, grad_norm: float, rule: str | None, *, needed: bool = False) -> Held | None:
        """The held state, if the step that started from it is to be looked at again: a rule of spike detection names
        it, or it is the first whose loss or gradient norm is not finite.

        Args:
            needed: it is, whatever the limit says.
        """
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        wanted = (rule is not None and finite) or (not finite and self.finite)
        self.finite = finite
        if self._held is None or not (needed or (wanted and len(self.committed) < self.limit)):
            return None
        return None if (self._held.state.step, self._held.segment) in self.committed else self._held
