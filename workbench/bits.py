"""float32 values as bits, and back: the form in which "exact" is decided and in which NaN survives JSON.

Knows numbers only; nothing of telemetry, traces or MLX.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDS_TO_INF = 2.0**128 - 2.0**103  # half a unit above the largest float32
_SINGLE, _WORD = struct.Struct("=f"), struct.Struct("=I")
_PATTERN = re.compile(r"0x[0-9a-f]{8}")


def float_bits(value: float | np.floating) -> str:
    """The float32 bits of `value`, such as ``0x4013c28f``. A Python float is rounded to float32 first."""
    number = float(value) if type(value) in (float, np.float32) else math.nan
    if abs(number) < _ROUNDS_TO_INF:  # every step asks for some
        return f"0x{_WORD.unpack(_SINGLE.pack(number))[0]:08x}"
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
    number = _shortest(value)
    return number if math.isfinite(number) else None


def _shortest(value: float | np.floating) -> float:
    return float(str(value if type(value) is np.float32 else np.float32(value)))


def json_floats(values: Sequence[np.float32 | None]) -> tuple[list[float | None], list[str | None] | None]:
    """A float32 array for JSON.

    Args:
        values: float32, or None where the quantity is undefined.

    Returns:
        The numbers, null where undefined or not finite; and, only when an entry is not finite, the bits of every
        defined entry, so that NaN, inf and "undefined" stay apart.
    """
    if set(map(type, values)) <= {np.float32}:  # as is usual: every step logs four of these arrays
        usual = list(map(float, map(str, values)))
        if all(map(math.isfinite, usual)):
            return usual, None  # type: ignore[return-value]
    shortest = [None if value is None else _shortest(value) for value in values]
    numbers = [None if number is None or not math.isfinite(number) else number for number in shortest]
    if numbers == shortest:  # neither NaN nor inf is None
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


@dataclass(frozen=True)
class UlpDifference:
    """How far two arrays of one dtype and shape are apart.

    Attributes:
        size: elements.
        differing: elements whose bits differ. The two zeros differ in bits, and so do two NaN with other payloads.
        nonfinite: of these, the ones where a side is NaN or infinite: they have no distance.
        max_ulp: the greatest distance among the other differing ones, in units in the last place: how many steps from
            one value to the next representable one lead from the one to the other. Both zeros are one value, so that
            -0.0 is 0 from 0.0, and 1 from the smallest number. None if there is none, or the dtype has no ULP here.
        max_abs: the greatest absolute difference among the same ones, exact to float64: near zero few ULP are nothing,
            and a change of sign is very many.
    """

    size: int
    differing: int
    nonfinite: int = 0
    max_ulp: int | None = None
    max_abs: float | None = None


# Of each format: its word, and the word of +inf. Sign and magnitude order all of them alike (IEEE 754; bfloat16 is the
# upper half of float32).
_FORMATS = {
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}
_CHUNK = 1 << 22  # elements at a time: temporaries of some 100 MB however large the arrays


def ulp_difference(left: np.ndarray, right: np.ndarray, dtype: str) -> UlpDifference:
    """Compares two arrays bit by bit, and says how far apart they are.

    Args:
        left, right: of one shape and item size; bfloat16, which numpy lacks, as its uint16 words.
        dtype: what the elements mean: "float32", "float16" or "bfloat16"; of any other, bits are compared and no
            distance is given.

    Raises:
        ValueError: the arrays have different shapes or item sizes.
    """
    if left.shape != right.shape or left.itemsize != right.itemsize:
        raise ValueError(f"{left.dtype}{left.shape} and {right.dtype}{right.shape} can't be compared bit by bit")
    ours, theirs = (np.ascontiguousarray(array).reshape(-1) for array in (left, right))
    if dtype not in _FORMATS:
        item = np.dtype((np.void, left.itemsize))
        return UlpDifference(ours.size, int(np.count_nonzero(ours.view(item) != theirs.view(item))))
    word, infinity = _FORMATS[dtype]
    found = UlpDifference(ours.size, 0)
    for start in range(0, ours.size, _CHUNK):
        pair = [side[start : start + _CHUNK].view(word) for side in (ours, theirs)]
        unlike = pair[0] != pair[1]
        if unlike.any():
            found = _with_chunk(found, [words[unlike] for words in pair], dtype, infinity)
    return found


def _with_chunk(found: UlpDifference, pair: list[np.ndarray], dtype: str, infinity: int) -> UlpDifference:
    """Adds pairs of words that differ."""
    sign = 1 << (8 * pair[0].itemsize - 1)
    finite = np.logical_and(*((words & words.dtype.type(sign - 1)) < infinity for words in pair))
    measured = [words[finite] for words in pair]
    max_ulp, max_abs = found.max_ulp, found.max_abs
    if finite.any():
        signed = [words.astype(np.int64) for words in measured]
        left, right = (np.where(words < sign, words, sign - words) for words in signed)  # both zeros are 0
        max_ulp = max(max_ulp or 0, int(np.abs(left - right).max()))
        left, right = (_values(words, dtype) for words in measured)
        max_abs = max(max_abs or 0.0, float(np.abs(left - right).max()))
    nonfinite = found.nonfinite + int(np.count_nonzero(~finite))
    return UlpDifference(found.size, found.differing + finite.size, nonfinite, max_ulp, max_abs)


def _values(words: np.ndarray, dtype: str) -> np.ndarray:
    """As float64, which holds each of them exactly."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return words.view(dtype).astype(np.float64)


def flip_bit(bits: str, position: int = 0) -> str:
    """The same pattern with one bit changed; position 0 is the lowest."""
    return f"0x{int(bits, 16) ^ (1 << position):08x}"
