"""The loss as a recorder's step returns it: a number, for a loop that was written for an MLX array."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

_NUMBERS = (bool, int, float, complex, np.generic)


class ReturnedLoss(float):
    """A float that has what a loop asks a loss for, and computes as the array did: a mean of losses that sets a
    learning rate has the bits that it had. An array of MLX of its dtype and shape computes each operator.

    It is evaluated, and as exact as the array was: a float64 holds every float32. What asks only whether it is a float
    takes it for one, which has no dtype: a function of MLX, an array of half precision to the left of an operator, and
    a list of numpy's. `mx.array(loss, loss.dtype)` is an array to all of them. (A function of MLX that takes a list of
    arrays takes no float: `mx.array(losses)` where a loop has `mx.stack(losses)`.)

    Args:
        loss: a number, or an array of one element.
        dtype, shape: of the array that the loss was; of an array these are its own.

    Attributes:
        dtype, shape: of the array that it was.
    """

    dtype: mx.Dtype
    shape: tuple[int, ...]
    __iter__ = None  # or `__getitem__` would be asked for items

    def __new__(cls, loss: Any, dtype: mx.Dtype = mx.float32, shape: tuple[int, ...] = ()) -> ReturnedLoss:
        if isinstance(loss, mx.array):
            dtype, shape, loss = loss.dtype, loss.shape, loss.item()
        made = super().__new__(cls, loss)
        made.dtype, made.shape = dtype, tuple(shape)
        return made

    def __mlx_array__(self) -> mx.array:
        value = float(self) if mx.issubdtype(self.dtype, mx.inexact) else int(self)
        return mx.array(value, self.dtype).reshape(self.shape)

    def __getattr__(self, name: str) -> Any:
        """What arrays have, such as `mean` and `astype`."""
        if name.startswith("_"):
            raise AttributeError(f"a loss has no {name}")
        return getattr(self.__mlx_array__(), name)

    def __getitem__(self, index: Any) -> mx.array:
        return self.__mlx_array__()[index]

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """As numpy computes with an array of MLX."""
        if any(isinstance(one, ReturnedLoss) for one in options.get("out", ())):
            return NotImplemented
        return getattr(ufunc, method)(*map(_numpy, inputs), **options)

    def _with(self, operation: Callable[[Any, Any], Any], other: Any, *, reflected: bool = False) -> Any:
        """Other things than numbers and arrays know how to compute with a float, or refuse."""
        if not isinstance(other, (*_NUMBERS, mx.array, np.ndarray)):
            return NotImplemented
        mine, its = self.__mlx_array__(), _mlx(other)
        found = operation(its, mine) if reflected else operation(mine, its)
        return _returned(found) if isinstance(other, _NUMBERS) else found

    def __neg__(self) -> Any:
        return _returned(operator.neg(self.__mlx_array__()))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return _returned(abs(self.__mlx_array__()))

    def __hash__(self) -> int:
        return float.__hash__(self)

    def __reduce__(self) -> Any:
        return _read, (float(self), str(self.dtype).rpartition(".")[2], self.shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    size = 1

    def item(self) -> Any:
        return self.__mlx_array__().item()

    def tolist(self) -> Any:
        return self.__mlx_array__().tolist()


def _mlx(value: Any) -> Any:
    return value.__mlx_array__() if isinstance(value, ReturnedLoss) else value


def _numpy(value: Any) -> Any:
    if not isinstance(value, ReturnedLoss):
        return value
    return float(value) if value.dtype == mx.bfloat16 else np.asarray(value.__mlx_array__())  # numpy has no bfloat16


def _returned(found: mx.array) -> Any:
    """A result of numbers. In float32 it is a loss again; of half precision, or of a comparison, an array: a float in
    its place would count as float32 where an array is made of it, such as a learning rate."""
    return ReturnedLoss(found) if found.dtype == mx.float32 else found


def _read(value: float, dtype: str, shape: tuple[int, ...]) -> ReturnedLoss:
    return ReturnedLoss(value, getattr(mx, dtype), shape)


def _forward(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._with(operation, other)


def _reflected(operation: Callable[[Any, Any], Any]) -> Any:
    return lambda self, other: self._with(operation, other, reflected=True)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(ReturnedLoss, f"__{_name}__", _forward(getattr(operator, _name)))
    setattr(ReturnedLoss, f"__r{_name}__", _reflected(getattr(operator, _name)))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(ReturnedLoss, f"__{_name}__", _forward(getattr(operator, _name)))
