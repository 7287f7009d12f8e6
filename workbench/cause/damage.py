"""How two states that should be one differ: which tensors, and in what way. Knows states; nothing of runs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from ..enumeration import some
from ..fingerprint import lane_of
from ..host import raw_views
from ..number_text import number
from ..snapshot import State

NAMED = 8  # tensors in a list of them
# A factor applied in the tensor's own dtype leaves each quotient within a rounding of it: half a unit in the last place
# is 2^-24 of a float32, 2^-11 of a float16, 2^-8 of a bfloat16.
ROUNDING = {mx.float32: 2.0**-22, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}


@dataclass(frozen=True)
class Damage:
    """One tensor, random state or cursor that differs.

    Attributes:
        lane: of the state: weights, adam_m, adam_v, other, rng, cursor.
        path: of the parameter that it is or belongs to; of the optimizer's array where it is neither.
        how: "zeroed", "scaled", "one bit", "swapped", "changed".
        detail: in words.
        numbers: `factor`, `index` (row-major) and `bit` (0 is the lowest), `differing` and `size` in elements.
    """

    lane: str
    path: str
    how: str
    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


def damages(left: State, found: State, parameters: Collection[str]) -> list[Damage]:
    """What differs in `found` from `left`, in the order weights, optimizer, random state, cursor.

    Args:
        parameters: paths of all parameters: moments are named by theirs.
    """
    differing = []
    for lane, path, ours, theirs in _pairs(left, found):
        owner = _owner(path, parameters)
        if ours is None or theirs is None:
            differing.append(Damage(lane, owner, "changed", f"{path} is only in one of the two"))
        elif ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            what = f"{ours.dtype}{ours.shape} became {theirs.dtype}{theirs.shape}"
            differing.append(Damage(lane, owner, "changed", what))
        else:
            one, other = raw_views([ours, theirs])
            if one.tobytes() != other.tobytes():
                swapped = _swapped(left, lane, path, owner, other)
                differing.append(swapped or _damage(lane, owner, ours, theirs))
    if left.rng != found.rng:
        differing.append(Damage("rng", "", "changed", f"random state {list(left.rng)} became {list(found.rng)}"))
    if left.cursor != found.cursor:
        differing.append(Damage("cursor", "", "changed", f"cursor {left.cursor} became {found.cursor}"))
    return differing


_Pair = tuple[str, str, mx.array | None, mx.array | None]


def _pairs(left: State, found: State) -> Iterator[_Pair]:
    """Lane, path, and the array on either side."""
    for path in dict.fromkeys((*left.weights, *found.weights)):
        yield "weights", path, left.weights.get(path), found.weights.get(path)
    for path in dict.fromkeys((*left.optimizer, *found.optimizer)):
        yield lane_of(path), path, left.optimizer.get(path), found.optimizer.get(path)


def _owner(path: str, parameters: Collection[str]) -> str:
    if path in parameters:
        return path
    owner = path.rpartition(".")[0]
    return next((one for one in (owner, owner.split(".", 2)[-1]) if one in parameters), path)


def _swapped(left: State, lane: str, path: str, owner: str, other: np.ndarray) -> Damage | None:
    """An m that holds what v held, or the reverse."""
    twin = {"adam_m": ".v", "adam_v": ".m"}.get(lane)
    partner = None if twin is None else left.optimizer.get(f"{path[:-2]}{twin}")
    if partner is None:
        return None
    (theirs,) = raw_views([partner])
    if theirs.shape != other.shape or theirs.tobytes() != other.tobytes():
        return None
    return Damage(lane, owner, "swapped", f"it holds what {path[:-2]}{twin} held")


def _damage(lane: str, path: str, ours: mx.array, theirs: mx.array) -> Damage:
    """Of two arrays of one dtype and shape that differ."""
    views = [np.ascontiguousarray(view).reshape(-1) for view in raw_views([ours, theirs])]
    one, other = (view.view(f"u{view.itemsize}") for view in views)
    where = np.flatnonzero(one != other)
    numbers: dict[str, float] = {"differing": len(where), "size": one.size}
    before, after = (np.array(array.astype(mx.float32)).reshape(-1).astype(np.float64) for array in (ours, theirs))
    flips = int(one[where[0]] ^ other[where[0]])
    if len(where) == 1 and flips.bit_count() == 1:
        index, bit = int(where[0]), flips.bit_length() - 1
        detail = f"bit {bit} of element {index}: {number(before[index], 6)} became {number(after[index], 6)}"
        return Damage(lane, path, "one bit", detail, numbers | {"index": index, "bit": bit})
    if not after.any():
        return Damage(lane, path, "zeroed", f"all {len(where):,} elements that were not 0 are 0", numbers)
    factor = _factor(before, after, ROUNDING.get(ours.dtype, 0.0))
    if factor is not None:
        return Damage(lane, path, "scaled", f"scaled by {number(factor, 6)}", numbers | {"factor": factor})
    return Damage(lane, path, "changed", f"{len(where):,} of {one.size:,} elements differ", numbers)


def _factor(before: np.ndarray, after: np.ndarray, rounding: float) -> float | None:
    """The one number by which every element was multiplied, if there is one. Elements that became subnormal or 0 lost
    digits, and say nothing."""
    usable = (before != 0) & np.isfinite(before) & np.isfinite(after) & (np.abs(after) > 1e-37)
    if usable.sum() < 2 or not rounding:
        return None
    quotients = after[usable] / before[usable]
    middle = float(np.median(quotients))
    same = np.abs(quotients - middle) <= rounding * abs(middle)
    return middle if middle and bool(same.all()) else None


def listed(found: list[Damage]) -> str:
    """In words, at most `NAMED` of them."""
    ways: dict[tuple[str, str], list[Damage]] = {}
    for one in found:
        ways.setdefault((one.lane, one.detail if one.how in ("scaled", "one bit") else one.how), []).append(one)
    words = []
    for (lane, _), alike in ways.items():
        first, names = alike[0], some((one.path or lane for one in alike), NAMED)
        words.append(f"{lane} of {names}: {first.detail}" if len(alike) == 1 else f"{lane} {first.how} in {names}")
    return "; ".join(words)
