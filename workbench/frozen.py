"""Weights that no step trains: stored once a run, beside its checkpoints, which name the file by its digest.

Whether an array is one of them is decided by its bits: whatever differs from the stored ones (running statistics, a
layer that was unfrozen) goes into the checkpoint's own file. Knows a model and a folder; nothing of states or runs.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from . import tensor_file
from .files import discard, sync_folder, temporary_beside, write_flushed
from .tensor_file import HostArray

LEAST = 1 << 20  # bytes: fewer are not worth a file of their own
_NAME = re.compile(r"frozen-[0-9a-f]{64}\.safetensors")


def is_base(name: str) -> bool:
    """Whether a file of this name holds the frozen weights of a run."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True)
class Base:
    """The file, as a commit record lists it.

    Attributes:
        arrays: what is in it.
    """

    name: str
    bytes: int
    sha256: str
    xxh3: str
    arrays: Mapping[str, mx.array]


class Frozen:
    """The frozen weights of one model, and where they have been stored."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._stored: tuple[Path, Base] | None = None

    def split(self, folder: Path, weights: Mapping[str, mx.array]) -> tuple[dict[str, mx.array], Base | None]:
        """The weights that a checkpoint has to hold itself, and the file that holds the others, which is durable.

        Raises:
            OSError: that file can't be written.
            ExperimentError: an array is of a type that the format can't hold.
        """
        if self._stored is None or self._stored[0] != folder or not (folder / self._stored[1].name).exists():
            trained: dict[str, Any] = dict(tree_flatten(self._model.trainable_parameters()))
            kept = {path: copy.copy(array) for path, array in weights.items() if path not in trained}
            if sum(array.nbytes for array in kept.values()) < LEAST:
                return dict(weights), None
            self._stored = folder, _store(folder, kept)
        base = self._stored[1]
        own = {path: array for path, array in weights.items() if not _same(base.arrays.get(path), array)}
        return own, base if len(own) < len(weights) else None


def _store(folder: Path, arrays: dict[str, mx.array]) -> Base:
    """Writes them, unless they are there: the same arrays always give the same bytes."""
    temporary = temporary_beside(folder / "frozen.safetensors")
    try:
        written = write_flushed(temporary, tensor_file.chunks("frozen.safetensors", arrays))
        name = f"frozen-{written.sha256}.safetensors"
        os.replace(temporary, folder / name)
    except BaseException:
        discard(temporary)
        raise
    sync_folder(folder)
    return Base(name, *written, arrays)


def _same(stored: mx.array | HostArray | None, array: mx.array | HostArray) -> bool:
    if stored is None or stored.shape != array.shape or stored.dtype != array.dtype:
        return False
    one, other = tensor_file.bits_of(stored), tensor_file.bits_of(array)
    return one.ctypes.data == other.ctypes.data or one.tobytes() == other.tobytes()
