"""Edits of a state: moments lost, swapped or scaled, a weight blown up, one bit flipped. Each returns another state.

Knows states; nothing of runs, recorders or faults. MLX arrays are immutable, so whoever holds the old state keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import mlx.core as mx
import numpy as np

from .errors import ExperimentError
from .host import raw_views
from .snapshot import State

MOMENTS = ("m", "v")
_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def zeroed(state: State, leaves: Collection[str] = MOMENTS) -> State:
    """Adam's m, v or both set to zero; the optimizer's step counter is kept.

    Raises:
        ExperimentError: the optimizer keeps none.
    """
    changed = {path: mx.zeros_like(state.optimizer[path]) for leaf in leaves for path in moments(state, leaf)}
    return replace(state, optimizer=state.optimizer | changed)


def swapped(state: State) -> State:
    """Adam's m in the place of v, and v in that of m."""
    pairs = [(f"{owner}.m", f"{owner}.v") for owner in (path[:-2] for path in moments(state, "m"))]
    changed = {one: state.optimizer[other] for pair in pairs for one, other in (pair, pair[::-1])}
    return replace(state, optimizer=state.optimizer | changed)


def scaled_moment(state: State, leaf: str, factor: float) -> State:
    """Adam's m or v times `factor`, in its own dtype."""
    changed = {path: _times(state.optimizer[path], factor) for path in moments(state, leaf)}
    return replace(state, optimizer=state.optimizer | changed)


def scaled_weight(state: State, path: str, factor: float) -> State:
    """One parameter times `factor`, in its own dtype."""
    return replace(state, weights=state.weights | {path: _times(state.weights[path], factor)})


def flipped(state: State, leaf: str, path: str, index: int, bit: int) -> State:
    """One bit of a parameter (`leaf` "weight") or of its m or v ("m", "v").

    Args:
        path: of the parameter.
        index: of the element, in row-major order.
        bit: 0 is the lowest.
    """
    if leaf == "weight":
        return replace(state, weights=state.weights | {path: flip(state.weights[path], index, bit)})
    kept = f"{path}.{leaf}"
    return replace(state, optimizer=state.optimizer | {kept: flip(state.optimizer[kept], index, bit)})


def flip(array: mx.array, index: int, bit: int) -> mx.array:
    """A copy of an array with one bit of one element changed."""
    raw = raw_views([array])[0].copy()
    words = raw.reshape(-1).view(_WORDS[raw.itemsize])
    words[index] ^= words.dtype.type(1 << bit)
    changed = mx.array(raw)
    return changed.view(array.dtype) if changed.dtype != array.dtype else changed


def cast(state: State, dtype: mx.Dtype) -> State:
    """Floating-point weights and moments in another dtype."""

    def tree(arrays: dict[str, mx.array], kept: Collection[str]) -> dict[str, mx.array]:
        return {
            path: array.astype(dtype) if path in kept and mx.issubdtype(array.dtype, mx.floating) else array
            for path, array in arrays.items()
        }

    both = [path for leaf in MOMENTS for path in moments(state, leaf)]
    return replace(state, weights=tree(state.weights, state.weights), optimizer=tree(state.optimizer, both))


def seeded(state: State, seed: int) -> State:
    """The random state of a seed, as `mx.random.seed` makes it."""
    return replace(state, rng=(seed >> 32, seed & 0xFFFFFFFF))


def moments(state: State, leaf: str) -> list[str]:
    """Paths of the optimizer's arrays named `leaf`.

    Raises:
        ExperimentError: it keeps none.
    """
    found = [path for path in state.optimizer if path.endswith(f".{leaf}")]
    if not found:
        raise ExperimentError(f"the optimizer keeps no {leaf!r}; expected one of the Adam family")
    return found


def _times(array: mx.array, factor: float) -> mx.array:
    return (array.astype(mx.float32) * factor).astype(array.dtype)
