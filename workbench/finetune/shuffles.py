"""The order of mlx-lm's batches, for any micro-batch, without drawing those before it.

mlx-lm (`mlx_lm.tuner.trainer.iterate_batches`) sorts the examples by its own measure of length, cuts the sorted list
into batches, and shuffles the batches anew each epoch with numpy's global random state, seeded once. Each evaluation
shuffles the validation batches with the same state, so when the evaluations fall decides the order of training too.
Knows numpy; nothing of examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Evaluations:
    """When mlx-lm evaluates: before micro-batch 1, each `every`-th and the last, if there is anything to evaluate.

    Attributes:
        batches: of the validation set; 0: there is none, or none is asked for.
        every: mlx-lm's `steps_per_eval`.
        last: mlx-lm's `iters`.
    """

    batches: int
    every: int
    last: int

    def before(self, iteration: int) -> bool:
        """Whether one comes before micro-batch `iteration`, counted from 1."""
        due = iteration == 1 or iteration % self.every == 0 or iteration == self.last
        return due and self.batches > 0 and iteration <= self.last


class Shuffles:
    """The shuffles that one seed gives: of the training batches in each epoch, of the validation batches in between.

    Args:
        seed: of numpy's random state.
        batches: training batches in an epoch.
        evaluations: when the validation batches are shuffled.
    """

    def __init__(self, seed: int, batches: int, evaluations: Evaluations) -> None:
        self.seed, self.batches, self.evaluations = seed, batches, evaluations
        self._epoch = -1
        self._draws: Iterator[tuple[np.ndarray, dict[int, np.ndarray]]] = iter(())

    def training(self, epoch: int) -> np.ndarray:
        """The order of the training batches in an epoch, counted from 0: (batches,) integers."""
        self._go_to(epoch)
        return self._training

    def validation(self, iteration: int) -> np.ndarray:
        """The order of the validation batches in the evaluation before micro-batch `iteration`, counted from 1."""
        self._go_to((iteration - 1) // self.batches)
        return self._validation[iteration]

    def _go_to(self, epoch: int) -> None:
        if epoch < self._epoch:
            self._epoch = -1
        if self._epoch < 0:
            self._draws = self._drawn()
        while self._epoch < epoch:
            self._training, self._validation = next(self._draws)
            self._epoch += 1

    def _drawn(self) -> Iterator[tuple[np.ndarray, dict[int, np.ndarray]]]:
        state = np.random.RandomState(self.seed)  # the generator behind np.random.seed and np.random.permutation
        first = 1
        while True:
            training = state.permutation(self.batches)
            # The first batch of an epoch is drawn before the evaluation that precedes its use.
            due = [i for i in range(first, first + self.batches) if self.evaluations.before(i)]
            yield training, {i: state.permutation(self.evaluations.batches) for i in due}
            first += self.batches
