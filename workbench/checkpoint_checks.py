"""Whether a run's checkpoints are whole, are the states that the run logged, and have the manifest's parameters.

Knows run folders and states; performs no step and writes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .checkpoints import checkpoint_reader
from .checkpoints.commit import Commit, files_of, read_commit, stem
from .errors import CheckpointError, WorkbenchError
from .files import canonical_json, sha256
from .fingerprint import known_method
from .ranks.rank_checks import differing_parts
from .recorded.layout import CHECKPOINTS
from .run import Run
from .snapshot import State
from .tensor_places import is_shared
from .untrusted import open_regular, read_file
from .verification import Check


def records(run: Run, committed: Sequence[tuple[int, int]]) -> Iterator[Commit]:
    """The commit records that can be read; what is wrong with others is said when their checkpoint is looked at."""
    for key in committed:
        with contextlib.suppress(CheckpointError):
            yield read_commit(run.path / CHECKPOINTS, *key)


def first_seal(run: Run, committed: Sequence[tuple[int, int]]) -> float:
    """Since when commit records have had seals in this run, Unix time in seconds; infinite: none has one."""
    if run.manifest.sealed or run.manifest.numbers:  # which came after the seals
        return 0.0
    return min((one.t for one in records(run, committed) if one.seal is not None), default=float("inf"))


def check_shared(run: Run, committed: Sequence[tuple[int, int]]) -> Iterator[Check]:
    """Whether the files that several checkpoints have in common are whole, with what is no tensor in them: their name
    has the SHA-256. Of one that is missing the checkpoints say so."""
    for name in sorted({name for one in records(run, committed) for name in files_of(one) if is_shared(name)}):
        try:
            with open_regular(run.path / CHECKPOINTS / name) as file:
                found = sha256(iter(lambda: file.read(1 << 20), b""))
        except OSError:
            continue
        if found in name:
            yield Check("checkpoint", name, "exact", "it has the SHA-256 that its name says")
        else:
            yield Check("checkpoint", name, "mismatch", f"it was changed: its SHA-256 is {found}, not that of its name")


def check_checkpoint(run: Run, step: int, segment: int, readable: bool, since: float) -> Check:
    """Its digests, and whether it is the state that the telemetry recorded and has the manifest's parameters.

    Args:
        readable: the telemetry can be read.
        since: see `first_seal`.
    """
    name = stem(step, segment)
    try:
        record = read_commit(run.path / CHECKPOINTS, step, segment)
        state = checkpoint_reader.read(run.path / CHECKPOINTS, step, segment, run.manifest.run, thorough=True)
        lanes = state.lanes(known_method(run.manifest.fingerprint, run.path))
    except WorkbenchError as error:
        return Check("checkpoint", name, "mismatch", str(error))
    if unlike := [lane for lane, value in record.state.items() if lanes.get(lane) != value]:
        return Check("checkpoint", name, "mismatch", f"its commit record has other fingerprints of {', '.join(unlike)}")
    if (sentence := _other_parameters(run, state)) is not None:
        return Check("checkpoint", name, "mismatch", sentence)
    if record.seal is None and record.t >= since:
        told = f"its commit record {name}.json has lost its own digest, the seal"
        return Check("checkpoint", name, "mismatch", told)
    if record.seal is not None and _digest(run.path / CHECKPOINTS / f"{name}.json") != record.seal:
        told = f"its commit record {name}.json was changed: it says the same, and is not spelled as it was written"
        return Check("checkpoint", name, "mismatch", told)
    if not readable or segment >= len(run.manifest.segments):
        return Check("checkpoint", name, "unverified", "its digests agree; there is no telemetry to compare it with")
    begun, ended = run.manifest.segments[segment].start, run.telemetry.last_step(segment)
    if step > max(begun, ended):
        told = f"the telemetry of segment {segment} ends at step {ended}, before this checkpoint"
        return Check("checkpoint", name, "mismatch", f"{told}: its last lines are gone")
    logged = {
        lane.removeprefix("state."): value
        for lane, value in run.state_evidence(step, segment).items()
        if lane.startswith("state.")
    }
    if not logged:
        return Check(
            "checkpoint", name, "unverified", "its digests agree; the telemetry has no fingerprint of this state"
        )
    if unlike := [lane for lane, value in logged.items() if lanes.get(lane) != value]:
        return Check(
            "checkpoint", name, "mismatch", f"it is not the state that the run logged: {', '.join(unlike)} differ"
        )
    began = step == run.manifest.segments[segment].start
    line = run.telemetry.meta(segment) if began else run.telemetry.at(step, segment)
    if (sentence := differing_parts(run, state, line)) is not None:
        return Check("checkpoint", name, "mismatch", sentence)
    return Check("checkpoint", name, "exact", "its digests agree, and it is the state that the run logged")


def _digest(record: Path) -> str | None:
    """As `Commit.sealed` has it, of the document itself: what a reader fills in where a field is missing counts not."""
    try:
        return sha256(canonical_json(msgspec.json.decode(read_file(record), type=dict[str, Any]) | {"seal": None}))
    except (OSError, ValueError):
        return None


def _other_parameters(run: Run, state: State) -> str | None:
    listed = {one.path: (tuple(one.shape), one.dtype) for one in run.manifest.parameters}
    held = {path: (array.shape, str(array.dtype).removeprefix("mlx.core.")) for path, array in state.weights.items()}
    for path in sorted(listed.keys() | held.keys()):
        if path not in listed or path not in held:
            return f"{path} stands only in the {'checkpoint' if path in held else 'manifest'}"
        if listed[path][0] != held[path][0]:
            return f"{path} has the shape {held[path][0]}, in the manifest {listed[path][0]}"
        if listed[path][1] != held[path][1]:
            return f"{path} has the dtype {held[path][1]}, in the manifest {listed[path][1]}"
    return None
