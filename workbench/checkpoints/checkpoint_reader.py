"""Reading a checkpoint back into a state, strictly: every byte verified before any array is made of it.

Knows states and a checkpoint's folder; nothing of runs, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import deduplication, read_ahead
from ..errors import CheckpointError
from ..frozen import is_base
from ..ranks.rank_parts import SUFFIX as RANKS
from ..ranks.rank_parts import part_of, parts_from
from ..ranks.world import world
from ..read_ahead import Content
from ..snapshot import State
from ..tensor_file import array_of, arrays_of
from ..tensor_places import Place
from ..trees import laid_out
from ..untrusted import decode
from .commit import CURSOR, OPTIMIZER, RNG, WEIGHTS, FileEntry, Rng, layouts_of, read_commit, stem, taken_of


def read(folder: Path, step: int, segment: int, run: str | None = None) -> State:
    """Reads a checkpoint. Every size and digest is verified before any array is made, from the very bytes verified.

    Args:
        run: identity of the run that it must belong to; None: any.

    Raises:
        CheckpointError: a file is missing, cut off, or changed since it was committed; or it is another run's.
    """
    record = read_commit(folder, step, segment)
    if run not in (None, record.run):
        raise CheckpointError(
            f"checkpoint {stem(step, segment)} in {folder} belongs to run {record.run}, expected {run}; "
            "put back the one that this run wrote"
        )
    content = {name: _verified(folder / name, entry) for name, entry in record.files.items()}
    name = stem(step, segment)
    try:
        rng = decode(content[name + RNG].whole(), Rng)
        cursor = decode(content[name + CURSOR].whole(), dict[str, Any])
        ranks = parts_from(content[name + RANKS].whole()) if name + RANKS in content else None
        weights, optimizer = (arrays_of(content[name + suffix]) for suffix in (WEIGHTS, OPTIMIZER))
        for base in filter(is_base, content):
            weights = arrays_of(content[base]) | weights
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name} can't be decoded: {error}") from error
    weights |= _taken_arrays(folder, name, taken_of(record).get("weights", {}))
    optimizer |= _taken_arrays(folder, name, taken_of(record).get("optimizer", {}))
    try:
        for part, arrays in (("weights", weights), ("optimizer", optimizer)):
            arrays |= {path: laid_out(arrays[path], axes) for path, axes in layouts_of(record).get(part, {}).items()}
            mx.eval(arrays)
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder / name} names a layout of what is not in it: {error}") from error
    if ranks is None:
        return State(step, weights, optimizer, rng.key, cursor)
    own = part_of(ranks, world().rank, world().size)
    return State(step, weights, optimizer, own.rng, own.cursor, ranks=ranks)


def _taken_arrays(folder: Path, name: str, places: Mapping[str, Place]) -> dict[str, mx.array]:
    """What a checkpoint has in shared files."""
    try:
        verified = deduplication.contents(folder, places)
        found = {path: array_of(path, one.dtype, one.shape, content) for path, one, content in verified}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} can't be read ({error.strerror}); the commit record of {name} takes tensors from it"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name}: {error}") from error
    mx.eval(found)
    return found


def _verified(path: Path, entry: FileEntry) -> Content:
    try:
        content = read_ahead.content(path, entry.bytes)
        size = os.stat(path).st_size if content is None else content.size
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); its commit record lists it") from error
    except MemoryError:
        raise CheckpointError(f"{path} can't be read: its {entry.bytes} bytes do not fit in memory") from None
    if content is None:
        raise CheckpointError(f"{path} has {size} bytes, expected {entry.bytes}: it was cut off or replaced")
    if content.sha256 != entry.sha256:
        raise CheckpointError(f"{path} was changed: its SHA-256 is {content.sha256}, expected {entry.sha256}")
    return content
