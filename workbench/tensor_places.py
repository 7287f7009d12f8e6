"""Where tensors stand in safetensors files (https://github.com/huggingface/safetensors#format): headers, byte ranges.

Knows bytes and files; nothing of arrays, states or runs, and imports no MLX.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from .digests import SHA256, XXH3
from .untrusted import DOCUMENT, decode, open_regular

# As numpy reads them; bfloat16, which it lacks, as uint16.
DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}
_SHARED = re.compile(r"shared-[0-9a-f]{64}\.safetensors", re.ASCII)

Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Offset = Annotated[int, msgspec.Meta(ge=0)]
InFile = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]  # what the system can be asked for


class Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """An entry of a header."""

    dtype: str
    shape: list[Size]
    data_offsets: tuple[Offset, Offset]


class Place(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor that a checkpoint has in another file, as its commit record lists it.

    Attributes:
        file: beside the checkpoint's own.
        start: of its bytes in the file; `bytes`: how many.
        sha256: of these bytes, in hexadecimal.
        dtype: as safetensors name it, such as "F32".
        xxh3: XXH3-128 of the bytes, too; older records have none.
    """

    file: str
    start: InFile
    bytes: InFile
    sha256: str
    dtype: str
    shape: tuple[Size, ...]
    xxh3: str | msgspec.UnsetType = msgspec.UNSET

    def digests(self, thorough: bool) -> dict[str, str]:
        """What reading verifies, by kind. `thorough`: all that there are."""
        return expected_digests(self.sha256, self.xxh3, thorough)

    def fault(self) -> str | None:
        """Why no record of ours can say this; None: it can."""
        if not is_shared(self.file):
            return f"it stands in {self.file!r}; expected the name of a shared file, shared-<SHA-256>.safetensors"
        if self.dtype not in DTYPES or size_of(self.dtype, self.shape) != self.bytes:
            return f"it has {self.bytes} bytes, which {self.dtype} of shape {tuple(self.shape)} does not have"
        return None


def expected_digests(sha256: str, xxh3: str | msgspec.UnsetType, thorough: bool) -> dict[str, str]:
    """The digests of a record that reading verifies, by kind: the faster one, if there is one, or all."""
    if xxh3 is msgspec.UNSET:
        return {SHA256: sha256}
    return {XXH3: xxh3, SHA256: sha256} if thorough else {XXH3: xxh3}


def size_of(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor."""
    return np.dtype(DTYPES[dtype]).itemsize * math.prod(shape)


def is_shared(name: str) -> bool:
    """Whether a file of this name holds tensors that several checkpoints have in common."""
    return _SHARED.fullmatch(name) is not None


def header(content: bytes | memoryview) -> dict[str, Tensor]:
    """The entries of a header, by name.

    Raises:
        ValueError: it is none.
    """
    entries = decode(content, dict[str, msgspec.Raw])
    return {name: decode(bytes(raw), Tensor) for name, raw in entries.items() if name != "__metadata__"}


def ends_at(path: Path) -> int:
    """Where the tensors of a file end, as its header says; only the header is read.

    Raises:
        OSError, ValueError: as of `tensors_in`.
    """
    found = tensors_in(path)
    with open_regular(path) as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    return max((first + size_of(one.dtype, one.shape) for first, one in found.values()), default=start)


def tensors_in(path: Path) -> dict[str, tuple[int, Tensor]]:
    """Where each tensor of a file starts, and what its header says of it; only the header is read.

    Raises:
        OSError: it can't be read.
        ValueError: it has no header, or one that leads out of the file.
    """
    with open_regular(path) as file:
        size, start = os.fstat(file.fileno()).st_size, 8 + int.from_bytes(file.read(8), "little")
        if start < 8 + 2 or start > min(size, DOCUMENT):
            raise ValueError(f"its header should end at byte {start} of {size}")
        found = header(file.read(start - 8))
    for name, one in found.items():
        if not one.data_offsets[0] <= one.data_offsets[1] <= size - start:
            raise ValueError(f"{name} should end at byte {start + one.data_offsets[1]} of {size}")
    return {name: (start + one.data_offsets[0], one) for name, one in found.items()}
