"""Interventions: step N once more, with exactly one thing changed, and what that does to it and to the steps after.

Every number comes from the one step function (`Stepper`), on the scene's own states and batches.
Knows a scene; nothing of run folders or files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import mlx.core as mx
import numpy as np
import pandas as pd

from ..detection.window import NORMAL_SIGMA_PER_MAD
from ..errors import ExperimentError
from ..experiment import kept_arrays, state_arrays
from ..spikes import LOSS_SIGMA_FLOOR
from ..step import StepResult
from .attempt import Attempt, put
from .changes import Change, parse_change
from .effect import Effect, effect
from .making import make

if TYPE_CHECKING:
    from .scene import Moment, Scene

SHARE = 2 / 3  # of the spike's height: a factor carries it that brings twice what is left for the other one
SIGMAS = 3.0  # a rise of fewer robust standard deviations of the losses before it is no spike to explain


def intervene(
    scene: Scene, change: Change | str | None, next_steps: int | None = None, *, once: bool = False
) -> Effect:
    """Performs step N with one change, then the steps after it.

    A changed setting (`Change.lasts`) holds from step N on, as in a fork; anything else touches only step N, or the
    state before it. The steps after N have the batches and random numbers of the untouched run, so that neither is a
    second difference.

    Args:
        change: see `parse_change`; None: nothing is changed, which must give the untouched step's bits again.
        next_steps: how many steps after N; None: as many as the scene was opened for.
        once: a changed setting holds for step N only.

    Raises:
        ExperimentError: the change does not fit this run, or changes nothing in it.
        ReplayError: a batch or state that it needs can't be had.
    """
    change = parse_change(change) if isinstance(change, str) else change
    following = scene.after(scene.next_steps if next_steps is None else next_steps)
    with scene.at_rest():
        attempt = Attempt(scene, *scene.before(), scene.stepper)
        if change is not None:
            make(change, attempt)
        return _perform(attempt, change, following, once)


def _perform(attempt: Attempt, change: Change | None, following: Sequence[Moment], once: bool) -> Effect:
    scene, before, result = attempt.scene, attempt.state.weights, None
    compiled = attempt.stepper.experiment.options.compile
    put(attempt.stepper.experiment, attempt.state)
    if not attempt.skipped:
        result = attempt.perform(attempt.moment)
        if change is not None and change.name == "dtype":
            _note_other_dtypes(attempt, result)
    found = effect(change, result, before, state_arrays(attempt.stepper.experiment.model))
    if change is not None and (once or (attempt.stepper is not scene.stepper and not change.lasts)):
        attempt = _back_to_the_run(attempt)
    losses = [attempt.perform(moment).loss for moment in following]
    if compiled != scene.stepper.experiment.options.compile and (change is None or change.name != "compile"):
        attempt.notes.append("performed eagerly, and the run's steps are compiled: last bits may differ for that alone")
    steps = len(losses) + (result is not None)
    return replace(found, next_losses=losses, steps=steps, compiled=compiled, notes=attempt.notes)


def _note_other_dtypes(attempt: Attempt, result: StepResult) -> None:
    left = [path for path, array in result.activations.items() if array.dtype != mx.float32]
    if left:
        attempt.notes.append(
            f"the outputs of {len(left)} of {len(result.activations)} layers are still not float32 (first {left[0]}): "
            "the model casts them itself"
        )


def _back_to_the_run(attempt: Attempt) -> Attempt:
    """The run's own step again, on the state that the changed one left, in the run's dtypes."""
    experiment, usual = attempt.stepper.experiment, attempt.scene.state(attempt.scene.step)
    left = replace(
        usual,
        weights=_cast_like(state_arrays(experiment.model), usual.weights),
        optimizer=_cast_like(kept_arrays(experiment), usual.optimizer),
    )
    put(attempt.experiment, left)
    return Attempt(attempt.scene, left, attempt.moment, attempt.scene.stepper, notes=attempt.notes)


def _cast_like(arrays: Mapping[str, mx.array], usual: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {path: array.astype(usual[path].dtype) for path, array in arrays.items()}


# ---- state or batch?


@dataclass(frozen=True)
class TwoByTwo:
    """The losses of {state N-1, an earlier state} × {batch N, another batch}, and which factor carries the spike.

    Attributes:
        losses: float32, by (state, batch).
        state_share, batch_share: how much of the rise from (earlier state, other batch) to (state N-1, batch N) each
            factor brings, averaged over the two ways to bring it (the Shapley value of two factors: Shapley 1953,
            Contributions to the Theory of Games II); they sum to 1. NaN where a loss is not finite.
        carrier: "batch" or "state" where its share is at least `SHARE`; "both" where it takes the two together;
            "neither" where the rise is no more than `SIGMAS` robust standard deviations of the losses before it.
    """

    states: tuple[int, int]  # N-1, the earlier one
    batches: tuple[int, int]  # N, the other one
    losses: dict[tuple[int, int], np.float32]
    state_share: float
    batch_share: float
    carrier: Literal["batch", "state", "both", "neither"]

    @property
    def table(self) -> pd.DataFrame:
        """Four losses: one row a state, one column a batch."""
        rows = [[float(self.losses[state, batch]) for batch in self.batches] for state in self.states]
        frame = pd.DataFrame(rows, columns=[f"batch {batch}" for batch in self.batches])
        return frame.set_index(pd.Index([f"state {state}" for state in self.states]))


def two_by_two(scene: Scene, state: int | None = None, batch: int | None = None) -> TwoByTwo:
    """Computes the losses that the scene doesn't have yet: three steps.

    Args:
        state: the earlier state; None: the earliest that the scene has.
        batch: the step whose batch is the other one; None: of the steps since that state, the one with the most usual
            loss, but never N-1: what is wrong with state N-1 may come from its batch.

    Raises:
        ExperimentError: there is no earlier state.
        ReplayError: the state or batch can't be had.
    """
    last = scene.step - 1
    state = scene.first if state is None else state
    if not scene.first <= state < last - 1:
        raise ExperimentError(
            f"the 2 by 2 of step {scene.step} needs a state from {scene.first} to {last - 2}, found {state}; "
            "open the scene with more context, or later in the run"
        )
    usual = {step: float(scene.moment(step).loss) for step in range(state + 1, last)}
    if batch is None:
        middle = np.nanmedian(list(usual.values()))
        batch = min(usual, key=lambda step: np.nan_to_num(abs(usual[step] - middle), nan=np.inf))
    losses = {(last, scene.step): scene.result.loss}
    for key, changes in {
        (last, batch): [Change("batch", batch)],
        (state, scene.step): [Change("state", state)],
        (state, batch): [Change("state", state), Change("batch", batch)],
    }.items():
        losses[key] = _loss(scene, changes)
    state_share, batch_share = _shares(losses, (last, state), (scene.step, batch))
    carrier = _carrier(losses, (last, state), (scene.step, batch), state_share, list(usual.values()))
    return TwoByTwo((last, state), (scene.step, batch), losses, state_share, batch_share, carrier)


def _loss(scene: Scene, changes: Sequence[Change]) -> np.float32:
    with scene.at_rest():
        attempt = Attempt(scene, *scene.before(), scene.stepper)
        for change in changes:
            make(change, attempt)
        put(attempt.stepper.experiment, attempt.state)
        return attempt.perform(attempt.moment).loss


def _shares(
    losses: Mapping[tuple[int, int], np.float32], states: tuple[int, int], batches: tuple[int, int]
) -> tuple[float, float]:
    spike, other_batch, other_state, calm = (float(losses[s, b]) for s in states for b in batches)
    with np.errstate(invalid="ignore", divide="ignore"):
        height = np.float64(spike - calm)
        return (
            float(((spike - other_state) + (other_batch - calm)) / 2 / height),
            float(((spike - other_batch) + (other_state - calm)) / 2 / height),
        )


def _carrier(
    losses: Mapping[tuple[int, int], np.float32],
    states: tuple[int, int],
    batches: tuple[int, int],
    state_share: float,
    usual: Sequence[float],
) -> Literal["batch", "state", "both", "neither"]:
    spike, other_batch, other_state, calm = (float(losses[s, b]) for s in states for b in batches)
    if not np.isfinite(spike):  # shares are undefined: which exchange alone makes it finite?
        by_batch, by_state = np.isfinite(other_batch), np.isfinite(other_state)
        return "both" if by_batch == by_state else "batch" if by_batch else "state"
    calm_losses = np.array([loss for loss in usual if np.isfinite(loss)] or [calm])
    middle = np.median(calm_losses)
    spread = NORMAL_SIGMA_PER_MAD * float(np.median(np.abs(calm_losses - middle)))
    sigma = max(spread, LOSS_SIGMA_FLOOR * abs(float(middle)))
    if not spike - calm > SIGMAS * sigma:
        return "neither"
    return "state" if state_share >= SHARE else "batch" if 1 - state_share >= SHARE else "both"
