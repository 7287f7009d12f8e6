"""The state that the next step depends on: captured, stored, read back and restored, strictly.

Knows MLX arrays and a checkpoint's files; nothing of manifests, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from . import deduplication, read_ahead, tensor_file
from .deduplication import Earlier
from .errors import CheckpointError
from .experiment import (
    Experiment,
    ensure_initialised,
    kept_arrays,
    put_arrays,
    put_kept,
    random_key,
    set_random_key,
    settled,
    state_arrays,
)
from .extras import of_object
from .files import (
    canonical_json,
    discard,
    pretty_json,
    sha256,
    sync_folder,
    temporary_beside,
    write_atomic,
    write_flushed,
)
from .fingerprint import lanes, method_here
from .frozen import Frozen, is_base
from .host import raw_views
from .ranks.rank_parts import SUFFIX as RANKS
from .ranks.rank_parts import RankPart, part_of, parts_from
from .ranks.world import world
from .read_ahead import Content
from .tensor_places import DTYPES, Place, header, size_of
from .trees import laid_out, layouts
from .untrusted import decode, read_file

WEIGHTS, OPTIMIZER, RNG, CURSOR = ".safetensors", ".optimizer.safetensors", ".rng", ".cursor"


@dataclass(frozen=True)
class State:
    """A state in memory. MLX arrays are immutable, so holding references is a snapshot and costs no copy.

    Attributes:
        step: N, counted from 1; state 0 is the initialisation.
        weights: every parameter of the model, frozen ones too, by dotted path.
        optimizer: every array of the optimizer's state, by dotted path, and of `Experiment.extra`, by "path@name".
        rng: the two words of the random state.
        cursor: where the data stream stands after the batch of step N.
        frozen: what knows which of the weights no step trains; None: nothing is known.
        ranks: of a data-parallel run, what each rank has for itself; `rng` and `cursor` are then this rank's.
    """

    step: int
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    rng: tuple[int, int]
    cursor: dict[str, Any]
    frozen: Frozen | None = None
    ranks: tuple[RankPart, ...] | None = None

    def lanes(self, method: str | None = None) -> dict[str, str]:
        """Fingerprint of each lane, by a method of `fingerprint`; None: the one that costs least here."""
        return lanes(self.weights, self.optimizer, self.rng, self.cursor, method or method_here())


class FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    bytes: int
    sha256: str


class Commit(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The commit record. A checkpoint without one does not exist."""

    checkpoint_version: int = 1
    run: str
    step: int
    segment: int
    files: dict[str, FileEntry]
    state: dict[str, str]  # fingerprint of each lane
    t: float
    # What is not in its own files, of "weights" and "optimizer" by path: it has not changed since an earlier one.
    taken: dict[str, dict[str, Place]] | msgspec.UnsetType = msgspec.UNSET
    # Of "weights" and "optimizer" by path: `trees.layout` of the arrays that were in another order than row-major.
    layouts: dict[str, dict[str, list[int]]] | msgspec.UnsetType = msgspec.UNSET
    seal: str | None = None  # SHA-256 of this record without it; runs recorded before it have none

    def sealed(self) -> Commit:
        """The record with its own digest: a flipped bit anywhere in it is noticed, too."""
        bare = msgspec.structs.replace(self, seal=None)
        return msgspec.structs.replace(self, seal=sha256(canonical_json(bare)))


Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Rng(msgspec.Struct, forbid_unknown_fields=True):
    key: tuple[Word, Word]


def capture(
    experiment: Experiment,
    step: int,
    cursor: dict[str, Any],
    rng: tuple[int, int] | None = None,
    arrays: tuple[dict[str, mx.array], dict[str, mx.array]] | None = None,
) -> State:
    """The experiment's present state. New handles of the same buffers: `a += 1` in a user's code changes its handle.

    Args:
        rng: the random state that the step left, where this thread's may have moved on since; None: this thread's.
        arrays: new handles of its arrays, weights and optimizer, where somebody has found them just now.
    """
    if arrays is not None:
        return State(step, *arrays, rng or random_key(), copy.deepcopy(cursor), experiment.frozen)
    weights = {path: copy.copy(array) for path, array in state_arrays(experiment.model).items()}
    optimizer = {path: copy.copy(array) for path, array in kept_arrays(experiment).items()}
    mx.eval(weights, optimizer)
    return State(step, weights, optimizer, rng or random_key(), copy.deepcopy(cursor), experiment.frozen)


def restore(experiment: Experiment, state: State) -> None:
    """Puts a state into an experiment, in place, and its sampler at the cursor.

    Arrays go into the existing containers, so a step that is already compiled goes on working. The random state comes
    last: positioning a sampler may draw from it.

    Raises:
        CheckpointError: an entry is missing, unexpected, or of another shape or dtype. Nothing is changed then.
    """
    ensure_initialised(experiment.optimizer, experiment.model)
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    _refuse_differences("weights", state.weights, state_arrays(experiment.model), trained)
    optimizer = {path: array for path, array in kept_arrays(experiment).items() if not of_object(path)}
    fixed = {path: array for path, array in state.optimizer.items() if not of_object(path)}
    _refuse_differences("optimizer state", fixed, optimizer, optimizer.keys())
    experiment.sampler.load_state_dict(copy.deepcopy(state.cursor))  # which may keep the object and change it
    # New handles here too, and laid out as `Experiment.prepare` leaves them.
    weights = {path: settled(array) for path, array in state.weights.items()}
    optimizer = {path: settled(array) for path, array in state.optimizer.items()}
    mx.eval(weights, optimizer)
    put_arrays(experiment.model, weights)
    put_kept(experiment, optimizer)
    set_random_key(state.rng)


def _refuse_differences(
    what: str, found: dict[str, mx.array], expected: dict[str, mx.array], typed: Collection[str]
) -> None:
    """`typed` are the paths whose dtype must agree. The forward pass of a BatchNorm in bfloat16 makes its running
    statistics float32, so what is not trained takes the checkpoint's."""
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {_some(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected {_some(extra)}")
    for path in sorted(found.keys() & expected.keys()):
        have, want = found[path], expected[path]
        if have.shape != want.shape or (have.dtype != want.dtype and path in typed):
            problems.append(f"{path} is {have.dtype}{have.shape}, expected {want.dtype}{want.shape}")
    if problems:
        raise CheckpointError(
            f"the checkpoint's {what} and this model and optimizer do not fit: {'; '.join(problems[:6])}"
            f"{f'; and {len(problems) - 6} more' if len(problems) > 6 else ''}. "
            "Rebuild the experiment that the run was recorded with."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def stem(step: int, segment: int) -> str:
    """File stem of a checkpoint: 00000200 in segment 0, 00000200.s2 in segment 2."""
    return f"{step:08d}" + (f".s{segment}" if segment else "")


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
) -> Commit:
    """Writes the four files, and when they and their names are on the disk the commit record.

    Tensors that have not changed since the checkpoint before it in the folder are not written again: see
    `deduplication`.

    A checkpoint that is there already with the same fingerprints is left as it is; any other under its name is removed
    first, as `delete` does, so that its commit record never stands beside new files.

    Args:
        folder: made if it is missing, but not those above it: a run's folder that has gone is not made anew.
        lanes: the state's fingerprints, where they are known; None: they are computed, by `method`.
        lasts: whether the checkpoint of a step and segment is there to stay; only disk space depends on it.

    Raises:
        OSError: the disk is full or read-only, or the folder has gone; no file that was committed before is touched.
        ExperimentError: the optimizer keeps an array that safetensors can't hold.
    """
    if not folder.is_dir():
        os.mkdir(folder)
        sync_folder(folder.parent)
    name = stem(state.step, segment)
    lanes = state.lanes(method) if lanes is None else lanes
    orders = {part: layouts(arrays) for part, arrays in (("weights", state.weights), ("optimizer", state.optimizer))}
    orders = {part: found for part, found in orders.items() if found}
    if (folder / f"{name}.json").exists():
        there = _committed(folder, state.step, segment, run, lanes)
        if there is not None and _layouts(there) == orders:
            return there
        delete(folder, state.step, segment)
    own, base = (state.weights, None) if state.frozen is None else state.frozen.split(folder, state.weights)
    optimizer, taken = state.optimizer, dict[str, dict[str, Place]]()
    if (before := _before(folder, state.step, segment, run)) is not None:
        own, taken["weights"] = deduplication.split(folder, _part(before, "weights", lasts), own)
        optimizer, taken["optimizer"] = deduplication.split(folder, _part(before, "optimizer", lasts), optimizer)
    taken = {part: places for part, places in taken.items() if places}
    parts: dict[str, Iterable[bytes | memoryview]] = {
        name + WEIGHTS: tensor_file.chunks(name + WEIGHTS, own),
        name + OPTIMIZER: tensor_file.chunks(name + OPTIMIZER, optimizer),
        name + RNG: [pretty_json(Rng(state.rng))],
        name + CURSOR: [pretty_json(state.cursor)],
    }
    if state.ranks is not None:
        parts[name + RANKS] = [pretty_json(state.ranks)]
    temporaries = {part: temporary_beside(folder / part) for part in parts}
    try:
        entries = {part: FileEntry(*write_flushed(temporaries[part], parts[part])) for part in parts}
        for part, temporary in temporaries.items():
            os.replace(temporary, folder / part)
    except BaseException:
        for temporary in temporaries.values():
            discard(temporary)
        raise
    if base is not None:
        entries[base.name] = FileEntry(base.bytes, base.sha256)
    sync_folder(folder)  # the names of the parts, before that of the record which vouches for them
    optional: dict[str, Any] = {"taken": taken or msgspec.UNSET, "layouts": orders or msgspec.UNSET}
    record = Commit(run=run, step=state.step, segment=segment, files=entries, state=lanes, t=t, **optional).sealed()
    write_atomic(folder / f"{name}.json", pretty_json(record))
    return record


def _before(folder: Path, step: int, segment: int, run: str) -> Commit | None:
    """The last checkpoint before this one, if it can be read. Which one it is decides nothing but what is shared."""
    keys = []
    for path in folder.glob("*.json"):
        number, _, other = path.stem.partition(".s")
        if number.isdecimal() and (other.isdecimal() or not other):
            keys.append((int(number), int(other or 0)))
    last = max((key for key in keys if key < (step, segment)), default=None)
    try:
        record = None if last is None else read_commit(folder, *last)
    except CheckpointError:
        return None
    return record if record is not None and record.run == run else None


def _part(record: Commit, part: str, lasts: Callable[[int, int], bool]) -> Earlier:
    name = stem(record.step, record.segment) + {"weights": WEIGHTS, "optimizer": OPTIMIZER}[part]
    return Earlier(name, record.files[name].sha256, _taken(record).get(part, {}), lasts(record.step, record.segment))


def _taken(record: Commit) -> dict[str, dict[str, Place]]:
    return {} if record.taken is msgspec.UNSET else record.taken


def _layouts(record: Commit) -> dict[str, dict[str, list[int]]]:
    return {} if record.layouts is msgspec.UNSET else record.layouts


def _committed(folder: Path, step: int, segment: int, run: str, lanes: dict[str, str]) -> Commit | None:
    """The commit record of a checkpoint, if it is of this very state and its files have their sizes."""
    try:
        record = read_commit(folder, step, segment)
        sizes = {name: os.stat(folder / name).st_size for name in record.files}
        places = [place for part in _taken(record).values() for place in part.values()]
        shared = {name: os.stat(folder / name).st_size for name in {place.file for place in places}}
    except (CheckpointError, OSError):
        return None
    whole = sizes == {name: entry.bytes for name, entry in record.files.items()}
    whole = whole and all(place.start + place.bytes <= shared[place.file] for place in places)
    return record if whole and (record.run, record.state) == (run, lanes) else None


def read_commit(folder: Path, step: int, segment: int) -> Commit:
    """Reads a commit record.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / f"{stem(step, segment)}.json"
    try:
        record = decode(read_file(path), Commit)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, so there is no checkpoint of step {step}") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{path} is damaged ({why}); expected the commit record of step {step}") from error
    names = {stem(step, segment) + suffix for suffix in (WEIGHTS, OPTIMIZER, RNG, CURSOR)}
    if record.checkpoint_version != 1:
        raise CheckpointError(f"{path} has checkpoint_version {record.checkpoint_version}; this workbench reads 1")
    parts = {name for name in record.files if not is_base(name)}
    names |= {stem(step, segment) + RANKS} & parts
    if (record.step, record.segment) != (step, segment) or parts != names or len(record.files) > len(names) + 1:
        raise CheckpointError(
            f"{path} describes step {record.step}, segment {record.segment}, files {sorted(record.files)}; "
            f"expected step {step}, segment {segment}, files {sorted(names)}"
        )
    if record.seal not in (None, record.sealed().seal):
        raise CheckpointError(f"{path} is damaged: it was changed since it was written, as its own digest says")
    for part, places in _taken(record).items():
        if part not in ("weights", "optimizer"):
            raise CheckpointError(f"{path} takes {part!r} from other files; expected weights or optimizer")
        for name, place in places.items():
            if (fault := place.fault()) is not None:
                raise CheckpointError(f"{path} is damaged: of {name} it says that {fault}")
    return record


def files_of(record: Commit) -> set[str]:
    """The names of all files that a checkpoint needs, those that it has in common with others too."""
    return {*record.files, *(place.file for part in _taken(record).values() for place in part.values())}


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
    weights |= _taken_arrays(folder, name, _taken(record).get("weights", {}))
    optimizer |= _taken_arrays(folder, name, _taken(record).get("optimizer", {}))
    try:
        for part, arrays in (("weights", weights), ("optimizer", optimizer)):
            arrays |= {path: laid_out(arrays[path], axes) for path, axes in _layouts(record).get(part, {}).items()}
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
        found = {path: _array(path, one.dtype, one.shape, content) for path, one, content in verified}
    except OSError as error:
        raise CheckpointError(
            f"{error.filename} can't be read ({error.strerror}); the commit record of {name} takes tensors from it"
        ) from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name}: {error}") from error
    mx.eval(found)
    return found


def arrays_of(content: bytes | Content) -> dict[str, mx.array]:
    """The arrays of a safetensors file. Not by `mx.load`: it reads a Python buffer in a thread of its own, which, when
    the process ends soon after, aborts it.

    Args:
        content: of which each piece is let go when its array is made.

    Raises:
        ValueError: it is not such a file: the tensors must be of known types and fill its data without a gap.
    """
    content = Content([content]) if isinstance(content, bytes) else content
    start = 8 + int.from_bytes(content.taken(0, min(8, content.size)), "little")
    if content.size < 8 or start > content.size:
        raise ValueError(f"its header should end at byte {start} of {content.size}")
    end, found = 0, {}
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
        found[name] = _array(name, entry.dtype, entry.shape, content.taken(start + first, start + last))
    if start + end != content.size:
        raise ValueError(f"its tensors end at byte {start + end} of {content.size}")
    mx.eval(found)
    return found


def _array(name: str, dtype: str, shape: Sequence[int], content: bytes | memoryview) -> mx.array:
    data = np.frombuffer(content, DTYPES[dtype])
    if dtype == "BOOL" and data.view(np.uint8).max(initial=0) > 1:
        raise ValueError(f"{name} holds a truth value that is neither 0 nor 1")
    array = mx.array(data.reshape(shape))
    return array.view(mx.bfloat16) if dtype == "BF16" else array


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


def first_difference(left: State, right: State) -> str | None:
    """Name of the first tensor (or `rng`, `cursor`) whose bytes differ between two states; None if none does."""
    for what, ours, theirs in (
        ("weights", left.weights, right.weights),
        ("optimizer", left.optimizer, right.optimizer),
    ):
        for path in sorted(ours.keys() | theirs.keys()):
            if path not in ours or path not in theirs:
                return f"{what} {path} (only in one)"
            if ours[path].dtype != theirs[path].dtype or ours[path].shape != theirs[path].shape:
                return f"{what} {path} (dtype or shape)"
            one, other = raw_views([ours[path], theirs[path]])
            if one.tobytes() != other.tobytes():
                return f"{what} {path}"
    if left.rng != right.rng:
        return "rng"
    return None if left.cursor == right.cursor else "cursor"


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
