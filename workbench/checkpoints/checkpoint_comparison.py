"""A checkpoint compared with a state, byte for byte, while its files are read: no array is made of them.

So it takes no memory but that of a stretch: what a core has just read and hashed, it compares while its cache still has
it. There is a verdict only if every digest of the commit record turned out right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..read_ahead import Source
from ..snapshot import State, same_bytes
from ..tensor_file import TYPES, bits_of, stretches_of
from ..tensor_places import Place, Tensor
from .checkpoint_reader import other_layout, parts_of

_STRETCH = 1 << 20  # bytes
ONE, FORM, BYTES = " (only in one)", " (dtype or shape)", ""  # in what a tensor differs


@dataclass(frozen=True)
class _Compared:
    """A tensor of a checkpoint: its number of axes, and in what it differs from the state's; None: in nothing."""

    axes: int
    unlike: str | None


def difference(folder: Path, step: int, segment: int, state: State, run: str | None = None) -> str | None:
    """The first tensor (or `rng`, `cursor`) in which a checkpoint and a state differ, as `snapshot.first_difference`
    names it; None: they are the same.

    Args:
        run: identity of the run that it must belong to; None: any.

    Raises:
        CheckpointError: as of `checkpoint_reader.read`.
    """
    wanted = {"weights": state.weights, "optimizer": state.optimizer}
    mx.eval(wanted)  # here: another thread could not
    found = parts_of(
        *(folder, step, segment, run),
        lambda part, content: _of_file(wanted[part], content),
        lambda part, path, place, content: _compared(wanted[part], path, place, [content]),
        alongside=True,
    )
    tensors = found.tensors()
    for part, axes in found.layouts.items():
        for path, order in axes.items():
            if path not in tensors[part] or sorted(order) != list(range(tensors[part][path].axes)):
                raise other_layout(folder, step, segment, ValueError(f"{path} along axes {order}"))
    for part, arrays in wanted.items():
        for path in sorted(arrays.keys() | tensors[part].keys()):
            unlike = tensors[part][path].unlike if path in tensors[part] else ONE
            if unlike is not None:
                return f"{part} {path}{unlike}"
    if found.rng != state.rng:
        return "rng"
    return None if found.cursor == state.cursor else "cursor"


def _of_file(wanted: Mapping[str, mx.array], content: Source) -> dict[str, _Compared]:
    found = {}
    for path, entry, start, end in stretches_of(content):
        cuts = range(start, end, _STRETCH)
        pieces = (content.taken(cut, min(cut + _STRETCH, end)) for cut in cuts)
        found[path] = _compared(wanted, path, entry, pieces)
        for _ in pieces:  # those after the first difference are hashed, too
            pass
    return found


def _compared(
    wanted: Mapping[str, mx.array], path: str, entry: Tensor | Place, pieces: Iterable[bytes | memoryview]
) -> _Compared:
    """Pieces: the tensor's bytes, one after the other."""
    array, axes = wanted.get(path), len(entry.shape)
    if array is None:
        return _Compared(axes, ONE)
    if TYPES.get(array.dtype) != entry.dtype or array.shape != tuple(entry.shape):
        return _Compared(axes, FORM)
    ours, done = bits_of(array).reshape(-1).view(np.uint8), 0
    for piece in pieces:
        theirs = np.frombuffer(piece, np.uint8)
        if not same_bytes(ours[done : done + theirs.size], theirs):
            return _Compared(axes, BYTES)
        done += theirs.size
    return _Compared(axes, None)
