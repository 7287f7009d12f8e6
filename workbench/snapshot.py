"""The state that the next step depends on: captured, stored, read back and restored, strictly.

Knows MLX arrays and a checkpoint's files; nothing of manifests, telemetry or trainers. No pickle, ever.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import mlx.core as mx
import msgspec
import numpy as np
from mlx.utils import tree_flatten

from .errors import CheckpointError, ExperimentError
from .experiment import Experiment, ensure_initialised, put_arrays, random_key, row_major, set_random_key, state_arrays
from .files import commit, pretty_json, sha256, sync_file, temporary_beside, write_atomic
from .fingerprint import lanes, method_here
from .host import raw_views

WEIGHTS, OPTIMIZER, RNG, CURSOR = ".safetensors", ".optimizer.safetensors", ".rng", ".cursor"


@dataclass(frozen=True)
class State:
    """A state in memory. MLX arrays are immutable, so holding references is a snapshot and costs no copy.

    Attributes:
        step: N, counted from 1; state 0 is the initialisation.
        weights: every parameter of the model, frozen ones too, by dotted path.
        optimizer: every array of the optimizer's state, by dotted path.
        rng: the two words of the random state.
        cursor: where the data stream stands after the batch of step N.
    """

    step: int
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    rng: tuple[int, int]
    cursor: dict[str, Any]

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


Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class Rng(msgspec.Struct, forbid_unknown_fields=True):
    key: tuple[Word, Word]


def capture(experiment: Experiment, step: int, cursor: dict[str, Any], rng: tuple[int, int] | None = None) -> State:
    """The experiment's present state. New handles of the same buffers: `a += 1` in a user's code changes its handle.

    Args:
        rng: the random state that the step left, where this thread's may have moved on since; None: this thread's.
    """
    weights = {path: copy.copy(array) for path, array in state_arrays(experiment.model).items()}
    optimizer = {path: copy.copy(array) for path, array in state_arrays(experiment.optimizer.state).items()}
    mx.eval(weights, optimizer)
    return State(step, weights, optimizer, rng or random_key(), copy.deepcopy(cursor))


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
    optimizer = state_arrays(experiment.optimizer.state)
    _refuse_differences("optimizer state", state.optimizer, optimizer, optimizer.keys())
    experiment.sampler.load_state_dict(copy.deepcopy(state.cursor))  # which may keep the object and change it
    # New handles here too, and row-major, as `Experiment.prepare` makes them.
    weights = {path: row_major(array) for path, array in state.weights.items()}
    optimizer = {path: row_major(array) for path, array in state.optimizer.items()}
    mx.eval(weights, optimizer)
    put_arrays(experiment.model, weights)
    put_arrays(experiment.optimizer.state, optimizer)
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


def write(state: State, folder: Path, *, run: str, segment: int, t: float, method: str | None = None) -> Commit:
    """Writes the four files and then the commit record, each flushed and renamed.

    Raises:
        OSError: the disk is full or read-only; no file that was committed before is touched.
        ExperimentError: the optimizer keeps an array that safetensors can't hold.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = stem(state.step, segment)
    entries: dict[str, FileEntry] = {}
    for suffix, arrays in ((WEIGHTS, state.weights), (OPTIMIZER, state.optimizer)):
        entries[name + suffix] = _write_arrays(folder / (name + suffix), arrays)
    for suffix, content in ((RNG, Rng(state.rng)), (CURSOR, state.cursor)):
        data = pretty_json(content)
        write_atomic(folder / (name + suffix), data)
        entries[name + suffix] = FileEntry(len(data), sha256(data))
    record = Commit(run=run, step=state.step, segment=segment, files=entries, state=state.lanes(method), t=t)
    write_atomic(folder / f"{name}.json", pretty_json(record))
    return record


def _write_arrays(path: Path, arrays: dict[str, mx.array]) -> FileEntry:
    temporary = temporary_beside(path)
    try:
        try:
            mx.save_safetensors(str(temporary), arrays)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "Unable to write" in str(error):
                raise OSError(f"{path} can't be written: {error}") from error
            raise ExperimentError(f"{path.name} can't hold this state: {error}") from error
        sync_file(temporary)
        with open(temporary, "rb") as file:
            digest = sha256(iter(lambda: file.read(1 << 22), b""))
        size = os.path.getsize(temporary)
        commit(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return FileEntry(size, digest)


def read_commit(folder: Path, step: int, segment: int) -> Commit:
    """Reads a commit record.

    Raises:
        CheckpointError: it is missing or damaged.
    """
    path = folder / f"{stem(step, segment)}.json"
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Commit)
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, so there is no checkpoint of step {step}") from None
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path} is damaged ({error}); expected the commit record of step {step}") from error
    names = {stem(step, segment) + suffix for suffix in (WEIGHTS, OPTIMIZER, RNG, CURSOR)}
    if record.checkpoint_version != 1:
        raise CheckpointError(f"{path} has checkpoint_version {record.checkpoint_version}; this workbench reads 1")
    if (record.step, record.segment) != (step, segment) or record.files.keys() != names:
        raise CheckpointError(
            f"{path} describes step {record.step}, segment {record.segment}, files {sorted(record.files)}; "
            f"expected step {step}, segment {segment}, files {sorted(names)}"
        )
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
        rng = msgspec.json.decode(content[name + RNG], type=Rng)
        cursor = msgspec.json.decode(content[name + CURSOR], type=dict[str, Any])
        weights, optimizer = (_arrays(content[name + suffix]) for suffix in (WEIGHTS, OPTIMIZER))
    except (msgspec.MsgspecError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder / name} can't be decoded: {error}") from error
    return State(step, weights, optimizer, rng.key, cursor)


class _Tensor(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "BOOL": "?"} | {
    f"{kind}{8 * size}": f"<{kind.lower()}{size}" for kind in "IU" for size in (1, 2, 4, 8)
}


def _arrays(content: bytes) -> dict[str, mx.array]:
    """The arrays of a safetensors file. Not by `mx.load`: it reads a Python buffer in a thread of its own, which, when
    the process ends soon after, aborts it.

    Raises:
        ValueError: it is not such a file.
    """
    start, whole = 8 + int.from_bytes(content[:8], "little"), memoryview(content)
    found = {}
    for name, raw in msgspec.json.decode(whole[8:start], type=dict[str, msgspec.Raw]).items():
        if name == "__metadata__":
            continue
        entry = msgspec.json.decode(raw, type=_Tensor)
        if entry.dtype not in _DTYPES:
            raise ValueError(f"{name} is of type {entry.dtype}; expected one of {', '.join(_DTYPES)}")
        data = whole[start + entry.data_offsets[0] : start + entry.data_offsets[1]]
        array = mx.array(np.frombuffer(data, _DTYPES[entry.dtype]).reshape(entry.shape))
        found[name] = array.view(mx.bfloat16) if entry.dtype == "BF16" else array
    mx.eval(found)
    return found


def _verified(path: Path, entry: FileEntry) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} can't be read ({error.strerror}); its commit record lists it") from error
    if len(content) != entry.bytes:
        raise CheckpointError(f"{path} has {len(content)} bytes, expected {entry.bytes}: it was cut off or replaced")
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
    """Removes a checkpoint: its commit record first, so that it never counts as whole with files missing."""
    name = stem(step, segment)
    for suffix in (".json", WEIGHTS, OPTIMIZER, RNG, CURSOR):
        (folder / (name + suffix)).unlink(missing_ok=True)
