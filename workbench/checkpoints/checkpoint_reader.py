"""Reading a checkpoint back into a state, strictly: every byte verified before any array made of it is handed out.

Knows states and a checkpoint's folder; nothing of runs, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import deduplication, digests, read_ahead
from ..errors import CheckpointError
from ..frozen import is_base
from ..ranks.rank_parts import SUFFIX as RANKS
from ..ranks.rank_parts import part_of, parts_from
from ..ranks.world import world
from ..read_ahead import Source
from ..snapshot import State
from ..tensor_file import array_of, arrays_of
from ..tensor_places import Place
from ..trees import laid_out
from ..untrusted import DOCUMENT, decode
from .commit import CURSOR, OPTIMIZER, RNG, WEIGHTS, FileEntry, Rng, layouts_of, read_commit, stem, taken_of


def read(folder: Path, step: int, segment: int, run: str | None = None, *, thorough: bool = False) -> State:
    """Reads a checkpoint. Every size is verified, and a digest of the very bytes that the arrays were made of.

    Args:
        run: identity of the run that it must belong to; None: any.
        thorough: all digests of the commit record are verified, not only the one that is fastest to verify.

    Raises:
        CheckpointError: a file is missing, cut off, or changed since it was committed; or it is another run's.
    """
    record = read_commit(folder, step, segment)
    if run not in (None, record.run):
        raise CheckpointError(
            f"checkpoint {stem(step, segment)} in {folder} belongs to run {record.run}, expected {run}; "
            "put back the one that this run wrote"
        )
    name = stem(step, segment)
    for part in (name + RNG, name + CURSOR, name + RANKS):
        if part in record.files and (size := record.files[part].bytes) > DOCUMENT:
            raise CheckpointError(
                f"{folder / part} has {size} bytes by its commit record; expected at most {DOCUMENT}: nothing of it "
                "was read"
            )
    tensors = (name + WEIGHTS, name + OPTIMIZER, *filter(is_base, record.files))
    try:
        held = {
            part: _verified(folder / part, entry, arrays_of if part in tensors else _whole, thorough)
            for part, entry in record.files.items()
        }
        rng = decode(held[name + RNG], Rng)
        cursor = decode(held[name + CURSOR], dict[str, Any])
        ranks = parts_from(held[name + RANKS]) if name + RANKS in held else None
        weights, optimizer = held[name + WEIGHTS], held[name + OPTIMIZER]
        for base in filter(is_base, held):
            weights = held[base] | weights
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name} can't be decoded: {error}") from error
    weights |= _taken_arrays(folder, name, taken_of(record).get("weights", {}), thorough)
    optimizer |= _taken_arrays(folder, name, taken_of(record).get("optimizer", {}), thorough)
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


def _taken_arrays(folder: Path, name: str, places: Mapping[str, Place], thorough: bool) -> dict[str, mx.array]:
    """What a checkpoint has in shared files."""
    try:
        verified = deduplication.contents(folder, places, thorough=thorough)
        found = {path: array_of(path, one.dtype, one.shape, content) for path, one, content in verified}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} can't be read ({error.strerror}); the commit record of {name} takes tensors from it"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name}: {error}") from error
    mx.eval(found)
    return found


def _whole(content: Source) -> bytes:
    return bytes(content.taken(0, content.size))


def _verified(path: Path, entry: FileEntry, make: Callable[[Source], Any], thorough: bool) -> Any:
    """What is made of a file's bytes, which turned out to be those that were committed.

    Raises:
        CheckpointError: they are not.
        ValueError: they are, and nothing can be made of them.
    """
    expected = entry.digests(thorough)
    try:
        content = read_ahead.content(path, entry.bytes, tuple(expected))
        if content is None:
            size = os.stat(path).st_size
            raise CheckpointError(f"{path} has {size} bytes, expected {entry.bytes}: it was cut off or replaced")
        with content:
            made, fault = None, None
            try:
                made = make(content)
            except ValueError as error:  # as of a changed file: that is to be said first
                fault = error
            found = content.found()
            if digests.unlike(found, expected) is not None:
                raise CheckpointError(_changed(path, entry, found))
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); its commit record lists it") from error
    except MemoryError:
        raise CheckpointError(f"{path} can't be read: its {entry.bytes} bytes do not fit in memory") from None
    if fault is not None:
        raise fault
    return made


def _changed(path: Path, entry: FileEntry, found: Mapping[str, str]) -> str:
    """Which digest is wrong. The file is read once more, for its SHA-256: that tells it from a record that is wrong."""
    every = entry.digests(thorough=True)
    with read_ahead.content(path, entry.bytes, tuple(every)) or contextlib.nullcontext() as content:
        again = {} if content is None else content.found()
    kind, wrong, right = digests.unlike(again, every) or digests.unlike(found, every) or ("", "", "")
    if kind == digests.NAMES[digests.XXH3] and again.get(digests.SHA256) == entry.sha256:
        return f"the commit record of {path} is wrong: its {kind} is {wrong}, expected {right}; its SHA-256 agrees"
    return f"{path} was changed: its {kind} is {wrong}, expected {right}"
