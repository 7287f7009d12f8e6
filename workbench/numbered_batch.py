"""A batch some of whose arguments are numbers of Python or numpy, which a step gets as they are.

Beside an array MLX gives such a number the array's dtype: 0.5 leaves bfloat16 as it is, an array made of it would not,
and code that computes with a Python float does so in 64 bits. Here the arrays made of them stand in their places, for
whoever looks at a batch as arrays. Knows MLX and numpy; nothing of experiments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np

Number = bool | int | float | np.generic
_NUMPY = {np.dtype(code).name for code in "?bhilqBHILQefd"}


class NumberedBatch(tuple[mx.array, ...]):
    """The arrays of a batch; those in the places of numbers have no axes.

    Attributes:
        numbers: the numbers, by their place.
    """

    numbers: dict[int, Number]

    def __new__(cls, arrays: Iterable[mx.array], numbers: Mapping[int, Number]) -> NumberedBatch:
        made = super().__new__(cls, arrays)
        made.numbers = dict(numbers)
        return made


def is_number(part: Any) -> bool:
    """Whether MLX takes it for a number that has no dtype of its own."""
    return isinstance(part, (bool, int, float)) or (isinstance(part, np.generic) and part.dtype.name in _NUMPY)


def numbers_of(batch: tuple[mx.array, ...]) -> dict[int, Number]:
    """The numbers of a batch, by their place; none of any other tuple of arrays."""
    return batch.numbers if isinstance(batch, NumberedBatch) else {}


def arguments(batch: tuple[mx.array, ...], *, compiled: bool = False) -> list[Any]:
    """What a step gets: the numbers as they are, and the arrays between them.

    Args:
        compiled: leave arrays in the places of numpy's numbers, which `mx.compile` refuses.
    """
    found: list[Any] = list(batch)
    for place, number in numbers_of(batch).items():
        if not compiled or isinstance(number, (bool, int, float)):  # np.float64 is a float
            found[place] = number
    return found


def with_array(batch: tuple[mx.array, ...], place: int, array: mx.array) -> tuple[mx.array, ...]:
    """The batch with another array in a place."""
    arrays = (*batch[:place], array, *batch[place + 1 :])
    return NumberedBatch(arrays, batch.numbers) if isinstance(batch, NumberedBatch) else arrays


def spelled(numbers: Mapping[int, Number]) -> dict[str, tuple[str, str]]:
    """Of each number, by its place, type and value as text that gives the same bits again."""
    return {str(place): _spelled(number) for place, number in sorted(numbers.items())}


def _spelled(number: Number) -> tuple[str, str]:
    if isinstance(number, np.generic):  # before the others: np.float64 is a float too
        return f"numpy.{number.dtype.name}", number.astype(number.dtype.newbyteorder("<")).tobytes().hex()
    return type(number).__name__, number.hex() if isinstance(number, float) else str(number)


def read(text: Mapping[str, tuple[str, str]]) -> dict[int, Number]:
    """The numbers that `spelled` wrote.

    Raises:
        ValueError: it did not.
    """
    return {int(place): _read(kind, value) for place, (kind, value) in text.items()}


def _read(kind: str, value: str) -> Number:
    if kind == "int":
        return int(value)
    if kind == "float":
        return float.fromhex(value)
    if kind == "bool" and value in ("True", "False"):
        return value == "True"
    name = kind.removeprefix("numpy.")
    if name == kind or name not in _NUMPY:
        raise ValueError(f"it has a number {value!r} of type {kind!r}, which no batch has")
    (found,) = np.frombuffer(bytes.fromhex(value), np.dtype(name).newbyteorder("<")).astype(name)
    return cast(np.generic, found)
