"""A step that is ready to be performed: its state, its batch, and its settings, each of which may be changed.

An edited state or batch goes through the run's own step function. A changed setting needs one of its own, which runs
eagerly: for a few steps that is faster than compiling (preset tiny, two CPU cores: a step takes 57 ms compiled, 58 ms
eager, and compiling a changed constant 0.4 s).
Knows a scene; nothing of changes, run folders or files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np

from ..bits import bits_float, float_bits
from ..errors import ExperimentError
from ..experiment import Batch, Experiment, put_arrays, put_kept, set_random_key
from ..number_text import number
from ..rate_scale import without_schedules
from ..snapshot import State, restore
from ..step import Stepper, StepResult, optimizer_states

if TYPE_CHECKING:
    from .scene import Moment, Scene


def floats(rates: Sequence[str | None]) -> list[float | None]:
    """Learning rates from their bits."""
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
    rates: Callable[[list[str | None]], list[float | None]] = floats
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
        self.refuse_own_step("the optimizer's settings")
        options = msgspec.structs.replace(self.experiment.options, compile=False)
        self._adjust(replace(self.experiment, optimizer=optimizer, options=options))

    def refuse_own_step(self, what: str) -> None:
        """
        Raises:
            ExperimentError: the run has a step function of its own, which decides `what`.
        """
        if self.experiment.step_fn is not None:
            raise ExperimentError(
                f"the run has a step function of its own, and only that decides {what}; change it there"
            )

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
                f"drop-row can't be tried: two performances from the same state differ ({name} "
                f"{number(bits_float(one), 6)} and {number(bits_float(other), 6)}): the step reads beyond a smaller "
                "batch, or is not deterministic"
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
        optimizer, usual = self.stepper.experiment.optimizer, floats(moment.rates)
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
