"""Names as a sentence lists them: all of them, or the first few and how many more there are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHOWN = 5  # names in a sentence; more are read by nobody


def listed(words: Sequence[str]) -> str:
    """All of them: `a, b and c`. At least one is needed."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def counted(count: int, one: str, several: str | None = None) -> str:
    """Such as `1 entry has` or `3 entries have`: the number, and the words for it.

    Args:
        one, several: the words; several None: those of one with an s.
    """
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def some(names: Iterable[object], most: int = SHOWN, *, total: int | None = None, joint: str = ",") -> str:
    """The first of them, as `str` has it, and how many more there are: `a, b and 3 more`; "" of none.

    Args:
        names: those that there are; with `total` the first of them.
        most: names that are shown at most.
        total: how many there are; None: as many as `names`.
        joint: what stands between two: "," or ";". Clauses have one before the "and", too.
    """
    found = [str(name) for name in names]
    left = (len(found) if total is None else total) - most
    more = f"{joint if joint == ';' else ''} and {left} more" if left > 0 else ""
    return f"{joint} ".join(found[:most]) + more
