"""MLX arrays seen from the host: raw bytes for digests, norms at memory speed.

Reads evaluated arrays without a copy where the backend allows it. A view belongs to a handle of its own: one on the
caller's would point into freed memory after an `a += 1` of the caller's. Being outside the step's graph, nothing here
can move a fusion boundary, so measuring cannot change a run's bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np

NORMS = (
    "float32 blocks of 4096, memory order"  # in the manifest: norms made in another way can't be compared bit by bit
)
FLOAT = np.dtype(np.float32)
_BLOCK = 4096  # elements a BLAS dot call: below every library's threading threshold, so threads cannot reorder the sum
_STRETCH = 32 * _BLOCK  # elements that are summed and hashed in turn: 512 KiB, which a core's cache still holds


def raw_views(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Each array as a contiguous numpy array over the same bytes; bfloat16, which numpy lacks, appears as uint16."""
    plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else copy(array) for array in arrays]
    mx.eval(plain)
    return [np.asarray(array, order="C") for array in plain]


def float_views(arrays: Sequence[mx.array]) -> list[np.ndarray]:
    """Each array as a flat float32 numpy array in memory order; float32 ones are not copied, others converted exactly.

    Memory order, because MLX lays a matrix's gradient out transposed, and reordering it would cost more than the sum.
    """
    plain = [copy(array) if array.dtype == mx.float32 else array.astype(mx.float32) for array in arrays]
    mx.eval(plain)
    found = []
    for array in plain:
        memory = memoryview(array)  # type: ignore[arg-type]
        whole = memory.c_contiguous and memory.nbytes
        found.append(np.frombuffer(memory, FLOAT) if whole else np.asarray(array).ravel(order="K"))
    return found


def strides(array: mx.array) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis."""
    found = memoryview(copy(array)).strides  # type: ignore[arg-type]
    assert found is not None
    return found


def square_sum(values: np.ndarray, also: Callable[[Any], object] | None = None) -> float:
    """Sum of squares of a flat float32 array, as float64: float32 products and partial sums over 4096 elements (BLAS
    dot), float64 above. Values whose squares leave float32's range are squared in float64 instead.

    Args:
        also: called with each stretch of the bytes in turn, while it is in the cache: one read of memory does for both.
    """
    with quiet():
        return quiet_square_sum(values, also)


def quiet() -> np.errstate:
    """Within: numpy says nothing of what overflows, underflows or is no number."""
    return np.errstate(over="ignore", invalid="ignore", under="ignore")


def quiet_square_sum(values: np.ndarray, also: Callable[[Any], object] | None = None) -> float:
    """`square_sum`, to be called within `quiet`: for many small arrays, entering it takes longer than the sum."""
    size = values.size
    if size > _STRETCH:
        total = _blockwise(values, also)
    else:
        if also is not None and size:
            also(values)
        if size <= _BLOCK:  # one BLAS call
            total = float(values.dot(values))
        elif size % _BLOCK:
            total = _blockwise(values)
        else:
            blocks = values.reshape(-1, _BLOCK)
            total = float(np.add.reduce(np.vecdot(blocks, blocks), dtype=np.float64))
    if not 1e-30 < total < 1e30:  # overflow, underflow, NaN, or exactly zero
        total = _blockwise(values.astype(np.float64))
    return total


def _blockwise(values: np.ndarray, also: Callable[[Any], object] | None = None) -> float:
    sums, rest = [], 0.0
    for start in range(0, values.size, _STRETCH):
        stretch = values[start : start + _STRETCH]
        if also is not None:
            also(stretch.data)
        whole = stretch.size - stretch.size % _BLOCK
        blocks = stretch[:whole].reshape(-1, _BLOCK)
        sums.append(np.vecdot(blocks, blocks))
        if whole < stretch.size:  # only the last one
            rest = float(np.vecdot(stretch[whole:], stretch[whole:]))
    whole_sums = sums[0] if len(sums) == 1 else np.concatenate(sums or [np.zeros(0)])
    return float(np.add.reduce(whole_sums, dtype=np.float64)) + rest


def norm(arrays: Sequence[np.ndarray]) -> np.float32:
    """L2 norm over all elements of several flat float32 arrays. NaN or inf if an element is."""
    with np.errstate(over="ignore", invalid="ignore"):
        return np.float32(np.sqrt(sum(square_sum(values) for values in arrays)))
