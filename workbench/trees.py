"""Trees of MLX arrays, by dotted path: a model's parameters, an optimizer's state. Found, laid out, put back.

Knows MLX; nothing of experiments.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from . import cuda
from .errors import ExperimentError
from .host import raw_views, strides


def state_arrays(tree: Any) -> dict[str, mx.array]:
    """The arrays of a model (its parameters, frozen ones too) or of an optimizer state, by dotted path, sorted."""
    return Leaves(tree).arrays()


class Leaves:
    """The arrays of one tree, asked for again and again, as every step does.

    Where each stands is remembered. It holds as long as every container holds the same containers, as many entries, and
    arrays in the same places; otherwise the tree is walked again.

    Attributes:
        tree: a model, of which these are the parameters, frozen ones too; or a dict, list or tuple, such as an
            optimizer's state: all arrays in it.
    """

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self._walk()

    def arrays(self) -> dict[str, mx.array]:
        """By dotted path, sorted."""
        found = self._now()  # which may find other paths
        return dict(zip(self._paths, found, strict=True))

    def handles(self) -> dict[str, mx.array]:
        """The same by new handles, which `a += 1` in a user's code leaves as they are."""
        found = self._now()
        return dict(zip(self._paths, map(copy, found), strict=True))

    def _now(self) -> list[mx.array]:
        found = self._found()
        if found is None:
            self._walk()
            found = self._found()
            assert found is not None
        return found

    def _found(self) -> list[mx.array] | None:
        """The arrays in order, or None if the tree has another structure by now."""
        if self._remade:
            self._walk()
        try:
            found = [container[key] for container, key in self._places]
            inner = [container[key] for container, key in self._inner_places]
            types = [type(container[key]) for container, key in self._other_places]
        except LookupError:
            return None
        same = all(map(operator.is_, inner, self._inner)) and types == self._types
        # With as many entries, and all that were there: the same ones.
        same = same and all(key in container for container, key in self._hidden_places)
        same = same and list(map(len, self._containers)) == self._lengths and set(map(type, found)) <= self._kinds
        return found if same else None

    def _walk(self) -> None:
        tree = self.tree
        model = isinstance(tree, nn.Module)
        self._remade = model and type(tree).parameters is not nn.Module.parameters  # by a method of the user's
        self._containers: list[Any] = []
        self._inner_places: list[tuple[Any, Any]] = []
        self._inner: list[Any] = []
        self._other_places: list[tuple[Any, Any]] = []
        self._hidden_places: list[tuple[Any, Any]] = []
        self._types: list[type] = []
        placed: dict[str, tuple[Any, Any]] = {}
        root = tree.parameters() if self._remade else tree
        if isinstance(root, mx.array):
            placed[""] = [root], 0
        else:
            self._enter(root, "", placed, (dict, list) if model and not self._remade else (dict, list, tuple))
        self._paths = sorted(placed)
        self._places = [placed[path] for path in self._paths]
        self._kinds = {type(container[key]) for container, key in self._places}
        self._lengths = list(map(len, self._containers))

    def _enter(self, container: Any, prefix: str, placed: dict[str, tuple[Any, Any]], kinds: tuple[type, ...]) -> None:
        """The arrays that `mlx.utils.tree_flatten` finds, by the same paths; of a model those of `parameters`, where
        attributes whose names begin with _ are none, nor is a tuple."""
        self._containers.append(container)
        private = tuple not in kinds and isinstance(container, nn.Module)
        for key, node in container.items() if isinstance(container, dict) else enumerate(container):
            if private and str(key).startswith("_"):
                self._hidden_places.append((container, key))
                continue
            if isinstance(node, mx.array):
                placed[f"{prefix}{key}"] = container, key
            elif isinstance(node, kinds):
                self._inner_places.append((container, key))
                self._inner.append(node)
                self._enter(node, f"{prefix}{key}.", placed, kinds)
            else:
                self._other_places.append((container, key))
                self._types.append(type(node))


def row_major(array: mx.array) -> mx.array:
    """The array in row-major order, with the strides that an array read from a file has; no copy if it is so already.

    `mx.contiguous` alone is not enough: an axis of length 1 may have any stride, and a matmul picks its kernel by it.
    """
    array = mx.contiguous(array)
    return array.reshape(-1).reshape(array.shape) if has_free_stride(array) else array


def is_row_major(array: mx.array) -> bool:
    """Whether `row_major` would give the array as it is. On a CUDA device, where asking would move the array, never."""
    return not cuda.available() and not has_free_stride(array) and memoryview(copy(array)).c_contiguous  # type: ignore[arg-type]


def has_free_stride(array: mx.array) -> bool:
    return array.ndim > 1 and 1 in array.shape


def layout(array: mx.array) -> tuple[int, ...] | None:
    """The axes of an array by their strides, the longest first, where it fills its memory in another order than
    row-major: a transposed view. MLX's matmul picks its kernel by that order, and an optimizer may keep it.

    None: it is row-major, has gaps, or an axis of length 1. Also on a CUDA device, where asking for the strides would
    move the array.
    """
    if array.ndim < 2 or array.size == 0 or 1 in array.shape or cuda.available():
        return None
    steps = strides(array)
    axes = tuple(sorted(range(array.ndim), key=lambda axis: -steps[axis]))
    expected = array.itemsize
    for axis in reversed(axes):
        if steps[axis] != expected:
            return None
        expected *= array.shape[axis]
    return None if axes == tuple(range(array.ndim)) else axes


def laid_out(array: mx.array, axes: Sequence[int]) -> mx.array:
    """An array with the same elements whose `layout` is `axes`.

    Raises:
        ValueError: they are not its axes.
    """
    if sorted(axes) != list(range(array.ndim)):
        raise ValueError(f"an array of shape {array.shape} can't be laid out along axes {list(axes)}")
    return mx.contiguous(array.transpose(*axes)).transpose(*(axes.index(axis) for axis in range(array.ndim)))


def layouts(arrays: Mapping[str, Any]) -> dict[str, list[int]]:
    """The `layout` of each array that has one, by path; of what is no MLX array, none."""
    found = {path: layout(array) for path, array in arrays.items() if isinstance(array, mx.array)}
    return {path: list(axes) for path, axes in found.items() if axes is not None}


def settled(array: mx.array) -> mx.array:
    """A new handle of the array, as it is if a checkpoint can give it back so: row-major, or in a `layout`. Otherwise
    row-major."""
    return copy(array) if layout(array) is not None else row_major(array)


def other_strides(array: mx.array, row_major: mx.array) -> bool:
    """Whether an array has other strides than the same one made row-major, where that can be told: see `layout`."""
    return array.ndim > 1 and array.size > 0 and not cuda.available() and strides(array) != strides(row_major)


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
    missed = [path for path, array in values.items() if there.get(path) is not array]
    if missed := [path for path in missed if not _stands_twice(tree, path, values, there)]:
        leaves: dict[str, Any] = dict(tree_flatten(tree))
        if isinstance(leaves.get(missed[0]), (np.ndarray, np.generic)):
            raise ExperimentError(
                f"{missed[0]} has become an array of numpy in the step, and no checkpoint holds that: a number of "
                "numpy times an array of MLX is one of numpy. Give model and optimizer numbers of Python "
                "(betas=(0.9, 0.99), float(momentum))"
            )
        raise ExperimentError(
            f"{missed[0]} can't be restored where it is: it stands in a tuple, or two entries share that path; "
            "keep it in a list, a dict or a module, under a name of its own"
        )


def _stands_twice(tree: Any, path: str, values: Mapping[str, mx.array], there: Mapping[str, mx.array]) -> bool:
    """Whether a module that holds the array stands under several paths, and has its bits from another of them."""
    slots = dict(_slots(tree))
    others = [other for other in values if other != path and slots.get(other) == slots.get(path, 0)]
    placed = [other for other in others if there[other] is values[other]]
    if not placed:
        return False
    one, other = raw_views([values[path], values[placed[0]]])
    return one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _slots(tree: Any, prefix: str = "") -> Iterator[tuple[str, tuple[int, Any]]]:
    """Where each array stands: its container and the key in it."""
    for key, node in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        if isinstance(node, (dict, list)):
            yield from _slots(node, f"{prefix}{key}.")
        elif isinstance(node, mx.array):
            yield f"{prefix}{key}", (id(tree), key)
