"""What a replay needs to rebuild a step: model, optimizer, loss, sampler, and the step's options.

Knows MLX; nothing of any particular model, data or trainer.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from . import extras
from .errors import ExperimentError
from .files import canonical_json
from .frozen import Frozen
from .host import raw_views
from .numbered_batch import NumberedBatch, arguments, is_number, numbers_of, spelled
from .plain_batches import PlainBatches
from .plain_json import plain_json
from .trees import Leaves, is_row_major
from .trees import has_free_stride as has_free_stride
from .trees import other_strides as other_strides
from .trees import put_arrays as put_arrays
from .trees import replace_arrays as replace_arrays
from .trees import row_major as row_major
from .trees import settled as settled
from .trees import state_arrays as state_arrays

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
            `"token_loss"`: the loss of each row or token, an array whose first axis is the batch's. With a `step_fn`
            it may be None: nothing but the probe needs it then.
        sampler: an iterator of batches with `state_dict` and `load_state_dict`; or any other iterable, whose batches a
            recorder then stores; or None: the loop hands each batch to the recorder, which stores it, and a replay
            takes it from the run's store.
        options: clip, accumulate, compile. Left out: those of `StepOptions`, but with a `step_fn` not compiled.
        step_fn: your own step, `step_fn(*batch)`, which performs forward and backward pass and the update of `model` by
            `optimizer`, and returns the loss; performed in place of the built-in step (see `own_step`).
        extra: what else the step reads and changes, by name: a tree (dict or list) of arrays, a module, or an object
            with `state_dict()` and `load_state_dict(state)` (see `extras`).

    Attributes:
        relaid: shapes of the parameters, by path, that `prepare` had to make row-major.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    loss_fn: LossFunction = None  # type: ignore[assignment]  # with a step_fn it may stay None: a probe is not made then
    sampler: Sampler = None  # type: ignore[assignment]  # never None once it is made
    options: StepOptions = None  # type: ignore[assignment]
    step_fn: Callable[..., Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    frozen: Frozen = field(init=False, repr=False, compare=False)
    relaid: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False, default_factory=dict)
    _leaves: dict[str, Leaves] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler):
            self.sampler = PlainBatches(self.sampler)
        if self.options is None:
            self.options = StepOptions(compile=self.step_fn is None)
        self._refuse_without_functions()
        if self.step_fn is not None and (self.options.clip is not None or self.options.accumulate != 1):
            raise ExperimentError(
                f"clip is {self.options.clip} and accumulate is {self.options.accumulate}, but step_fn is a step of "
                "your own; do both inside it, and leave these options out"
            )
        if isinstance(self.step_fn, type(mx.compile(_nothing))):
            raise ExperimentError(
                "step_fn is compiled already, so nothing inside it can be seen; pass the plain function and "
                "compile=True: it is compiled here, with all of the state"
            )
        extras.check(self.extra, self.options.compile)
        self.frozen = Frozen(self.model)

    def _refuse_without_functions(self) -> None:
        if self.loss_fn is None and self.step_fn is None:
            raise ExperimentError(
                "there is neither loss_fn nor step_fn, so no step can be performed; expected loss_fn(model, *batch), "
                "which returns the loss, or step_fn(*batch), a step of your own"
            )
        for name, given in (("loss_fn", self.loss_fn), ("step_fn", self.step_fn)):
            if given is not None and not callable(given):
                raise ExperimentError(f"{name} is of type {type(given).__name__}; expected a function")

    def prepare(self) -> None:
        """Brings the state into the form that a restored one has: initialised, evaluated, and laid out as a checkpoint
        can say it.

        MLX picks matmul kernels by memory layout. A transposed view stays one (`trees.layout`), for a loop without a
        recorder would use it so; what has gaps, or an axis of length 1, becomes row-major.
        """
        ensure_initialised(self.optimizer, self.model)
        for tree in (self.model, self.optimizer.state, *extras.trees(self.extra)):
            arrays = state_arrays(tree)
            mx.eval(arrays)
            laid = {path: settled(leaf) for path, leaf in arrays.items()}
            mx.eval(laid)
            put_arrays(tree, laid)
            if tree is self.model:
                self.relaid |= {path: leaf.shape for path, leaf in arrays.items() if other_strides(leaf, laid[path])}
        leaves: dict[str, Any] = dict(tree_flatten(self.optimizer.state))
        if odd := sorted(path for path, leaf in leaves.items() if not isinstance(leaf, mx.array)):
            raise ExperimentError(
                f"the optimizer keeps {odd[0]} as {type(leaves[odd[0]]).__name__}; expected an MLX array, for nothing "
                "else is saved and restored with its state"
            )

    def leaves(self, name: str, tree: Any) -> Leaves:
        """The arrays of a tree of this experiment that every step asks for, by a name of its own."""
        found = self._leaves.get(name)
        if found is None or found.tree is not tree:
            found = self._leaves[name] = Leaves(tree)
        return found


def _nothing() -> None:
    """Compiled only to learn the type of compiled functions, which MLX has no name for."""


def weight_arrays(experiment: Experiment) -> dict[str, mx.array]:
    """All parameters of the model, frozen ones too, by path."""
    return experiment.leaves("model", experiment.model).arrays()


def state_handles(experiment: Experiment) -> tuple[dict[str, mx.array], dict[str, mx.array]]:
    """New handles of the state's arrays: `weight_arrays` and `kept_arrays`."""
    weights = experiment.leaves("model", experiment.model).handles()
    kept = experiment.leaves("optimizer", experiment.optimizer.state).handles()
    more = extras.arrays(experiment.extra) if experiment.extra else {}
    return weights, kept | {path: copy(array) for path, array in more.items()}


def kept_arrays(experiment: Experiment) -> dict[str, mx.array]:
    """All arrays of the state beside the weights, by path: those of the optimizer, then those of `extra`."""
    found = experiment.leaves("optimizer", experiment.optimizer.state).arrays()
    return found | extras.arrays(experiment.extra) if experiment.extra else found


def put_kept(experiment: Experiment, values: Mapping[str, mx.array]) -> None:
    """Puts arrays back where `kept_arrays` found them."""
    put_arrays(experiment.optimizer.state, {path: array for path, array in values.items() if not extras.owns(path)})
    extras.put(experiment.extra, values)


def read_cursor(sampler: Sampler) -> dict[str, Any]:
    """The sampler's cursor, copied all the way down: a sampler may hand out the object that it goes on changing.

    Raises:
        ExperimentError: JSON would not give the same cursor again (a tuple becomes a list, and that is all).
    """
    cursor = plain_json(sampler.state_dict(), "the sampler's cursor", "state_dict()")
    if not isinstance(cursor, dict):
        raise ExperimentError(f"the sampler's cursor is a {type(cursor).__name__}; expected a dict of JSON values")
    return cursor


def ensure_initialised(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Creates the optimizer's state unless it exists: on lazy creation MLX fills whatever is missing with zeros."""
    members = getattr(optimizer, "optimizers", [optimizer])
    if not all(getattr(member, "_initialized", False) for member in members):
        optimizer.init(model.trainable_parameters())


def as_batch(batch: Any) -> Batch:
    """A batch as a tuple of row-major MLX arrays; a `NumberedBatch` if it has numbers of Python or numpy.

    Args:
        batch: an array, or a tuple or list of arrays (MLX or numpy) and numbers.

    Raises:
        ExperimentError: it holds something else.
    """
    if isinstance(batch, Mapping):
        names = ", ".join(f"batch[{name!r}]" for name in batch) + "," * (len(batch) == 1)
        raise ExperimentError(
            f"the batch holds a {type(batch).__name__}; expected its arrays alone, in the order of the arguments of "
            f"the step or loss function, which gets them one by one: recorder.step(({names}))"
        )
    parts: list[Any] = arguments(batch) if isinstance(batch, NumberedBatch) else _parts(batch)
    arrays = tuple([_row_major(part) for part in parts])
    mx.eval(arrays)
    numbers = {place: part for place, part in enumerate(parts) if is_number(part)}
    return NumberedBatch(arrays, numbers) if numbers else arrays


def _parts(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _row_major(part: Any) -> mx.array:
    """A new handle. Nothing is computed for an array that is row-major as it is: waking MLX's thread takes a while."""
    array = copy(part) if isinstance(part, mx.array) else _as_array(part)
    return array if is_row_major(array) else row_major(array)


def _as_array(part: Any) -> mx.array:
    values = np.asarray(part)
    if values.dtype.kind not in "biufc":
        raise ExperimentError(
            f"the batch holds a {type(part).__name__}; expected an array of numbers, or a tuple or list of them"
        )
    return mx.array(values)


def batch_hash(batch: Batch) -> str:
    """SHA-256 over dtype, shape and raw bytes of each array, in order; and over the numbers, if there are any."""
    digest = _BLANK.copy()
    for array, view in zip(batch, raw_views(batch), strict=True):
        digest.update(_form(array.dtype, array.shape))
        if view.size:
            digest.update(view.data)
    if numbers := numbers_of(batch):
        digest.update(canonical_json(spelled(numbers)))
    return digest.hexdigest()


_BLANK = hashlib.sha256()  # copied: a new one makes OpenSSL look for the algorithm each time


@functools.lru_cache(maxsize=64)
def _form(dtype: mx.Dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()


def random_state() -> mx.array:
    """This thread's random state: uint32[2]. MLX's own object has no type for its only item."""
    state: Any = mx.random.state
    return state[0]


def random_key() -> tuple[int, int]:
    """The two words of this thread's random state.

    Raises:
        ExperimentError: it holds no numbers.
    """
    try:
        high, low = cast(list[int], random_state().tolist())
    except RuntimeError as error:
        raise ExperimentError(
            "the random state of this thread holds no numbers: a compiled function drew from mx.random without "
            "mx.random.state among its inputs and outputs. Name it there, and call mx.random.seed(n) before going on"
        ) from error
    return high, low


def set_random_key(key: tuple[int, int]) -> None:
    """Restores the random state. `mx.random.state` refuses assignment, but `key(seed)` is the seed's two words."""
    high, low = key
    mx.random.seed((high << 32) | low)
