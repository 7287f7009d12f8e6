"""The probe pass: the same state and batch once more, instrumented, to measure what telemetry does not log.

It never feeds the exact pass: the two are separate computations, and the probe is certified only if its loss and every
gradient have the exact pass's bits. It runs the loss function, of a loop with a step of its own too: there it is what
tells the loss of each row. Knows steps and states; nothing of files or comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import mlx.core as mx
from mlx.utils import tree_flatten

from .bits import float_bits
from .errors import WorkbenchError
from .experiment import Batch, random_state
from .numbered_batch import arguments, without_numpy
from .probes.measure import measure
from .probes.measured import Row
from .probes.streamed import portions, streamed
from .probes.watch import Forward, Watch
from .ranks.world import everywhere, world
from .snapshot import State, restore, same_arrays
from .step import Stepper, StepResult, forward_backward


@dataclass(frozen=True)
class Probe:
    """What the probe pass measured.

    Attributes:
        certified: loss and all gradients equal the exact pass's, bit for bit.
        compiled: whether the pass that is reported ran compiled.
        rows: activations and their gradients, by layer and call.
        forward: attention, logits and targets; None if they were not watched.
        certified_forward: the same of the pass in which these were seen, if that was another one.
        token_loss: of a step of the user's own, what its loss function gives; None: nothing, or it was not asked for.
        unmade: why there was no such pass, in a phrase; empty: there was.
    """

    certified: bool
    compiled: bool
    rows: list[Row]
    forward: Forward | None = None
    certified_forward: bool | None = None
    token_loss: mx.array | None = None
    unmade: str = ""


def probe(
    stepper: Stepper,
    batch: Batch,
    exact: StepResult,
    *,
    compiled: bool,
    watched: bool = True,
    meanwhile: Callable[[], None] = lambda: None,
) -> Probe:
    """Runs the instrumented forward and backward pass on the state that the stepper's experiment now holds.

    The caller restores the state N-1 (with its random state) before, and whatever it needs after.

    Args:
        batch: the batch of step N.
        exact: the exact pass's result on the same state and batch.
        compiled: run the pass through `mx.compile`, as the run's own step.
        watched: also see attention and logits.
        meanwhile: called once, when the pass has begun to be computed.
    """
    experiment = stepper.experiment
    watch = Watch(experiment.model, experiment.loss_fn)
    instrumented = replace(experiment, loss_fn=watch.loss_fn) if watched else experiment

    asked = watched and experiment.step_fn is not None  # else the exact pass has it

    def forward(*arrays: mx.array) -> tuple:
        with watch if watched else nullcontext():
            loss, gradients, capture, told = forward_backward(instrumented, arrays, stepper.layers, tap_gradients=True)
        seen = [one.arrays for one in watch.seen]
        tokens = [told] if asked and told is not None and told.ndim else []
        return loss, dict(tree_flatten(gradients)), capture.activations, capture.activation_gradients, seen, tokens

    state = [experiment.model.state, mx.random.state]
    run = mx.compile(forward, inputs=state, outputs=state) if compiled else forward
    loss, gradients, activations, activation_gradients, seen, tokens = run(
        *arguments(without_numpy(batch), compiled=experiment.options.compile)
    )
    left = [experiment.model.parameters(), random_state()]
    if experiment.options.accumulate == 1 and world().size == 1:
        rows = streamed(portions("activation", activations), meanwhile)
        _evaluate([loss, tokens], seen)
        noted = watch.forward(seen) if watched else None
        del seen  # before the backward pass, which needs the room
        watch.seen.clear()
        rows += streamed(portions("activation_gradient", activation_gradients, _beside(stepper, gradients)))
        mx.eval(gradients, left)
    else:  # several passes, or ranks that wait for each other: in whatever order MLX finds best
        meanwhile()
        _evaluate([loss, tokens, gradients, activations, activation_gradients, left], seen)
        rows = measure("activation", activations) + measure("activation_gradient", activation_gradients)
        noted = watch.forward(seen) if watched else None
    same_loss = float_bits(loss.item()) == float_bits(exact.loss)
    # Ranks that perform a step together go on to the next pass together.
    certified = everywhere(same_loss and same_arrays(gradients, exact.gradients))
    token_loss = tokens[0] if tokens else None
    return Probe(certified, compiled, rows, noted, certified if watched else None, token_loss)


def _beside(stepper: Stepper, gradients: Mapping[str, mx.array]) -> dict[str, list[mx.array]]:
    """Gradients of a layer's parameters, by the layer: with what reaches its first call, the last that the backward
    pass comes to, they can be computed, and what they are computed from is not waited with."""
    return {layer: [gradients[path] for path in paths if path in gradients] for layer, paths in stepper.owned.items()}


def _evaluate(results: list, seen: list) -> None:
    """Together, so that no tensor waits in memory for what was only watched to be computed from it."""
    try:
        mx.eval(results, seen)
    except RuntimeError:  # something seen under `mx.vmap` has no value: `Watch.forward` leaves it out
        mx.eval(results)


def certified_probe(
    stepper: Stepper,
    before: State,
    batch: Batch,
    exact: StepResult,
    meanwhile: Callable[[], None] = lambda: None,
) -> Probe:
    """Eager first: it needs no compiling. Where eager bits differ (fp16 on CPU, CUDA), compiled as the run's step; and
    where outputs for what is watched moved bits of that, compiled once more without them.

    A step of the user's own does without the loss function: where that is missing, or can't be run on the step's batch,
    nothing is measured, and `Probe.unmade` says why.

    Args:
        before: state N-1, from which each pass starts.
        meanwhile: called once, while the first pass is being computed: for what the host has to do anyway.
    """
    experiment, told = stepper.experiment, list[bool]()

    def once() -> None:
        told.append(True)
        meanwhile()

    if experiment.loss_fn is None:
        meanwhile()
        return Probe(False, False, [], unmade="the experiment has no loss function (loss_fn), which it would run")
    restore(experiment, before)
    try:
        eager = probe(stepper, batch, exact, compiled=False, meanwhile=once)
    except WorkbenchError:
        raise
    except Exception as error:  # of any kind: a loss function that no step has run yet
        if experiment.step_fn is None or told:
            raise
        meanwhile()
        return Probe(False, False, [], unmade=_unmade(error))
    if eager.certified or not stepper.experiment.options.compile:
        return eager
    restore(stepper.experiment, before)
    compiled = probe(stepper, batch, exact, compiled=True)
    if compiled.certified:
        return compiled
    restore(stepper.experiment, before)
    plain = probe(stepper, batch, exact, compiled=True, watched=False)
    if plain.certified:
        return replace(plain, forward=eager.forward, certified_forward=False)
    return eager


def _unmade(error: Exception) -> str:
    said = " ".join(str(error).split()) or "no reason given"
    return f"the loss function (loss_fn) can't be run on the batch that the step took: {type(error).__name__}: {said}"
