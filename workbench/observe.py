"""What telemetry logs every step, computed the same way while recording and while replaying.

Knows a performed step; nothing of files, comparison or probes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from . import cuda
from .bits import bits_float, float_bits, json_float
from .experiment import Batch, Experiment, batch_hash, kept_arrays, random_key, set_random_key, state_arrays
from .fingerprint import MIXED, LanePlan, lanes, method_here
from .norms import square_sums
from .rate_scale import scale_schedules
from .snapshot import read, restore
from .step import Stepper, StepResult, optimizer_states
from .telemetry import ARRAYS, Edits, Restart, array_fields, scalar_fields


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
        method: of the fingerprints.
    """

    batch_hash: str
    loss: np.float32
    grad_norm: np.float32
    norms: dict[str, list[np.float32 | None]]
    state: dict[str, str]
    lr: float | None
    method: str

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


def observe(
    stepper: Stepper, batch: Batch, result: StepResult, cursor: Mapping[str, Any], method: str | None = None
) -> Observation:
    """Observes the step just performed.

    Args:
        cursor: where the data stream stands after `batch`.
        method: of the fingerprints, as the run's manifest names it; None: the one that costs least here.
    """
    method = method or method_here()
    if method == MIXED and cuda.available():
        asked = result.asked
        if not isinstance(asked, Request):
            asked = Request(stepper, result.gradients, result.activations)
            mx.eval(asked.pending)
        optimizer = asked.optimizer
        state, known = asked.answers(random_key(), cursor)
    else:
        optimizer, sums = kept_arrays(stepper.experiment), dict[str, float]()
        state = lanes(state_arrays(stepper.experiment.model), optimizer, random_key(), cursor, method, sums)
        known = {("optimizer", path): value for path, value in sums.items()}
    owned = [stepper.owned[path] for path in stepper.layers]
    outputs = [[path] for path in stepper.layers]
    found = zip(ARRAYS, _squares(result, optimizer, known), (outputs, *[owned] * 3), strict=True)
    norms = {name: _roots(values, layers) for name, values, layers in found}
    return Observation(
        batch_hash(batch), result.loss, result.grad_norm, norms, state, learning_rate(stepper.experiment), method
    )


class Request:
    """Digests of the state and sums of squares, asked of a CUDA device together with the step, which then costs the
    time of reading only: all else is done while the device computes the step.

    Attributes:
        optimizer: the optimizer's arrays by path.
    """

    def __init__(
        self, stepper: Stepper, gradients: Mapping[str, mx.array], activations: Mapping[str, mx.array]
    ) -> None:
        experiment = stepper.experiment
        self.optimizer = kept_arrays(experiment)
        self._plan = LanePlan(state_arrays(experiment.model), self.optimizer)
        self._others = [("activation", path) for path in activations] + [("gradient", path) for path in gradients]
        self._state = cuda.launch(self._plan.arrays, digests=True)
        self._other = cuda.launch([*activations.values(), *gradients.values()], digests=False)

    @property
    def pending(self) -> Any:
        return self._state.pending, self._other.pending

    def answers(
        self, rng: Iterable[int], cursor: Mapping[str, Any]
    ) -> tuple[dict[str, str], dict[tuple[str, str], float]]:
        """The lanes' fingerprints, and the sum of squares of each array by kind and path."""
        (squares, digests), (others, _) = self._state.result(), self._other.result()
        sums = dict(zip(self._plan.names, squares.tolist(), strict=True))
        return self._plan.lanes(digests, rng, cursor), sums | dict(zip(self._others, others.tolist(), strict=True))


def measure_alongside(stepper: Stepper) -> Stepper:
    """Makes the stepper ask for what `observe` will want, where that saves time."""
    if cuda.available():
        stepper.ask = lambda gradients, activations: Request(stepper, gradients, activations)
    return stepper


def _squares(
    result: StepResult, optimizer: Mapping[str, mx.array], known: Mapping[tuple[str, str], float]
) -> list[dict[str, float]]:
    """The sums of squares of outputs by layer, and of gradients, `m` and `v` by parameter."""
    named = {("activation", path): array for path, array in result.activations.items()}
    named |= {("gradient", path): array for path, array in result.gradients.items()}
    moments = [moment_paths(optimizer, leaf, result.gradients) for leaf in ("m", "v")]
    named |= {("optimizer", path): optimizer[path] for paths in moments for path in paths.values()}
    sums = square_sums(named, known)
    found = [{path: sums["activation", path] for path in result.activations}]
    found.append({path: sums["gradient", path] for path in result.gradients})
    return found + [{parameter: sums["optimizer", path] for parameter, path in paths.items()} for paths in moments]


def _roots(squares: Mapping[str, float], layers: Iterable[Iterable[str]]) -> list[np.float32 | None]:
    """L2 norm of each layer from the sums of squares of its arrays; None for one without any."""
    sums = [[squares[path] for path in paths if path in squares] for paths in layers]
    with np.errstate(over="ignore", invalid="ignore"):
        roots = np.sqrt(np.array([sum(values) for values in sums], np.float64)).astype(np.float32)
    return [root if values else None for root, values in zip(roots, sums, strict=True)]


def learning_rate(experiment: Experiment) -> float | None:
    """The learning rate that the last update used; None for an optimizer without one."""
    optimizer = getattr(experiment.optimizer, "optimizers", [experiment.optimizer])[0]
    value = optimizer.state.get("learning_rate")
    return None if value is None else float(value.item())


def learning_rates(experiment: Experiment) -> list[str | None]:
    """Bits of the learning rate that each optimizer's state holds; None for one without."""
    found = [state.get("learning_rate") for state in optimizer_states(experiment.optimizer)]
    return [None if value is None else float_bits(value.item()) for value in found]


def rate_paths(experiment: Experiment) -> list[str]:
    """Where the optimizer's state, or that of each member of a MultiOptimizer, would hold the learning rate."""
    members = getattr(experiment.optimizer, "optimizers", None)
    return ["learning_rate"] if members is None else [f"states.{n}.learning_rate" for n in range(len(members))]


def edit(experiment: Experiment, edits: Edits) -> None:
    """Does to the state what the training loop did between two steps.

    Raises:
        CheckpointError: the state that it went on from can't be read.
    """
    if isinstance(edits, Restart):
        restore(experiment, read(Path(edits.folder), edits.step, edits.segment, edits.run))
    if edits.rng is not None:
        set_random_key(edits.rng)
    for state, bits in zip(optimizer_states(experiment.optimizer), edits.learning_rate or (), strict=False):
        if bits is not None:
            state["learning_rate"] = mx.array(float(bits_float(bits)), mx.float32)
    if edits.rate_factor is not None:
        scale_schedules(experiment.optimizer, edits.rate_factor)
    for _ in range(edits.skip):
        next(experiment.sampler, None)


def moments(optimizer: Mapping[str, mx.array], leaf: str, parameters: Container[str]) -> dict[str, mx.array]:
    """The optimizer's arrays named `leaf`, by path of the parameter."""
    return {parameter: optimizer[path] for parameter, path in moment_paths(optimizer, leaf, parameters).items()}


def moment_paths(optimizer: Iterable[str], leaf: str, parameters: Container[str]) -> dict[str, str]:
    """Paths of the optimizer's arrays named `leaf`, by parameter. A MultiOptimizer has them under ``states.K.``."""
    found = {}
    for path in optimizer:
        owner, _, name = path.rpartition(".")
        if name == leaf:
            for parameter in (owner, owner.split(".", 2)[-1]):
                if parameter in parameters:
                    found[parameter] = path
                    break
    return found
