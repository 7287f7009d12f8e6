"""What a replay needs to rebuild a step: model, optimizer, loss, sampler, and the step's options.

Knows MLX; nothing of any particular model, data or trainer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from . import extras
from .batch_arrays import Batch as Batch
from .batch_arrays import as_batch as as_batch
from .batch_arrays import batch_hash as batch_hash
from .cursors import Sampler
from .cursors import read_cursor as read_cursor
from .errors import ExperimentError
from .frozen import Frozen
from .plain_batches import PlainBatches
from .plain_numbers import real, truth, whole
from .random_state import random_key as random_key
from .random_state import random_state as random_state
from .random_state import set_random_key as set_random_key
from .trees import Leaves, other_strides, put_arrays, settled, state_arrays
from .trees import has_free_stride as has_free_stride
from .trees import replace_arrays as replace_arrays
from .trees import row_major as row_major

LossFunction = Callable[..., Any]


class StepOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a step is performed. Each of these moves bits, so each is in the manifest."""

    clip: float | None = None  # global gradient norm above which gradients are scaled down; None: never
    accumulate: int = 1  # micro-batches a step: equal parts of the batch's leading axis
    compile: bool = True  # run the step through mx.compile
    deterministic: bool = True  # on a GPU: gradients free of the order of atomics (see `deterministic`)

    def __post_init__(self) -> None:
        micro_batches, clip = whole(self.accumulate), None if self.clip is None else real(self.clip)
        if micro_batches is None or not 1 <= micro_batches < 2**31:
            raise ExperimentError(f"accumulate is {self.accumulate!r}; expected at least 1 micro-batch a step")
        if self.clip is not None and (clip is None or not 0 < clip < math.inf):
            raise ExperimentError(f"clip is {self.clip!r}; expected a positive gradient norm, or none to switch it off")
        msgspec.structs.force_setattr(self, "accumulate", micro_batches)
        msgspec.structs.force_setattr(self, "clip", clip)
        for name in ("compile", "deterministic"):
            if (chosen := truth(getattr(self, name))) is None:
                raise ExperimentError(f"{name} is {getattr(self, name)!r}; expected True or False")
            msgspec.structs.force_setattr(self, name, chosen)


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
        numpy: whether the step gets the arrays of numpy in a batch as such: one of the user's own that is not compiled
            does, unless it can't take them; None: that is not known yet.
        loss_form: dtype and shape of the loss that a step of the user's own returned last.
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
    numpy: bool | None = field(init=False, repr=False, compare=False, default=None)
    loss_form: tuple[mx.Dtype, tuple[int, ...]] = field(init=False, repr=False, compare=False, default=(mx.float32, ()))
    _leaves: dict[str, Leaves] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._refuse_other_kinds()
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
        self.numpy = False if self.step_fn is None or self.options.compile else None

    def _refuse_other_kinds(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise ExperimentError(f"the model is {_kind(self.model)}; expected an mlx.nn.Module")
        if isinstance(self.optimizer, type) or not all(hasattr(self.optimizer, one) for one in _OF_OPTIMIZERS):
            raise ExperimentError(
                f"the optimizer is {_kind(self.optimizer)}; expected one of mlx.optimizers, such as "
                "mlx.optimizers.AdamW(1e-3)"
            )
        if not isinstance(self.extra, dict):
            raise ExperimentError(
                f"extra is {_kind(self.extra)}; expected a dict of what else the step reads and changes, by name"
            )

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
        self._refuse_betas_of_numpy()
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

    def _refuse_betas_of_numpy(self) -> None:
        """They make moments of numpy, which stay unseen until a state is to be put back."""
        for member in getattr(self.optimizer, "optimizers", [self.optimizer]):
            betas = getattr(member, "betas", ())
            if isinstance(betas, (list, tuple)) and any(isinstance(one, np.generic) for one in betas):
                raise ExperimentError(
                    f"betas of the optimizer {type(member).__name__} are numbers of numpy; such a number times an "
                    "array of MLX is an array of numpy, which no checkpoint holds. Give it numbers of Python: "
                    f"betas={tuple(map(float, betas))}"
                )

    def leaves(self, name: str, tree: Any) -> Leaves:
        """The arrays of a tree of this experiment that every step asks for, by a name of its own."""
        found = self._leaves.get(name)
        if found is None or found.tree is not tree:
            found = self._leaves[name] = Leaves(tree)
        return found


_OF_OPTIMIZERS = ("init", "update", "state")


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"


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


def ensure_initialised(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Creates the optimizer's state unless it exists: on lazy creation MLX fills whatever is missing with zeros."""
    members = getattr(optimizer, "optimizers", [optimizer])
    if not all(getattr(member, "_initialized", False) for member in members):
        optimizer.init(model.trainable_parameters())
