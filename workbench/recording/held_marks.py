"""What a Python value is at one moment, as a mark to be told from that of another: small, and holding on to no array.

A number, text, function or class is marked by what it is; a list, dict or set by its size and keys, and any other
object by its class (what they hold has marks of its own); a buffer of numpy by its bytes, up to a limit. No code of a
class is run. Knows Python's objects and numpy's; nothing of experiments.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import functools
import types
from hashlib import sha256
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from ..bare_objects import (
    MISSING,
    defined_in_python,
    full_name,
    is_a,
    is_plain,
    items_of,
    name_of,
    plain_numpy,
    plain_value,
)
from ..object_graph import IN_C, held_in_c, of_partial

BUFFER = 1 << 20  # bytes of an array of numpy that are looked at: half a millisecond
BUFFERS = 1 << 24  # of all together
_LONG = 1_000  # items of a set, or of what has no paths of its own, that are looked at
_TEXT = 80  # characters of a value in a sentence
_DEEP = 4  # tuples in tuples, functions of functions

_WRITTEN_IN_C: tuple[type, ...] = (types.BuiltinFunctionType, type(mx.exp))
_ATOMS = (bytes, complex, range, slice, decimal.Decimal, np.dtype, mx.Dtype, np.generic)
_AS_THEY_ARE = set(map(id, (int, str, bool, bytes, type(None), type(Ellipsis), range, mx.Dtype)))
_TOLD_BY_TEXT = (complex, slice, decimal.Decimal, np.dtype)
FILLED = (list, dict, set, collections.deque, bytearray, np.ndarray)
"""Classes of what a step may only put something in."""


class Mark(NamedTuple):
    """
    Attributes:
        content: equal to that of the same value later.
        said: what a sentence calls it; None: as it is printed.
        value: it, if that is immutable.
    """

    content: Any
    said: str | None = None
    value: Any = MISSING

    @property
    def text(self) -> str:
        return _printed(self.value) if self.said is None else self.said

    def is_longer(self, then: Mark) -> bool:
        """Whether it is that of a list which had less items."""
        lists = [one.content for one in (then, self) if type(one.content) is tuple and one.content[0] == "list"]
        return len(lists) == 2 and lists[0][1] < lists[1][1]

    def beside(self, then: Mark) -> str:
        """The text in a sentence that has that of another mark, too."""
        text = self.text
        return text if text != then.text else f"another {text.removeprefix('a ').removeprefix('the ')}"


class Marks:
    """Those of one moment: together they read no more than `BUFFERS` bytes of numpy's."""

    def __init__(self) -> None:
        self._left = BUFFERS

    def of(self, value: Any) -> Mark | None:
        """None: it is too large to be looked at, or says nothing."""
        if is_plain(value) or type(value) is fractions.Fraction or is_a(value, (int, float, str, *_ATOMS)):
            return Mark(_token(value), value=value)
        if is_a(value, np.ndarray):
            return self._of_buffer(plain_numpy(value))
        if is_a(value, bytearray):
            size = bytearray.__len__(value)
            return Mark(_digest(value), _sized("bytearray", size, "byte")) if size <= BUFFER else None
        if is_a(value, dict):
            return Mark(_of_keys(value), _sized("dict", dict.__len__(value), "key"))
        if is_a(value, (list, tuple)):
            kind: Any = list if is_a(value, list) else tuple
            count = kind.__len__(value)
            return Mark((kind.__name__, count), _sized(kind.__name__, count, "item"))
        if is_a(value, (set, frozenset, collections.deque)):
            return _of_items(value)
        return Mark(_token(value), _named(value))

    def _of_buffer(self, value: np.ndarray) -> Mark | None:
        if value.dtype.hasobject or value.nbytes > min(BUFFER, self._left):
            return None
        self._left -= value.nbytes
        content = (value.shape, str(value.dtype), _digest(np.ascontiguousarray(value).tobytes()))
        return Mark(content, f"a numpy array of shape {value.shape}")


def _sized(kind: str, count: int, unit: str) -> str:
    return f"a {kind} of {count} {unit}{'' if count == 1 else 's'}"


def _digest(content: Any) -> bytes:
    return sha256(content).digest()


def _of_keys(value: dict[Any, Any]) -> Any:
    """The keys, and what has no path: the values under keys that are neither text nor whole numbers."""
    if dict.__len__(value) > _LONG:
        return "dict", dict.__len__(value)
    return frozenset((_token(key), None if is_a(key, (str, int)) else _token(item)) for key, item in dict.items(value))


def _of_items(value: Any) -> Mark:
    kind: Any = next(one for one in (set, frozenset, collections.deque) if is_a(value, one))
    count = kind.__len__(value)
    said = _sized(kind.__name__, count, "item")
    if count > _LONG:
        return Mark((kind.__name__, count), said)
    items = [_token(item) for item in items_of(value)]
    return Mark((kind.__name__, tuple(items) if kind is collections.deque else frozenset(items)), said)


def _token(value: Any, depth: int = _DEEP) -> Any:
    """Hashable, and equal for the same value. Of a class only the name is in it: hashing that may run code."""
    kind = type(value)
    name = full_name(kind)
    if kind is float or is_a(value, np.floating):
        return name, (float(value) + 0.0).hex()  # NaN is itself, and -0 is 0
    if id(kind) in _AS_THEY_ARE:
        return name, value
    if is_a(value, (int, float, str)):
        return name, _token(plain_value(value))
    if is_a(value, np.generic):
        return name, None if value.dtype.hasobject else value.tobytes()
    if kind is fractions.Fraction or is_a(value, _TOLD_BY_TEXT) and not defined_in_python(kind):
        return name, repr(value)
    if depth and is_a(value, tuple):
        return "tuple", tuple(_token(item, depth - 1) for item in items_of(value)[:_LONG])
    if is_a(value, types.FunctionType):
        return name, value.__module__, value.__qualname__, value.__code__
    if depth and (function := _wrapped(value)) is not MISSING:
        return name, _token(function, depth - 1)
    if is_a(value, _WRITTEN_IN_C):
        return name, value.__name__
    return name, full_name(value) if is_a(value, type) else None  # what it holds has paths of its own


def _wrapped(value: Any) -> Any:
    """The function that a method, a partial or a compiled function calls."""
    if is_a(value, types.MethodType):
        return value.__func__
    if is_a(value, functools.partial):
        return of_partial(value)[0]
    if full_name(type(value)) in IN_C:
        return next((one for one in held_in_c(value) if is_a(one, (types.FunctionType, functools.partial))), MISSING)
    return MISSING


def _named(value: Any) -> str:
    if is_a(value, (types.FunctionType, *_WRITTEN_IN_C)):
        return f"the function {value.__name__}"
    if (function := _wrapped(value)) is not MISSING:
        return _named(function)
    return f"the class {name_of(value)}" if is_a(value, type) else f"a {name_of(type(value))}"


def _printed(value: Any) -> str:
    kind, plain = type(value), plain_value(value)
    if type(plain) in (str, bytes):
        plain = plain[:_TEXT]
    try:
        text = repr(plain)
    except ValueError:  # a whole number of thousands of digits
        text = hex(plain)
    text = f"{name_of(kind)}({text})" if defined_in_python(kind) and plain is not value else text
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1]}…"
