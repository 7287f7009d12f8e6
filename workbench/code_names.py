"""The names that a function's code uses: of global variables, of attributes, and of modules that it imports.

Knows code objects; nothing of what stands under the names.
"""

from __future__ import annotations

import collections
import dis
import functools
import importlib.util
import types
from collections.abc import Callable
from typing import Any

_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


@functools.lru_cache(maxsize=4096)
def imported(code: types.CodeType, package: str) -> tuple[str, ...]:
    """Names of the modules that a function's code imports when it runs."""
    found, before = [], collections.deque[Any]([0, 0], maxlen=2)
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level = before[0] if type(before[0]) is int else 0
            if package or not level:
                found.append(importlib.util.resolve_name("." * level + str(one.argval), package or None))
        before.append(one.argval)
    return tuple(dict.fromkeys(found + _inside(code, lambda inner: imported(inner, package))))


@functools.lru_cache(maxsize=4096)
def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Names of the global variables that a function's code reads or sets, with the functions written inside it."""
    found = [str(one.argval) for one in dis.get_instructions(code) if one.opname in _GLOBAL]
    return tuple(dict.fromkeys(found + _inside(code, globals_used)))


@functools.lru_cache(maxsize=4096)
def attributes_used(code: types.CodeType) -> tuple[str, ...]:
    """Names of the attributes that a function's code asks for (and of global variables), as `globals_used`."""
    return tuple(dict.fromkeys([*code.co_names, *_inside(code, attributes_used)]))


@functools.lru_cache(maxsize=4096)
def chains(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Global variables of which a function's code asks an attribute at once, with it and those of it in turn, as
    `globals_used`: of ``nn.losses.mse_loss(x)`` the three names."""
    found: list[tuple[str, ...]] = []
    at: list[str] = []
    for one in dis.get_instructions(code):
        if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            at = [str(one.argval)]
        elif at and one.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            at.append(str(one.argval))
            found.append(tuple(at))
        elif one.opname not in ("CACHE", "EXTENDED_ARG"):
            at = []
    whole = [one for one in found if (one not in {longer[: len(one)] for longer in found if len(longer) > len(one)})]
    return tuple(dict.fromkeys([*whole, *_inside(code, chains)]))


def _inside(code: types.CodeType, names: Callable[[types.CodeType], tuple[Any, ...]]) -> list[Any]:
    return [name for one in code.co_consts if isinstance(one, types.CodeType) for name in names(one)]
