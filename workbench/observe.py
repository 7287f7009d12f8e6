"""What telemetry logs every step, computed the same way while recording and while replaying.

Knows a performed step; nothing of files, comparison or probes.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .bits import bits_float, float_bits, json_float
from .checkpoints.checkpoint_reader import read
from .errors import ChangedByHand, TelemetryError
from .experiment import Batch, Experiment, random_key, set_random_key
from .fingerprint import MIXED, method_here
from .lines.line import ARRAYS, Edits, Restart, array_fields, rate_bits, scalar_fields
from .norms import square_sums
from .rate_scale import rate_paths as paths_of_rates
from .rate_scale import scale_schedules
from .readings import HostReading, HostState, Norms, Read, Reading, reading
from .readings import moment_paths as moment_paths
from .snapshot import restore
from .step import Stepper, StepResult, optimizer_states
from .tensor_file import TYPES, array_of, bits_of

RateArray = tuple[str, list[int], str]  # type, as safetensors name it, shape, and bytes in hexadecimal
_ENTRIES = 64  # of a learning rate that telemetry logs


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
        ready: fields that were made while the step was computed, by name, each with the norms that they are of.
        arrays: new handles of the state's arrays, weights and optimizer, if it was asked to hold them.
        has_gradients: not so of a step of the user's own that left its update out: their norm is undefined then.
    """

    batch_hash: str
    loss: np.float32
    grad_norm: np.float32
    norms: dict[str, Norms]
    state: dict[str, str]
    lr: float | None
    method: str
    ready: Mapping[str, tuple[Norms, dict[str, Any]]] = field(default_factory=dict, repr=False, compare=False)
    arrays: tuple[dict[str, mx.array], dict[str, mx.array]] | None = field(default=None, repr=False, compare=False)
    has_gradients: bool = True

    def evidence(self) -> dict[str, Any]:
        """The comparable items, as bits, named as in a trace. None: undefined."""
        arrays = {name: [None if v is None else float_bits(v) for v in self.norms[name]] for name in ARRAYS}
        return {
            "batch_hash": self.batch_hash,
            "loss": float_bits(self.loss),
            "grad_norm": float_bits(self.grad_norm) if self.has_gradients else None,
            "lr": rate_bits(self.lr),
            **arrays,
            **{f"state.{lane}": value for lane, value in self.state.items()},
        }

    def fields(self) -> dict[str, Any]:
        """The fields of a telemetry line or of a trace."""
        found: dict[str, Any] = {"batch_hash": self.batch_hash, "state": self.state}
        found |= scalar_fields("loss", self.loss)
        found |= scalar_fields("grad_norm", self.grad_norm) if self.has_gradients else {"grad_norm": None}
        for name in ARRAYS:
            norms, fields = self.ready.get(name, (None, {}))
            found |= fields if norms is self.norms[name] else array_fields(name, self.norms[name])
        found["lr"] = None if self.lr is None else json_float(self.lr)
        return found


def observe(
    stepper: Stepper, batch: Batch, result: StepResult, cursor: Mapping[str, Any], method: str | None = None
) -> Observation:
    """Observes the step just performed.

    Args:
        cursor: where the data stream stands after `batch`.
        method: of the fingerprints, as the run's manifest names it; None: the one that costs least here.
    """
    method = method or method_here()
    asked = result.asked
    if not isinstance(asked, Reading) or asked.batch is not batch or asked.method != method or asked.done:
        asked = reading(stepper.experiment, batch, result.gradients, result.activations, method)
        mx.eval(asked.pending)
    found = asked.read(random_key(), cursor)
    norms = _norms(stepper, result, asked, found)
    rate = learning_rate(stepper.experiment)
    arrays = (asked.weights, asked.optimizer) if asked.hold else None
    asked.drop()
    numbers = result.loss, result.grad_norm
    seen = bool(result.gradients)
    return Observation(asked.batch_hash, *numbers, norms, found.state, rate, method, asked.ready, arrays, seen)


def measure_alongside(stepper: Stepper, *, hold: bool = False) -> Stepper:
    """Makes the stepper ask for what `observe` will want, while it computes the step.

    Args:
        hold: have the observation keep hold of the state's arrays, for who will capture the state.
    """

    ahead: list[HostState] = []  # of the step that is being computed

    def parts() -> list[list[mx.array]]:
        if method_here() == MIXED:  # read where it is computed
            return []
        ahead[:] = [HostState(stepper.experiment, method_here())]
        return ahead[0].parts

    def ask(batch: Batch, gradients: Mapping[str, mx.array], activations: Mapping[str, mx.array]) -> Reading:
        state = ahead.pop() if ahead else None
        found = reading(stepper.experiment, batch, gradients, activations, method_here(), state)
        found.hold = hold
        if isinstance(found, HostReading):
            outputs, parameters = _layers(stepper)
            found.norms = _roots((found.activations, outputs), (found.gradients, parameters))
            named = zip(ARRAYS, found.norms, strict=False)  # the first two
            found.ready = {name: (norms, array_fields(name, norms)) for name, norms in named}
            found.take()  # last: it waits for the update
        return found

    stepper.ask, stepper.parts = ask, parts
    return stepper


def _norms(stepper: Stepper, result: StepResult, asked: Reading, found: Read) -> dict[str, Norms]:
    """The four per-layer arrays: L2 norm of each layer, from the sums of squares of its arrays; None without any."""
    outputs, parameters = _layers(stepper)
    names = [path for paths in asked.moments for path in paths.values()]
    optimizer = found.optimizer
    if not isinstance(asked, HostReading) or not optimizer.keys() >= set(names):
        optimizer = square_sums({path: asked.optimizer[path] for path in names}, optimizer)
    moments = [{parameter: optimizer[path] for parameter, path in paths.items()} for paths in asked.moments]
    last = _roots(*((squares, parameters) for squares in moments))
    if asked.norms is None:
        activations = square_sums(result.activations, found.activations)
        gradients = square_sums(result.gradients, found.gradients)
        first = _roots((activations, outputs), (gradients, parameters))
    else:
        first = asked.norms
    return dict(zip(ARRAYS, [*first, *last], strict=True))


def _layers(stepper: Stepper) -> tuple[list[list[str]], list[list[str]]]:
    """The outputs and the parameters of each layer."""
    return [[path] for path in stepper.layers], [stepper.owned[path] for path in stepper.layers]


def _roots(*kinds: tuple[Mapping[str, float], list[list[str]]]) -> list[Norms]:
    """L2 norm of each layer from the sums of squares of its arrays, for several kinds of them; None for one without."""
    sums: list[float | None] = []
    for squares, layers in kinds:
        for paths in layers:
            if len(paths) == 1:
                sums.append(squares.get(paths[0]))
            else:
                own = [squares[path] for path in paths if path in squares]
                sums.append(sum(own) if own else None)
    with np.errstate(over="ignore", invalid="ignore"):
        roots = np.sqrt(np.array([0.0 if one is None else one for one in sums], np.float64)).astype(np.float32)
    norms: Norms = list(roots)
    if None in sums:
        norms = [None if one is None else root for one, root in zip(sums, norms, strict=True)]
    ends = list(itertools.accumulate(len(layers) for _, layers in kinds))
    return [norms[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def learning_rate(experiment: Experiment) -> float | None:
    """The learning rate that the last update used; None for an optimizer without one, or with one that is no number."""
    optimizer = getattr(experiment.optimizer, "optimizers", [experiment.optimizer])[0]
    value = optimizer.state.get("learning_rate")
    return None if value is None or value.size != 1 else float(value.item())


def learning_rates(experiment: Experiment) -> list[str | None]:
    """Bits of the learning rate that each optimizer's state holds; None for one without, or whose rate is no number."""
    found = [state.get("learning_rate") for state in optimizer_states(experiment.optimizer)]
    return [None if value is None or value.size != 1 else float_bits(float(value.item())) for value in found]


def rate_arrays(experiment: Experiment) -> list[RateArray | None]:
    """Each optimizer's learning rate where bits of float32 do not say all of it: where it is no scalar of that type, as
    `optimizer.learning_rate = 0` makes it. None: they do, or it is none that is `logged`."""
    found: list[RateArray | None] = []
    for state in optimizer_states(experiment.optimizer):
        value = state.get("learning_rate")
        if value is None or (value.dtype == mx.float32 and value.ndim == 0) or not logged(value):
            found.append(None)
        else:
            mx.eval(value)
            found.append((TYPES[value.dtype], list(value.shape), bits_of(value).tobytes().hex()))
    return found


def logged(rate: mx.array) -> bool:
    """Whether telemetry logs a learning rate whole, so that a replay can set it as the loop did."""
    return rate.dtype in TYPES and rate.size <= _ENTRIES


def rate_paths(experiment: Experiment) -> list[str]:
    """Where the optimizer's state, or that of each member of a MultiOptimizer, would hold the learning rate."""
    return paths_of_rates(experiment.optimizer)


def edit(experiment: Experiment, edits: Edits) -> None:
    """Does to the state what the training loop did between two steps.

    Raises:
        CheckpointError: the state that it went on from can't be read.
        TelemetryError: it set a learning rate that can't be made again of what is logged of it.
        ChangedByHand: it changed what no checkpoint holds.
    """
    if edits.by_hand is not None:
        raise ChangedByHand(
            f"the loop changed {edits.by_hand} between two steps, outside of them, and no checkpoint holds the changed "
            "state: no replay can follow there"
        )
    if isinstance(edits, Restart):
        restore(experiment, read(Path(edits.folder), edits.step, edits.segment, edits.run))
    if edits.rng is not None:
        set_random_key(edits.rng)
    states = optimizer_states(experiment.optimizer)
    for state, bits, whole in itertools.zip_longest(states, edits.learning_rate or (), edits.rate_arrays or ()):
        if state is not None and whole is not None:
            state["learning_rate"] = _rate(*whole)
        elif state is not None and bits is not None:
            state["learning_rate"] = mx.array(float(bits_float(bits)), mx.float32)
    if edits.rate_factor is not None:
        scale_schedules(experiment.optimizer, edits.rate_factor)
    for _ in range(edits.skip):
        next(experiment.sampler, None)


def _rate(dtype: str, shape: list[int], data: str) -> mx.array:
    try:
        return array_of("the learning rate", dtype, shape, bytes.fromhex(data))
    except (KeyError, ValueError) as error:
        raise TelemetryError(
            f"the telemetry says that the loop set a learning rate of type {dtype[:20]!r} and shape {shape[:8]}, which "
            f"can't be made of the bytes {data[:40]!r} ({error}); expected those of the array that it set"
        ) from error


def moments(optimizer: Mapping[str, mx.array], leaf: str, parameters: Container[str]) -> dict[str, mx.array]:
    """The optimizer's arrays named `leaf`, by path of the parameter."""
    return {parameter: optimizer[path] for parameter, path in moment_paths(optimizer, leaf, parameters).items()}
