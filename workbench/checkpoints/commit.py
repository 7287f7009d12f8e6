"""A checkpoint's commit record, which names its files and vouches for them, and the names that the files have.

Knows a checkpoint's folder; nothing of arrays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import CheckpointError
from ..files import canonical_json, sha256
from ..frozen import is_base
from ..ranks.rank_parts import SUFFIX as RANKS
from ..tensor_places import Place, expected_digests
from ..untrusted import decode, read_file
from .checkpoint_names import stem as stem

WEIGHTS, OPTIMIZER, RNG, CURSOR = ".safetensors", ".optimizer.safetensors", ".rng", ".cursor"


class FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """A file that a commit record vouches for.

    Attributes:
        xxh3: XXH3-128, which reading verifies in place of the slower SHA-256; older records have none. Neither is
            signed: whoever changes a file on purpose can change its record.
    """

    bytes: int
    sha256: str
    xxh3: str | msgspec.UnsetType = msgspec.UNSET

    def digests(self, thorough: bool) -> dict[str, str]:
        """What reading verifies, by kind: see `digests`. `thorough`: all that there are."""
        return expected_digests(self.sha256, self.xxh3, thorough)


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
    """The file of a random state."""

    key: tuple[Word, Word]


def taken_of(record: Commit) -> dict[str, dict[str, Place]]:
    """Of "weights" and "optimizer" by path: where what is not in the checkpoint's own files stands."""
    return {} if record.taken is msgspec.UNSET else record.taken


def layouts_of(record: Commit) -> dict[str, dict[str, list[int]]]:
    """Of "weights" and "optimizer" by path: the order of the axes of what is not in row-major order."""
    return {} if record.layouts is msgspec.UNSET else record.layouts


def files_of(record: Commit) -> set[str]:
    """The names of all files that a checkpoint needs, those that it has in common with others too."""
    return {*record.files, *(place.file for part in taken_of(record).values() for place in part.values())}


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
    for part, places in taken_of(record).items():
        if part not in ("weights", "optimizer"):
            raise CheckpointError(f"{path} takes {part!r} from other files; expected weights or optimizer")
        for name, place in places.items():
            if (fault := place.fault()) is not None:
                raise CheckpointError(f"{path} is damaged: of {name} it says that {fault}")
    return record
