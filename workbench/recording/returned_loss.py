"""The loss as a recorder's step returns it: a number, for a loop that was written for an MLX array."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np


class ReturnedLoss(float):
    """A float that has what a loop asks a loss of shape () and dtype float32 for, and computes as that did: a mean of
    losses that sets a learning rate has the bits that it had.

    It is evaluated, and as exact as the array was: a float64 holds every float32. A function of MLX that takes a list
    of arrays takes no float: `mx.array(losses)` where a loop has `mx.stack(losses)`.
    """

    dtype, shape, ndim, size = mx.float32, (), 0, 1

    def item(self) -> float:
        return float(self)

    def _with(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        """As arrays of MLX compute: both numbers in float32, and the result. Other things than numbers know how."""
        if not isinstance(other, (int, float)):
            return NotImplemented
        with np.errstate(all="ignore"):
            return ReturnedLoss(operation(np.float32(self), np.float32(other)))

    def __add__(self, other: Any) -> Any:
        return self._with(other, operator.add)

    def __radd__(self, other: Any) -> Any:
        return self._with(other, lambda mine, its: its + mine)

    def __sub__(self, other: Any) -> Any:
        return self._with(other, operator.sub)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda mine, its: its - mine)

    def __mul__(self, other: Any) -> Any:
        return self._with(other, operator.mul)

    def __rmul__(self, other: Any) -> Any:
        return self._with(other, lambda mine, its: its * mine)

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, operator.truediv)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with(other, lambda mine, its: its / mine)

    def tolist(self) -> float:
        return float(self)

    def astype(self, dtype: mx.Dtype) -> mx.array:
        return mx.array(float(self), mx.float32).astype(dtype)

    def __mlx_array__(self) -> mx.array:
        return mx.array(float(self), mx.float32)
