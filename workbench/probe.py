"""The probe pass: the same state and batch once more, instrumented, to measure what telemetry does not log.

It never feeds the exact pass: the two are separate computations, and the probe is certified only if its loss and every
gradient have the exact pass's bits. Knows steps and states; nothing of files or comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .bits import float_bits, json_float
from .experiment import Batch, random_state
from .fingerprint import fingerprint
from .host import float_views, square_sum
from .observe import moments
from .snapshot import State
from .step import Stepper, StepResult, forward_backward
from .trace import Row


@dataclass(frozen=True)
class Probe:
    """What the probe pass measured.

    Attributes:
        certified: loss and all gradients equal the exact pass's, bit for bit.
        compiled: whether the pass that is reported ran compiled.
        rows: activations and their gradients, by layer and call.
    """

    certified: bool
    compiled: bool
    rows: list[Row]


def measure(kind: str, tensors: Mapping[str, mx.array]) -> list[Row]:
    """Statistics of named tensors, in order: L2 and RMS in float32, max |x|, count of non-finite elements."""
    rows = []
    for (path, array), view in zip(tensors.items(), float_views(list(tensors.values())), strict=True):
        squares, nonfinite, peak = square_sum(view), 0, None
        if not np.isfinite(squares):
            finite = np.isfinite(view)
            nonfinite = int(view.size - np.count_nonzero(finite))
            view = view[finite]
        if view.size:
            peak = max(float(view.max()), -float(view.min()))
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            l2 = np.float32(np.sqrt(squares))
            rms = np.float32(np.sqrt(squares / max(array.size, 1)))
        rows.append(
            Row(
                path=path,
                kind=kind,
                dtype=str(array.dtype).removeprefix("mlx.core."),
                size=array.size,
                l2=json_float(l2),
                rms=json_float(rms),
                max_abs=None if peak is None else json_float(peak),
                nonfinite=nonfinite,
                l2_bits=None if np.isfinite(l2) else float_bits(l2),
            )
        )
    return rows


def probe(stepper: Stepper, batch: Batch, exact: StepResult, *, compiled: bool) -> Probe:
    """Runs the instrumented forward and backward pass on the state that the stepper's experiment now holds.

    The caller restores the state N-1 (with its random state) before, and whatever it needs after.

    Args:
        batch: the batch of step N.
        exact: the exact pass's result on the same state and batch.
        compiled: run the pass through `mx.compile`, as the run's own step.
    """
    experiment = stepper.experiment

    def forward(*arrays: mx.array) -> tuple:
        loss, gradients, capture, _ = forward_backward(experiment, arrays, stepper.layers, tap_gradients=True)
        return loss, dict(tree_flatten(gradients)), capture.activations, capture.activation_gradients

    state = [experiment.model.state, mx.random.state]
    run = mx.compile(forward, inputs=state, outputs=state) if compiled else forward
    loss, gradients, activations, activation_gradients = run(*batch)
    mx.eval(loss, gradients, activations, activation_gradients, experiment.model.parameters(), random_state())
    same_loss = float_bits(loss.item()) == float_bits(exact.loss)
    certified = same_loss and fingerprint(gradients) == fingerprint(exact.gradients)
    rows = measure("activation", activations) + measure("activation_gradient", activation_gradients)
    return Probe(certified, compiled, rows)


def parameter_rows(before: State, after: State, gradients: Mapping[str, mx.array]) -> list[Row]:
    """Statistics of every parameter's gradient, update, weight and moments: of state N, and of N-1 as `*_before`.

    The update is the change really applied: weight after minus weight before, in float32.
    """
    rows = measure("gradient", {path: gradients[path] for path in sorted(gradients)})
    rows += measure(
        "update",
        {
            path: after.weights[path].astype(mx.float32) - before.weights[path].astype(mx.float32)
            for path in sorted(gradients)
        },
    )
    for state, suffix in ((after, ""), (before, "_before")):
        rows += measure(f"weight{suffix}", {path: state.weights[path] for path in sorted(gradients)})
        for leaf in ("m", "v"):
            rows += measure(f"adam_{leaf}{suffix}", moments(state.optimizer, leaf, gradients))
    return rows
