"""What a replay needs to rebuild a step: model, optimizer, loss, sampler, and the step's options.

Knows MLX; nothing of any particular model, data or trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from .errors import ExperimentError
from .files import sha256
from .host import raw_views

Batch = tuple[mx.array, ...]
LossFunction = Callable[..., Any]


@runtime_checkable
class Sampler(Protocol):
    """A stream of batches that knows where it stands.

    `state_dict()` is the cursor: a few JSON values that say where the stream stands after the batch handed out last,
    never after one that was fetched ahead. `load_state_dict(cursor)` puts the stream there.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, cursor: dict[str, Any]) -> None: ...


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is performed. Each of these moves bits, so each is in the manifest."""

    clip: float | None = None  # global gradient norm above which gradients are scaled down; None: never
    accumulate: int = 1  # micro-batches a step: equal parts of the batch's leading axis
    compile: bool = True  # run the step through mx.compile
    deterministic: bool = True  # on a GPU: gradients free of the order of atomics (see `deterministic`)

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ExperimentError(f"accumulate is {self.accumulate}; expected at least 1 micro-batch a step")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ExperimentError(f"clip is {self.clip}; expected a positive gradient norm, or none to switch it off")


@dataclass
class Experiment:
    """A training job, ready to perform its next step.

    Args:
        model: any `nn.Module`.
        optimizer: any optimizer of `mlx.optimizers`.
        loss_fn: `loss_fn(model, *batch)` returns a scalar, or `(scalar, extras)`. Extras may be a dict with the entry
            `"token_loss"`: the loss of each row or token, an array whose first axis is the batch's.
        sampler: an iterator of batches with `state_dict` and `load_state_dict`.
        options: clip, accumulate, compile.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    loss_fn: LossFunction
    sampler: Sampler
    options: StepOptions = field(default_factory=StepOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler):
            raise ExperimentError(
                f"the sampler ({type(self.sampler).__name__}) must be an iterator with state_dict() and "
                "load_state_dict(cursor); without a cursor no past batch can be found again"
            )

    def prepare(self) -> None:
        """Brings the state into the form that a restored one has: initialised, evaluated, and row-major.

        MLX picks matmul kernels by memory layout, so a parameter that starts as a transposed view would give other bits
        than the same parameter read back from a file.
        """
        ensure_initialised(self.optimizer, self.model)
        for tree in (self.model, self.optimizer.state):
            rows = {path: row_major(leaf) for path, leaf in state_arrays(tree).items()}
            mx.eval(rows)
            put_arrays(tree, rows)
        leaves: dict[str, Any] = dict(tree_flatten(self.optimizer.state))
        if odd := sorted(path for path, leaf in leaves.items() if not isinstance(leaf, mx.array)):
            raise ExperimentError(
                f"the optimizer keeps {odd[0]} as {type(leaves[odd[0]]).__name__}; expected an MLX array, for nothing "
                "else is saved and restored with its state"
            )


def read_cursor(sampler: Sampler) -> dict[str, Any]:
    """The sampler's cursor, copied all the way down: a sampler may hand out the object that it goes on changing.

    Raises:
        ExperimentError: JSON would not give the same cursor again (a tuple becomes a list, and that is all).
    """
    cursor = _plain(sampler.state_dict(), "")
    if not isinstance(cursor, dict):
        raise ExperimentError(f"the sampler's cursor is a {type(cursor).__name__}; expected a dict of JSON values")
    return cursor


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{path}.{number}") for number, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise ExperimentError(f"the sampler's cursor{path} has the key {key!r}; expected text")
        return {key: _plain(item, f"{path}.{key}") for key, item in value.items()}
    if type(value) in (str, int, bool, type(None)) or type(value) is float and math.isfinite(value):
        return value
    found = value if type(value) is float else f"{type(value).__module__}.{type(value).__qualname__}"
    raise ExperimentError(
        f"the sampler's cursor{path} is {str(found).removeprefix('builtins.')}; expected a JSON value "
        "(text, a whole or finite number, true, false, null, a list or a dict); convert it in state_dict()"
    )


def ensure_initialised(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Creates the optimizer's state unless it exists: on lazy creation MLX fills whatever is missing with zeros."""
    members = getattr(optimizer, "optimizers", [optimizer])
    if not all(getattr(member, "_initialized", False) for member in members):
        optimizer.init(model.trainable_parameters())


def state_arrays(tree: Any) -> dict[str, mx.array]:
    """The arrays of a model (its parameters, frozen ones too) or of an optimizer state, by dotted path, sorted."""
    tree = tree.parameters() if isinstance(tree, nn.Module) else tree
    leaves: dict[str, Any] = dict(tree_flatten(tree))
    return {path: leaves[path] for path in sorted(leaves) if isinstance(leaves[path], mx.array)}


def row_major(array: mx.array) -> mx.array:
    """The array in row-major order, with the strides that an array read from a file has; no copy if it is so already.

    `mx.contiguous` alone is not enough: an axis of length 1 may have any stride, and a matmul picks its kernel by it.
    """
    array = mx.contiguous(array)
    return array.reshape(-1).reshape(array.shape) if has_free_stride(array) else array


def has_free_stride(array: mx.array) -> bool:
    return array.ndim > 1 and 1 in array.shape


def replace_arrays(tree: Any, values: Mapping[str, mx.array], prefix: str = "") -> None:
    """Puts arrays in place by path, replacing no container: a compiled step holds on to the containers it saw."""
    for key, node in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        path = f"{prefix}{key}"
        if isinstance(node, (dict, list)):
            replace_arrays(node, values, f"{path}.")
        elif isinstance(node, mx.array) and path in values:
            tree[key] = values[path]


def put_arrays(tree: Any, values: Mapping[str, mx.array]) -> None:
    """`replace_arrays`, and a check that each array is really there now.

    Raises:
        ExperimentError: one is in a container that can't be changed, such as a tuple.
    """
    replace_arrays(tree, values)
    there = state_arrays(tree)
    if missed := [path for path, array in values.items() if there.get(path) is not array]:
        raise ExperimentError(
            f"{missed[0]} can't be restored where it is: it stands in a tuple, or two entries share that path; "
            "keep it in a list, a dict or a module, under a name of its own"
        )


def as_batch(batch: Any) -> Batch:
    """A batch as a tuple of row-major MLX arrays.

    Args:
        batch: an array, or a tuple or list of arrays (MLX or numpy).

    Raises:
        ExperimentError: it holds something else.
    """
    parts: Iterable[Any] = batch if isinstance(batch, (tuple, list)) else (batch,)
    arrays = tuple(row_major(_as_array(part)) for part in parts)
    mx.eval(arrays)
    return arrays


def _as_array(part: Any) -> mx.array:
    if isinstance(part, mx.array):
        return part
    values = np.asarray(part)
    if values.dtype.kind not in "biufc":
        raise ExperimentError(
            f"the batch holds a {type(part).__name__}; expected an array of numbers, or a tuple or list of them"
        )
    return mx.array(values)


def batch_hash(batch: Batch) -> str:
    """SHA-256 over dtype, shape and raw bytes of each array, in order."""

    def chunks() -> Iterator[bytes | memoryview]:
        for array, view in zip(batch, raw_views(batch), strict=True):
            yield f"{array.dtype}{array.shape}".encode()
            yield view.data if view.size else b""

    return sha256(chunks())


def random_state() -> mx.array:
    """This thread's random state: uint32[2]. MLX's own object has no type for its only item."""
    state: Any = mx.random.state
    return state[0]


def random_key() -> tuple[int, int]:
    """The two words of this thread's random state."""
    high, low = np.asarray(random_state()).tolist()
    return high, low


def set_random_key(key: tuple[int, int]) -> None:
    """Restores the random state. `mx.random.state` refuses assignment, but `key(seed)` is the seed's two words."""
    high, low = key
    mx.random.seed((high << 32) | low)
