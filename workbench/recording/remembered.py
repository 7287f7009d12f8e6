"""The learning rates that the last step left, remembered to tell later whether the loop has set others.

Knows experiments and states; nothing of folders or telemetry but what a line says of edits.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import mlx.core as mx

from ..experiment import Experiment
from ..lines.line import Edits
from ..observe import RateArray, learning_rates, rate_arrays, rate_paths
from ..snapshot import State
from ..step import optimizer_states


class Remembered:
    def __init__(self) -> None:
        self._rates: tuple[list[str | None], list[RateArray | None]] = [], []
        self._rate_arrays: dict[str, mx.array] = {}

    def keep_rates(self, experiment: Experiment) -> None:
        """Remembers the learning rates of this state, for the loop may set others before the next step."""
        self._rates = learning_rates(experiment), rate_arrays(experiment)
        states = zip(rate_paths(experiment), optimizer_states(experiment.optimizer), strict=True)
        self._rate_arrays = {
            path: copy.copy(rate) for path, one in states if (rate := one.get("learning_rate")) is not None
        }

    def edits(self, experiment: Experiment, key: tuple[int, int], left: tuple[int, int] | None) -> Edits:
        """What the loop changed between two steps, of what a replay can change too.

        Args:
            key: the random state now.
            left: the one that the last step left.
        """
        rng = None if key == left else key
        if (rates := (learning_rates(experiment), rate_arrays(experiment))) == self._rates:
            return Edits(rng=rng)
        return Edits(rng=rng, learning_rate=rates[0], rate_arrays=rates[1] if any(rates[1]) else None)

    def as_left(self, state: State) -> State:
        """The state with the learning rates that the last step left."""
        return replace(state, optimizer=state.optimizer | self._rate_arrays)
