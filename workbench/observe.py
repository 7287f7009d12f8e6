"""What telemetry logs every step, computed the same way while recording and while replaying.

Knows a performed step; nothing of files, comparison or probes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .bits import bits_float, float_bits, json_float
from .experiment import Batch, Experiment, batch_hash, random_key, set_random_key, state_arrays
from .fingerprint import lanes
from .host import float_views, square_sum
from .step import Stepper, StepResult, optimizer_states
from .telemetry import ARRAYS, Edits, array_fields, scalar_fields


@dataclass(frozen=True)
class Observation:
    """One step as telemetry sees it.

    Attributes:
        batch_hash: SHA-256 of the batch.
        loss, grad_norm: float32.
        norms: the four per-layer arrays, float32 in layer order, None where undefined: the output of each layer's last
            call, and the gradient, `m` and `v` over the parameters it owns.
        state: fingerprint of each lane of the state after the update.
        lr: the learning rate that the update used.
    """

    batch_hash: str
    loss: np.float32
    grad_norm: np.float32
    norms: dict[str, list[np.float32 | None]]
    state: dict[str, str]
    lr: float | None

    def evidence(self) -> dict[str, Any]:
        """The comparable items, as bits, named as in a trace."""
        arrays = {name: [None if v is None else float_bits(v) for v in self.norms[name]] for name in ARRAYS}
        return {
            "batch_hash": self.batch_hash,
            "loss": float_bits(self.loss),
            "grad_norm": float_bits(self.grad_norm),
            **arrays,
            **{f"state.{lane}": value for lane, value in self.state.items()},
        }

    def fields(self) -> dict[str, Any]:
        """The fields of a telemetry line or of a trace."""
        found: dict[str, Any] = {"batch_hash": self.batch_hash, "state": self.state}
        found |= scalar_fields("loss", self.loss) | scalar_fields("grad_norm", self.grad_norm)
        for name in ARRAYS:
            found |= array_fields(name, self.norms[name])
        return found | {"lr": None if self.lr is None else json_float(self.lr)}


def observe(stepper: Stepper, batch: Batch, result: StepResult, cursor: Mapping[str, Any]) -> Observation:
    """Observes the step just performed. `cursor` is where the data stream stands after `batch`."""
    model, optimizer = stepper.experiment.model, state_arrays(stepper.experiment.optimizer.state)
    kept = (moments(optimizer, leaf, result.gradients) for leaf in ("m", "v"))
    tensors = (result.activations, result.gradients, *kept)
    owned = [stepper.owned[path] for path in stepper.layers]
    members = ([[path] for path in stepper.layers], owned, owned, owned)
    norms = {}
    for name, arrays, layers in zip(ARRAYS, tensors, members, strict=True):
        squares = {key: square_sum(view) for key, view in zip(arrays, float_views(list(arrays.values())), strict=True)}
        norms[name] = [_root([squares[key] for key in keys if key in squares]) for keys in layers]
    return Observation(
        batch_hash(batch),
        result.loss,
        result.grad_norm,
        norms,
        lanes(state_arrays(model), optimizer, random_key(), cursor),
        learning_rate(stepper.experiment),
    )


def learning_rate(experiment: Experiment) -> float | None:
    """The learning rate that the last update used; None for an optimizer without one."""
    optimizer = getattr(experiment.optimizer, "optimizers", [experiment.optimizer])[0]
    value = optimizer.state.get("learning_rate")
    return None if value is None else float(value.item())


def learning_rates(experiment: Experiment) -> list[str | None]:
    """Bits of the learning rate that each optimizer's state holds; None for one without."""
    found = [state.get("learning_rate") for state in optimizer_states(experiment.optimizer)]
    return [None if value is None else float_bits(value.item()) for value in found]


def edit(experiment: Experiment, edits: Edits) -> None:
    """Does to the state what the training loop did between two steps."""
    if edits.rng is not None:
        set_random_key(edits.rng)
    for state, bits in zip(optimizer_states(experiment.optimizer), edits.learning_rate or (), strict=False):
        if bits is not None:
            state["learning_rate"] = mx.array(float(bits_float(bits)), mx.float32)


def moments(optimizer: Mapping[str, mx.array], leaf: str, parameters: Container[str]) -> dict[str, mx.array]:
    """The optimizer's arrays named `leaf`, by path of the parameter. A MultiOptimizer has them under ``states.K.``."""
    found = {}
    for path, array in optimizer.items():
        owner, _, name = path.rpartition(".")
        if name == leaf:
            for parameter in (owner, owner.split(".", 2)[-1]):
                if parameter in parameters:
                    found[parameter] = array
                    break
    return found


def _root(squares: list[float]) -> np.float32 | None:
    if not squares:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        return np.float32(np.sqrt(sum(squares)))
