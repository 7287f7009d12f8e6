"""float32 values as bits, and back: the form in which "exact" is decided and in which NaN survives JSON.

Knows numbers only; nothing of telemetry, traces or MLX.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # half a unit above the largest float32
_PATTERN = re.compile(r"0x[0-9a-f]{8}")


def float_bits(value: float | np.floating) -> str:
    """The float32 bits of `value`, such as ``0x4013c28f``. A Python float is rounded to float32 first."""
    if isinstance(value, float) and abs(value) >= _ROUNDS_TO_INF:  # numpy would warn
        value = math.copysign(math.inf, value)
    return f"0x{np.asarray(value, dtype=np.float32).view(np.uint32).item():08x}"


def bits_float(bits: str) -> np.float32:
    """The float32 with these bits.

    Raises:
        ValueError: `bits` is not ``0x`` and eight lower-case hexadecimal digits.
    """
    if not _PATTERN.fullmatch(bits):
        raise ValueError(f"{bits!r} is not float32 bits; expected 0x and eight lower-case hexadecimal digits")
    word = np.array([int(bits, 16)], dtype=np.uint32)
    return word.view(np.float32)[0]


def json_float(value: float | np.floating) -> float | None:
    """A Python float that prints with the fewest digits that give the same float32 again; None if not finite."""
    single = np.float32(value)
    return float(str(single)) if np.isfinite(single) else None


def json_floats(values: Sequence[np.float32 | None]) -> tuple[list[float | None], list[str | None] | None]:
    """A float32 array for JSON.

    Args:
        values: float32, or None where the quantity is undefined.

    Returns:
        The numbers, null where undefined or not finite; and, only when an entry is not finite, the bits of every
        defined entry, so that NaN, inf and "undefined" stay apart.
    """
    numbers = [None if value is None else json_float(value) for value in values]
    if all(value is None or np.isfinite(value) for value in values):
        return numbers, None
    return numbers, [None if value is None else float_bits(value) for value in values]


def array_bits(numbers: Sequence[float | None], bits: Sequence[str | None] | None) -> list[str | None]:
    """The inverse of `json_floats`, as bits: one entry a value, None where undefined.

    Raises:
        ValueError: the two lists have different lengths, or a pattern is malformed or contradicts its number.
    """
    if bits is None:
        return [None if number is None else float_bits(number) for number in numbers]
    if len(bits) != len(numbers):
        raise ValueError(f"{len(numbers)} numbers but {len(bits)} bit patterns")
    for number, pattern in zip(numbers, bits, strict=True):
        value = None if pattern is None else bits_float(pattern)
        finite = value is not None and np.isfinite(value)
        if (None if number is None else float_bits(number)) != (pattern if finite else None):
            raise ValueError(f"{number} stands beside the bits {pattern}, which mean {value}")
    return list(bits)


def ulp_distance(left: str, right: str) -> int | None:
    """How many float32 values lie between two bit patterns (0 for equal bits); None if either is not finite."""
    if not (np.isfinite(bits_float(left)) and np.isfinite(bits_float(right))):
        return None

    def ordered(bits: str) -> int:
        word = int(bits, 16)
        return word if word < 0x80000000 else 0x80000000 - word

    return abs(ordered(left) - ordered(right))


def flip_bit(bits: str, position: int = 0) -> str:
    """The same pattern with one bit changed; position 0 is the lowest."""
    return f"0x{int(bits, 16) ^ (1 << position):08x}"
