"""The objects that functions and other objects hold on to: what each holds, by path, and where that stands in it.

Knows Python's objects, and numpy's and MLX's as leaves; nothing of experiments. Modules, the standard library's
machinery (threads, locks, loggers) and this package's own objects are not looked into.
"""

from __future__ import annotations

import collections
import dis
import functools
import gc
import importlib.util
import os
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

LIMIT = 100_000  # objects looked into: one to two seconds
MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()
PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, slice)
_PLAIN = set(PLAIN)

_MACHINERY = {
    *("workbench", "threading", "_thread", "logging", "queue", "concurrent", "asyncio", "multiprocessing", "weakref"),
    *("importlib", "subprocess", "warnings", "abc", "typing", "ctypes", "ast", "re", "decimal", "datetime", "pathlib"),
}
_LIBRARIES = {*sys.stdlib_module_names, "mlx", "numpy", "workbench", "pandas", "scipy", "matplotlib", "torch"}
_IMMUTABLE_TYPE = 1 << 8  # a type's flag: written in C, as far as the interpreter's own are concerned
BOUND = (types.BuiltinMethodType, types.MethodWrapperType)
_DEPTH = 2  # modules within modules that a function's code may use by name
_WEAK = (weakref.WeakKeyDictionary, weakref.WeakValueDictionary)


def is_a(value: Any, kinds: Any) -> bool:
    """As `isinstance`, by the type alone: an object may answer for its class itself, by code of its own."""
    return issubclass(type(value), kinds)


class Place(NamedTuple):
    """Where a value stands: an item of a container, what a cell holds, or an attribute."""

    holder: Any
    key: Any
    kind: str = "item"

    def put(self, value: Any) -> None:
        if self.kind == "cell":
            self.holder.cell_contents = value
        elif self.kind == "attribute":
            (type if is_a(self.holder, type) else object).__setattr__(self.holder, self.key, value)
        elif is_a(self.holder, dict):
            dict.__setitem__(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


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
        if type(edge.value) in _PLAIN or is_a(edge.value, mx.array) or id(edge.value) in seen:
            continue
        if looked >= limit:
            yield Edge(edge.path, MISSING, None)
            return
        looked += 1
        seen.add(id(edge.value))
        todo.extend(_children(edge.path, edge.value))


def _children(path: str, value: Any) -> Iterator[Edge]:
    dot = f"{path}." if path else ""
    if is_a(value, (Names, Slots, ENVIRONMENT)):
        return
    if is_a(value, dict):
        yield from _items(path, value)
    elif is_a(value, (list, tuple, collections.deque)):
        if not all_plain(items := items_of(value)):
            placed = not is_a(value, tuple)
            for number, item in enumerate(items):
                yield Edge(f"{path}[{number}]", item, Place(value, number) if placed else None)
    elif is_a(value, (set, frozenset)):
        yield from (Edge(f"{path}{{}}", item, None) for item in items_of(value) if type(item) not in PLAIN)
    elif is_a(value, np.ndarray):
        yield from _objects(path, plain_numpy(value))
        if type(value) is np.ndarray:
            return
    elif is_a(value, weakref.ReferenceType):
        yield Edge(path, weakref.ReferenceType.__call__(value), None)
    elif is_a(value, _WEAK):
        yield Edge(path, object.__getattribute__(value, "data"), None)
    elif is_a(value, types.MappingProxyType):
        yield from _of_proxy(path, value)
        return
    elif is_a(value, functools.partial):
        yield Edge(path, value.func, None)
        yield Edge(f"{dot}args", value.args, None)
        yield Edge(f"{dot}keywords", value.keywords, None)
    elif is_a(value, types.MethodType):
        yield Edge(f"{dot}self", value.__self__, None)
        yield Edge(path, value.__func__, None)
        return
    elif is_a(value, types.FunctionType):
        if ours(value.__module__):
            yield from _of_function(path, dot, value)
        return
    elif is_a(value, (staticmethod, classmethod)):
        yield Edge(path, value.__func__, None)
        return
    elif is_a(value, property):
        yield from (Edge(path, one, None) for one in (value.fget, value.fset, value.fdel))
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
    elif (wrapped := _cached(value)) is not None:
        yield Edge(path, wrapped, None)
    elif is_a(value, types.ModuleType) or _top(type(value).__module__) in _MACHINERY:
        return
    if type(value) not in _BARE:
        yield from _attributes(path, dot, value)


def _items(path: str, value: dict[Any, Any]) -> Iterator[Edge]:
    dot = f"{path}." if path else ""
    for key, item in list(dict.items(value)):
        kind = type(key)
        if kind in _PLAIN or kind is tuple and all_plain(key):
            named = f"{dot}{key}" if kind in (str, int, bool) else f"{path}[{str(key)[:20]}]"
        else:
            named = f"{path}[a {kind.__name__}]"
            if kind not in KEYS:
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
    held = attribute(value, "__dict__")
    if is_a(held, dict):
        yield Edge(path, held, None)
    kind: Any = type(value)
    if names := slots(kind):
        yield Edge(path, Slots(value, names), None)
        for name in names:
            if (item := attribute(value, name)) is not MISSING:
                yield Edge(f"{dot}{name}", item, Place(value, name, "attribute"))
    for one in kind.__mro__:
        if ours(one.__module__):
            yield Edge(f"{dot}{one.__name__}", one, None)


def attribute(value: Any, name: str) -> Any:
    """An attribute as Python finds it where a class does not say otherwise: no code of the class is run."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return MISSING


@functools.lru_cache(maxsize=1024)
def slots(kind: Any) -> tuple[str, ...]:
    """Names of the attributes for which classes written in Python have made slots; the fields of one of msgspec's."""
    if fields := getattr(kind, "__struct_fields__", ()):
        return tuple(fields)
    return tuple(
        name
        for one in kind.__mro__
        if defined_in_python(one)
        for name, member in vars(one).items()
        if is_a(member, types.MemberDescriptorType)
    )


def _of_class(dot: str, kind: type) -> Iterator[Edge]:
    for one in kind.__mro__ if ours(kind.__module__) else ():
        if ours(one.__module__):
            yield Edge(dot.removesuffix("."), Slots(one, class_names(one)), None)
            for name in class_names(one):
                yield Edge(f"{dot}{name}", vars(one)[name], Place(one, name, "attribute"))


def _of_metaclass(dot: str, kind: type) -> Iterator[Edge]:
    if ours(type(kind).__module__):
        yield Edge(f"{dot}{type(kind).__name__}", type(kind), None)


def class_names(kind: type) -> tuple[str, ...]:
    """Attributes that a class statement, or an assignment since, has given a class; its methods, too."""
    inner = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return tuple(
        name
        for name, value in vars(kind).items()
        if (is_a(value, types.FunctionType) or not (name.startswith("__") and name.endswith("__")))
        and not name.startswith("_abc_")
        and not is_a(value, inner)
    )


def _of_function(path: str, dot: str, function: types.FunctionType) -> Iterator[Edge]:
    """What it closes over, its defaults and attributes, and the global variables that its code uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield Edge(f"{dot}{name}", cell, None)
        try:
            yield Edge(f"{dot}{name}", cell.cell_contents, Place(cell, "cell_contents", "cell"))
        except ValueError:  # not assigned yet
            continue
    yield from (Edge(f"{dot}default {at}", item, None) for at, item in enumerate(function.__defaults__ or ()))
    if function.__kwdefaults__:
        yield Edge(path, function.__kwdefaults__, None)
    yield Edge(path, function.__dict__, None)  # empty or not: the step may give it attributes
    names, space = globals_used(function.__code__), function.__globals__
    yield Edge(path, Names(space, names), None)
    for name in names:
        if isinstance(module := space.get(name), types.ModuleType):
            yield from _of_module(f"{dot}{name}", module, function.__code__)
        elif name in space:
            yield Edge(f"{dot}{name}", space[name], Place(space, name))
    for name in _imported(function.__code__, str(space.get("__package__") or "")):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            whole = ".".join(parts[:end])
            if isinstance(module := sys.modules.get(whole), types.ModuleType):
                yield from _of_module(f"{dot}{whole}", module, function.__code__)


def _of_module(path: str, module: types.ModuleType, code: types.CodeType, depth: int = _DEPTH) -> Iterator[Edge]:
    """The variables of a module of one's own that a function's code may use by name."""
    if not ours(module.__name__) or "site-packages" in (getattr(module, "__file__", None) or ""):
        return
    names = tuple(name for name in _attributes_used(code) if name in vars(module))
    yield Edge(path, Names(vars(module), names), None)
    for name in names:
        value = vars(module)[name]
        if not is_a(value, types.ModuleType):
            yield Edge(f"{path}.{name}", value, Place(vars(module), name))
        elif depth:
            yield from _of_module(f"{path}.{name}", value, code, depth - 1)


@functools.lru_cache(maxsize=4096)
def _imported(code: types.CodeType, package: str) -> tuple[str, ...]:
    """Names of the modules that a function's code imports when it runs."""
    found, before = [], collections.deque[Any]([0, 0], maxlen=2)
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level = before[0] if type(before[0]) is int else 0
            if package or not level:
                found.append(importlib.util.resolve_name("." * level + str(one.argval), package or None))
        before.append(one.argval)
    return tuple(dict.fromkeys(found + _inside(code, lambda inner: _imported(inner, package))))


@functools.lru_cache(maxsize=4096)
def globals_used(code: types.CodeType) -> tuple[str, ...]:
    """Names of the global variables that a function's code reads or sets, with the functions written inside it."""
    found = [str(one.argval) for one in dis.get_instructions(code) if one.opname in _GLOBAL]
    return tuple(dict.fromkeys(found + _inside(code, globals_used)))


@functools.lru_cache(maxsize=4096)
def _attributes_used(code: types.CodeType) -> tuple[str, ...]:
    return tuple(dict.fromkeys([*code.co_names, *_inside(code, _attributes_used)]))


def _inside(code: types.CodeType, names: Callable[[types.CodeType], tuple[str, ...]]) -> list[str]:
    return [name for one in code.co_consts if isinstance(one, types.CodeType) for name in names(one)]


ENVIRONMENT: Any = type(os.environ)
KEYS = {type, *_PLAIN, types.FunctionType}  # as the keys of a dict: found where they are used
_BARE = {dict, list, tuple, set, frozenset, collections.deque}  # without attributes
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"}


def items_of(value: Any) -> list[Any]:
    """The items of a list, tuple, deque or set, whatever a class derived from it does when it is looped over."""
    kinds: Any = (list, tuple, collections.deque, set, frozenset)
    return list(next(kind for kind in kinds if is_a(value, kind)).__iter__(value))


def plain_numpy(value: np.ndarray) -> np.ndarray:
    """A view of an array, or of one of a class derived from it, that does what numpy's own do."""
    return value if type(value) is np.ndarray else np.ndarray.view(value, np.ndarray)


def all_plain(values: Iterable[Any]) -> bool:
    return set(map(type, values)) <= _PLAIN


def _cached(value: Any) -> Any:
    return value.__wrapped__ if is_a(value, CACHED) else None


CACHED = type(functools.lru_cache(len))  # of which nothing but what it wraps can be seen


def _top(module: Any) -> str:
    return str(module).partition(".")[0]


def ours(module: Any) -> bool:
    """Whether a module may be the user's: none of the standard library, MLX, numpy or this package."""
    return _top(module) not in _LIBRARIES


@functools.lru_cache(maxsize=4096)
def defined_in_python(kind: Any) -> bool:
    if kind.__flags__ & _IMMUTABLE_TYPE:
        return False
    own = vars(kind)
    if "__dict__" in own or "__slots__" in own or any(is_a(one, types.FunctionType) for one in own.values()):
        return True
    return any(defined_in_python(base) for base in kind.__bases__)


def base_in_c(kind: type) -> type:
    """The first class of a type's order of resolution that was not written in Python."""
    return next(one for one in kind.__mro__ if not defined_in_python(one))
