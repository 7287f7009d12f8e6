"""A digest of an array's bits that any order of reading gives alike, so a device can compute it in parallel.

The bytes are taken as words of 32 bits. Each word is mixed with its place by a bijection, and the results are added
modulo 2^32, twice with other constants. One changed bit therefore always changes the digest; words that are swapped or
doubled change it with probability 1 - 2^-64. (A plain or XOR sum would miss them.) The rounds have the form of
MurmurHash3's finalizer (A. Appleby, public domain): multiply by an odd number, then XOR with the high bits.
"""

from __future__ import annotations

import numpy as np

# Odd, so that multiplying is a bijection; those of MurmurHash3 and xxHash32, whose authors chose them for avalanche.
MULTIPLIERS = ((0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35), (0x27D4EB2F, 0xC2B2AE3D, 0x165667B1))
STEPS = ((15, 13), (16, 14))  # bits of the shift after each multiplication
_STRETCH = 1 << 17  # words at a time: the temporaries stay in the cache


def digest(view: np.ndarray) -> tuple[int, int]:
    """The two 32-bit lanes of an array's bytes, in row-major order; zeros fill up the last word."""
    raw = np.ascontiguousarray(view).reshape(-1).view(np.uint8)
    whole = raw.size - raw.size % 4
    words = raw[:whole].view("<u4")
    rest = int.from_bytes(raw[whole:].tobytes(), "little")
    lanes = [0, 0]
    for start in range(0, words.size, _STRETCH):
        _add(lanes, words[start : start + _STRETCH].astype(np.uint32), start)
    if whole < raw.size:
        _add(lanes, np.array([rest], np.uint32), words.size)
    return lanes[0], lanes[1]


def _add(lanes: list[int], words: np.ndarray, start: int) -> None:
    places = np.arange(start, start + words.size, dtype=np.uint64).astype(np.uint32)
    for lane, ((place, *factors), shifts) in enumerate(zip(MULTIPLIERS, STEPS, strict=True)):
        mixed = words ^ places * np.uint32(place)
        for factor, shift in zip(factors, shifts, strict=True):
            mixed *= np.uint32(factor)
            mixed ^= mixed >> np.uint32(shift)
        lanes[lane] = (lanes[lane] + int(mixed.sum(dtype=np.uint32))) % 2**32
