"""Reading a checkpoint back into a state, strictly: every byte verified before any array made of it is handed out.

Knows states and a checkpoint's folder; nothing of runs, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import mlx.core as mx

from .. import deduplication, digests, read_ahead
from ..alongside import Alongside
from ..digests import LONG
from ..errors import CheckpointError
from ..frozen import is_base
from ..ranks.rank_parts import SUFFIX as RANKS
from ..ranks.rank_parts import RankPart, part_of, parts_from
from ..ranks.world import world
from ..read_ahead import Source
from ..snapshot import State
from ..tensor_file import array_of, arrays_of
from ..tensor_places import Place
from ..trees import laid_out
from ..untrusted import DOCUMENT, decode
from .commit import CURSOR, OPTIMIZER, RNG, WEIGHTS, FileEntry, Rng, layouts_of, read_commit, stem, taken_of

T = TypeVar("T")


@dataclass
class Parts(Generic[T]):
    """What a checkpoint holds, verified.

    Attributes:
        weights, optimizer: what was made of each tensor, by path.
        layouts: see `commit.layouts_of`.
        rng, cursor, ranks: as of a `State`; of a data-parallel run the first two are this rank's.
    """

    weights: dict[str, T]
    optimizer: dict[str, T]
    layouts: dict[str, dict[str, list[int]]]
    rng: tuple[int, int]
    cursor: dict[str, Any]
    ranks: tuple[RankPart, ...] | None

    def tensors(self) -> dict[str, dict[str, T]]:
        return {"weights": self.weights, "optimizer": self.optimizer}


def read(folder: Path, step: int, segment: int, run: str | None = None, *, thorough: bool = False) -> State:
    """Reads a checkpoint. Every size is verified, and a digest of the very bytes that the arrays were made of.

    Args:
        run: identity of the run that it must belong to; None: any.
        thorough: all digests of the commit record are verified, not only the one that is fastest to verify.

    Raises:
        CheckpointError: a file is missing, cut off, or changed since it was committed; or it is another run's.
    """
    found = parts_of(
        *(folder, step, segment, run),
        lambda part, content: arrays_of(content),
        lambda part, path, place, content: array_of(path, place.dtype, place.shape, content),
        thorough=thorough,
    )
    try:
        for part, arrays in found.tensors().items():
            arrays |= {path: laid_out(arrays[path], axes) for path, axes in found.layouts.get(part, {}).items()}
            mx.eval(arrays)
    except (KeyError, ValueError) as error:
        raise other_layout(folder, step, segment, error) from error
    return State(step, found.weights, found.optimizer, found.rng, found.cursor, ranks=found.ranks)


def other_layout(folder: Path, step: int, segment: int, error: Exception) -> CheckpointError:
    name = folder / stem(step, segment)
    return CheckpointError(f"checkpoint {name} names a layout of what is not in it: {error}")


def parts_of(
    folder: Path,
    step: int,
    segment: int,
    run: str | None,
    of_file: Callable[[str, Source], dict[str, T]],
    of_place: Callable[[str, str, Place, memoryview], T],
    *,
    thorough: bool = False,
    alongside: bool = False,
) -> Parts[T]:
    """The parts of a checkpoint, as `read` verifies them.

    Args:
        of_file: makes something of the tensors of a file, by path; it is given the part that they belong to.
        of_place: the same of one tensor in a shared file, given its part, its path, and its bytes, which last until the
            next.
        alongside: large files are read at the same time, by threads.

    Raises:
        CheckpointError: as of `read`.
    """
    record = read_commit(folder, step, segment)
    if run not in (None, record.run):
        raise CheckpointError(
            f"checkpoint {stem(step, segment)} in {folder} belongs to run {record.run}, expected {run}; "
            "put back the one that this run wrote"
        )
    name = stem(step, segment)
    for small in (name + RNG, name + CURSOR, name + RANKS):
        if small in record.files and (size := record.files[small].bytes) > DOCUMENT:
            raise CheckpointError(
                f"{folder / small} has {size} bytes by its commit record; expected at most {DOCUMENT}: nothing of it "
                "was read"
            )
    tensors = {name + WEIGHTS: "weights", name + OPTIMIZER: "optimizer"}
    tensors |= {file: "weights" for file in filter(is_base, record.files)}

    def begun(file: str, entry: FileEntry) -> Alongside[Any]:
        made = partial(of_file, tensors[file]) if file in tensors else _whole
        here = not alongside or entry.bytes < LONG or file == name + OPTIMIZER  # the largest, of most optimizers
        return Alongside(lambda: _verified(folder / file, entry, made, thorough), here=here)

    try:
        # The optimizer's file, read here, comes last: the others are being read by then.
        order = sorted(record.files, key=lambda file: file == name + OPTIMIZER)
        reading = {file: begun(file, record.files[file]) for file in order}
        held = {file: reading[file].result() for file in record.files}
        rng = decode(held[name + RNG], Rng)
        cursor = decode(held[name + CURSOR], dict[str, Any])
        ranks = parts_from(held[name + RANKS]) if name + RANKS in held else None
        weights, optimizer = held[name + WEIGHTS], held[name + OPTIMIZER]
        for base in filter(is_base, held):
            weights = held[base] | weights
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name} can't be decoded: {error}") from error
    weights |= _taken(folder, name, taken_of(record).get("weights", {}), partial(of_place, "weights"), thorough)
    optimizer |= _taken(folder, name, taken_of(record).get("optimizer", {}), partial(of_place, "optimizer"), thorough)
    key = rng.key
    if ranks is not None:
        own = part_of(ranks, world().rank, world().size)
        key, cursor = own.rng, own.cursor
    return Parts(weights, optimizer, layouts_of(record), key, cursor, ranks)


def _taken(
    folder: Path,
    name: str,
    places: Mapping[str, Place],
    made: Callable[[str, Place, memoryview], T],
    thorough: bool,
) -> dict[str, T]:
    """What a checkpoint has in shared files."""
    try:
        verified = deduplication.contents(folder, places, thorough=thorough)
        return {path: made(path, one, content) for path, one, content in verified}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} can't be read ({error.strerror}); the commit record of {name} takes tensors from it"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name}: {error}") from error


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
