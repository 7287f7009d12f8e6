"""What of a state each rank has for itself: its random state and its data cursor. Weights and moments all ranks share.

Rank 0 writes the parts of all ranks into the checkpoint, so that one commit record vouches for all of them: there is no
checkpoint that is whole for some ranks only. Knows the format; nothing of MLX's arrays or of folders.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from ..untrusted import decode

SUFFIX = ".ranks"  # of the file, beside a checkpoint's others
Word = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]


class RankPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """
    Attributes:
        rng: the two words of the rank's random state.
        cursor: where its data stream stands.
    """

    rng: tuple[Word, Word]
    cursor: dict[str, Any]


def parts_from(content: bytes) -> tuple[RankPart, ...]:
    """
    Raises:
        ValueError: it is no list of parts, one a rank.
    """
    found = decode(content, list[RankPart])
    if len(found) < 2:
        raise ValueError(f"it has the parts of {len(found)} ranks; expected 2 or more")
    return tuple(found)


def part_of(parts: Sequence[RankPart], rank: int, size: int) -> RankPart:
    """The part that a process goes on from: its own, where as many are here as there were; else rank 0's, which is for
    looking at only."""
    return parts[rank] if size == len(parts) else parts[0]
