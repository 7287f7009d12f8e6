"""Writing arrays as a safetensors file (https://github.com/huggingface/safetensors#format) in one pass.

Each stretch of bytes is hashed while it is in the cache, so that the file need not be read back. Tensors stand in the
order of their names: the same arrays always give the same bytes. Knows arrays and files; nothing of states or runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import mlx.core as mx
import msgspec
import numpy as np

from .errors import ExperimentError
from .host import raw_views

TYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.complex64: "C64",
    mx.bool_: "BOOL",
    mx.int8: "I8",
    mx.int16: "I16",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint8: "U8",
    mx.uint16: "U16",
    mx.uint32: "U32",
    mx.uint64: "U64",
}
_STRETCH = 1 << 20  # bytes: what a core's cache holds, and long enough for hashing and writing to let other threads run
_ALIGNED = 8  # bytes to which the header is filled with spaces


@dataclass(frozen=True)
class HostArray:
    """An array's bits as numpy holds them, and its type; bfloat16 appears as uint16."""

    dtype: mx.Dtype
    bits: np.ndarray

    @classmethod
    def of(cls, array: mx.array) -> HostArray:
        return cls(array.dtype, np.array(raw_views([array])[0]))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes


def bits_of(array: mx.array | HostArray) -> np.ndarray:
    """An array's bits as a contiguous numpy array."""
    return array.bits if isinstance(array, HostArray) else raw_views([array])[0]


def chunks(name: str, arrays: Mapping[str, mx.array | HostArray]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, a stretch at a time.

    Args:
        name: of the file, for the message.

    Raises:
        ExperimentError: an array is of a type that the format can't hold.
    """
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    paths, start = sorted(arrays), 0
    for path in paths:
        array = arrays[path]
        if array.dtype not in TYPES:
            raise ExperimentError(f"{name} can't hold this state: {path} is of type {array.dtype}")
        shape = list(array.shape)
        header[path] = {"dtype": TYPES[array.dtype], "shape": shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % _ALIGNED)
    yield len(text).to_bytes(8, "little") + text
    for path in paths:  # one at a time: on a device that must copy for it, this bounds what is held
        view = bits_of(arrays[path])
        if view.size:
            whole = view.reshape(-1).data.cast("B")
            for first in range(0, len(whole), _STRETCH):
                yield whole[first : first + _STRETCH]
