"""Arrays of numpy in a batch, which a step of the user's own gets as what they are.

Arithmetic in numpy has other bits than in MLX: uint8 divided by 255.0 is computed in 64 bits, and a mean is summed in
the order of the memory. So what a step is handed again, in a replay or to check it, has the dtype, the values and the
strides of the array that the loop handed over. Knows numpy and MLX; nothing of experiments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from .errors import ExperimentError

_OF_MLX = {*("bool", "float16", "float32", "complex64", "int8", "int16", "int32", "int64")}
_OF_MLX |= {"uint8", "uint16", "uint32", "uint64"}
Form = tuple[str, tuple[int, ...] | None]  # dtype and strides
_MOST = 1 << 40  # bytes from the first to the last element: a column of a data set has them far apart


class NumpyPart(NamedTuple):
    """What the MLX array in the place of one of numpy does not say of it.

    Attributes:
        dtype: numpy's, with its byte order, such as "<f8".
        strides: in bytes; None: row-major without gaps.
        exact: a copy of the values, where MLX has no such dtype; None: the MLX array has them all.
    """

    dtype: str
    strides: tuple[int, ...] | None
    exact: np.ndarray | None

    @classmethod
    def of(cls, array: np.ndarray) -> NumpyPart:
        """
        Raises:
            ExperimentError: it is of a class derived from numpy's array.
        """
        if type(array) not in (np.ndarray, np.memmap):
            raise ExperimentError(
                f"the batch holds a {type(array).__module__}.{type(array).__qualname__}, which computes by rules of "
                "its own; expected an array of numpy or MLX: hand over np.asarray(x), or mx.array(x)"
            )
        kept = array.dtype.newbyteorder("=").name in _OF_MLX
        strides = None if array.flags.c_contiguous else array.strides
        return cls(array.dtype.str, strides, None if kept else np.array(array, order="C", subok=False))

    def array(self, held: mx.array) -> np.ndarray:
        """A new array like the one that was handed over.

        Args:
            held: the MLX array in its place.
        """
        values = np.asarray(held) if self.exact is None else self.exact
        if self.strides is None:
            return np.array(values, self.dtype, order="C")
        made = _empty(values.shape, np.dtype(self.dtype), self.strides)
        made[...] = values
        return made

    def of_changed(self, held: mx.array) -> NumpyPart:
        """The same for other values, which the MLX array has."""
        return self._replace(exact=None if self.exact is None else np.asarray(held).astype(self.exact.dtype))

    def check(self, held: mx.array) -> None:
        """
        Raises:
            ValueError: it can't be of an array in whose place that one stands.
        """
        dtype = np.dtype(self.dtype)
        if dtype.kind not in "biufc" or self.strides is not None and len(self.strides) != held.ndim:
            raise ValueError(f"it has an array of numpy of dtype {self.dtype!r} and strides {self.strides}")
        if (dtype.newbyteorder("=").name in _OF_MLX) != (self.exact is None):
            raise ValueError(f"the values of its array of dtype {self.dtype!r} are not beside it")
        if self.exact is not None and self.exact.shape != held.shape:
            raise ValueError(f"its array of dtype {self.dtype!r} has shape {self.exact.shape}, expected {held.shape}")
        if self.strides is not None and sum(_spans(held.shape, self.strides)) > _MOST:
            raise ValueError(f"its array of shape {held.shape} has strides {self.strides}")


def _spans(shape: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
    return [abs(stride) * max(length - 1, 0) for length, stride in zip(shape, strides, strict=True)]


def _empty(shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...]) -> np.ndarray:
    """An array with these strides, in memory of its own."""
    if math.prod(shape) == 0:
        return np.empty(shape, dtype)
    spans = _spans(shape, strides)
    start = sum(span for span, stride in zip(spans, strides, strict=True) if stride < 0)
    return np.ndarray(shape, dtype, np.empty(sum(spans) + dtype.itemsize, np.uint8).data, start, strides)


class AsItIs:
    """An array of numpy on its way to a step, through code that makes a new handle of each argument by `copy`."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __copy__(self) -> np.ndarray:
        return self.array


def spelled(parts: Mapping[int, NumpyPart]) -> dict[str, Form]:
    """Of each, by its place, dtype and strides."""
    return {str(place): (part.dtype, part.strides) for place, part in sorted(parts.items())}


def read(text: Mapping[str, Form], arrays: Mapping[str, mx.array]) -> dict[int, NumpyPart]:
    """What `spelled` wrote, with the values of which MLX has no dtype.

    Args:
        arrays: of the file; `beside` gives the names of those values.

    Raises:
        ValueError: it did not write it, or values are missing.
    """
    found = {}
    for place, (dtype, strides) in text.items():
        held, raw, exact = arrays.get(place), arrays.get(beside(int(place))), None
        if held is None:
            raise ValueError(f"it has no array {place}")
        try:
            if raw is not None:
                exact = np.asarray(raw).view(dtype).reshape(held.shape)
            found[int(place)] = NumpyPart(dtype, None if strides is None else tuple(strides), exact)
            found[int(place)].check(held)
        except (TypeError, ValueError) as error:
            raise ValueError(str(error)) from error
    return found


def beside(place: int) -> str:
    """The name of an array of raw bytes: the values of a part of which MLX has no dtype."""
    return f"exact.{place}"


def raw_bytes(parts: Mapping[int, NumpyPart]) -> dict[int, np.ndarray]:
    """By place, the raw bytes of the values of which MLX has no dtype."""
    exact = {place: part.exact for place, part in sorted(parts.items()) if part.exact is not None}
    return {place: values.reshape(-1).view(np.uint8) for place, values in exact.items()}
