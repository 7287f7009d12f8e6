"""Which array a handle stands for: MLX's arrays never change, but a handle can be given another one.

A Python object of type `mx.array` is a handle. `weight *= 0.9` and `weight[0] = 0` keep the object and give it another
array, so that `is` sees nothing. MLX shows no identity of the array itself; nanobind, which makes the objects, keeps
its address behind their head (`nb_inst` in nanobind's `nb_internals.h`), and there it is read, if a try proves it
right. Nothing is computed or moved for it, on any device. Knows MLX's objects; nothing of experiments.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Iterable
from copy import copy

import mlx.core as mx

_AT = object.__basicsize__ + 8  # behind the object's head: 8 bytes of nanobind's own, then the array
_SIZE = 8
_WORDS = ctypes.cast(_SIZE, ctypes.POINTER(ctypes.c_uint64))  # all of memory, but for its first word, which is NULL's


def identities(handles: Iterable[mx.array]) -> list[int] | None:
    """Of each handle what tells its array from every other that is alive; None: this build of MLX does not show it."""
    return _read(handles) if _shown() else None


def _read(handles: Iterable[mx.array]) -> list[int]:
    words = _WORDS
    return [words[(id(handle) + _AT - _SIZE) >> 3] for handle in handles]


@functools.cache
def _shown() -> bool:
    """Whether what is read is one for handles of the same array, another for another, and another after a change."""
    kind: type = mx.array
    if sys.implementation.name != "cpython" or kind.__basicsize__ < _AT + _SIZE:
        return False
    one, other = mx.zeros(2), mx.zeros(2)
    mx.eval(one, other)
    same, scaled, assigned = copy(one), copy(one), copy(one)
    scaled *= 1
    assigned[0] = 0
    mx.eval(scaled, assigned)
    first, *alike = _read([one, copy(one), same])
    return set(alike) == {first} and len({first, *_read([other, scaled, assigned])}) == 4
