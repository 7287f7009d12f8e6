"""The random state that a step left, from the one that it began with: MLX splits its key once for each draw.

The telemetry has only a fingerprint of it, so the keys that follow are tried until one has that. Knows keys and
fingerprints; nothing of runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from ..fingerprint import fingerprint_json

Key = tuple[int, int]
DRAWS = 20_000  # of one step that are tried
_AT_ONCE = 64


class FollowingKeys:
    """The keys after a first one, each made once: what a step that seeds the random state anew leaves is not among
    them, and the search for it, which tries all, is repeated for every step."""

    def __init__(self) -> None:
        self._keys: Iterator[Key] = iter(())
        self._at: dict[Key, int] = {}  # by key, how many draws after the first
        self._found: dict[str, Key] = {}  # by fingerprint

    def left_by(self, began: Key, fingerprint: str) -> Key | None:
        """The key with a fingerprint (of the lane `rng`) that comes from another by drawing; None: none was found."""
        if began not in self._at or len(self._at) > 2 * DRAWS + _AT_ONCE:
            self._keys, self._at, self._found = _following(began), {}, {}
        known = self._found.get(fingerprint)
        if known is not None and 0 <= self._at[known] - self._at[began] <= DRAWS:
            return known
        while len(self._at) <= self._at.get(began, 0) + DRAWS:
            key = next(self._keys)
            own = fingerprint_json(list(key))
            self._at[key], self._found[own] = len(self._at), key
            if own == fingerprint:
                return key
        return None


def _following(key: Key) -> Iterator[Key]:
    """A key, and those after each draw: a split's first half is the next state, its second the key of the draw."""
    yield key
    last = mx.array(key, mx.uint32)
    while True:
        keys = []
        for _ in range(_AT_ONCE):
            last = mx.random.split(last)[0]
            keys.append(last)
        yield from map(tuple, np.asarray(mx.stack(keys)).tolist())


_last = FollowingKeys()


def left_by(began: Key, fingerprint: str) -> Key | None:
    """As `FollowingKeys.left_by`, which remembers the keys that were tried for the step before."""
    return _last.left_by(began, fingerprint)
