"""The names of a checkpoint's files, and which checkpoint a name is of. Knows names; reads no file."""

from __future__ import annotations

import re
from pathlib import Path

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
    """(step, segment) of every checkpoint that has a commit record in a folder, by step; none if it is not there."""
    if not folder.is_dir():
        return []
    return sorted(key for path in folder.glob("*.json") if (key := key_of(path.stem)) is not None)
