"""One number a lane that differs when any bit of the state differs.

A lane is hashed as one stream of (path, dtype, shape, raw bytes), paths in sorted order, so swapped and duplicated
values are seen. The per-step hash is XXH3-128 (xxHash 0.8, https://xxhash.com): not cryptographic, but fast.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import mlx.core as mx
import xxhash

from .files import canonical_json
from .host import raw_views
from .telemetry import LANES

METHOD = "xxh3_128"  # named in the manifest: another hash of the same state is no evidence


def fingerprint(tensors: Mapping[str, mx.array]) -> str:
    """The fingerprint of named tensors, 32 hexadecimal digits."""
    found = xxhash.xxh3_128()
    paths = sorted(tensors)
    for path, view in zip(paths, raw_views([tensors[path] for path in paths]), strict=True):
        found.update(f"{path}\0{tensors[path].dtype}\0{tensors[path].shape}\0".encode())
        if view.size:
            found.update(view.data)
    return found.hexdigest()


def fingerprint_json(value: Any) -> str:
    """The fingerprint of a JSON value."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


def lane_of(path: str) -> str:
    """The lane of an optimizer array: Adam's `m` and `v` have their own, everything else is `other`."""
    leaf = path.rpartition(".")[2]
    return {"m": "adam_m", "v": "adam_v"}.get(leaf, "other") if "." in path else "other"


def lanes(
    weights: Mapping[str, mx.array], optimizer: Mapping[str, mx.array], rng: Iterable[int], cursor: Mapping[str, Any]
) -> dict[str, str]:
    """The fingerprint of each lane of a state: weights, adam_m, adam_v, other, rng, cursor."""
    groups: dict[str, dict[str, mx.array]] = {"weights": dict(weights), "adam_m": {}, "adam_v": {}, "other": {}}
    for path, array in optimizer.items():
        groups[lane_of(path)][path] = array
    found = {lane: fingerprint(group) for lane, group in groups.items()}
    found |= {"rng": fingerprint_json(list(rng)), "cursor": fingerprint_json(cursor)}
    return {lane: found[lane] for lane in LANES}
