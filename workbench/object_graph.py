"""The objects that functions and other objects hold on to: what each holds, by path, and where that stands in it.

Knows Python's objects, and numpy's and MLX's as leaves; nothing of experiments. Modules, the standard library's
machinery (threads, locks, loggers) and this package's own objects are not looked into. No code of a class is run.
"""

from __future__ import annotations

import collections
import functools
import gc
import os
import sys
import types
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .bare_objects import (
    MISSING,
    PLAIN,
    all_plain,
    attributes,
    class_names,
    defined_in_python,
    full_name,
    inherits,
    is_a,
    is_plain,
    items_of,
    module_of,
    name_of,
    names_of,
    order_of,
    plain_numpy,
    set_item,
    set_slot,
    slot,
    slots,
)
from .code_names import attributes_used, globals_used, imported
from .report_branches import BARS, REPORTERS

LIMIT = 100_000  # objects looked into: one to two seconds

_MACHINERY = {
    *("workbench", "threading", "_thread", "logging", "queue", "concurrent", "asyncio", "multiprocessing", "weakref"),
    *("importlib", "subprocess", "warnings", "abc", "typing", "ctypes", "ast", "re", "decimal", "datetime", "pathlib"),
    *(REPORTERS - BARS),  # a step may ask a bar where it stands
}
_LIBRARIES = {*sys.stdlib_module_names, "mlx", "numpy", "workbench", "pandas", "scipy", "matplotlib", "torch"}
_LIBRARIES |= REPORTERS
WRAPPING = ("mlx", "functools", "contextlib")  # whose functions may close over a user's
IN_C = ("mlx.core._gc_func", "mlx.core.custom_function", "nanobind.nb_bound_method")
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_DEPTH = 2  # modules within modules that a function's code may use by name
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


class Place(NamedTuple):
    """Where a value stands: an item of a container, what a cell holds, or an attribute."""

    holder: Any
    key: Any
    kind: str = "item"

    def put(self, value: Any) -> None:
        if self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind == "attribute":
            if is_a(self.holder, type):
                type.__setattr__(self.holder, self.key, value)
            else:
                set_slot(self.holder, self.key, value)
        else:
            set_item(self.holder, self.key, value)


class Names(NamedTuple):
    """Some of the names of a namespace: the global variables that a function uses."""

    space: dict[str, Any]
    names: tuple[str, ...]


class Slots(NamedTuple):
    """The attributes of an object that are not in a dict."""

    owner: Any
    names: tuple[str, ...]


class Edge(NamedTuple):
    """That something holds a value; `place` is None where nothing else can be put in its place."""

    path: str
    value: Any
    place: Place | None


def walk(roots: Iterable[tuple[str, Any]], skip: Collection[int], limit: int = LIMIT) -> Iterator[Edge]:
    """Every edge below the roots. What an object holds comes once; values that several hold come as often.

    An edge with a value that is `Names`, `Slots` or a namespace (a dict) stands for that part of its holder.

    Args:
        skip: ids of objects that are not looked into.

    Returns:
        The edges; the last one has the value `MISSING` if not all could be looked at, and the path of the first not.
    """
    seen = set(skip)
    todo = collections.deque(Edge(path, value, None) for path, value in roots)
    looked = 0
    while todo:
        edge = todo.popleft()
        yield edge
        if is_plain(edge.value) or is_a(edge.value, mx.array) or id(edge.value) in seen:
            continue
        if looked >= limit:
            yield Edge(edge.path, MISSING, None)
            return
        looked += 1
        seen.add(id(edge.value))
        todo.extend(_children(edge.path, edge.value))


def _children(path: str, value: Any) -> Iterator[Edge]:
    dot = f"{path}." if path else ""
    if is_a(value, (Names, Slots)) or type(value) is ENVIRONMENT:
        return
    if is_a(value, dict):
        yield from _items(path, value)
    elif is_a(value, (list, tuple, collections.deque)):
        if not all_plain(items := items_of(value)):
            placed = not is_a(value, tuple)
            for number, item in enumerate(items):
                yield Edge(f"{path}[{number}]", item, Place(value, number) if placed else None)
    elif is_a(value, (set, frozenset)):
        yield from (Edge(f"{path}{{}}", item, None) for item in items_of(value) if not is_plain(item))
    elif is_a(value, np.ndarray):
        yield from _objects(path, plain_numpy(value))
        if type(value) is np.ndarray:
            return
    elif is_a(value, weakref.ReferenceType):
        yield Edge(path, weakref.ReferenceType.__call__(value), None)
    elif inherits(value, *_WEAK):
        yield Edge(path, (attributes(value) or {}).get("data"), None)
    elif is_a(value, types.MappingProxyType):
        yield from _of_proxy(path, value)
        return
    elif is_a(value, functools.partial):
        for name, item in zip((path, f"{dot}args", f"{dot}keywords"), of_partial(value), strict=True):
            yield Edge(name, item, None)
    elif is_a(value, types.MethodType):
        yield Edge(f"{dot}self", value.__self__, None)
        yield Edge(path, value.__func__, None)
        return
    elif is_a(value, types.FunctionType):
        if ours(value.__module__):
            yield from _of_function(path, dot, value)
        elif _top(value.__module__) in WRAPPING:
            yield from closed_over(dot, value)
        return
    elif is_a(value, (staticmethod, classmethod, property)) or full_name(type(value)) in IN_C:
        yield from (Edge(path, one, None) for one in held_in_c(value))
        return
    elif is_a(value, BOUND):
        if not is_a(value.__self__, (types.ModuleType, type, type(None))):
            yield Edge(path, value.__self__, None)
        return
    elif is_a(value, memoryview):
        yield Edge(path, value.obj, None)
        return
    elif is_a(value, type):
        yield from _of_class(dot, value)
        yield from _of_metaclass(dot, value)
        return
    elif is_a(value, CACHED):
        yield Edge(path, (attributes(value) or {}).get("__wrapped__"), None)
    elif is_a(value, types.ModuleType) or _top(module_of(type(value))) in _MACHINERY:
        return
    if id(type(value)) not in _BARE:
        yield from _attributes(path, dot, value)


def _items(path: str, value: dict[Any, Any]) -> Iterator[Edge]:
    dot = f"{path}." if path else ""
    for key, item in list(dict.items(value)):
        kind = type(key)
        if is_plain(key) or kind is tuple and all_plain(key):
            named = f"{dot}{key}" if kind is str or kind is int or kind is bool else f"{path}[{str(key)[:20]}]"
        else:
            named = f"{path}[a {name_of(kind)}]"
            if id(kind) not in _KEYS:
                yield Edge(named, key, None)
        yield Edge(named, item, Place(value, key))


def _of_proxy(path: str, proxy: Any) -> Iterator[Edge]:
    """What a read-only view of a dict shows; the names of a class are not put back as a dict is."""
    for held in gc.get_referents(proxy):
        if is_a(held, dict) and "__module__" in held:
            yield from (Edge(edge.path, edge.value, None) for edge in _items(path, held))
        else:
            yield Edge(path, held, None)


def _objects(path: str, value: np.ndarray) -> Iterator[Edge]:
    if value.dtype == object:
        yield from (Edge(f"{path}[{number}]", item, None) for number, item in enumerate(value.flat))
    elif value.dtype.hasobject and value.dtype.names:
        for name in value.dtype.names:
            yield from _objects(f"{path}.{name}", value[name])


def _attributes(path: str, dot: str, value: Any) -> Iterator[Edge]:
    if (held := attributes(value)) is not None:
        yield Edge(path, held, None)
    kind: Any = type(value)
    if names := tuple(slots(kind)):
        yield Edge(path, Slots(value, names), None)
        for name in names:
            if (item := slot(value, name)) is not MISSING:
                yield Edge(f"{dot}{name}", item, Place(value, name, "attribute"))
    for one in order_of(kind):
        if ours(module_of(one)):
            yield Edge(f"{dot}{name_of(one)}", one, None)
        elif _top(module_of(one)) == "mlx" and defined_in_python(one):
            yield from _set_on(f"{dot}{name_of(one)}", one)


def _set_on(path: str, kind: type) -> Iterator[Edge]:
    """What one's own code has set on a class of MLX: functions of one's own, and what is no function."""
    yield Edge(path, Slots(kind, class_names(kind)), None)
    for name in class_names(kind):
        value = names_of(kind)[name]
        inner = value.__func__ if is_a(value, (staticmethod, classmethod)) else value
        inner = inner.fget if is_a(inner, property) else inner
        if not is_a(inner, types.FunctionType) or ours(inner.__module__):
            yield Edge(f"{path}.{name}", value, Place(kind, name, "attribute"))


def of_partial(value: Any) -> tuple[Any, ...]:
    """The function, the arguments and the keywords of a partial."""
    kind: Any = functools.partial
    return kind.func.__get__(value), kind.args.__get__(value), kind.keywords.__get__(value)


def held_in_c(value: Any) -> list[Any]:
    """What an object written in C holds, as it tells the collector of cyclic garbage: without its class."""
    return [one for one in gc.get_referents(value) if not is_plain(one) and not is_a(one, type)]


def _of_class(dot: str, kind: type) -> Iterator[Edge]:
    for one in order_of(kind) if ours(module_of(kind)) else ():
        if ours(module_of(one)):
            yield Edge(dot.removesuffix("."), Slots(one, class_names(one)), None)
            for name in class_names(one):
                yield Edge(f"{dot}{name}", names_of(one)[name], Place(one, name, "attribute"))


def _of_metaclass(dot: str, kind: type) -> Iterator[Edge]:
    if ours(module_of(type(kind))):
        yield Edge(f"{dot}{name_of(type(kind))}", type(kind), None)


def closed_over(dot: str, function: types.FunctionType) -> Iterator[Edge]:
    """The cells of a function, and what stands in each."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield Edge(f"{dot}{name}", cell, None)
        try:
            yield Edge(f"{dot}{name}", cell.cell_contents, Place(cell, "cell_contents", "cell"))
        except ValueError:  # not assigned yet
            continue


def _of_function(path: str, dot: str, function: types.FunctionType) -> Iterator[Edge]:
    """What it closes over, its defaults and attributes, and the global variables that its code uses."""
    yield from closed_over(dot, function)
    yield from (Edge(f"{dot}default {at}", item, None) for at, item in enumerate(function.__defaults__ or ()))
    if function.__kwdefaults__:
        yield Edge(path, function.__kwdefaults__, None)
    yield Edge(path, function.__dict__, None)  # empty or not: the step may give it attributes
    names, space = globals_used(function.__code__), function.__globals__
    yield Edge(path, Names(space, names), None)
    for name in names:
        if is_a(module := space.get(name), types.ModuleType):
            yield from of_module(f"{dot}{name}", module, function.__code__)
        elif name in space:
            yield Edge(f"{dot}{name}", space[name], Place(space, name))
    for name in imported(function.__code__, str(space.get("__package__") or "")):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if is_a(module := sys.modules.get(whole), types.ModuleType):
                yield from of_module(f"{dot}{whole}", module, function.__code__)


def of_module(path: str, module: Any, code: types.CodeType, depth: int = _DEPTH) -> Iterator[Edge]:
    """The variables of a module of one's own that a function's code may use by name."""
    space = attributes(module) or {}
    if not own_module(module):
        return
    names = tuple(name for name in attributes_used(code) if name in space)
    yield Edge(path, Names(space, names), None)
    for name in names:
        value = space[name]
        if not is_a(value, types.ModuleType):
            yield Edge(f"{path}.{name}", value, Place(space, name))
        elif depth:
            yield from of_module(f"{path}.{name}", value, code, depth - 1)


ENVIRONMENT: Any = type(os.environ)
CACHED = type(functools.lru_cache(len))  # of which nothing but what it wraps can be seen
_KEYS = set(map(id, (type, *PLAIN, types.FunctionType)))  # as the keys of a dict: found where they are used
_BARE = set(map(id, (dict, list, tuple, set, frozenset, collections.deque)))  # without attributes


def _top(module: Any) -> str:
    return module.partition(".")[0] if type(module) is str else ""


def own_module(module: Any) -> bool:
    """Whether a module is the user's, and was not installed."""
    space = attributes(module) or {}
    return ours(space.get("__name__")) and "site-packages" not in str(space.get("__file__") or "")


def ours(module: Any) -> bool:
    """Whether a module may be the user's: none of the standard library, MLX, numpy, what reports, or this package."""
    return _top(module) not in _LIBRARIES
