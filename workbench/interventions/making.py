"""The changes that are made to a step, each by a function: to its state, its batch, or one of its settings.

Knows attempts, batches and MLX's optimizers; nothing of run folders or files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from ..errors import ExperimentError
from ..experiment import Batch, as_batch
from ..fingerprint import lane_of
from ..numbered_batch import NumberedBatch, arguments, numbers_of, numpy_of, without_numpy
from ..step import clipped
from .attempt import Attempt, floats, put
from .changes import Change, Times


def make(change: Change, attempt: Attempt) -> None:
    """Makes a change to an attempt.

    Raises:
        ExperimentError: it does not fit this run, or changes nothing in it.
        ReplayError: a batch or state that it needs can't be had.
    """
    _MAKERS[change.name](attempt, change.value)


# ---- the changes, one function each


def _lr(attempt: Attempt, value: float | Times) -> None:
    optimizer = attempt.experiment.optimizer
    if any(bits is None for bits in attempt.moment.rates):
        raise ExperimentError(f"{_name(optimizer)} has no learning rate in its state, so lr can't be changed")

    def rates(untouched: list[str | None]) -> list[float | None]:
        if not isinstance(value, Times):
            return [value] * len(untouched)
        return [None if rate is None else rate * value.factor for rate in floats(untouched)]

    if [np.float32(rate) for rate in rates(attempt.moment.rates)] == floats(attempt.moment.rates):
        raise _nothing(f"the learning rate of step {attempt.scene.step} is that already")
    attempt.rates = rates
    if not any("learning_rate" in member._schedulers for member in _members(optimizer)):
        return
    if attempt.experiment.step_fn is not None:  # it has the optimizer, so a copy of that would not be used
        attempt.unscheduled = True
        attempt.with_options()
    else:
        attempt.with_optimizer(_copied(optimizer, unscheduled=True))  # else the schedule would set it again


def _clip(attempt: Attempt, limit: float | None) -> None:
    attempt.refuse_own_step("how gradients are clipped")
    if limit == attempt.experiment.options.clip:
        raise _nothing(f"the run clips {'nothing' if limit is None else f'at {limit}'} already")
    attempt.with_options(clip=limit)


def _reset(attempt: Attempt, leaves: Sequence[str]) -> None:
    _refuse_other_than_adam(attempt, "moments")
    lanes = {f"adam_{leaf}" for leaf in leaves}
    zeros = {path: mx.zeros_like(array) for path, array in attempt.state.optimizer.items() if lane_of(path) in lanes}
    attempt.state = replace(attempt.state, optimizer=attempt.state.optimizer | zeros)
    attempt.notes.append("the step counter stays, so bias correction does not start afresh")


def _v_max(attempt: Attempt, word: str) -> None:
    _refuse_other_than_adam(attempt, "second moment")
    attempt.refuse_own_step("which gradients enter the second moment")
    if any(isinstance(member, optim.Adamax) for member in _members(attempt.experiment.optimizer)):
        raise ExperimentError("Adamax keeps a maximum of |g| as v, not a mean of g², so v=max does not apply")
    result, clip = attempt.scene.result, attempt.experiment.options.clip
    entering = (
        result.gradients
        if clip is None
        else clipped(result.gradients, mx.array(float(result.grad_norm), mx.float32), clip)
    )
    raised = {}
    for path, v in attempt.state.optimizer.items():
        if lane_of(path) == "adam_v":
            owner = path.rpartition(".")[0]  # below `states.K.` in a MultiOptimizer
            gradient = entering[owner] if owner in entering else entering[owner.split(".", 2)[-1]]
            raised[path] = mx.maximum(v, mx.square(gradient))
    attempt.state = replace(attempt.state, optimizer=attempt.state.optimizer | raised)


def _beta2(attempt: Attempt, value: float) -> None:
    _refuse_other_than_adam(attempt, "beta2")
    if all(member.betas[1] == value for member in _members(attempt.experiment.optimizer)):
        raise _nothing(f"its beta2 is {value} already")
    optimizer = _copied(attempt.experiment.optimizer)
    for member in _members(optimizer):
        member.betas = type(member.betas)([member.betas[0], value])
    attempt.with_optimizer(optimizer)


def _eps(attempt: Attempt, value: float) -> None:
    _refuse_other_than_adam(attempt, "epsilon")
    if all(member.eps == value for member in _members(attempt.experiment.optimizer)):
        raise _nothing(f"its epsilon is {value} already")
    optimizer = _copied(attempt.experiment.optimizer)
    for member in _members(optimizer):
        member.eps = value
    attempt.with_optimizer(optimizer)


def _drop_row(attempt: Attempt, row: int) -> None:
    batch, pieces = attempt.moment.batch, attempt.experiment.options.accumulate
    sizes = {array.shape[0] for array in batch if array.ndim}
    if len(sizes) != 1:
        raise ExperimentError(
            f"the arrays of the batch have leading axes {sorted(sizes)}; expected one batch size, or there are no rows"
        )
    rows = sizes.pop()
    if row >= rows or rows == 1:
        what = "only one row, and a step needs one" if rows == 1 else f"rows 0 to {rows - 1}"
        raise ExperimentError(f"row {row} can't be dropped: the batch of step {attempt.scene.step} has {what}")
    parts = arguments(without_numpy(batch))
    kept = ([_without(part, row, behind) if getattr(part, "ndim", 0) else part for part in parts] for behind in (0, 1))
    first, second = (_like(batch, as_batch(arrays), row) for arrays in kept)
    attempt.moment, attempt.twin = replace(attempt.moment, batch=first), second
    if (rows - 1) % pieces:
        attempt.with_options(accumulate=1)
        attempt.notes.append(f"{rows - 1} rows can't be cut into {pieces} micro-batches, so they are one")
    if attempt.scene.draws:
        attempt.notes.append("the step draws random numbers, and other ones for each row of a smaller batch")


def _like(batch: Batch, made: Batch, row: int) -> Batch:
    """The batch without a row, as it reaches the step: with arrays of numpy where it had them."""
    found = {place: part.of_changed(made[place]) for place, part in numpy_of(batch).items()}
    for place, part in numpy_of(batch).items():
        if part.exact is not None and part.exact.ndim:
            found[place] = found[place]._replace(exact=np.delete(part.exact, row, 0))
    return NumberedBatch(made, numbers_of(made), found) if found else made


def _without(array: mx.array, row: int, behind: int) -> mx.array:
    """The other rows, and in memory behind them one that is all `behind`: a token that every vocabulary has."""
    kept = mx.concatenate([array[:row], array[row + 1 :], mx.full(array.shape, behind, array.dtype)[:1]])[:-1]
    mx.eval(kept)  # a view: computed within a step it would be copied
    return kept


def _batch(attempt: Attempt, step: int | str) -> None:
    if step == "skip":
        attempt.skipped = True
        attempt.notes.append(f"step {attempt.scene.step} is not performed: those after it start from the state before")
        return
    if step == attempt.scene.step:
        raise _nothing(f"batch {step} is its own")
    batch: Batch = attempt.scene.batch(int(step))
    attempt.moment = replace(attempt.moment, batch=batch)


def _state(attempt: Attempt, step: int) -> None:
    if step >= attempt.scene.step - 1:
        raise ExperimentError(
            f"state={step} is not earlier than the state that step {attempt.scene.step} starts from; "
            f"expected at most {attempt.scene.step - 2}"
        )
    attempt.state = attempt.scene.state(step)
    if any(member._schedulers for member in _members(attempt.experiment.optimizer)):
        attempt.notes.append(f"schedules follow the state's own counter: as at step {step + 1}")


def _dtype(attempt: Attempt, name: str) -> None:
    dtype = getattr(mx, name)
    halves = {array.dtype for array in attempt.state.weights.values() if mx.issubdtype(array.dtype, mx.floating)}
    if halves <= {dtype}:
        raise _nothing(f"every weight is {name} already")

    def cast(arrays: Mapping[str, mx.array]) -> dict[str, mx.array]:
        return {
            path: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
            for path, array in arrays.items()
        }

    attempt.state = replace(attempt.state, weights=cast(attempt.state.weights), optimizer=cast(attempt.state.optimizer))
    put(attempt.experiment, attempt.state)  # before a stepper looks at the model
    attempt.with_options()


def _rng(attempt: Attempt, seed: int) -> None:
    if not attempt.scene.draws:
        raise _nothing(f"step {attempt.scene.step} draws no random numbers")
    attempt.moment = replace(attempt.moment, key=(seed >> 32, seed & 0xFFFFFFFF))


def _compile(attempt: Attempt, value: bool) -> None:
    if value == attempt.experiment.options.compile:
        raise _nothing(f"its steps are {'' if value else 'not '}compiled already")
    attempt.with_options(compile=value)


def _deterministic(attempt: Attempt, value: bool) -> None:
    options = attempt.experiment.options
    if mx.default_device().type != mx.DeviceType.gpu:
        raise _nothing("on the CPU the stock operations are used either way")
    if value == options.deterministic:
        raise _nothing(f"it uses {'deterministic' if value else 'stock'} operations already")
    attempt.with_options(compile=options.compile, deterministic=value)  # as the run's: kernels matter


_MAKERS: dict[str, Callable[[Attempt, Any], None]] = {
    "lr": _lr,
    "clip": _clip,
    "reset": _reset,
    "v": _v_max,
    "beta2": _beta2,
    "eps": _eps,
    "drop-row": _drop_row,
    "batch": _batch,
    "state": _state,
    "dtype": _dtype,
    "rng": _rng,
    "compile": _compile,
    "deterministic": _deterministic,
}


def _nothing(why: str) -> ExperimentError:
    return ExperimentError(f"this would change nothing in the run: {why}")


# ---- optimizers


def _members(optimizer: optim.Optimizer) -> list[Any]:
    return getattr(optimizer, "optimizers", [optimizer])


def _name(optimizer: optim.Optimizer) -> str:
    names = " and ".join(dict.fromkeys(type(member).__name__ for member in _members(optimizer)))
    return f"MultiOptimizer of {names}" if isinstance(optimizer, optim.MultiOptimizer) else names


def _refuse_other_than_adam(attempt: Attempt, what: str) -> None:
    """By kind, not by the names in its state: the `v` of SGD is a momentum."""
    optimizer = attempt.experiment.optimizer
    if not all(isinstance(member, optim.Adam) for member in _members(optimizer)):
        raise ExperimentError(f"{_name(optimizer)} is not Adam, AdamW or Adamax: it has no {what} to change")


def _copied(optimizer: optim.Optimizer, *, unscheduled: bool = False) -> optim.Optimizer:
    """A copy with containers of its own and the same arrays."""
    twin = copy.copy(optimizer)
    if isinstance(optimizer, optim.MultiOptimizer):
        members = [_copied(member, unscheduled=unscheduled) for member in optimizer.optimizers]
        twin.optimizers = members  # type: ignore[attr-defined]
        return twin
    twin.state = tree_map(lambda array: array, optimizer.state)
    twin._schedulers = {
        name: schedule
        for name, schedule in optimizer._schedulers.items()
        if not (unscheduled and name == "learning_rate")
    }
    return twin
