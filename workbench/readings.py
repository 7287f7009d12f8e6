"""What is read of a step's arrays for telemetry, got ready while the step is still being computed.

On a CUDA device digests and sums are computed there, with the step. On the host a second core is free meanwhile: for
hashing the batch, finding every array and its lane, and the norms of layer outputs and gradients, which are
there before the update is. Knows experiments and a step's arrays; nothing of files or comparison.
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import numpy as np

from . import cuda
from .experiment import Batch, Experiment, batch_hash, state_handles
from .fingerprint import MIXED, BytesPlan, LanePlan, digests
from .norms import square_sums

Norms = list[np.float32 | None]


@dataclass
class Read:
    """
    Attributes:
        state: fingerprint of each lane.
        activations, gradients, optimizer: sums of squares by path, as far as they are known by now.
    """

    state: dict[str, str]
    activations: Mapping[str, float] = field(default_factory=dict)
    gradients: Mapping[str, float] = field(default_factory=dict)
    optimizer: Mapping[str, float] = field(default_factory=dict)


class _Reading:
    """
    Attributes:
        weights, optimizer: the state's arrays by path.
        norms: of the layers' outputs and gradients, where they were got ready too.
        ready: what of them is logged, by name; see `Observation`.
        hold: whether somebody will capture the state.
        done: they were let go: this can't be read any more.
    """

    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    _plan: BytesPlan | LanePlan
    norms: list[Norms] | None = None
    ready: Mapping[str, tuple[Norms, dict[str, Any]]] = MappingProxyType({})
    hold = done = False

    def drop(self) -> None:
        """Lets go of the state's arrays: held, they would stand beside those of the next step, and take their room."""
        self.weights, self.optimizer, self.done = {}, {}, True
        del self._plan


class HostState:
    """The arrays of a state that is being computed, to be read on the host.

    Attributes:
        weights, optimizer: new handles of them, by path.
        plan: of the fingerprints.
        parts: the arrays in the order in which they are read; none where that is in one go.
    """

    def __init__(self, experiment: Experiment, method: str) -> None:
        self.weights, self.optimizer = state_handles(experiment)
        self.plan = (LanePlan if method == MIXED else BytesPlan)(self.weights, self.optimizer)
        self.parts = self.plan.parts() if isinstance(self.plan, BytesPlan) else []


class HostReading(_Reading):
    """
    Args:
        gradients, activations: of the step, which is being computed or has been. The state is the one after it.
        state: its arrays, where somebody has found them just now.

    Attributes:
        batch_hash: of the batch.
        moments: the paths of `m` and of `v` by parameter.
        activations, gradients: sums of squares by path.
        pending: nothing: no array is computed for it.
    """

    pending = ()

    def __init__(
        self,
        experiment: Experiment,
        batch: Batch,
        gradients: Mapping[str, mx.array],
        activations: Mapping[str, mx.array],
        method: str,
        state: HostState | None = None,
    ) -> None:
        self.batch, self.method = batch, method
        if state is None:
            state = HostState(experiment, method)
        self.weights, self.optimizer, self._plan = state.weights, state.optimizer, state.plan
        self.batch_hash = batch_hash(batch)
        self.moments = _moments(self.optimizer, gradients or self.weights)
        self.activations = square_sums(activations)  # which waits for the backward pass, not for the update
        self.gradients = square_sums(gradients)

    def take(self) -> None:
        """Reads each part of the state as soon as the update has computed it."""
        if isinstance(self._plan, BytesPlan):
            self._plan.take()

    def read(self, rng: Iterable[int], cursor: Mapping[str, Any]) -> Read:
        """After the step."""
        squares: dict[str, float] = {}
        if isinstance(self._plan, BytesPlan):
            state = self._plan.lanes(rng, cursor, squares)
        else:
            state = self._plan.lanes(digests(self._plan.arrays), rng, cursor)
        return Read(state, self.activations, self.gradients, squares)


class DeviceReading(_Reading):
    """Digests of the state and sums of squares, asked of a CUDA device together with the step, which then costs the
    time of reading only: all else is done while the device computes the step.

    Args and attributes as of a `HostReading`; `pending` is what to evaluate.
    """

    method = MIXED
    _plan: LanePlan

    def __init__(
        self,
        experiment: Experiment,
        batch: Batch,
        gradients: Mapping[str, mx.array],
        activations: Mapping[str, mx.array],
    ) -> None:
        self.batch = batch
        self.weights, self.optimizer = state_handles(experiment)
        self._plan = LanePlan(self.weights, self.optimizer)
        self._paths = list(activations), list(gradients)
        self._state = cuda.launch(self._plan.arrays, digests=True)
        self._other = cuda.launch([*activations.values(), *gradients.values()], digests=False)
        self.moments = _moments(self.optimizer, gradients or self.weights)

    @property
    def batch_hash(self) -> str:
        return batch_hash(self.batch)

    @property
    def pending(self) -> Any:
        return self._state.pending, self._other.pending

    def read(self, rng: Iterable[int], cursor: Mapping[str, Any]) -> Read:
        """After the step."""
        (squares, found), others = self._state.result(), self._other.result()[0].tolist()
        outputs, parameters = self._paths
        named = zip(self._plan.names, squares.tolist(), strict=True)
        return Read(
            self._plan.lanes(found, rng, cursor),
            dict(zip(outputs, others[: len(outputs)], strict=True)),
            dict(zip(parameters, others[len(outputs) :], strict=True)),
            {path: value for (owner, path), value in named if owner == "optimizer"},
        )


Reading = HostReading | DeviceReading


def reading(
    experiment: Experiment,
    batch: Batch,
    gradients: Mapping[str, mx.array],
    activations: Mapping[str, mx.array],
    method: str,
    state: HostState | None = None,
) -> Reading:
    """A reading on the device that computes the step, if it can be done there.

    Args:
        method: of the fingerprints.
        state: as of a `HostReading`.
    """
    if method == MIXED and cuda.available():
        return DeviceReading(experiment, batch, gradients, activations)
    return HostReading(experiment, batch, gradients, activations, method, state)


def _moments(optimizer: Iterable[str], parameters: Iterable[str]) -> list[dict[str, str]]:
    return _moments_of(tuple(optimizer), tuple(parameters))


@functools.lru_cache(maxsize=64)
def _moments_of(optimizer: tuple[str, ...], parameters: tuple[str, ...]) -> list[dict[str, str]]:
    known = frozenset(parameters)
    return [moment_paths(optimizer, leaf, known) for leaf in ("m", "v")]


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
