"""The one function that performs a train step. Recording and replay both call it, with the same compile setting.

A step is: forward and backward pass of each micro-batch, the global gradient norm, clipping, the optimizer's update.
Knows an `Experiment`; nothing of files, telemetry or any particular model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from . import extras, own_step
from .capture import Capture, layers_of
from .deterministic import deterministic_operations
from .errors import ExperimentError
from .experiment import (
    Batch,
    Experiment,
    has_free_stride,
    other_strides,
    put_arrays,
    random_state,
    row_major,
    state_arrays,
    weight_arrays,
)
from .numbered_batch import Number, arguments, numbers_of, spelled
from .ranks.world import averaged
from .rate_scale import schedules


class Asked(Protocol):
    """Arrays to be evaluated together with the step."""

    @property
    def pending(self) -> Any: ...


@dataclass(frozen=True)
class StepResult:
    """What a step returns beside the new state, which is in the experiment's model and optimizer. All evaluated.

    Attributes:
        loss: float32; with accumulation the mean over micro-batches.
        grad_norm: float32, global L2 norm before clipping.
        gradients: by parameter path, before clipping, in the parameter's dtype.
        activations: output of the last call of each layer (with accumulation: in the last micro-batch).
        token_loss: the loss function's `token_loss`, or None.
        asked: what `Stepper.ask` returned.
    """

    loss: np.float32
    grad_norm: np.float32
    gradients: dict[str, mx.array]
    activations: dict[str, mx.array]
    token_loss: mx.array | None
    asked: Asked | None = None


def micro_batches(batch: Batch, parts: int) -> list[Batch]:
    """Cuts the leading axis of every array into `parts` equal pieces.

    Raises:
        ExperimentError: the batch size is not a multiple of `parts`.
    """
    if parts == 1:
        return [batch]
    sizes = {array.shape[0] if getattr(array, "ndim", 0) else 0 for array in batch}  # a number has no rows either
    if len(sizes) != 1 or min(sizes) % parts or min(sizes) == 0:
        raise ExperimentError(
            f"a batch with leading axes {sorted(sizes)} can't be cut into {parts} equal micro-batches; "
            "expected one batch size, a multiple of accumulate"
        )
    rows = sizes.pop() // parts
    return [tuple(array[start : start + rows] for array in batch) for start in range(0, rows * parts, rows)]


def forward_backward(
    experiment: Experiment, batch: Batch, layers: Sequence[str], *, tap_gradients: bool = False
) -> tuple[mx.array, Any, Capture, mx.array | None]:
    """Loss, gradients (a tree like the trainable parameters), the last micro-batch's capture, and the token loss."""

    def loss_fn(*arrays: mx.array) -> tuple[mx.array, Any]:
        returned = experiment.loss_fn(experiment.model, *arrays)
        loss, extras = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, None)
        return loss, extras.get("token_loss") if isinstance(extras, dict) else None

    value_and_grad = nn.value_and_grad(experiment.model, loss_fn)
    parts = micro_batches(batch, experiment.options.accumulate)
    total, gradients, token_losses = None, None, []
    for part in parts:
        with operations(experiment), Capture(experiment.model, layers, gradients=tap_gradients) as capture:
            (loss, token_loss), part_gradients = value_and_grad(*arguments(part, compiled=experiment.options.compile))
        loss = loss.astype(mx.float32)
        total = loss if total is None else total + loss
        gradients = part_gradients if gradients is None else tree_map(mx.add, gradients, part_gradients)
        token_losses.append(token_loss)
    assert total is not None
    if len(parts) > 1:
        total = total / len(parts)
        gradients = tree_map(lambda gradient: gradient / len(parts), gradients)
    gradients = averaged(gradients)
    tokens = None if token_losses[0] is None else mx.concatenate(token_losses) if len(parts) > 1 else token_losses[0]
    return total, gradients, capture, tokens


def operations(experiment: Experiment) -> AbstractContextManager[None]:
    """The operations to trace a step with: deterministic ones where stock ones are not and the run asks for them."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    return deterministic_operations() if on_gpu and experiment.options.deterministic else nullcontext()


def global_norm(gradients: Any) -> mx.array:
    """L2 norm over all gradients, squares summed in float32 whatever the gradients' dtype (bfloat16 sums lose bits)."""
    leaves: dict[str, mx.array] = dict(tree_flatten(gradients))
    squares = [mx.sum(mx.square(gradient.astype(mx.float32))) for gradient in leaves.values()]
    return mx.sqrt(sum(squares[1:], squares[0]))


def clipped(gradients: Any, grad_norm: mx.array, limit: float) -> Any:
    """Gradients scaled by min(1, limit / (norm + 1e-6)): global-norm clipping (Pascanu et al. 2013, arXiv:1211.5063),
    with the 1e-6 of `mlx.optimizers.clip_grad_norm`."""
    scale = mx.minimum(limit / (grad_norm + 1e-6), 1.0)
    return tree_map(lambda gradient: (gradient * scale).astype(gradient.dtype), gradients)


def optimizers(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """The members of a MultiOptimizer, or the optimizer itself."""
    return list(getattr(optimizer, "optimizers", [optimizer]))


def optimizer_states(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    """The live state dict of an optimizer, or of each member of a MultiOptimizer."""
    return [member.state for member in optimizers(optimizer)]


def steady(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer was seen to leave a weight of shape (1, 64) row-major in loops without a recorder.

    Measured: 12 loops of 6 steps in one process, mlx 0.32.4 on a CPU, eager and compiled. These gave the same bits
    each time; SGD without momentum, Adagrad and RMSprop gave 2 to 5 different results.
    """
    if type(optimizer) is optim.SGD:
        return bool(optimizer.momentum)
    return type(optimizer) in _STEADY


_STEADY = {optim.AdaDelta, optim.Adafactor, optim.Adam, optim.AdamW, optim.Adamax, optim.Lion, optim.Muon}


class Stepper:
    """Performs the steps of an experiment, advancing its state in place.

    Args:
        experiment: prepared here (`Experiment.prepare`).
        layers: layer paths in execution order, from a manifest; None: found from the first batch.

    Attributes:
        layers: paths in first-execution order; layers that the first forward pass did not call come last.
        owned: the trainable parameters of each layer.
        ask: if set, called with the batch, gradients and activations of each step while it is being computed: first
            forward and backward pass, then the update, so that who waits for gradients has them before that is done.
        parts: where `ask` is set: gives arrays of the new state in the order in which they are read there, in parts.
            Each part is evaluated by itself, so that it can be read while those after it are computed.
        relaid: shapes of the parameters, by path, whose strides MLX had left to chance: at the start, and after a step.
    """

    def __init__(self, experiment: Experiment, layers: Sequence[str] | None = None) -> None:
        experiment.prepare()
        self.experiment = experiment
        self.owned = layers_of(experiment.model)
        self.layers = list(layers) if layers is not None else []
        if layers is not None and set(layers) != set(self.owned):
            missing, extra = sorted(set(layers) - set(self.owned)), sorted(set(self.owned) - set(layers))
            raise ExperimentError(
                f"the model's layers are not the recorded ones: missing {missing}, unexpected {extra}; "
                "rebuild the model that the run was recorded with"
            )
        self.ask: Callable[[Batch, dict[str, mx.array], dict[str, mx.array]], Asked] | None = None
        self.parts: Callable[[], Sequence[Sequence[mx.array]]] = tuple
        self._step: Callable[..., Any] | None = None
        self._order: list[str] = []
        self._numbers: dict[int, Number] = {}  # of the batch before
        self._told = False
        self.relaid = experiment.relaid
        self._free = any(has_free_stride(array) for tree in self._trees() for array in state_arrays(tree).values())

    def __call__(self, batch: Batch) -> StepResult:
        """Performs one step on `batch` and evaluates the new state."""
        if self._step is None or self._schedules != schedules(self.experiment.optimizer):
            self._step = self._build()  # a compiled step would go on with the schedules that it saw
        self.refuse_other_containers()
        if self.experiment.options.compile and (numbers := numbers_of(batch)):
            self._tell_of_numbers(numbers)
        with own_step.explained(self.experiment):
            return self._performed(self._step, batch)

    def _performed(self, step: Callable[..., Any], batch: Batch) -> StepResult:
        # New handles: a loss function that changes its arguments in place must not change the caller's batch.
        handles = map(copy.copy, arguments(batch, compiled=self.experiment.options.compile))
        loss, grad_norm, gradients, activations, tokens = step(*handles)
        self.layers = self.layers or self._order + [path for path in self.owned if path not in self._order]
        found = self._fix_strides() if self._free else {}
        if self.ask is not None:
            mx.async_eval(loss, grad_norm, activations, gradients)
            for part in self.parts():
                mx.async_eval(part)
        state = [weight_arrays(self.experiment), self.experiment.optimizer.state, random_state()]
        outputs: list[Any] = [loss, grad_norm, gradients, activations, tokens, *state]
        outputs += [state_arrays(tree) for tree in extras.trees(self.experiment.extra)]
        asked = None
        if self.ask is not None:
            mx.async_eval(outputs)
            asked = self.ask(batch, gradients, activations)
            outputs.append(asked.pending)
        mx.eval(outputs)
        if not all(map(steady, optimizers(self.experiment.optimizer))):
            for path, (left, fixed) in found.items():
                sources = [left, gradients.get(path, left)]  # whose buffer, and so whose strides, the new value may get
                if path not in self.relaid and any(other_strides(source, fixed) for source in sources):
                    self.relaid[path] = left.shape
        numbers = np.float32(loss.item()), np.float32(grad_norm.item())
        return StepResult(*numbers, gradients, activations, tokens[0] if tokens else None, asked)

    def _trees(self) -> list[Any]:
        """What holds the arrays of the state."""
        experiment = self.experiment
        return [experiment.model, experiment.optimizer.state, *extras.trees(experiment.extra)]

    def _tell_of_numbers(self, numbers: dict[int, Number]) -> None:
        """To `mx.compile` a number is a constant, whether a recorder looks on or not."""
        before, now = spelled(self._numbers), spelled(numbers)
        changed = [place for place in before.keys() & now.keys() if before[place] != now[place]]
        if changed and not self._told:
            self._told = True
            warnings.warn(
                f"argument {min(changed)} of the step is a number that changes, and MLX compiles a step anew for each "
                "value of a number; hand over an array, mx.array(value), which it takes as an input",
                stacklevel=4,
            )
        self._numbers = numbers

    def refuse_other_containers(self) -> None:
        """A compiled step goes on with the containers it saw: others in their place would be recorded, not used.

        Raises:
            ExperimentError: the optimizer's state is in another dict now.
        """
        if self._step is None or not self.experiment.options.compile:
            return
        states = optimizer_states(self.experiment.optimizer)
        if any(now is not then for now, then in zip(states, self._containers, strict=True)):
            raise ExperimentError(
                "optimizer.state was replaced by another dict after the first step, which a compiled step never sees; "
                "change its entries instead: optimizer.state.update(...)"
            )

    def _fix_strides(self) -> dict[str, tuple[mx.array, mx.array]]:
        """Strides along axes of length 1 depend on which buffers MLX could reuse, so on what else holds the old arrays:
        left as they are, they would be hidden state that no checkpoint has.

        Returns:
            Of each such parameter the array as it was left, and as it is now.
        """
        found = {}
        for tree in self._trees():
            free = {path: array for path, array in state_arrays(tree).items() if has_free_stride(array)}
            fixed = {path: row_major(array) for path, array in free.items()}
            put_arrays(tree, fixed)
            if tree is self.experiment.model:
                found = {path: (free[path], fixed[path]) for path in free}
        return found

    def _build(self) -> Callable[..., Any]:
        experiment, layers = self.experiment, list(self.owned)
        model, optimizer, clip = experiment.model, experiment.optimizer, experiment.options.clip
        self._containers, self._schedules = optimizer_states(optimizer), schedules(optimizer)

        def step(*batch: mx.array) -> tuple[Any, ...]:
            tokens = None
            if experiment.step_fn is None:
                loss, gradients, capture, tokens = forward_backward(experiment, batch, layers)
                grad_norm = global_norm(gradients)
                optimizer.update(model, gradients if clip is None else clipped(gradients, grad_norm, clip))
            else:
                loss, gradients, capture = own_step.perform(experiment, batch, layers, operations(experiment))
                loss, grad_norm = loss.astype(mx.float32), global_norm(gradients)
            self._order = capture.order
            flat = dict(tree_flatten(gradients))
            return loss, grad_norm, flat, capture.last(capture.activations), [] if tokens is None else [tokens]

        if not experiment.options.compile:
            return step
        state = [model.state, optimizer.state, mx.random.state, *extras.trees(experiment.extra)]
        return mx.compile(step, inputs=state, outputs=state)
