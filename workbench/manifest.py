"""The manifest `run.json`: what a run was, and how to rebuild it.

Knows the format; nothing of MLX, telemetry or replay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .errors import RunError, WorkbenchError
from .files import canonical_json, pretty_json, sha256, write_atomic
from .ranks.rank_setup import RankSetup
from .spikes import SpikeSettings
from .untrusted import decode, read_file

NAME = "run.json"
VERSION = 1


class DataFile(msgspec.Struct, forbid_unknown_fields=True):
    """A data file as it was when the run started. `path` is as the user gave it, made absolute."""

    path: str
    bytes: int
    sha256: str


class Parameter(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    shape: list[int]
    dtype: str


class Segment(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A stretch of steps without a break.

    Attributes:
        segment: its number, from 0.
        start: step of the state it started from; its own steps come after.
        parent: the segment whose state that was; None for the first.
        environment: numeric environment of the processes that wrote it.
        norms: how its norms were added; None: as `Manifest.norms` says.
        code: digests of the source files that performed its steps, by module; None: not recorded. See `sources`.
        rate_factor: what the schedules of learning rates are multiplied by in it; less than 1 after a rollback.
        values: what the step read beside its state when the process that began it performed its first step, as texts
            by path; unset: not recorded. See `recording.start_values`.
    """

    segment: int
    start: int
    parent: int | None
    t: float
    environment: dict[str, Any]
    norms: str | None = None
    code: dict[str, str] | None = None
    rate_factor: float = 1.0
    values: dict[str, str] | UnsetType = UNSET


class Parent(msgspec.Struct, forbid_unknown_fields=True):
    """Where a forked run came from.

    Attributes:
        run: identity of the parent.
        path: its folder at that time.
        step: the fork's first state is the parent's state after this step, with `changes` made.
        segment: in which the parent performed that step.
        changes: how the fork differs, each as the command line spells it; empty: not at all.
    """

    run: str
    path: str
    step: int
    segment: int = 0
    changes: list[str] = []


class End(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How far a run got, which nothing else in the folder says once the end of its telemetry is gone.

    Attributes:
        step: at which it was done.
        seal: of the telemetry's last line, which says so; see `lines.seal`.
        checkpoints: step and segment of those that there were then.
    """

    step: int
    seal: str
    checkpoints: list[tuple[int, int]]


class Manifest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`rebuild` is how to get the experiment again: {"kind": "trainer", "config": {...}}, {"kind": "factory",
    "factory": "module:function", "arguments": {...}}, or {"kind": "none"}, to which a script that recorded a loop
    of its own adds its path and arguments, "script" and "argv", which of its recorders this was, "recorder", from 1,
    and the name by which `python -m` ran it, "module". Opening a run imports nothing that it names.
    """

    format_version: int = VERSION
    run: str  # random identity; telemetry and commit records carry it too
    created: float
    workbench: str  # code version
    rebuild: dict[str, Any]
    options: dict[str, Any]  # StepOptions
    optimizer: dict[str, Any]  # class and hyperparameters
    data: list[DataFile]
    layers: list[str]
    owned: dict[str, list[str]]
    parameters: list[Parameter]
    fingerprint: str  # method of the per-step fingerprints
    norms: str = "unnamed"  # method of the logged norms: another order of adding has other bits
    save_every: int
    keep_last: int | None = None
    keep_every: int | None = None
    spikes: dict[str, Any] | None  # SpikeSettings; null: detection was off
    recovery: dict[str, Any] | None = None  # settings of `recovery`; null in runs recorded before there were any
    segments: list[Segment]
    parent: Parent | None = None
    stored_batches: bool = False  # in the folder `batches`, named by the hash that telemetry logs
    own_step: bool = False  # the experiment has a step function of its own
    numbers: bool = False  # those of Python or numpy in a batch reach the step as they are, not as arrays
    numpy: bool = False  # so do arrays of numpy
    loss: str = "float32"  # dtype of the loss that the first step returned; what is logged of it is float32
    extra: list[str] = []  # names of the state that it keeps outside model and optimizer
    ranks: RankSetup | UnsetType = UNSET  # who trained together; of one process there is none
    ignore: list[str] | UnsetType = UNSET  # what the step changes, and the user says that no step depends on
    sealed: bool = False  # lines and commit records carry their digests, and meta lines that of the manifest
    end: End | UnsetType = UNSET  # taken away when a process goes on with the run, and put back at its end

    def lineage(self, segment: int, step: int) -> int:
        """The segment that performed `step` on the way that leads to `segment`.

        Raises:
            RunError: there is no such segment.
        """
        if not 0 <= segment < len(self.segments):
            raise RunError(f"segment {segment} does not exist; the run has segments 0 to {len(self.segments) - 1}")
        entry = self.segments[segment]
        while step <= entry.start and entry.parent is not None:
            entry = self.segments[entry.parent]
        return entry.segment

    def norms_of(self, segment: int) -> str:
        """How the norms of a segment were added."""
        return self.segments[segment].norms or self.norms

    def ways(self, segment: int) -> list[tuple[int, int, float]]:
        """The stretches that led to `segment`, it first: (segment, after this step, up to and with this one)."""
        stretches, high = [], float("inf")
        entry: Segment | None = self.segments[segment]
        while entry is not None:
            if entry.start < high:
                stretches.append((entry.segment, entry.start, high))
            high = min(high, entry.start)
            entry = None if entry.parent is None else self.segments[entry.parent]
        return stretches


def write(manifest: Manifest, folder: Path) -> None:
    """
    Raises:
        RunError: `read` could not read it; nothing is written then.
    """
    content = pretty_json(manifest)
    parsed(content, folder / NAME)
    write_atomic(folder / NAME, content)


def digest(content: bytes, segments: int | None = None) -> str:
    """SHA-256 of what a manifest says, in hexadecimal: of its JSON with sorted keys and without spaces. Left out are
    `end`, which changes while the rest does not, and where data files lie: who moves them may say so, and their size
    and SHA-256 tell whether they are those.

    Args:
        content: of the file.
        segments: as if it had only so many; None: all.

    Raises:
        ValueError: it is no manifest.
    """
    msgspec.json.decode(content, type=_Digested)
    document = msgspec.json.decode(content, type=dict[str, Any])
    document.pop("end", None)
    document["data"] = [{name: one[name] for name in one if name != "path"} for one in document["data"]]
    if segments is not None:
        document["segments"] = document["segments"][:segments]
    return sha256(canonical_json(document))


def read(folder: Path) -> Manifest:
    """Reads a run's manifest.

    Raises:
        RunError: the folder is no run, or the manifest is damaged or of another version.
    """
    path = folder / NAME
    try:
        content = read_file(path)
    except FileNotFoundError:
        what = "is not a run folder (no run.json in it)" if folder.is_dir() else "does not exist"
        raise RunError(f"{folder} {what}; expected the folder that a run was recorded in") from None
    except NotADirectoryError:
        raise RunError(f"{folder} is a file; expected the folder that a run was recorded in") from None
    except OSError as error:
        raise RunError(f"{path} can't be read ({error.strerror})") from error
    return parsed(content, path)


def parsed(content: bytes, path: Path) -> Manifest:
    """The manifest that a file's content is; `path` is named in the sentence of the error.

    Raises:
        RunError: it is damaged, or of another version.
    """
    try:
        version = msgspec.json.decode(content, type=_Version).format_version
        if version != VERSION:
            raise RunError(f"{path} has format_version {version}; this workbench reads {VERSION}")
        manifest = decode(content, Manifest)
        msgspec.convert(manifest.options, _Options)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: {error}; expected a run's manifest") from error
    for number, entry in enumerate(manifest.segments):
        parents = [None] if number == 0 else range(number)
        if entry.segment != number or entry.start < 0 or entry.parent not in parents:
            raise RunError(f"{path} is damaged: segment {number} is described as {entry}")
    if not manifest.segments:
        raise RunError(f"{path} is damaged: it describes no segment")
    if unlike := sorted(set(manifest.layers) ^ manifest.owned.keys()):
        raise RunError(f"{path} is damaged: the layer {unlike[0]!r} stands in only one of 'layers' and 'owned'")
    try:
        SpikeSettings(**manifest.spikes or {})
    except (TypeError, WorkbenchError) as error:
        raise RunError(f"{path} is damaged: its 'spikes' are no settings of spike detection: {error}") from error
    return manifest


class _Options(msgspec.Struct):
    """Of what types the step's options are; `experiment.StepOptions` says what they mean."""

    clip: float | None = None
    accumulate: int = 1
    compile: bool = True
    deterministic: bool = True


class _Digested(msgspec.Struct):
    data: list[dict[str, Any]]
    segments: list[Any]


class _Version(msgspec.Struct):
    format_version: int
