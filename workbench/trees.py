"""Trees of MLX arrays, by dotted path: a model's parameters, an optimizer's state. Found, laid out, put back.

Knows MLX; nothing of experiments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from . import cuda
from .errors import ExperimentError
from .host import raw_views, strides


def state_arrays(tree: Any) -> dict[str, mx.array]:
    """The arrays of a model (its parameters, frozen ones too) or of an optimizer state, by dotted path, sorted."""
    found: dict[str, mx.array] = {}
    if not isinstance(tree, nn.Module):
        _gather(found, "", tree)
    elif type(tree).parameters is nn.Module.parameters:
        _gather_parameters(found, "", tree)
    else:
        _gather(found, "", tree.parameters())
    return {path: found[path] for path in sorted(found)}


def _gather(found: dict[str, mx.array], prefix: str, tree: Any) -> None:
    """The arrays that `mlx.utils.tree_flatten` finds, by the same paths, in a fraction of its time: every step asks."""
    if isinstance(tree, mx.array):
        found[prefix[:-1]] = tree
    elif isinstance(tree, (dict, list, tuple)):
        for key, node in tree.items() if isinstance(tree, dict) else enumerate(tree):
            _gather(found, f"{prefix}{key}.", node)


def _gather_parameters(found: dict[str, mx.array], prefix: str, tree: dict[str, Any] | list[Any]) -> None:
    """Those of `nn.Module.parameters`: a module's attributes whose names begin with _ are none, nor is a tuple."""
    private = isinstance(tree, nn.Module)
    items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, node in items:
        if private and key.startswith("_"):
            continue
        if isinstance(node, mx.array):
            found[f"{prefix}{key}"] = node
        elif isinstance(node, (dict, list)):
            _gather_parameters(found, f"{prefix}{key}.", node)


def row_major(array: mx.array) -> mx.array:
    """The array in row-major order, with the strides that an array read from a file has; no copy if it is so already.

    `mx.contiguous` alone is not enough: an axis of length 1 may have any stride, and a matmul picks its kernel by it.
    """
    array = mx.contiguous(array)
    return array.reshape(-1).reshape(array.shape) if has_free_stride(array) else array


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
