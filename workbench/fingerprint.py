"""One number a lane that differs when any bit of the state differs.

A lane is hashed as one stream of (path, dtype, shape, contents), paths in sorted order, so swapped and duplicated
values are seen. The hash is XXH3-128 (xxHash 0.8, https://xxhash.com): not cryptographic, but fast. Contents are the
raw bytes where the host can read them, and on a CUDA device their digest (`mixing`), which is computed there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import xxhash

from . import cuda
from .errors import RunError
from .files import canonical_json
from .host import FLOAT, quiet, quiet_square_sum, raw_views
from .lines.line import LANES
from .mixing import digest

# Named in the manifest: another hash of the same state is no evidence.
BYTES, MIXED = "xxh3_128", "xxh3_128 of mix32x2"
METHODS = (BYTES, MIXED)
# A state is read in parts, each as soon as it is computed: bytes that are worth one, and parts at most. Only the last,
# a sixteenth, is read when nothing is computed any more; and each costs MLX an evaluation.
_PART, _PARTS = 1 << 19, 16


def method_here() -> str:
    """The method that costs least on MLX's default device. Either gives the same everywhere."""
    return MIXED if cuda.available() else BYTES


def known_method(name: str, where: object) -> str:
    """The method that a manifest names.

    Raises:
        RunError: this workbench doesn't have it.
    """
    if name not in METHODS:
        raise RunError(f"{where} was fingerprinted with {name}; this workbench has {', '.join(METHODS)}")
    return name


def fingerprint(tensors: Mapping[str, mx.array], method: str = BYTES, squares: dict[str, float] | None = None) -> str:
    """The fingerprint of named tensors, 32 hexadecimal digits.

    Args:
        squares: receives the sum of squares of each float32 tensor for which the same read of memory gives it.
    """
    if method == MIXED:
        named = sorted(tensors)
        return _of_digests(_headers(tensors, named), digests([tensors[path] for path in named]))
    paths = tuple(sorted(tensors))
    stream = _Stream(_forms(paths), [tensors[path] for path in paths])
    with quiet():
        stream.take(slice(None), squares)
    return stream.digest.hexdigest()


class _Stream:
    """The stream that a lane is hashed as, of arrays under the paths of `forms`, which may be taken in several goes.

    Attributes:
        arrays: in the order of the paths.
        digest: of what was taken.
    """

    def __init__(self, forms: _Forms, arrays: list[mx.array]) -> None:
        self.arrays, self.digest = arrays, xxhash.xxh3_128()
        self._forms = list(zip(forms.paths, *forms.of(arrays), arrays, strict=True))

    def take(self, which: slice, squares: dict[str, float] | None) -> None:
        """The next ones, once they are computed; within `quiet`. `squares` as of `fingerprint`."""
        update = self.digest.update
        mx.eval(self.arrays[which])
        for path, header, is_float, array in self._forms[which]:
            update(header)
            memory = memoryview(array)  # type: ignore[arg-type]  # for a moment: the handle may be the caller's
            if not memory.c_contiguous:  # made row-major: squares of the array are added in an order of its own
                update(raw_views([array])[0].data)
            elif not is_float or squares is None:
                update(memory)
            elif memory.nbytes:
                squares[path] = quiet_square_sum(np.frombuffer(memory, FLOAT), update)
            else:
                squares[path] = 0.0


class _Forms:
    """What the stream has before the contents of each array under some paths: made anew where a dtype or shape changed.

    Attributes:
        paths: in their order.
    """

    def __init__(self, paths: tuple[str, ...]) -> None:
        self.paths = paths
        self._made: tuple[Any, Any] = None, ([], [])  # shapes and dtypes, and what was made for them

    def of(self, arrays: Sequence[mx.array]) -> tuple[list[bytes], list[bool]]:
        """Of each array its header, and whether it is float32."""
        now = [array.shape for array in arrays], [array.dtype for array in arrays]
        then, made = self._made  # read once: another thread may ask, too
        if then != now:
            headers = [_header(*one) for one in zip(self.paths, now[1], now[0], strict=True)]
            made = headers, [dtype == mx.float32 for dtype in now[1]]
            self._made = now, made
        return made


@functools.lru_cache(maxsize=64)
def _forms(paths: tuple[str, ...]) -> _Forms:
    return _Forms(paths)


@functools.lru_cache(maxsize=1 << 16)
def _header(path: str, dtype: mx.Dtype, shape: tuple[int, ...]) -> bytes:
    return f"{path}\0{dtype}\0{shape}\0".encode()


def _headers(tensors: Mapping[str, mx.array], paths: Iterable[str]) -> bytes:
    return b"".join(_header(path, tensors[path].dtype, tensors[path].shape) for path in paths)


def _of_digests(headers: bytes, found: np.ndarray) -> str:
    return xxhash.xxh3_128_hexdigest(headers + found.astype("<u4").tobytes())


def digests(arrays: Sequence[mx.array]) -> np.ndarray:
    """uint32 (n, 2): the digest of each array, computed where it is, and alike on every backend."""
    if cuda.available():
        reading = cuda.launch(arrays, digests=True)
        mx.eval(reading.pending)
        return reading.result()[1]
    return np.array([digest(view) for view in raw_views(arrays)], np.uint32).reshape(-1, 2)


def fingerprint_json(value: Any) -> str:
    """The fingerprint of a JSON value."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value))


@functools.lru_cache(maxsize=1 << 16)
def lane_of(path: str) -> str:
    """The lane of an optimizer array: Adam's `m` and `v` have their own, everything else is `other`."""
    leaf = path.rpartition(".")[2]
    return {"m": "adam_m", "v": "adam_v"}.get(leaf, "other") if "." in path else "other"


def lanes(
    weights: Mapping[str, mx.array],
    optimizer: Mapping[str, mx.array],
    rng: Iterable[int],
    cursor: Mapping[str, Any],
    method: str = BYTES,
    squares: dict[str, float] | None = None,
) -> dict[str, str]:
    """The fingerprint of each lane of a state: weights, adam_m, adam_v, other, rng, cursor.

    Args:
        squares: receives the sum of squares of optimizer arrays, as `fingerprint` does.
    """
    if method == MIXED:
        plan = LanePlan(weights, optimizer)
        return plan.lanes(digests(plan.arrays), rng, cursor)
    return BytesPlan(weights, optimizer).lanes(rng, cursor, squares)


@functools.lru_cache(maxsize=64)
def _paths_of_lanes(weights: tuple[str, ...], optimizer: tuple[str, ...]) -> list[tuple[str, tuple[str, ...]]]:
    """The paths of each lane, sorted."""
    groups: dict[str, list[str]] = {"weights": list(weights), "adam_m": [], "adam_v": [], "other": []}
    for path in optimizer:
        groups[lane_of(path)].append(path)
    return [(lane, tuple(sorted(paths))) for lane, paths in groups.items()]


def _with_json(found: dict[str, str], rng: Iterable[int], cursor: Mapping[str, Any]) -> dict[str, str]:
    found |= {"rng": fingerprint_json(list(rng)), "cursor": fingerprint_json(cursor)}
    return {lane: found[lane] for lane in LANES}


class BytesPlan:
    """The arrays of each lane of a state, which need not be evaluated yet."""

    def __init__(self, weights: Mapping[str, mx.array], optimizer: Mapping[str, mx.array]) -> None:
        self._lanes = {
            lane: _Stream(_forms(paths), [(weights if lane == "weights" else optimizer)[path] for path in paths])
            for lane, paths in _paths_of_lanes(tuple(weights), tuple(optimizer))
        }
        self._cuts = _cuts_of(tuple([tuple([one.nbytes for one in lane.arrays]) for lane in self._lanes.values()]))
        self._squares: dict[str, float] = {}
        self._taken = False

    def parts(self) -> list[list[mx.array]]:
        """The arrays in the order in which they are read: each part has a stretch of every lane."""
        lanes = self._lanes.values()
        return [
            [array for lane, cut in zip(lanes, cuts, strict=True) for array in lane.arrays[cut]] for cuts in self._cuts
        ]

    def take(self) -> None:
        """Reads all arrays, one part after another, each once it is computed."""
        for lane in self._lanes.values():
            lane.digest.reset()  # an interrupt may have cut it off before
        with quiet():
            for cuts in self._cuts:
                for (name, lane), cut in zip(self._lanes.items(), cuts, strict=True):
                    lane.take(cut, None if name == "weights" else self._squares)
        self._taken = True

    def lanes(
        self, rng: Iterable[int], cursor: Mapping[str, Any], squares: dict[str, float] | None = None
    ) -> dict[str, str]:
        """The fingerprints. `squares` as of the function `lanes`."""
        if not self._taken:
            self.take()
        if squares is not None:
            squares |= self._squares
        return _with_json({name: lane.digest.hexdigest() for name, lane in self._lanes.items()}, rng, cursor)


@functools.lru_cache(maxsize=64)
def _cuts_of(sizes: tuple[tuple[int, ...], ...]) -> list[list[slice]]:
    """Where to cut lanes of arrays of these sizes in bytes, so that each part has about as much of every lane: a kernel
    computes a weight together with its `m` and `v`."""
    parts = min(max(sum(map(sum, sizes)) // _PART, 1), _PARTS)
    ends = []
    for lane in sizes:
        before = np.cumsum([0, *lane])
        ends.append(np.searchsorted(before, before[-1] * np.arange(parts + 1) / parts).tolist())
        ends[-1][-1] = len(lane)
    return [[slice(own[part], own[part + 1]) for own in ends] for part in range(parts)]


class LanePlan:
    """What the lanes of a state need beside the digests of its arrays; it can be made while a device computes them.

    Attributes:
        names: of the arrays: ("weights" or "optimizer", path), lane by lane.
        arrays: in that order.
    """

    def __init__(self, weights: Mapping[str, mx.array], optimizer: Mapping[str, mx.array]) -> None:
        self.names: list[tuple[str, str]] = []
        self.arrays: list[mx.array] = []
        self._parts: dict[str, tuple[bytes, slice]] = {}
        for lane, paths in _paths_of_lanes(tuple(weights), tuple(optimizer)):
            start, group = len(self.arrays), weights if lane == "weights" else optimizer
            self.names += [("weights" if lane == "weights" else "optimizer", path) for path in paths]
            self.arrays += [group[path] for path in paths]
            self._parts[lane] = _headers(group, paths), slice(start, len(self.arrays))

    def lanes(self, found: np.ndarray, rng: Iterable[int], cursor: Mapping[str, Any]) -> dict[str, str]:
        """The fingerprints, from the digests of `arrays`: uint32 (n, 2)."""
        of_arrays = {lane: _of_digests(headers, found[rows]) for lane, (headers, rows) in self._parts.items()}
        return _with_json(of_arrays, rng, cursor)
