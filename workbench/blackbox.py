"""The black box: the state before each step, held in memory, to be committed when that step turns out to be a spike.

MLX's arrays are immutable, so holding a state is holding references: no copy, but its buffers can't be used again for
the next one, so that a recorded run needs memory for one state more. Knows states; nothing of folders or telemetry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .experiment import Experiment
from .memory import memory, state_size
from .snapshot import State

SHARE = 0.25  # of the device's memory: a larger state is not held
LIMIT = 8  # states committed a run: a run that spikes all the time must not fill the disk


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
    _held: tuple[State, int] | None = None

    @classmethod
    def for_experiment(cls, experiment: Experiment, limit: int) -> BlackBox:
        """One that holds states only if each takes at most a quarter of the device's memory."""
        size = state_size(experiment)
        return cls(limit, size) if size <= SHARE * memory() else cls(0)

    @property
    def on(self) -> bool:
        return self.limit > 0

    def hold(self, state: State, segment: int) -> None:
        """Holds the state that the last step left, in place of the one before."""
        if self.on:
            self._held = state, segment

    def due(self, loss: float, grad_norm: float, rule: str | None) -> tuple[State, int] | None:
        """The held state and its segment, if the step that started from it is to be looked at again: a rule of spike
        detection names it, or it is the first whose loss or gradient norm is not finite."""
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        wanted = (rule is not None and finite) or (not finite and self.finite)
        self.finite = finite
        if not wanted or self._held is None or len(self.committed) >= self.limit:
            return None
        state, segment = self._held
        return None if (state.step, segment) in self.committed else self._held
