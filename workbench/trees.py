"""Trees of MLX arrays, by dotted path: a model's parameters, an optimizer's state. Found, made row-major, put back.

Knows MLX; nothing of experiments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from .errors import ExperimentError
from .host import raw_views


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
