"""Sums of squares of a step's arrays, computed where the arrays are: on the host, or on a CUDA device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import mlx.core as mx

from . import cuda, host
from .host import float_views, quiet, quiet_square_sum

Name = TypeVar("Name", bound=Hashable)


def method_here() -> str:
    """How norms are added on MLX's default device: in the manifest, since another order of adding has other bits."""
    return cuda.NORMS if cuda.available() else host.NORMS


def square_sums(arrays: Mapping[Name, mx.array], known: Mapping[Name, float] | None = None) -> dict[Name, float]:
    """The sum of squares of each floating array, as float64.

    Args:
        known: sums that another read of the same arrays gave already (`fingerprint.lanes`).
    """
    found = {name: value for name, value in known.items() if name in arrays} if known else {}
    rest = [name for name in arrays if name not in found] if found else list(arrays)
    if not rest and not cuda.available():
        return found
    if cuda.available():
        if rest:
            reading = cuda.launch([arrays[name] for name in rest], digests=False)
            mx.eval(reading.pending)
            found |= dict(zip(rest, map(float, reading.result()[0]), strict=True))
        # Squares that left float32's range there are added again on the host, which squares such values in float64.
        rest = [name for name in arrays if not 1e-30 < found[name] < 1e30]
    views = float_views([arrays[name] for name in rest])
    with quiet():
        for name, view in zip(rest, views, strict=True):
            found[name] = quiet_square_sum(view)
    return found
