"""The names of a checkpoint's files, and which checkpoint a name is of. Knows names; reads no file."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ..errors import CheckpointError

_STEM = re.compile(r"([0-9]{8,19})(?:\.s([0-9]{1,19}))?")


def stem(step: int, segment: int) -> str:
    """File stem of a checkpoint: 00000200 in segment 0, 00000200.s2 in segment 2."""
    return f"{step:08d}" + (f".s{segment}" if segment else "")


def key_of(name: str) -> tuple[int, int] | None:
    """Step and segment of the checkpoint that has just this stem; None: none has. 200 and 00000200.s0 are no stems."""
    found = _STEM.fullmatch(name)
    key = None if found is None else (int(found[1]), int(found[2] or 0))
    return key if key is not None and stem(*key) == name else None


def committed(folder: Path) -> list[tuple[int, int]]:
    """(step, segment) of every checkpoint that has a commit record in a folder, by step; none if it is not there.

    Raises:
        CheckpointError: it is there, and can't be read: `Path.glob` would find nothing in it, without a word.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} can't be read ({error.strerror}), so which checkpoints it holds is not known; expected a folder "
            "that this user can read"
        ) from error
    records = (name.removesuffix(".json") for name in names if name.endswith(".json"))
    return sorted(key for name in records if (key := key_of(name)) is not None)
