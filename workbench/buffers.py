"""What buffers hold, and generators of random numbers: arrays of numpy and MLX, bytes, streams in memory.

Read and put back in place without code of a class derived from theirs. Knows nothing of what holds them.
"""

from __future__ import annotations

import array
import copy
import io
import random
from typing import Any

import mlx.core as mx
import numpy as np

from .bare_objects import MISSING, is_a, names_of, plain_numpy
from .host import raw_views


def read_bytes(thing: Any) -> bytes:
    return memoryview(thing).tobytes()


def write_bytes(thing: Any, then: bytes) -> None:
    if is_a(thing, array.array):
        array.array.__delitem__(thing, slice(None))
        array.array.frombytes(thing, then)
    else:
        bytearray.__setitem__(thing, slice(None), then)


def read_numpy(value: np.ndarray) -> np.ndarray:
    return plain_numpy(value).copy(order="K")


def read_mlx(value: mx.array) -> mx.array:
    return copy.copy(value)  # a handle of its own: `a += 1` changes the other


def same_mlx(one: mx.array, other: mx.array) -> bool:
    """Whether two arrays have the same bits. One of a trace that is over has none: nothing can be said of it."""
    if not _readable(one):
        return True
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    try:
        a, b = raw_views([one, other])
    except (RuntimeError, ValueError):
        return False
    return bool(a.ctypes.data == b.ctypes.data or a.tobytes() == b.tobytes())


def _readable(value: mx.array) -> bool:
    try:
        raw_views([value])
    except (RuntimeError, ValueError):
        return False
    return True


def write_mlx(thing: mx.array, then: mx.array) -> None:
    if not same_mlx(then, thing) and thing.shape == then.shape and thing.dtype == then.dtype:
        thing[...] = then


def write_numpy(thing: np.ndarray, then: np.ndarray) -> None:
    np.copyto(plain_numpy(thing), then)


def _in_memory(thing: Any) -> Any:
    """The class whose methods do to a stream in memory what those of a class of one's own may not."""
    return io.BytesIO if is_a(thing, io.BytesIO) else io.StringIO


def _closed(thing: Any) -> bool:
    return names_of(_in_memory(thing))["closed"].__get__(thing)


def read_stream(thing: Any) -> list[Any]:
    return [MISSING] if _closed(thing) else [_in_memory(thing).getvalue(thing), _in_memory(thing).tell(thing)]


def write_stream(thing: Any, then: list[Any]) -> None:
    if len(then) == 2 and not _closed(thing):
        kind = _in_memory(thing)
        kind.seek(thing, 0)
        kind.truncate(thing)
        kind.write(thing, then[0])
        kind.seek(thing, then[1])


def read_random(thing: random.Random) -> list[Any]:
    return [] if is_a(thing, random.SystemRandom) else [random.Random.getstate(thing)]


def write_random(thing: random.Random, then: list[Any]) -> None:
    for state in then:
        random.Random.setstate(thing, state)


def bits_of(thing: Any) -> Any:
    return thing if isinstance(thing, np.random.BitGenerator) else thing.bit_generator


def write_generator(thing: Any, then: str) -> None:
    bits_of(thing).state = copy.deepcopy(then)


def same_state(one: Any, other: Any) -> bool:
    return repr(_listed(one)) == repr(_listed(other))


def _listed(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _listed(value) for key, value in state.items()}
    return state.tobytes() if isinstance(state, np.ndarray) else state
