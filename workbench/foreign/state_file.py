"""Tensors in files that others wrote: safetensors and npz, read without MLX and without ever unpickling anything.

Formats: https://github.com/huggingface/safetensors#format and numpy.lib.format. A file is known by its content.
"""

from __future__ import annotations

import json
import math
import mmap
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ..enumeration import some
from ..errors import CheckpointError
from ..untrusted import open_regular

# Of safetensors: numpy's dtype. bfloat16, which numpy lacks, as its 16-bit words.
_DTYPES = {
    **{"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "BOOL": "|b1", "C64": "<c8"},
    **{"I8": "|i1", "I16": "<i2", "I32": "<i4", "I64": "<i8", "U8": "|u1", "U16": "<u2", "U32": "<u4", "U64": "<u8"},
}
_NAMES = {
    **{"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool", "C64": "complex64"},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_CHUNK = 1 << 22  # elements at a time

_PICKLE = "a pickle, which runs code when it is loaded"
_REFUSED = {
    b"\x80": f"{_PICKLE} (.pt, .bin, .ckpt or .pkl)",
    b"\x89HDF": "HDF5 (.h5)",
    b"GGUF": "GGUF",
}
_FOLDERS = {
    "_METADATA": "orbax",
    "_CHECKPOINT_METADATA": "orbax",
    "manifest.ocdbt": "orbax",
    "checkpoint": "TensorFlow",
}
_SHARDS = "model.safetensors.index.json"


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file.

    Attributes:
        dtype: MLX's name of it.
        words: its elements as they lie in the file, flat; bfloat16 as uint16 words.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    words: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def chunks(self) -> Iterator[np.ndarray]:
        """The elements in stretches, as float64 or complex128, which hold those of every dtype but 64-bit integers."""
        words = self.words()
        for start in range(0, self.size, _CHUNK):
            part = words[start : start + _CHUNK]
            if self.dtype == "bfloat16":
                part = (part.astype(np.uint32) << np.uint32(16)).view(np.float32)
            yield part.astype(np.complex128 if self.dtype == "complex64" else np.float64)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; or of a folder, those of the shards that its `model.safetensors.index.json` names.

    Raises:
        CheckpointError: the file is damaged, or of another format, which is named.
    """
    if path.is_dir():
        return _shards(path)
    try:
        with open_regular(path) as file:
            start = file.read(8)
            size = file.seek(0, 2)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); expected a file of tensors") from error
    for mark, format in _REFUSED.items():
        if start.startswith(mark) and not _could_be_header(start, size):
            _refuse(path, format)
    if start.startswith(b"PK"):
        return _zipped(path)
    if not _could_be_header(start, size):
        begins = f"it begins with {start.decode(errors='replace')!r}" if start else "it is empty"
        raise CheckpointError(f"{path} is no file of tensors that is known here: {begins}; expected safetensors or npz")
    return _safetensors(path, content, size)


def _refuse(path: Path, format: str) -> None:
    raise CheckpointError(
        f"{path} is {format}; expected safetensors or npz. It is not opened: save the tensors with mx.save_safetensors "
        "(or safetensors.torch.save_file) where they were made"
    )


def _could_be_header(start: bytes, size: int) -> bool:
    return len(start) == 8 and 2 <= int.from_bytes(start, "little") <= min(_HEADER, size - 8)


def _safetensors(path: Path, content: bytes | mmap.mmap, size: int) -> dict[str, Tensor]:
    length = int.from_bytes(content[:8], "little")
    try:
        header = json.loads(content[8 : 8 + length])
        entries = msgspec.convert({k: v for k, v in header.items() if k != "__metadata__"}, dict[str, _Entry])
    except (ValueError, AttributeError, RecursionError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is damaged: its header is no safetensors header ({error})") from error
    found, base, ends = {}, 8 + length, []
    for name, entry in entries.items():
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{path} holds {name} as {entry.dtype}; expected one of {', '.join(_DTYPES)}")
        kind, (start, end) = np.dtype(_DTYPES[entry.dtype]), entry.data_offsets
        count = math.prod(entry.shape)
        if min([*entry.shape, start]) < 0 or end - start != count * kind.itemsize or base + end > size:
            raise CheckpointError(
                f"{path} is damaged: {name} of shape {entry.shape} can't lie in bytes {start} to {end} of {size - base}"
            )
        ends.append(end)
        found[name] = Tensor(name, _NAMES[entry.dtype], tuple(entry.shape), _reader(content, kind, count, base + start))
    told = base + max(ends, default=0)
    if told != size:
        raise CheckpointError(f"{path} is damaged: it has {size} bytes; its header speaks of {told}")
    return found


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def _reader(content: bytes | mmap.mmap, kind: np.dtype, count: int, offset: int) -> Callable[[], np.ndarray]:
    return lambda: np.frombuffer(content, kind, count, offset) if count else np.empty(0, kind)


def _zipped(path: Path) -> dict[str, Tensor]:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
        if any(name.endswith(".pkl") for name in names):
            _refuse(path, f"{_PICKLE} (a file of PyTorch)")
        if not all(name.endswith(".npy") for name in names):
            raise CheckpointError(f"{path} is a zip file of {names[:3]}; expected .npy files, as an npz has")
        archive = np.load(path, allow_pickle=False)
        return {name: _npy(path, archive, name) for name in archive.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError) as error:
        raise CheckpointError(f"{path} is damaged, or holds Python objects, which are not opened: {error}") from error


def _npy(path: Path, archive: np.lib.npyio.NpzFile, name: str) -> Tensor:
    array = archive[name]
    kind = "bfloat16" if array.dtype == np.dtype("V2") else array.dtype.name  # MLX writes bfloat16 as two opaque bytes
    if kind not in _NAMES.values():
        raise CheckpointError(f"{path} holds {name} as {array.dtype}; expected one of {', '.join(_NAMES.values())}")
    words = np.ascontiguousarray(array).reshape(-1).view("<u2" if kind == "bfloat16" else array.dtype)
    return Tensor(name, kind, array.shape, lambda: words)


def _shards(path: Path) -> dict[str, Tensor]:
    for name, format in _FOLDERS.items():
        if (path / name).exists():
            _refuse(path, f"a checkpoint of {format}")
    try:
        index = msgspec.json.decode((path / _SHARDS).read_bytes(), type=_Shards)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is a folder without {_SHARDS}; expected a file of tensors") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path / _SHARDS} is damaged: {error}") from error
    found: dict[str, Tensor] = {}
    for name in sorted(set(index.weight_map.values())):
        if Path(name).name != name:
            raise CheckpointError(f"{path / _SHARDS} names {name!r}; expected a file beside it")
        found |= read_tensors(path / name)
    if missing := sorted(set(index.weight_map) - set(found)):
        raise CheckpointError(f"{path}: the shards lack {len(missing)} tensors of the index: {some(missing)}")
    return found


class _Shards(msgspec.Struct):
    weight_map: dict[str, str]
