"""Arrays as a safetensors file (https://github.com/huggingface/safetensors#format): its bytes, and arrays made of them.

Written and hashed in one pass, so that the file need not be read back.
Tensors stand in the order of their names: the same arrays always give the same bytes. Knows arrays and files; nothing
of states or runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import msgspec
import numpy as np

from .errors import ExperimentError
from .files import Chunks
from .host import raw_views
from .read_ahead import Content, Source
from .tensor_places import DTYPES, Tensor, header, size_of
from .untrusted import DOCUMENT

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
_STRETCH = 1 << 22  # bytes written at a time: shorter ones make a writer and a hashing thread wait for each other
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


def chunks(name: str, arrays: Mapping[str, mx.array | HostArray]) -> Chunks:
    """The bytes of a safetensors file, a stretch at a time.

    Args:
        name: of the file, for the message.

    Raises:
        ExperimentError: an array is of a type that the format can't hold.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    paths, start = sorted(arrays), 0
    for path in paths:
        array = arrays[path]
        if array.dtype not in TYPES:
            raise ExperimentError(f"{name} can't hold this state: {path} is of type {array.dtype}")
        shape = list(array.shape)
        entries[path] = {"dtype": TYPES[array.dtype], "shape": shape, "data_offsets": [start, start + array.nbytes]}
        start += array.nbytes
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % _ALIGNED)
    text = len(text).to_bytes(8, "little") + text
    return Chunks(len(text) + start, lambda: _stretches(text, [arrays[path] for path in paths]))


def _stretches(header: bytes, arrays: Sequence[mx.array | HostArray]) -> Iterator[bytes | memoryview]:
    yield header
    for array in arrays:  # one at a time: on a device that must copy for it, this bounds what is held
        view = bits_of(array)
        if view.size:
            whole = view.reshape(-1).data.cast("B")
            for first in range(0, len(whole), _STRETCH):
                yield whole[first : first + _STRETCH]


def arrays_of(content: bytes | Source) -> dict[str, mx.array]:
    """The arrays of a safetensors file. Not by `mx.load`: it reads a Python buffer in a thread of its own, which, when
    the process ends soon after, aborts it.

    Args:
        content: of which each piece is let go when its array is made.

    Raises:
        ValueError: as of `stretches_of`.
    """
    content = Content(content) if isinstance(content, bytes) else content
    found = {
        name: array_of(name, entry.dtype, entry.shape, content.taken(start, end))
        for name, entry, start, end in stretches_of(content)
    }
    mx.eval(found)
    return found


def stretches_of(content: Source) -> Iterator[tuple[str, Tensor, int, int]]:
    """Of each tensor of a safetensors file, in order, its name, its entry in the header, and the bytes of the file
    where it starts and ends: which are to be taken before the next is asked for.

    Raises:
        ValueError: it is not such a file: the tensors must be of known types and fill its data without a gap.
    """
    start = 8 + int.from_bytes(content.taken(0, min(8, content.size)), "little")
    if content.size < 8 or start > min(content.size, DOCUMENT):
        raise ValueError(f"its header should end at byte {start} of {content.size}")
    end = 0
    for name, entry in sorted(header(content.taken(8, start)).items(), key=lambda one: one[1].data_offsets):
        if entry.dtype not in DTYPES:
            raise ValueError(f"{name} is of type {entry.dtype}; expected one of {', '.join(DTYPES)}")
        first, last = entry.data_offsets
        size = size_of(entry.dtype, entry.shape)
        if first != end or last - first != size:
            raise ValueError(
                f"{name}, {entry.dtype} of shape {entry.shape}, stands at bytes {first} to {last} of the data; "
                f"expected {size} bytes from {end}"
            )
        end = last
        yield name, entry, start + first, start + last
    if start + end != content.size:
        raise ValueError(f"its tensors end at byte {start + end} of {content.size}")


def array_of(name: str, dtype: str, shape: Sequence[int], content: bytes | memoryview) -> mx.array:
    """An array made of a tensor's bytes, of the type that safetensors name so. Raises ValueError: they can't be its."""
    data = np.frombuffer(content, DTYPES[dtype])
    if dtype == "BOOL" and data.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{name} holds a truth value that is neither 0 nor 1")
    array = mx.array(data.reshape(shape))
    return array.view(mx.bfloat16) if dtype == "BF16" else array
