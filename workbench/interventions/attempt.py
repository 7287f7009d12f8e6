"""One change made to a step that is ready to be performed: to its state, its batch, or its settings.

An edited state or batch goes through the run's own step function. A changed setting needs one of its own, which runs
eagerly: for a few steps that is faster than compiling (preset tiny, two CPU cores: a step takes 57 ms compiled, 58 ms
eager, and compiling a changed constant 0.4 s).
Knows a scene; nothing of run folders or files.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx.utils import tree_map

from ..bits import bits_float, float_bits
from ..errors import ExperimentError
from ..experiment import Batch, Experiment, as_batch, put_arrays, put_kept, set_random_key
from ..fingerprint import lane_of
from ..numbered_batch import arguments
from ..rate_scale import without_schedules
from ..snapshot import State, restore
from ..step import Stepper, StepResult, clipped, optimizer_states
from .changes import Change, Times

if TYPE_CHECKING:
    from .scene import Moment, Scene


def _floats(rates: Sequence[str | None]) -> list[float | None]:
    return [None if bits is None else float(bits_float(bits)) for bits in rates]


@dataclass
class Attempt:
    """Step N, ready to be performed: the untouched one, until a change is made to it.

    Attributes:
        state: what it starts from.
        moment: what else it takes.
        stepper: what performs it and the steps after it.
        rates: the learning rates of a step, from the untouched ones as bits.
        unscheduled: the optimizer's own schedules of learning rates are taken out while a step is performed.
        skipped: step N is not performed.
        twin: the batch of `moment` once more, where it has fewer rows than the run's, with another row in memory behind
            its last one. MLX reads beyond an array without a word, and a step that does has another result with it.
        notes: what else had to be different.
    """

    scene: Scene
    state: State
    moment: Moment
    stepper: Stepper
    rates: Callable[[list[str | None]], list[float | None]] = _floats
    unscheduled: bool = False
    skipped: bool = False
    twin: Batch | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def experiment(self) -> Experiment:
        """The run's own."""
        return self.scene.stepper.experiment

    def with_options(self, *, compile: bool = False, **options: Any) -> None:
        """Another stepper, with other options on the same model and optimizer."""
        changed = msgspec.structs.replace(self.experiment.options, compile=compile, **options)
        self._adjust(replace(self.experiment, options=changed))

    def with_optimizer(self, optimizer: optim.Optimizer) -> None:
        """Another stepper, with another optimizer on the same model.

        Raises:
            ExperimentError: the run's step function is one of its own, which knows the optimizer that it has.
        """
        _refuse_own_step(self, "the optimizer's settings")
        options = msgspec.structs.replace(self.experiment.options, compile=False)
        self._adjust(replace(self.experiment, optimizer=optimizer, options=options))

    def _adjust(self, experiment: Experiment) -> None:
        self.stepper = Stepper(experiment, self.scene.layers)

    def perform(self, moment: Moment) -> StepResult:
        """One step, from the state that the stepper's experiment is in; with a `twin`, step N from `state`, twice.

        Raises:
            ExperimentError: it was to have another learning rate, and the run's own step function set it again; or it
                has a smaller batch, and two performances from the same state differ.
        """
        if self.twin is None or moment is not self.moment:
            return self._performed(moment)
        first = _told(self._performed(replace(moment, batch=self.twin)))
        put(self.stepper.experiment, self.state)
        result = self._performed(moment)
        if (second := _told(result)) != first:
            name, one, other = next((name, first[name], second[name]) for name in first if first[name] != second[name])
            raise ExperimentError(
                f"drop-row can't be tried: two performances from the same state differ ({name} {bits_float(one):.6g} "
                f"and {bits_float(other):.6g}): the step reads beyond a smaller batch, or is not deterministic"
            )
        return result

    def _performed(self, moment: Moment) -> StepResult:
        experiment, rates = self.stepper.experiment, self.rates(moment.rates)
        for state, rate in zip(optimizer_states(experiment.optimizer), rates, strict=True):
            if rate is not None:  # a schedule, where there is one, overwrites it within the step
                state["learning_rate"] = mx.array(rate, mx.float32)
        set_random_key(moment.key)
        self.scene.computed += 1
        with without_schedules(experiment.optimizer) if self.unscheduled else nullcontext():
            result = self.stepper(moment.batch)
        self._refuse_other_rates(rates, moment)
        return result

    def _refuse_other_rates(self, rates: Sequence[float | None], moment: Moment) -> None:
        optimizer, usual = self.stepper.experiment.optimizer, _floats(moment.rates)
        if self.stepper.experiment.step_fn is None or [rate and np.float32(rate) for rate in rates] == usual:
            return
        for state, rate in zip(optimizer_states(optimizer), rates, strict=True):
            if rate is not None and np.float32(state["learning_rate"].item()) != np.float32(rate):
                raise ExperimentError(
                    "the run's step function sets the learning rate itself, so it can't be changed from outside; "
                    "change it there"
                )


def _told(result: StepResult) -> dict[str, str]:
    """The numbers of a step that tell two tries apart, as bits."""
    return {"loss": float_bits(result.loss), "gradient norm": float_bits(result.grad_norm)}


def put(experiment: Experiment, state: State) -> None:
    """`restore`, also where the experiment's arrays have other dtypes than the state's."""
    put_arrays(experiment.model, state.weights)
    put_kept(experiment, state.optimizer)
    restore(experiment, state)


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
        return [None if rate is None else rate * value.factor for rate in _floats(untouched)]

    if [np.float32(rate) for rate in rates(attempt.moment.rates)] == _floats(attempt.moment.rates):
        raise _nothing(f"the learning rate of step {attempt.scene.step} is that already")
    attempt.rates = rates
    if not any("learning_rate" in member._schedulers for member in _members(optimizer)):
        return
    if attempt.experiment.step_fn is not None:  # it has the optimizer, so a copy of that would not be used
        attempt.unscheduled = True
        attempt.with_options()
    else:
        attempt.with_optimizer(_copied(optimizer, unscheduled=True))  # else the schedule would set it again


def _refuse_own_step(attempt: Attempt, what: str) -> None:
    if attempt.experiment.step_fn is not None:
        raise ExperimentError(f"the run has a step function of its own, and only that decides {what}; change it there")


def _clip(attempt: Attempt, limit: float | None) -> None:
    _refuse_own_step(attempt, "how gradients are clipped")
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
    _refuse_own_step(attempt, "which gradients enter the second moment")
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
    first, second = (
        as_batch([_without(part, row, behind) if getattr(part, "ndim", 0) else part for part in arguments(batch)])
        for behind in (0, 1)
    )
    attempt.moment, attempt.twin = replace(attempt.moment, batch=first), second
    if (rows - 1) % pieces:
        attempt.with_options(accumulate=1)
        attempt.notes.append(f"{rows - 1} rows can't be cut into {pieces} micro-batches, so they are one")
    if attempt.scene.draws:
        attempt.notes.append("the step draws random numbers, and other ones for each row of a smaller batch")


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
