"""A recorder that plants faults which no description of the run can hold: edits of the state, and transient ones.

A state edit is recorded as what it would be in life, a resume from a state other than the one that was left: a segment
that starts from a checkpoint of the edited state. A transient fault leaves no trace but its effect, as a bit flipped by
the hardware would; no replay repeats it. Knows recorders and steps; nothing of how faults are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .. import snapshot
from ..bits import bits_float, flip_bit, float_bits
from ..experiment import Experiment, read_cursor, replace_arrays, state_arrays
from ..observe import Observation
from ..record import Recorder
from ..recording.step_log import StepLog
from ..snapshot import State
from ..step import Stepper

Edit = Callable[[State, State], State]  # of the state as it is, and of the run's first one


@dataclass(frozen=True)
class GradientFlip:
    """One bit of the gradient of parameter `path`, with accumulation of that of each micro-batch; `index` in row-major
    order, `bit` 0 is the lowest."""

    path: str
    index: int
    bit: int


@dataclass(frozen=True)
class Acts:
    """What to do, by the step at which it shows first.

    Attributes:
        edits: of the state before the step, in order.
        gradients: bits to flip in the step's gradients, before their norm is taken and they are clipped.
        losses: bits to flip in the loss that is logged.
    """

    edits: Mapping[int, Sequence[Edit]] = field(default_factory=dict)
    gradients: Mapping[int, Sequence[GradientFlip]] = field(default_factory=dict)
    losses: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.edits or self.gradients or self.losses)


class Saboteur(Recorder):
    """Records like any recorder, and plants `acts` on the way. Other arguments are those of `Recorder`."""

    def __init__(self, acts: Acts, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._acts = acts
        self._log = FalseLog(acts.losses, self._standing, self._judge, self._unkept)
        first = snapshot.capture(self.experiment, self.step_number, read_cursor(self.experiment.sampler))
        self._first = replace(first, weights={})  # which no edit asks for

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """As of any recorder. An edit comes before the batch is drawn, for it may move the cursor."""
        edited = 0
        while steps is None or self.step_number < steps:
            number = self.step_number + 1
            if number in self._acts.edits and number != edited:
                self._edit(self._acts.edits[number])
                edited = number
            drawn = False
            for batch in super().batches(number):
                drawn = True
                yield batch
            if not drawn:
                return

    def step(self, batch: Any) -> float:
        """As of any recorder."""
        flips = self._acts.gradients.get(self.step_number + 1)
        if not flips:
            return super().step(batch)
        ordinary = self._stepper
        self._stepper = Stepper(_flipping(self.experiment, flips), ordinary.layers or None)
        try:
            return super().step(batch)
        finally:
            self._stepper = ordinary

    def _edit(self, edits: Sequence[Edit]) -> None:
        if self._out.saves.last != (self.step_number, self.segment):
            self.checkpoint()  # the state that was left: what the damaged one can be compared with
        state = snapshot.capture(self.experiment, self.step_number, read_cursor(self.experiment.sampler))
        for edit in edits:
            state = edit(state, self._first)
        snapshot.restore(self.experiment, state)
        self.open_segment()


class FalseLog(StepLog):
    """A log of steps some of whose losses have bits flipped. Other arguments are those of `StepLog`.

    Args:
        losses: the bits to flip, by step.
    """

    def __init__(self, losses: Mapping[int, Sequence[int]], *parts: Any) -> None:
        super().__init__(*parts)
        self._losses = losses

    def append(self, step: int, seen: Observation, edits: dict[str, Any]) -> None:
        for bit in self._losses.get(step, ()):
            seen = replace(seen, loss=bits_float(flip_bit(float_bits(seen.loss), bit)))
        super().append(step, seen, edits)


def _flipping(experiment: Experiment, flips: Sequence[GradientFlip]) -> Experiment:
    """The same experiment with a loss function whose gradients have the bits flipped. It shares model, optimizer and
    sampler, and the step function is the very same: only the backward pass of some parameters is another."""
    loss_fn = experiment.loss_fn

    def flipping(model: nn.Module, *batch: mx.array) -> Any:
        ordinary = {path: array for path, array in state_arrays(model).items() if path in {one.path for one in flips}}
        changed = dict(ordinary)
        for one in flips:
            changed[one.path] = _with_flipped_gradient(changed[one.path], one.index, one.bit)
        replace_arrays(model, changed)
        try:
            return loss_fn(model, *batch)
        finally:
            replace_arrays(model, ordinary)

    return replace(experiment, loss_fn=flipping)


def _with_flipped_gradient(array: mx.array, index: int, bit: int) -> mx.array:
    """The same values; the gradient that comes back to them has one bit changed."""
    word = {2: np.uint16, 4: np.uint32}[array.dtype.size]
    mask = np.zeros(array.size, word)
    mask[index] = 1 << bit
    flips = mx.array(mask).reshape(array.shape)

    @mx.custom_function
    def identity(x: mx.array) -> mx.array:
        return x

    @identity.vjp
    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return (cotangent.view(flips.dtype) ^ flips).view(cotangent.dtype)

    return cast(mx.array, identity(array))
