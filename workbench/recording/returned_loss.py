"""The loss as a recorder's step returns it: a number, for a loop that was written for an MLX array."""

from __future__ import annotations

import mlx.core as mx


class ReturnedLoss(float):
    """A float that has what a loop asks a loss of shape () and dtype float32 for.

    It is evaluated, and as exact as the array was: a float64 holds every float32. A function of MLX that takes a list
    of arrays takes no float: `mx.array(losses)` where a loop has `mx.stack(losses)`.
    """

    dtype, shape, ndim, size = mx.float32, (), 0, 1

    def item(self) -> float:
        return float(self)

    def tolist(self) -> float:
        return float(self)

    def astype(self, dtype: mx.Dtype) -> mx.array:
        return mx.array(float(self), mx.float32).astype(dtype)

    def __mlx_array__(self) -> mx.array:
        return mx.array(float(self), mx.float32)
