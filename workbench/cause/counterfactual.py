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

from ..batches.row_targets import row_targets
from ..bits import float_bits
from ..experiment import Batch, as_batch, kept_arrays, set_random_key, state_arrays
from ..interventions.attempt import Attempt, put
from ..interventions.changes import Change, parse_change
from ..interventions.making import make
from ..lines.line import Restart
from ..numbered_batch import without_numpy
from ..observe import edit
from ..snapshot import State
from ..step import StepResult, forward_backward

if TYPE_CHECKING:
    from ..interventions.scene import Scene


@dataclass(frozen=True)
class Shot:
    """One performed step.

    Attributes:
        step: its number; its batch and random numbers are that step's unless the trial says otherwise.
        loss, grad_norm: float32 values as floats.
        row_losses: mean loss of each row over its own targets, float64 (rows,): inf where a loss is not finite, NaN
            where the row has no target or where which positions are targets can't be known (see
            `batches.row_targets`); None without a token loss, and where the rows were not asked for.
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
        rows: losses of rows by the loss function of a step of the user's own, by state and batch.
    """

    scene: Scene
    shots: dict[tuple[int, int], Shot] = field(default_factory=dict)
    borrowed: dict[int, State] = field(default_factory=dict)
    rows: dict[tuple[int, int], np.ndarray | None] = field(default_factory=dict)

    @property
    def last(self) -> int:
        """The state that step N starts from."""
        return self.scene.step - 1

    def own(self) -> Shot:
        """Step N, untouched."""
        return self._shot(self.scene.step, self.scene.result, self.scene.moment(self.scene.step).batch)

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
                self.shots[state, batch] = self._shot(batch, attempt.perform(moment), moment.batch)
        return self.shots[state, batch]

    def with_rows(self, one: Shot, state: int) -> Shot:
        """A shot with the losses of its rows also where the step is the user's own, and returns none: they are those of
        its loss function on the same state and batch, if the loss that it gives has the bits of the step's.

        Args:
            one: a step on its own batch, or that of a step on another state.
            state: the state that it was performed on.
        """
        scene, experiment = self.scene, self.scene.stepper.experiment
        if one.row_losses is not None or experiment.step_fn is None or experiment.loss_fn is None:
            return one
        if (state, one.step) not in self.rows:
            batch = scene.batch(one.step)
            moment = scene.moment(one.step if state == one.step - 1 and state >= scene.first else scene.step)
            with scene.at_rest():
                put(experiment, self.borrowed.get(state) or scene.state(state))
                set_random_key(moment.key)
                loss, _, _, told = forward_backward(experiment, without_numpy(batch), scene.layers)
                scene.computed += 1
                found = None
                if told is not None and float_bits(float(loss)) == float_bits(one.loss):
                    kind = scene.run.manifest.rebuild.get("kind")
                    found = rows_of(told, batch, loss=one.loss, kind=kind)
            self.rows[state, one.step] = found
        return replace(one, row_losses=self.rows[state, one.step])

    def without_row(self, row: int) -> Shot:
        """Step N without a row of its batch."""
        with self.scene.at_rest():
            attempt = Attempt(self.scene, *self.scene.before(), self.scene.stepper)
            make(Change("drop-row", row), attempt)
            put(attempt.stepper.experiment, attempt.state)
            return self._shot(self.scene.step, attempt.perform(attempt.moment), attempt.moment.batch)

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
                its = attempt.moment if step == first else moment
                found.append(self._shot(step, attempt.perform(its), its.batch))
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
                found.append(self._shot(step, scene.stepper(batch), batch))
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
                found.append(self._shot(step, attempt.perform(moment), moment.batch))
        return found

    def _shot(self, step: int, result: StepResult, batch: Batch) -> Shot:
        """Of a step performed on a batch, with the losses of its rows."""
        kind = self.scene.run.manifest.rebuild.get("kind")
        whole = self.scene.stepper.experiment.options.accumulate == 1
        return replace(shot(step, result), row_losses=row_losses(result, batch, kind=kind, whole=whole))


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
    """What a trial keeps of a performed step, without the losses of its rows."""
    return Shot(step, float(result.loss), float(result.grad_norm))


def row_losses(
    result: StepResult, batch: Batch = (), *, kind: str | None = None, whole: bool = True
) -> np.ndarray | None:
    """As `Shot.row_losses`.

    Args:
        batch: that the step was performed on; empty: not known.
        kind: of the run's rebuild.
        whole: whether the step's loss is that of the whole batch; otherwise the mean of micro-batches' losses.
    """
    if result.token_loss is None or result.token_loss.ndim == 0:
        return None
    return rows_of(result.token_loss, batch, loss=float(result.loss) if whole else None, kind=kind)


def rows_of(told: mx.array, batch: Batch, *, loss: float | None, kind: str | None) -> np.ndarray | None:
    """The same of what a loss function gives as `token_loss`; None where it tells of no rows.

    Args:
        loss: the step's, if it is that of the whole batch.
    """
    if told.ndim == 0:
        return None
    table = np.array(told.astype(mx.float32)).astype(np.float64)
    table = table.reshape(table.shape[0], -1)
    arrays = [np.array(one.astype(mx.float32) if one.dtype == mx.bfloat16 else one) for one in batch]
    targets = row_targets(table, arrays, kind=kind, mean=loss)
    sums = table.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.isfinite(sums), sums / targets, np.inf)
