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


def left_by(began: Key, fingerprint: str) -> Key | None:
    """The key with a fingerprint (of the lane `rng`) that comes from another by drawing; None: none was found."""
    return next((key for key in _following(began) if fingerprint_json(list(key)) == fingerprint), None)


def _following(key: Key) -> Iterator[Key]:
    """A key, and those after each draw: a split's first half is the next state, its second the key of the draw."""
    yield key
    last = mx.array(key, mx.uint32)
    for _ in range(DRAWS // _AT_ONCE):
        keys = []
        for _ in range(_AT_ONCE):
            last = mx.random.split(last)[0]
            keys.append(last)
        yield from map(tuple, np.asarray(mx.stack(keys)).tolist())
