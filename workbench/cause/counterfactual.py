"""What steps would have been with one thing changed in them: measured on a scene's own states and batches.

`intervene` changes step N itself. Here a change may also be made some steps earlier, and the steps from there to N are
performed again. Knows a scene; nothing of run folders, files or verdicts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from ..experiment import Batch, as_batch, kept_arrays, state_arrays
from ..interventions.attempt import Attempt, make, put
from ..interventions.changes import Change, parse_change
from ..observe import edit
from ..snapshot import State
from ..step import StepResult
from ..telemetry import Restart

if TYPE_CHECKING:
    from ..interventions.scene import Scene


@dataclass(frozen=True)
class Shot:
    """One performed step.

    Attributes:
        step: its number; its batch and random numbers are that step's unless the trial says otherwise.
        loss, grad_norm: float32 values as floats.
        row_losses: mean loss of a token of each row, float64 (rows,); None without a token loss, or one a row.
    """

    step: int
    loss: float
    grad_norm: float
    row_losses: np.ndarray | None = None


@dataclass
class Trials:
    """Trials on a scene, each performed once.

    Attributes:
        scene: whose states and batches are used; it is left as it was.
        shots: what was measured, by state and batch.
        borrowed: states from elsewhere, such as a checkpoint before the scene's first, by step.
    """

    scene: Scene
    shots: dict[tuple[int, int], Shot] = field(default_factory=dict)
    borrowed: dict[int, State] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The state that step N starts from."""
        return self.scene.step - 1

    def own(self) -> Shot:
        """Step N, untouched."""
        return shot(self.scene.step, self.scene.result)

    def shot(self, state: int, batch: int) -> Shot:
        """The batch of a step on a state of the scene, or a borrowed one, with the random numbers of step N."""
        if (state, batch) == (self.last, self.scene.step):
            return self.own()
        if (state, batch) not in self.shots:
            with self.scene.at_rest():
                moment = replace(self.scene.moment(self.scene.step), batch=self.scene.batch(batch))
                held = self.borrowed.get(state) or self.scene.state(state)
                attempt = Attempt(self.scene, held, moment, self.scene.stepper)
                put(attempt.stepper.experiment, attempt.state)
                self.shots[state, batch] = shot(batch, attempt.perform(moment))
        return self.shots[state, batch]

    def without_row(self, row: int) -> Shot:
        """Step N without a row of its batch."""
        with self.scene.at_rest():
            attempt = Attempt(self.scene, *self.scene.before(), self.scene.stepper)
            make(Change("drop-row", row), attempt)
            put(attempt.stepper.experiment, attempt.state)
            return shot(self.scene.step, attempt.perform(attempt.moment))

    def redo(
        self,
        first: int,
        change: Change | str | None = None,
        *,
        steps: Collection[int] | None = None,
        beyond: int = 0,
        state: State | None = None,
        batch: Batch | None = None,
    ) -> list[Shot]:
        """Steps `first` to N and `beyond` more, from the state before `first`, with a change.

        Args:
            change: a setting holds in the steps of `steps`; anything else is made before or in step `first`.
            steps: None: `first` only.
            state: another state to start from.
            batch: another batch for step `first`.

        Raises:
            ExperimentError: the change does not fit this run, or changes nothing in it.
            ReplayError: a batch or state that it needs can't be had.
        """
        scene, found = self.scene, []
        change = parse_change(change) if isinstance(change, str) else change
        following = scene.after(beyond)
        moments = [scene.moment(step) for step in range(first, scene.step + 1)] + following
        if batch is not None:
            moments[0] = replace(moments[0], batch=batch)
        changed = {first} if steps is None else set(steps)
        with scene.at_rest():
            attempt = Attempt(scene, state or scene.state(first - 1), moments[0], scene.stepper)
            if change is not None:
                make(change, attempt)
            put(attempt.stepper.experiment, attempt.state)
            usual, rates = Attempt(scene, attempt.state, attempt.moment, scene.stepper).rates, attempt.rates
            if attempt.skipped:
                found.append(Shot(first, math.nan, math.nan))
            for step, moment in enumerate(moments, start=first):
                if step == first and attempt.skipped:
                    continue
                attempt.rates = rates if step in changed else usual
                found.append(shot(step, attempt.perform(attempt.moment if step == first else moment)))
                if step == first and change is not None and not change.lasts and attempt.stepper is not scene.stepper:
                    attempt = _own_step(attempt)
                    rates = attempt.rates
        return found

    def drawn(self, state: State, *, beyond: int = 0) -> list[Shot]:
        """The steps after a state up to N and `beyond` more, on the batches that its own cursor leads to, with its own
        random state and step counter: what would have been, had the run gone on from it.

        Raises:
            ReplayError: the data stream ends.
        """
        scene, found = self.scene, []
        experiment = scene.stepper.experiment
        with scene.at_rest():
            put(experiment, state)
            for step in range(state.step + 1, scene.step + 1 + beyond):
                edits = scene.run.edits(step, scene.segment)
                if edits is not None and not isinstance(edits, Restart):
                    edit(experiment, edits)
                try:
                    batch = as_batch(next(experiment.sampler))
                except StopIteration:
                    break
                scene.computed += 1
                found.append(shot(step, scene.stepper(batch)))
        return found

    def along(self, step: int, factors: Sequence[float], batch: int) -> list[Shot]:
        """A batch on states between the one before a step and the one after it: weights before + factor · update."""
        scene = self.scene
        before, after = scene.state(step - 1), scene.state(step)
        found = []
        with scene.at_rest():
            moment = replace(scene.moment(step), batch=scene.batch(batch))
            for factor in factors:
                weights = {path: _between(array, after.weights[path], factor) for path, array in before.weights.items()}
                attempt = Attempt(scene, replace(before, weights=weights), moment, scene.stepper)
                put(attempt.stepper.experiment, attempt.state)
                found.append(shot(step, attempt.perform(moment)))
        return found


def _between(before: mx.array, after: mx.array, factor: float) -> mx.array:
    if not mx.issubdtype(before.dtype, mx.floating):
        return before
    moved = before.astype(mx.float32) + factor * (after.astype(mx.float32) - before.astype(mx.float32))
    return moved.astype(before.dtype)


def _own_step(attempt: Attempt) -> Attempt:
    """The run's own step again, on the state that the changed one left."""
    experiment = attempt.stepper.experiment
    left = replace(attempt.state, weights=state_arrays(experiment.model), optimizer=kept_arrays(experiment))
    put(attempt.experiment, left)
    return Attempt(attempt.scene, left, attempt.moment, attempt.scene.stepper)


def shot(step: int, result: StepResult) -> Shot:
    """What a trial keeps of a performed step."""
    return Shot(step, float(result.loss), float(result.grad_norm), row_losses(result))


def row_losses(result: StepResult) -> np.ndarray | None:
    """Mean loss of a token of each row, float64 (rows,); None where the loss function gives no loss of each row."""
    if result.token_loss is None or result.token_loss.ndim == 0:
        return None
    table = np.array(result.token_loss.astype(mx.float32)).astype(np.float64)
    return table.reshape(table.shape[0], -1).mean(axis=1)
