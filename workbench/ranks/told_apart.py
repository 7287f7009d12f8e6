"""Two values that should be equal, as a sentence shows them: the parts that differ, so that these are what is seen.

Knows JSON values; nothing of ranks or runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST = 3  # parts that are shown
ROOM = 120  # characters of each
BEFORE = 20  # of these, up to the first that differs


def told_apart(ours: Any, theirs: Any) -> tuple[str, str]:
    """What stands in a sentence for each of two JSON values that differ.

    Returns:
        Of objects, and of lists of as many, the entries that differ, after where they stand: "members.0.eps 1e-08".
        Of a long text the stretch in which it begins to differ, between dots.
    """
    parts = list(_differing("", ours, theirs))
    shown = [_pair(place, one, other) for place, one, other in parts[:MOST]]
    more = [f"{len(parts) - MOST} more"] if len(parts) > MOST else []
    left, right = (", ".join([*side, *more]) for side in zip(*shown, strict=True))
    return left, right


_MISSING = object()


def _differing(place: str, ours: Any, theirs: Any) -> Iterator[tuple[str, Any, Any]]:
    if _members(ours) and _members(theirs) and len(ours) == len(theirs):
        ours, theirs = dict(enumerate(ours)), dict(enumerate(theirs))
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        yield place, ours, theirs
        return
    for name in {**ours, **theirs}:
        one, other = ours.get(name, _MISSING), theirs.get(name, _MISSING)
        if one != other:
            yield from _differing(f"{place}.{name}" if place else f"{name}", one, other)


def _members(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _pair(place: str, ours: Any, theirs: Any) -> tuple[str, str]:
    left, right = ("not there" if one is _MISSING else str(one) for one in (ours, theirs))
    shorter = min(len(left), len(right))
    first = next((at for at in range(shorter) if left[at] != right[at]), shorter)
    before = f"{place} " if place else ""
    return before + _stretch(left, first), before + _stretch(right, first)


def _stretch(text: str, first: int) -> str:
    if len(text) <= ROOM:
        return text
    start = max(0, min(first - BEFORE, len(text) - ROOM))
    end = start + ROOM
    return f"{'…' if start else ''}{text[start:end]}{'…' if end < len(text) else ''}"
