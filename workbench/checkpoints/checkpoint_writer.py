"""Writing a checkpoint: its files, and when they are on the disk the commit record; and removing one.

Knows states and a checkpoint's folder; nothing of runs, telemetry or trainers.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from .. import deduplication, tensor_file
from ..deduplication import Earlier
from ..errors import CheckpointError
from ..files import discard, pretty_json, sync_folder, temporary_beside, write_atomic, write_together
from ..ranks.rank_parts import SUFFIX as RANKS
from ..snapshot import State
from ..tensor_places import Place
from ..trees import layouts
from .checkpoint_names import committed
from .commit import (
    CURSOR,
    OPTIMIZER,
    RNG,
    WEIGHTS,
    Commit,
    FileEntry,
    Rng,
    layouts_of,
    read_commit,
    stem,
    taken_of,
)


def write(
    state: State,
    folder: Path,
    *,
    run: str,
    segment: int,
    t: float,
    method: str | None = None,
    lanes: dict[str, str] | None = None,
    lasts: Callable[[int, int], bool] = lambda step, segment: True,
    make: bool = True,
) -> Commit:
    """Writes the four files, and when they and their names are on the disk the commit record.

    Tensors that have not changed since the checkpoint before it in the folder are not written again: see
    `deduplication`.

    A checkpoint that is there already with the same fingerprints is left as it is; any other under its name is removed
    first, as `delete` does, so that its commit record never stands beside new files.

    Args:
        folder: made if it is missing, but not those above it: a run's folder that has gone is not made anew.
        make: False: nor is this one, which was there before.
        lanes: the state's fingerprints, where they are known; None: they are computed, by `method`.
        lasts: whether the checkpoint of a step and segment is there to stay; only disk space depends on it.

    Raises:
        OSError: the disk is full or read-only, or the folder has gone; no other checkpoint is touched.
        ExperimentError: the optimizer keeps an array that safetensors can't hold.
    """
    if not folder.is_dir():
        if not make:
            raise FileNotFoundError(errno.ENOENT, "the folder has gone", str(folder))
        os.mkdir(folder)
        sync_folder(folder.parent)
    name = stem(state.step, segment)
    lanes = state.lanes(method) if lanes is None else lanes
    orders = {part: layouts(arrays) for part, arrays in (("weights", state.weights), ("optimizer", state.optimizer))}
    orders = {part: found for part, found in orders.items() if found}
    if (folder / f"{name}.json").exists():
        there = _committed(folder, state.step, segment, run, lanes)
        if there is not None and layouts_of(there) == orders:
            return there
        delete(folder, state.step, segment)
    own, base = (state.weights, None) if state.frozen is None else state.frozen.split(folder, state.weights)
    optimizer, taken = state.optimizer, dict[str, dict[str, Place]]()
    if (before := _before(folder, state.step, segment, run)) is not None:
        own, taken["weights"] = deduplication.split(folder, _part(before, "weights", lasts), own)
        optimizer, taken["optimizer"] = deduplication.split(folder, _part(before, "optimizer", lasts), optimizer)
    taken = {part: places for part, places in taken.items() if places}
    parts: dict[str, Iterable[bytes | memoryview]] = {
        name + OPTIMIZER: tensor_file.chunks(name + OPTIMIZER, optimizer),  # first: the larger, to be flushed longest
        name + WEIGHTS: tensor_file.chunks(name + WEIGHTS, own),
        name + RNG: [pretty_json(Rng(state.rng))],
        name + CURSOR: [pretty_json(state.cursor)],
    }
    if state.ranks is not None:
        parts[name + RANKS] = [pretty_json(state.ranks)]
    temporaries = {part: temporary_beside(folder / part) for part in parts}
    try:
        written = write_together({temporaries[part]: chunks for part, chunks in parts.items()})
        entries = {part: FileEntry(*written[temporary]) for part, temporary in temporaries.items()}
        for part, temporary in temporaries.items():
            os.replace(temporary, folder / part)
    except BaseException:
        for temporary in temporaries.values():
            discard(temporary)
        raise
    if base is not None:
        entries[base.name] = FileEntry(base.bytes, base.sha256, base.xxh3)
    optional: dict[str, Any] = {"taken": taken or msgspec.UNSET, "layouts": orders or msgspec.UNSET}
    record = Commit(run=run, step=state.step, segment=segment, files=entries, state=lanes, t=t, **optional).sealed()
    # The names of the parts are durable before that of the record which vouches for them; after its content, for a
    # file system with a journal has then written both at once.
    write_atomic(folder / f"{name}.json", pretty_json(record), first=lambda: sync_folder(folder))
    return record


def _before(folder: Path, step: int, segment: int, run: str) -> Commit | None:
    """The last checkpoint before this one, if it can be read. Which one it is decides nothing but what is shared."""
    last = max((key for key in committed(folder) if key < (step, segment)), default=None)
    try:
        record = None if last is None else read_commit(folder, *last)
    except CheckpointError:
        return None
    return record if record is not None and record.run == run else None


def _part(record: Commit, part: str, lasts: Callable[[int, int], bool]) -> Earlier:
    name = stem(record.step, record.segment) + {"weights": WEIGHTS, "optimizer": OPTIMIZER}[part]
    return Earlier(name, record.files[name].sha256, taken_of(record).get(part, {}), lasts(record.step, record.segment))


def _committed(folder: Path, step: int, segment: int, run: str, lanes: dict[str, str]) -> Commit | None:
    """The commit record of a checkpoint, if it is of this very state and its files have their sizes."""
    try:
        record = read_commit(folder, step, segment)
        sizes = {name: os.stat(folder / name).st_size for name in record.files}
        places = [place for part in taken_of(record).values() for place in part.values()]
        shared = {name: os.stat(folder / name).st_size for name in {place.file for place in places}}
    except (CheckpointError, OSError):
        return None
    whole = sizes == {name: entry.bytes for name, entry in record.files.items()}
    whole = whole and all(place.start + place.bytes <= shared[place.file] for place in places)
    return record if whole and (record.run, record.state) == (run, lanes) else None


def delete(folder: Path, step: int, segment: int) -> None:
    """Removes a checkpoint: its commit record first, and for good, so that it never counts as whole with files missing.

    Raises:
        OSError: it can't be removed.
    """
    name = stem(step, segment)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / f"{name}.json")
        sync_folder(folder)
    ranks = [RANKS] if (folder / (name + RANKS)).exists() else []
    for suffix in (WEIGHTS, OPTIMIZER, RNG, CURSOR, *ranks):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / (name + suffix))
    deduplication.collect(folder)


def sweep(folder: Path) -> None:
    """Removes what a process that was killed while writing left: temporary files, and shared ones that no checkpoint
    came to name; only its run's recorder may."""
    for path in folder.glob(".*.tmp*") if folder.is_dir() else ():
        discard(path)
    with contextlib.suppress(OSError):
        deduplication.collect(folder)
