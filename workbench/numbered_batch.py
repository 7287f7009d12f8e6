"""A batch some of whose arguments are numbers of Python or numpy, or arrays of numpy, which a step gets as they are.

Beside an array MLX gives such a number the array's dtype: 0.5 leaves bfloat16 as it is, an array made of it would not,
and code that computes with a Python float does so in 64 bits. Here the arrays made of them stand in their places, for
whoever looks at a batch as arrays. Knows MLX and numpy; nothing of experiments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import mlx.core as mx
import numpy as np

from .numpy_parts import AsItIs, NumpyPart

Number = bool | int | float | np.generic
_NUMPY = {np.dtype(code).name for code in "?bhilqBHILQefd"}


class NumberedBatch(tuple[mx.array, ...]):
    """The arrays of a batch; those in the places of numbers have no axes.

    Attributes:
        numbers: the numbers, by their place.
        numpy: what the arrays of numpy were, in whose places others stand.
        own: those arrays themselves, for the one step that is to get them; later ones get new ones like them.
    """

    numbers: dict[int, Number]
    numpy: dict[int, NumpyPart]
    own: dict[int, np.ndarray]

    def __new__(
        cls,
        arrays: Iterable[mx.array],
        numbers: Mapping[int, Number],
        numpy: Mapping[int, NumpyPart] | None = None,
        own: Mapping[int, np.ndarray] | None = None,
    ) -> NumberedBatch:
        made = super().__new__(cls, arrays)
        made.numbers, made.numpy, made.own = dict(numbers), dict(numpy or {}), dict(own or {})
        return made


def is_number(part: Any) -> bool:
    """Whether MLX takes it for a number that has no dtype of its own."""
    return isinstance(part, (bool, int, float)) or (isinstance(part, np.generic) and part.dtype.name in _NUMPY)


def numbers_of(batch: tuple[mx.array, ...]) -> dict[int, Number]:
    """The numbers of a batch, by their place; none of any other tuple of arrays."""
    return batch.numbers if isinstance(batch, NumberedBatch) else {}


def numpy_of(batch: tuple[mx.array, ...]) -> dict[int, NumpyPart]:
    """What was an array of numpy in a batch, by its place; none of any other tuple of arrays."""
    return batch.numpy if isinstance(batch, NumberedBatch) else {}


def lent(batch: tuple[mx.array, ...], parts: Any) -> tuple[mx.array, ...]:
    """The batch for the step that is to get the arrays of numpy which the loop handed over: it may change them, as it
    would without a recorder.

    Args:
        parts: what the batch was made of.
    """
    if not (numpy := numpy_of(batch)):
        return batch
    given = parts if isinstance(parts, (tuple, list)) else [parts]
    own = {place: given[place] for place in numpy if isinstance(given[place], np.ndarray)}
    return NumberedBatch(batch, numbers_of(batch), numpy, own)


def put_back(batch: tuple[mx.array, ...]) -> None:
    """Gives the lent arrays of numpy the values that they had."""
    if not isinstance(batch, NumberedBatch):
        return
    for place, own in batch.own.items():
        then = batch.numpy[place].array(batch[place])
        if own.tobytes() != then.tobytes():
            own[...] = then


def without_numpy(batch: tuple[mx.array, ...]) -> tuple[mx.array, ...]:
    """The batch with arrays of MLX in the places of those of numpy, also for a step."""
    if not numpy_of(batch):
        return batch
    numbers = numbers_of(batch)
    return NumberedBatch(batch, numbers) if numbers else tuple(batch)


def arguments(batch: tuple[mx.array, ...], *, compiled: bool = False) -> list[Any]:
    """What a step gets: the numbers as they are, and the arrays between them; each array of numpy in an `AsItIs`.

    Args:
        compiled: leave arrays of MLX in the places of numpy's, and of its numbers, which `mx.compile` refuses.
    """
    found: list[Any] = list(batch)
    for place, number in numbers_of(batch).items():
        if not compiled or isinstance(number, (bool, int, float)):  # np.float64 is a float
            found[place] = number
    if not compiled and isinstance(batch, NumberedBatch):
        for place, part in batch.numpy.items():
            own = batch.own.get(place)
            found[place] = AsItIs(part.array(batch[place]) if own is None else own)
    return found


def with_array(batch: tuple[mx.array, ...], place: int, array: mx.array) -> tuple[mx.array, ...]:
    """The batch with another array in a place."""
    arrays = (*batch[:place], array, *batch[place + 1 :])
    if not isinstance(batch, NumberedBatch):
        return arrays
    numpy = batch.numpy
    if place in numpy:
        numpy = {**numpy, place: numpy[place].of_changed(array)}
    return NumberedBatch(arrays, batch.numbers, numpy)


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
