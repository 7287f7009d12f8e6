"""The state that the next step depends on: captured, stored, read back and restored, strictly.

Knows MLX arrays and a checkpoint's files; nothing of manifests, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from . import tensor_file
from .errors import CheckpointError
from .experiment import (
    Experiment,
    ensure_initialised,
    kept_arrays,
    put_arrays,
    put_kept,
    random_key,
    row_major,
    set_random_key,
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
from .untrusted import decode, open_regular, read_file

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
    """

    step: int
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    rng: tuple[int, int]
    cursor: dict[str, Any]
    frozen: Frozen | None = None

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
    seal: str | None = None  # SHA-256 of this record without it; runs recorded before it have none

    def sealed(self) -> Commit:
        """The record with its own digest: a flipped bit anywhere in it is noticed, too."""
        bare = msgspec.structs.replace(self, seal=None)
        return msgspec.structs.replace(self, seal=sha256(canonical_json(bare)))


Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Rng(msgspec.Struct, forbid_unknown_fields=True):
    key: tuple[Word, Word]


def capture(experiment: Experiment, step: int, cursor: dict[str, Any], rng: tuple[int, int] | None = None) -> State:
    """The experiment's present state. New handles of the same buffers: `a += 1` in a user's code changes its handle.

    Args:
        rng: the random state that the step left, where this thread's may have moved on since; None: this thread's.
    """
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
    # New handles here too, and row-major, as `Experiment.prepare` makes them.
    weights = {path: row_major(array) for path, array in state.weights.items()}
    optimizer = {path: row_major(array) for path, array in state.optimizer.items()}
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
            f"the {what} of the checkpoint does not fit this model and optimizer: {'; '.join(problems[:6])}"
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
) -> Commit:
    """Writes the four files, and when they and their names are on the disk the commit record.

    A checkpoint that is there already with the same fingerprints is left as it is; any other under its name is removed
    first, as `delete` does, so that its commit record never stands beside new files.

    Args:
        folder: made if it is missing, but not those above it: a run's folder that has gone is not made anew.
        lanes: the state's fingerprints, where they are known; None: they are computed, by `method`.

    Raises:
        OSError: the disk is full or read-only, or the folder has gone; no file that was committed before is touched.
        ExperimentError: the optimizer keeps an array that safetensors can't hold.
    """
    if not folder.is_dir():
        os.mkdir(folder)
        sync_folder(folder.parent)
    name = stem(state.step, segment)
    lanes = state.lanes(method) if lanes is None else lanes
    if (folder / f"{name}.json").exists():
        if (there := _committed(folder, state.step, segment, run, lanes)) is not None:
            return there
        delete(folder, state.step, segment)
    own, base = (state.weights, None) if state.frozen is None else state.frozen.split(folder, state.weights)
    parts: dict[str, Iterable[bytes | memoryview]] = {
        name + WEIGHTS: tensor_file.chunks(name + WEIGHTS, own),
        name + OPTIMIZER: tensor_file.chunks(name + OPTIMIZER, state.optimizer),
        name + RNG: [pretty_json(Rng(state.rng))],
        name + CURSOR: [pretty_json(state.cursor)],
    }
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
    record = Commit(run=run, step=state.step, segment=segment, files=entries, state=lanes, t=t).sealed()
    write_atomic(folder / f"{name}.json", pretty_json(record))
    return record


def _committed(folder: Path, step: int, segment: int, run: str, lanes: dict[str, str]) -> Commit | None:
    """The commit record of a checkpoint, if it is of this very state and its files have their sizes."""
    try:
        record = read_commit(folder, step, segment)
        sizes = {name: os.stat(folder / name).st_size for name in record.files}
    except (CheckpointError, OSError):
        return None
    whole = sizes == {name: entry.bytes for name, entry in record.files.items()}
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
    if (record.step, record.segment) != (step, segment) or parts != names or len(record.files) > len(names) + 1:
        raise CheckpointError(
            f"{path} describes step {record.step}, segment {record.segment}, files {sorted(record.files)}; "
            f"expected step {step}, segment {segment}, files {sorted(names)}"
        )
    if record.seal not in (None, record.sealed().seal):
        raise CheckpointError(f"{path} is damaged: it was changed since it was written, as its own digest says")
    return record


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
        rng = decode(content[name + RNG], Rng)
        cursor = decode(content[name + CURSOR], dict[str, Any])
        weights, optimizer = (arrays_of(content[name + suffix]) for suffix in (WEIGHTS, OPTIMIZER))
        for base in filter(is_base, content):
            weights = arrays_of(content[base]) | weights
    except ValueError as error:
        raise CheckpointError(f"checkpoint {folder / name} can't be decoded: {error}") from error
    return State(step, weights, optimizer, rng.key, cursor)


Size = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Offset = Annotated[int, msgspec.Meta(ge=0)]


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[Size]
    data_offsets: tuple[Offset, Offset]


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}


def arrays_of(content: bytes) -> dict[str, mx.array]:
    """The arrays of a safetensors file. Not by `mx.load`: it reads a Python buffer in a thread of its own, which, when
    the process ends soon after, aborts it.

    Raises:
        ValueError: it is not such a file: the tensors must be of known types and fill its data without a gap.
    """
    start, whole, found = 8 + int.from_bytes(content[:8], "little"), memoryview(content), {}
    if len(content) < 8 or start > len(content):
        raise ValueError(f"its header should end at byte {start} of {len(content)}")
    end = 0
    for name, entry in sorted(_header(whole[8:start]).items(), key=lambda one: one[1].data_offsets):
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{name} is of type {entry.dtype}; expected one of {', '.join(_DTYPES)}")
        first, last = entry.data_offsets
        size = np.dtype(_DTYPES[entry.dtype]).itemsize * math.prod(entry.shape)
        if first != end or last - first != size:
            raise ValueError(
                f"{name}, {entry.dtype} of shape {entry.shape}, stands at bytes {first} to {last} of the data; "
                f"expected {size} bytes from {end}"
            )
        end = last
        data = np.frombuffer(whole[start + first : start + last], _DTYPES[entry.dtype])
        if entry.dtype == "BOOL" and data.view(np.uint8).max(initial=0) > 1:
            raise ValueError(f"{name} holds a truth value that is neither 0 nor 1")
        array = mx.array(data.reshape(entry.shape))
        found[name] = array.view(mx.bfloat16) if entry.dtype == "BF16" else array
    if start + end != len(content):
        raise ValueError(f"its tensors end at byte {start + end} of {len(content)}")
    mx.eval(found)
    return found


def _header(content: memoryview) -> dict[str, _Tensor]:
    entries = decode(content, dict[str, msgspec.Raw])
    return {name: decode(bytes(raw), _Tensor) for name, raw in entries.items() if name != "__metadata__"}


def _verified(path: Path, entry: FileEntry) -> bytes:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                raise CheckpointError(f"{path} has {size} bytes, expected {entry.bytes}: it was cut off or replaced")
            content = file.read(size)
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); its commit record lists it") from error
    except MemoryError:
        raise CheckpointError(f"{path} can't be read: its {size} bytes do not fit in memory") from None
    if (found := sha256(content)) != entry.sha256:
        raise CheckpointError(f"{path} was changed: its SHA-256 is {found}, expected {entry.sha256}")
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
    for suffix in (WEIGHTS, OPTIMIZER, RNG, CURSOR):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(folder / (name + suffix))


def sweep(folder: Path) -> None:
    """Removes the temporary files that a process which was killed while writing left; only its run's recorder may."""
    for path in folder.glob(".*.tmp*") if folder.is_dir() else ():
        discard(path)
