"""The first tensor of a step that is not finite although everything before it was, forward or backward.

Only a step that has such a tensor pays for finding it: one more uncompiled pass that counts the non-finite elements of
whatever enters and leaves a module or an attention call, and of the gradients on their way back.
Knows steps and states; nothing of files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ..bits import float_bits
from ..capture import ModuleCalls, function_calls, gradient_tap, is_floating
from ..deterministic import attention_calls
from ..experiment import Batch, Experiment
from ..fingerprint import fingerprint
from ..ranks.world import everywhere, world
from ..snapshot import State, restore
from ..step import Stepper, StepResult, forward_backward
from .measured import NonFinite, Row
from .watch import is_attention_softmax

MASKS = ("batch", "intermediate", "activation", "logits")  # kinds of tensors in which -inf may be meant


@dataclass(frozen=True)
class _Event:
    """A tensor that was there, in the order of execution; `counts` are its NaN, +inf and -inf elements."""

    kind: str
    path: str
    what: str
    size: int
    counts: mx.array
    call: int = 0
    micro_batch: int = 0


def first_nonfinite(
    stepper: Stepper,
    before: State,
    after: State,
    batch: Batch,
    result: StepResult,
    rows: Sequence[Row],
    *,
    forward: bool = True,
) -> NonFinite | None:
    """The first non-finite tensor of a step; None if loss, gradient norm and everything in `rows` are finite.

    The order: batch, state N-1, each micro-batch forward up to the loss and backward, parameter gradients (before
    clipping), gradient norm, state N. A batch, activation or logits whose only non-finite elements are -inf count as a
    mask: they are passed over, unless the loss is not finite and nothing else was found. What a module got but no
    module returned was computed between two calls, in the module that encloses them, which is then named.

    Args:
        before, after: states N-1 and N; the experiment is left at some other state.
        result: of the exact pass.
        rows: of the probe pass.
        forward: whether the loss function can be run; else what comes before the parameter gradients is left out.
    """
    tokens = result.token_loss is None or mx.isfinite(result.token_loss).all().item()
    norm = np.isfinite(result.grad_norm) or not result.gradients  # of a step that left its update out
    sound = np.isfinite(result.loss) and norm and tokens
    if everywhere(bool(sound) and not any(row.nonfinite for row in rows)):
        return None
    masks: list[NonFinite] = []
    stages: Iterable[tuple[list[_Event], str]] = _stages(stepper, before, after, batch, result, forward)
    if world().size > 1:
        stages = list(stages)  # the pass among them is one of all ranks, also of those that would not need it
    for events, note in stages:
        counted = [event.counts for event in events]
        mx.eval(counted)
        for event, counts in zip(events, np.array(mx.stack(counted)) if events else (), strict=True):
            if counts.any():
                found = _found(event, counts.tolist(), note)
                if counts[:2].any() or event.kind not in MASKS:
                    return found
                masks.append(found)
    return masks[0] if masks and not sound else None


def _stages(
    stepper: Stepper, before: State, after: State, batch: Batch, result: StepResult, forward: bool
) -> Iterator[tuple[list[_Event], str]]:
    """Events in the order of execution, and what must be said about all of them. Later stages may not be needed."""
    inputs = {str(number): array for number, array in enumerate(batch)}
    yield _events("batch", "array {} of the batch", inputs), ""
    yield _events("weight_before", "the weight {} of state N-1", before.weights), ""
    yield _events("optimizer_before", "{} in the optimizer of state N-1", before.optimizer), ""
    if forward:
        restore(stepper.experiment, before)
        trail = _Trail(stepper.experiment)
        loss, gradients = trail.run(batch, stepper.layers)
        same = float_bits(np.float32(loss)) == float_bits(result.loss) and fingerprint(gradients) == fingerprint(
            result.gradients
        )
        note = "" if same else " (found by an uncompiled pass, whose bits differ from the run's)"
        yield trail.events, note
    backward = [path for layer in reversed(stepper.layers) for path in reversed(stepper.owned[layer])]
    ordered = {path: result.gradients[path] for path in backward if path in result.gradients}
    yield _events("gradient", "the gradient of {}", ordered), ""
    if ordered:
        yield _events("grad_norm", "the global gradient norm", {"": mx.array(float(result.grad_norm))}), ""
    yield _events("optimizer", "{} in the optimizer of state N", after.optimizer), ""
    yield _events("weight", "the weight {} of state N", after.weights), ""


def _events(kind: str, what: str, tensors: Mapping[str, mx.array]) -> list[_Event]:
    floating = {path: array for path, array in tensors.items() if is_floating(array)}
    return [_Event(kind, path, what.format(path), array.size, _counts(array)) for path, array in floating.items()]


def _counts(array: mx.array) -> mx.array:
    return mx.stack([mx.sum(found) for found in (mx.isnan(array), mx.isposinf(array), mx.isneginf(array))])


def _found(event: _Event, counts: list[int], note: str) -> NonFinite:
    named = [f"{count:,} {name}" for count, name in zip(counts, ("NaN", "inf", "-inf"), strict=True) if count]
    elements = f"{', '.join(named)} of {event.size:,} elements" if event.size > 1 else named[0].split()[1]
    again = f" in call {event.call}" if event.call else ""
    return NonFinite(
        path=event.path,
        kind=event.kind,
        call=event.call,
        micro_batch=event.micro_batch,
        count=sum(counts),
        sentence=f"The first non-finite tensor is {event.what}{again}: {elements}; all before it is finite{note}.",
    )


class _Trail:
    """An instrumented pass that counts, in order, whatever a call gets, gives, and sends back.

    Attributes:
        events: in the order of execution.
    """

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._modules = ModuleCalls.of_all(experiment.model, self._around)
        self._forward, self._part = False, -1
        self._calls: dict[str, int] = {}
        self.events: list[_Event] = []

    def run(self, batch: Batch, layers: Sequence[str]) -> tuple[mx.array, dict[str, mx.array]]:
        with ExitStack() as stack:
            stack.enter_context(self._modules)
            stack.enter_context(attention_calls(self._attention))
            stack.enter_context(function_calls(nn.losses, "cross_entropy", self._cross_entropy))
            stack.enter_context(function_calls(mx, "softmax", self._softmax))
            instrumented = replace(self._experiment, loss_fn=self._loss)
            loss, gradients, _, _ = forward_backward(instrumented, batch, layers)
        flat = dict(tree_flatten(gradients))
        mx.eval(loss, flat, [event.counts for event in self.events])
        return loss, flat

    def _loss(self, model: nn.Module, *batch: mx.array) -> Any:
        self._calls, self._forward = {}, True
        self._part += 1
        try:
            returned = self._experiment.loss_fn(model, *batch)
        finally:
            self._forward = False  # a backward pass may call modules again
        loss = returned[0] if isinstance(returned, tuple) else returned
        self._note("loss", "", "the loss", loss)
        return returned

    def _note(self, kind: str, path: str, what: str, array: mx.array, call: int = 0) -> None:
        self.events.append(_Event(kind, path, what, array.size, _counts(array), call, self._part))

    def _tapped(self, kind: str, path: str, what: str, array: mx.array, call: int = 0) -> mx.array:
        return gradient_tap(array, lambda cotangent: self._note(kind, path, what, cotangent, call))

    def _around(self, path: str, perform: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name, inside = path or "the model", self._modules.stack[-2] if len(self._modules.stack) > 1 else ""
        call = self._calls.get(path, 0)
        if self._forward:
            self._calls[path] = call + 1
            for array in filter(is_floating, (*args, *kwargs.values())):
                self._note("intermediate", inside, f"what {inside or 'the model'} hands to {name}", array)

        def leaving(array: mx.array) -> mx.array:
            if self._forward:
                self._note("activation", path, f"the output of {name}", array, call)
            return self._tapped("activation_gradient", path, f"the gradient of the output of {name}", array, call)

        return _mapped(perform(*args, **kwargs), leaving)

    def _attention(self, perform: Callable[..., mx.array], q: Any, k: Any, v: Any, **options: Any) -> mx.array:
        path = self._modules.path
        name, inputs = path or "the model", []
        for what, array in (("query", q), ("key", k), ("value", v)):
            if self._forward:
                self._note("intermediate", path, f"the {what} that enters attention in {name}", array)
            what = f"the gradient of the {what} that enters attention in {name}"
            inputs.append(self._tapped("attention_gradient", path, what, array))
        output = perform(*inputs, **options)
        if self._forward:
            self._note("attention", path, f"the output of attention in {name}", output)
        return output

    def _softmax(self, perform: Callable[..., mx.array], a: Any, *args: Any, **kwargs: Any) -> mx.array:
        if is_attention_softmax(a, *args, **kwargs):
            path = self._modules.path
            what = f"the gradient of the attention scores in {path or 'the model'}"
            a = self._tapped("attention_gradient", path, what, a)
        return perform(a, *args, **kwargs)

    def _cross_entropy(self, perform: Callable[..., mx.array], logits: Any, *args: Any, **kwargs: Any) -> mx.array:
        if self._forward and is_floating(logits):
            self._note("logits", "", "the logits that enter cross entropy", logits)
        return perform(logits, *args, **kwargs)


def _mapped(output: Any, function: Callable[[mx.array], mx.array]) -> Any:
    """Applies a function to a floating array, or to those in a tuple or list."""
    if isinstance(output, (tuple, list)):
        items = [function(item) if is_floating(item) else item for item in output]
        return getattr(output, "_make", type(output))(items)  # a namedtuple takes its items one by one
    return function(output) if is_floating(output) else output
