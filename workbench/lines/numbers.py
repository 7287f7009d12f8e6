"""Arrays of numbers as JSON text, parsed all at once."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from .columns import Odd


def _library() -> Any:
    try:
        return importlib.import_module("simdjson")
    except ImportError:  # there is no wheel of it for every Python; reading then takes about half as long again
        return None


simdjson = _library()

# Stands for null, which the parser takes for no number. If the text has it too, counting shows it.
_MARK = sys.float_info.max
_FLAT = msgspec.json.Decoder(list[float | None])


def count(text: bytes, character: bytes) -> int:
    """As `bytes.count` of a single byte that is frequent, and four times as fast."""
    return int(np.count_nonzero(np.frombuffer(text, np.uint8) == character[0]))


def flat_numbers(texts: Sequence[Any]) -> np.ndarray:
    """Arrays of equal length.

    Args:
        texts: bytes-like, each the JSON text of an array of numbers and nulls.

    Returns:
        float64, shape (arrays, length), each the nearest to the decimal number; NaN for null.

    Raises:
        Odd: an entry is something else, or the arrays differ in length, are empty or hold arrays.
    """
    joined = b",".join(texts)
    characters = np.frombuffer(joined, np.uint8)
    ends = np.flatnonzero(characters == ord("]"))
    starts = np.append(0, ends[:-1] + 2)
    # Each text begins and ends with a bracket, and there is no other: none has another in it.
    if count(joined, b"[") != len(texts) or len(ends) != len(texts) or ends[-1] != len(joined) - 1:
        raise Odd
    if starts[-1] >= len(joined) or (characters[starts] != ord("[")).any():
        raise Odd
    if (characters[starts[1:] - 1] != ord(",")).any():
        raise Odd
    before = _ranks(characters == ord(","), ends)
    width, rest = divmod(int(before[-1]) + 1, len(texts))
    if rest or (before != np.arange(width - 1, width * len(texts), width)).any():
        raise Odd
    values = _simd(joined) if simdjson is not None else _plain(joined)
    if len(values) != width * len(texts):  # empty arrays
        raise Odd
    return values.reshape(len(texts), width)


def _ranks(marked: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How many are marked before each place: counted in words of 64 bits, and a third as long as finding them all."""
    packed = np.packbits(marked, bitorder="little")
    words = np.zeros(len(packed) // 8 + 1, np.dtype("<u8"))
    words.view(np.uint8)[: len(packed)] = packed
    up_to = np.cumsum(np.bitwise_count(words), dtype=np.int64)  # to the end of each word
    own, bit = words[places >> 6], (places & 63).astype(np.uint64)
    return up_to[places >> 6] - np.bitwise_count(own >> bit)


class _Own(threading.local):
    """A parser for each thread: it keeps its memory from block to block."""

    def __init__(self) -> None:
        self.parser = simdjson.Parser()


_OWN = None if simdjson is None else _Own()


def _simd(joined: bytes) -> np.ndarray:
    assert _OWN is not None
    parser = _OWN.parser
    try:
        return np.frombuffer(parser.parse(b"[" + joined + b"]").as_buffer(of_type="d"))
    except TypeError:  # not all are numbers
        pass
    except (ValueError, RuntimeError):
        raise Odd from None
    nulls = joined.count(b"null")
    try:
        marked = joined.replace(b"null", repr(_MARK).encode())
        values = np.frombuffer(parser.parse(b"[" + marked + b"]").as_buffer(of_type="d"))
    except (TypeError, ValueError, RuntimeError):
        raise Odd from None
    absent = values == _MARK
    if np.count_nonzero(absent) != nulls:
        raise Odd
    return np.where(absent, np.nan, values)


def parsed(text: bytearray) -> np.ndarray:
    """A JSON array of numbers as float64, each the nearest to the decimal number.

    Raises:
        Odd: it is something else; or there is no library for it.
    """
    if _OWN is None:
        raise Odd
    try:
        return np.frombuffer(_OWN.parser.parse(text).as_buffer(of_type="d"))
    except (TypeError, ValueError, RuntimeError):
        raise Odd from None


def _plain(joined: bytes) -> np.ndarray:
    try:
        flat = b"[" + joined.translate(None, b"[]") + b"]"
        return np.array(_FLAT.decode(flat), np.float64)  # None becomes NaN, and no JSON number is one
    except (msgspec.MsgspecError, RecursionError):
        raise Odd from None
