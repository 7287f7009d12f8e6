"""A batch as a tuple of MLX arrays, whatever a sampler or loop gives it as, and the hash that telemetry logs of it.

Knows MLX and numpy; nothing of experiments.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from copy import copy
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import ExperimentError
from .files import canonical_json
from .host import raw_views
from .numbered_batch import NumberedBatch, is_number, numbers_of, numpy_of, spelled
from .numpy_parts import NumpyPart, raw_bytes
from .trees import is_row_major, row_major

Batch = tuple[mx.array, ...]


def as_batch(batch: Any, *, numpy: bool = False) -> Batch:
    """A batch as a tuple of row-major MLX arrays; a `NumberedBatch` if it has numbers of Python or numpy.

    Args:
        batch: an array, or a tuple or list of arrays (MLX or numpy) and numbers.
        numpy: note what its arrays of numpy are: the step gets them as such. (A `NumberedBatch` keeps what it has.)

    Raises:
        ExperimentError: it holds something else.
    """
    if isinstance(batch, Mapping):
        names = ", ".join(f"batch[{name!r}]" for name in batch) + "," * (len(batch) == 1)
        raise ExperimentError(
            f"the batch holds a {type(batch).__name__}; expected its arrays alone, in the order of the arguments of "
            f"the step or loss function, which gets them one by one: recorder.step(({names}))"
        )
    parts = _parts(batch)
    arrays = tuple([_row_major(part) for part in parts])
    mx.eval(arrays)
    if isinstance(batch, NumberedBatch):
        return NumberedBatch(arrays, batch.numbers, batch.numpy)
    numbers = {place: part for place, part in enumerate(parts) if is_number(part)}
    of_numpy = {place: NumpyPart.of(part) for place, part in enumerate(parts) if numpy and isinstance(part, np.ndarray)}
    return NumberedBatch(arrays, numbers, of_numpy) if numbers or of_numpy else arrays


def _parts(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, (tuple, list)) else [batch]


def _row_major(part: Any) -> mx.array:
    """A new handle. Nothing is computed for an array that is row-major as it is: waking MLX's thread takes a while."""
    array = copy(part) if isinstance(part, mx.array) else _as_array(part)
    return array if is_row_major(array) else row_major(array)


def _as_array(part: Any) -> mx.array:
    try:
        values = np.asarray(part)
    except (ValueError, TypeError, RuntimeError) as error:
        reason = str(error).partition(". ")[0]
        raise ExperimentError(
            f"the batch holds a {type(part).__name__} that makes no array ({reason}); expected an array of numbers, or "
            "a tuple or list of arrays that are not nested further: pad what has rows of several lengths"
        ) from error
    if values.dtype.kind not in "biufc":
        raise ExperimentError(
            f"the batch holds a {type(part).__name__}; expected an array of numbers, or a tuple or list of them"
        )
    if values.dtype.itemsize > (16 if values.dtype.kind == "c" else 8):
        raise ExperimentError(
            f"the batch holds an array of {values.dtype}, which MLX has nothing for; convert it, with "
            "astype(numpy.float32) say"
        )
    if not values.dtype.isnative:
        values = values.astype(values.dtype.newbyteorder("="))
    if any(stride < 0 for stride in values.strides):  # MLX takes no array that is read backwards
        values = values.copy(order="C")
    return mx.array(values)


def batch_hash(batch: Batch) -> str:
    """SHA-256 over dtype, shape and raw bytes of each array, in order; and over the numbers, if there are any, and the
    values of numpy's arrays of which MLX has no dtype."""
    digest = _BLANK.copy()
    for array, view in zip(batch, raw_views(batch), strict=True):
        digest.update(_form(array.dtype, array.shape))
        if view.size:
            digest.update(view.data)
    if numbers := numbers_of(batch):
        digest.update(canonical_json(spelled(numbers)))
    numpy = numpy_of(batch)
    for place, values in raw_bytes(numpy).items():
        digest.update(f"{place}{numpy[place].dtype}".encode())
        digest.update(values.data)
    return digest.hexdigest()


_BLANK = hashlib.sha256()  # copied: a new one makes OpenSSL look for the algorithm each time


@functools.lru_cache(maxsize=64)
def _form(dtype: mx.Dtype, shape: tuple[int, ...]) -> bytes:
    return f"{dtype}{shape}".encode()
