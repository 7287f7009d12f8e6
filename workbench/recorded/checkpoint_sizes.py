"""What a run's checkpoints take on the disk, beside the least that their states could take.

Reads commit records and the headers of tensor files; no tensor, and imports no MLX.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ..checkpoints.checkpoint_names import stem
from ..errors import CheckpointError
from ..tensor_places import Place, tensors_in
from ..untrusted import decode, read_file
from .layout import CHECKPOINTS

if TYPE_CHECKING:
    import pandas as pd

    from .recorded_run import RecordedRun


class CheckpointSize(msgspec.Struct, frozen=True):
    """What a committed checkpoint takes; bytes.

    Attributes:
        bytes: what it takes alone: its own files, its commit record, the run's frozen weights, and of shared files (see
            `deduplication`) the tensors that it has there.
        new_bytes: what it added to the disk: of each file that no earlier checkpoint names, all of it (a hard link is
            the file that it links to). Their sum is what all the run's checkpoints take.
        limit_bytes: parameters x (weights + what the optimizer keeps of each; m and v for Adam): the tensors of its
            state and nothing else. Without deduplication or compression no checkpoint can take less.
        shared_bytes: of these, what has not changed since an earlier checkpoint, and stands in shared files.
    """

    step: int
    segment: int
    bytes: int
    new_bytes: int
    limit_bytes: int
    shared_bytes: int


class _Record(msgspec.Struct):
    files: dict[str, dict[str, int | str]]
    taken: dict[str, dict[str, Place]] = {}


def checkpoint_sizes(run: RecordedRun) -> list[CheckpointSize]:
    """What each committed checkpoint takes, by step.

    Raises:
        CheckpointError: a commit record or a tensor file can't be read.
    """
    folder, seen, found = run.path / CHECKPOINTS, set[tuple[int, int]](), []
    for step, segment in run.checkpoints:
        name = stem(step, segment)
        try:
            found.append(CheckpointSize(step, segment, *_sizes(folder, f"{name}.json", seen)))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the size of checkpoint {folder / name} can't be told: {error}") from error
    return found


def size_frame(sizes: Sequence[CheckpointSize]) -> pd.DataFrame:
    """One row a checkpoint: the attributes of `CheckpointSize`, and ratio, bytes / limit_bytes."""
    import pandas as pd

    names = CheckpointSize.__struct_fields__
    frame = pd.DataFrame([[getattr(one, name) for name in names] for one in sizes], columns=list(names))
    return frame.assign(ratio=frame["bytes"] / frame["limit_bytes"])


def size_sentence(sizes: Sequence[CheckpointSize]) -> str:
    """Such as "12 checkpoints take 262.1 MB: alone each would take at most 131.0 MB, 1.0002 times its tensors."."""
    largest = max(sizes, key=lambda one: one.bytes)
    many, total = len(sizes) > 1, sum(one.new_bytes for one in sizes)
    alone = sum(one.bytes for one in sizes)
    saved = f"; sharing what did not change saves {(alone - total) / 1e6:.1f} MB" if alone > total else ""
    largest_one = f"the largest {largest.bytes / 1e6:.1f} MB, " if many else ""
    ratio = largest.bytes / max(largest.limit_bytes, 1)
    return (
        f"{len(sizes)} checkpoint{'s take' if many else ' takes'} {total / 1e6:.1f} MB: {largest_one}{ratio:.4f} times "
        f"its tensors{saved}."
    )


def _sizes(folder: Path, record: str, seen: set[tuple[int, int]]) -> tuple[int, int, int, int]:
    """bytes, new_bytes, limit_bytes, shared_bytes; its files are added to those seen."""
    listed = decode(read_file(folder / record), _Record)
    places = [place for part in listed.taken.values() for place in part.values()]
    for name in {*listed.files, *(place.file for place in places)}:
        if Path(name).name != name:
            raise ValueError(f"{record} names {name!r}; expected a file beside it")
    total = new = 0
    for name in {record, *listed.files, *(place.file for place in places)}:
        status = os.stat(folder / name)
        if name == record or name in listed.files:
            total += status.st_size
        if (key := (status.st_dev, status.st_ino)) not in seen:
            seen.add(key)
            new += status.st_size
    shared = sum(place.bytes for place in places)
    # Of a frozen weight that was unfrozen, the checkpoint has its own: each path of a part counts once.
    tensors: dict[tuple[str, str], int] = {}
    for name in listed.files:
        if name.endswith(".safetensors"):
            part = "optimizer" if name.endswith(".optimizer.safetensors") else "weights"
            for path, (_, one) in tensors_in(folder / name).items():
                tensors[part, path] = one.data_offsets[1] - one.data_offsets[0]
    for part, found in listed.taken.items():
        tensors |= {(part, path): place.bytes for path, place in found.items()}
    return total + shared, new, sum(tensors.values()), shared
