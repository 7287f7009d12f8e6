"""What can be reached from a model or a function beside a model's parameters: arrays and plain values, by path.

MLX looks for parameters in modules, dicts and lists, under names that do not start with `_`. Whatever else holds an
array (a tuple, an object, a closure) is neither trained nor saved. No code of a class is run to look at what it holds.
Knows MLX and Python objects; not experiments.
"""

from __future__ import annotations

import collections
import copy
import gc
import sys
import types
from collections.abc import Callable, Collection, Iterator
from functools import partial, partialmethod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .bare_objects import (
    MISSING,
    attributes,
    class_names,
    defined_in_python,
    full_name,
    inherits,
    is_a,
    is_number,
    items_of,
    module_of,
    name_of,
    names_of,
    order_of,
    plain_value,
    slot,
    slots,
)
from .code_names import globals_used, imported
from .host import raw_views
from .library_functions import LIBRARY, by_name, library_bases, of_classes
from .object_graph import (
    CACHED,
    IN_C,
    WRAPPING,
    Place,
    closed_over,
    held_in_c,
    of_module,
    of_partial,
    ours,
    own_module,
)
from .report_branches import REPORTERS
from .trees import state_arrays

Found = tuple[str, Any, Place | None]
Classes = dict[int, tuple[str, Any]]  # by id, for a class may have a hash of its own: a path, and the class
INHERITED = "inherited"  # kind of a place: in an object's attributes, where nothing stands yet

_LIMIT = 20_000  # objects visited, and
_LONG = 1_000  # items of a list: enough for any model, and no walk through a data set
_PLAIN = (int, float, str, bool, type(None))
_FOREIGN = {"builtins", "mlx", "numpy", "workbench", "threading", "collections", "functools", "itertools"}
_HOLDERS = (types.SimpleNamespace, partialmethod)
_ONCE = ("__init__", "__new__", "__post_init__", "__init_subclass__", "__repr__", "__str__")  # methods no step calls
_FOREIGN |= {"types", "queue"} | REPORTERS  # what a progress bar counts is its own


def unseen(model: nn.Module, skip: Collection[int] = ()) -> list[str]:
    """Paths of the arrays that are reachable from the model but not in `parameters()`; without those below a name that
    starts with `_`, which is how MLX's own layers keep a constant, and those below objects with an id in `skip`."""
    return [path for path, value in beside(model, skip) if isinstance(value, mx.array) and not _private(path)]


def beside(model: nn.Module, skip: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Arrays and plain values that are reachable from the model, but for its parameters, each with its path."""
    known = {id(array) for array in state_arrays(model).values()}
    return ((path, value) for path, value in walk(model, "", skip) if id(value) not in known)


def _private(path: str) -> bool:
    return any(part.startswith("_") for part in path.replace("[", ".").split("."))


def walk(root: Any, path: str, skip: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Arrays and plain values below an object, each with its path; objects with an id in `skip` are left out."""
    return ((found, value) for found, value, _ in visit(root, path, skip))


def visit(
    root: Any,
    path: str,
    skip: Collection[int] = (),
    also: tuple[type, ...] = (),
    classes: Classes | None = None,
) -> Iterator[Found]:
    """As `walk`, and the place of each: what holds it, and the key there; None where nothing else can be put.

    Args:
        also: classes of which each instance comes, too, as often as it is held; but for the root.
        classes: gets those whose methods a step may call, each with a path: of layers, and of the user's objects.
    """
    return _visit([(path, root, None)], {id(root)}, skip, also, classes)


def visit_methods(classes: Classes, skip: Collection[int] = (), also: tuple[type, ...] = ()) -> Iterator[Found]:
    """What the methods of classes reach: those of the user's with what they use, of MLX's which functions they are."""
    known: set[int] = set()
    while new := [one for key, one in classes.items() if key not in known]:
        known |= classes.keys()
        own = [(path, kind) for path, kind in new if ours(module_of(kind))]
        roots: list[Found] = [(f"{path}.{name}", one, None) for path, kind in own for name, one in _methods(kind)]
        yield from _visit(roots, (), skip, also, classes)
        if also:
            yield from of_classes([(path, kind) for path, kind in new if not ours(module_of(kind))])


def _methods(kind: type) -> Iterator[tuple[str, Any]]:
    inside = (staticmethod, classmethod, property)
    for name, one in names_of(kind).items():
        if name in _ONCE:
            continue
        for held in held_in_c(one) if is_a(one, inside) else [one]:
            if is_a(held, types.FunctionType):
                yield name, held


def _visit(
    todo: list[Found],
    roots: Collection[int],
    skip: Collection[int],
    also: tuple[type, ...],
    classes: Classes | None,
) -> Iterator[Found]:
    seen = set(skip)
    todo = todo[::-1]
    for _ in range(_LIMIT):
        if not todo:
            return
        path, value, place = todo.pop()
        if is_a(value, (mx.array, np.number, *_PLAIN)):
            yield path, value, place
            continue
        if id(value) not in roots and is_a(value, also):
            yield path, value, place
        if id(value) in seen or (place is not None and place.kind == LIBRARY):
            continue
        seen.add(id(value))
        if classes is not None:
            for name, kind in _kinds(path, value):
                classes.setdefault(id(kind), (name, kind))
        todo += reversed(list(_children(path, value)))


def _kinds(path: str, value: Any) -> Iterator[tuple[str, type]]:
    """The classes whose methods a step may call with a value, each with a path."""
    if is_a(value, nn.Module):
        kinds = [one for one in order_of(type(value)) if ours(module_of(one))] + library_bases(type(value))
        yield from ((f"{path}.{name_of(one)}" if path else name_of(one), one) for one in kinds)
    elif is_a(value, type) and ours(module_of(value)):
        yield path, value


def _children(path: str, value: Any) -> Iterator[Found]:
    dot = f"{path}." if path else ""
    if is_a(value, nn.Module):
        yield from _of_dict(dot, value)
        yield from (one for one in _of_dict(dot, attributes(value) or {}) if one[0] != f"{dot}_no_grad")
        yield from _inherited(dot, value)
    elif is_a(value, dict):
        yield from _of_dict(dot, value)
    elif inherits(value, collections.UserDict, collections.UserList):
        yield path, (attributes(value) or {}).get("data"), None
    elif is_a(value, types.MappingProxyType):
        yield from ((path, held, None) for held in gc.get_referents(value) if is_a(held, dict))
    elif is_a(value, partial):
        yield from zip((path, f"{dot}args", f"{dot}keywords"), of_partial(value), (None, None, None), strict=True)
    elif is_a(value, (list, tuple)):
        if len(items := items_of(value)) > _LONG:
            return
        holds = is_a(value, list)
        yield from ((f"{path}[{at}]", item, Place(value, at) if holds else None) for at, item in enumerate(items))
        yield from _attributes(dot, value)
    elif is_a(value, types.MethodType):
        yield from ((f"{dot}self", value.__self__, None), (path, value.__func__, None))
    elif is_a(value, types.FunctionType):
        if _top(value.__module__) not in _FOREIGN:
            yield from ((f"{dot}{name}", item, place) for name, item, place in _of_function(value))
        elif _top(value.__module__) in WRAPPING:
            yield from _closed_over(dot, value)
    elif is_a(value, type):
        if ours(module_of(value)):
            own = names_of(value)
            yield from ((f"{dot}{name}", own[name], Place(value, name, "attribute")) for name in _class_values(value))
    elif is_a(value, CACHED):
        yield path, (attributes(value) or {}).get("__wrapped__"), None
    elif full_name(type(value)) in IN_C:
        yield from ((path, one, None) for one in held_in_c(value))
    elif is_a(value, types.ModuleType):
        if own_module(value):  # held by an object
            yield from ((f"{dot}{name}", item, Place(space, name)) for space, name, item in _variables(value))
    elif is_a(value, _HOLDERS) or _top(module_of(type(value))) not in _FOREIGN:
        yield from _attributes(dot, value)


def _of_dict(dot: str, held: dict[Any, Any]) -> Iterator[Found]:
    for key, item in list(dict.items(held)):
        if is_a(key, (str, int)):
            yield f"{dot}{plain_value(key)}", item, Place(held, key)


def _top(module: Any) -> str:
    return module.partition(".")[0] if type(module) is str else ""


def _attributes(dot: str, value: Any) -> Iterator[Found]:
    yield from _of_dict(dot, attributes(value) or {})
    yield from _inherited(dot, value)
    for name in slots(type(value)):
        if (item := slot(value, name)) is not MISSING:
            yield f"{dot}{name}", item, Place(value, name, "attribute")
    for one in order_of(type(value)):
        if ours(module_of(one)):
            yield f"{dot}{name_of(one)}", one, None


def _inherited(dot: str, value: Any) -> Iterator[Found]:
    """Numbers that an object has from its class: with `self.n += 1` it gets one of its own, which starts from that."""
    own = attributes(value)
    if own is None:
        return
    known = set(own)
    for one in order_of(type(value)):
        for name in class_names(one) if ours(module_of(one)) else ():
            if name not in known and is_number(item := names_of(one)[name]):
                yield f"{dot}{name}", item, Place(own, name, INHERITED)
            known.add(name)


def _class_values(kind: type) -> list[str]:
    own = names_of(kind)
    return [name for name in class_names(kind) if not callable(own[name])]


def _of_function(function: types.FunctionType) -> Iterator[Found]:
    """What it closes over, its defaults, and the global variables that its code reads."""
    yield from _closed_over("", function)
    yield from ((f"default {number}", item, None) for number, item in enumerate(function.__defaults__ or ()))
    yield from _of_dict("", function.__kwdefaults__ or {})
    yield from _of_dict("", function.__dict__)
    space, code = function.__globals__, function.__code__
    modules: dict[str, Any] = {
        name: sys.modules.get(name) for name in imported(code, str(space.get("__package__") or ""))
    }
    for name in globals_used(code):
        if is_a(space.get(name), types.ModuleType):
            modules[name] = space[name]
        elif name in space:
            yield name, space[name], Place(space, name)
    for name, module in modules.items():
        if is_a(module, types.ModuleType):
            edges = of_module(name, module, code)
            yield from ((edge.path, edge.value, edge.place) for edge in edges if edge.place is not None)
    yield from by_name(function)


def _variables(module: Any) -> Iterator[tuple[dict[str, Any], str, Any]]:
    space = attributes(module) or {}
    for name, item in list(space.items()):
        if not name.startswith("__") and not is_a(item, types.ModuleType):
            yield space, name, item


def _closed_over(dot: str, function: types.FunctionType) -> Iterator[Found]:
    return ((edge.path, edge.value, edge.place) for edge in closed_over(dot, function) if edge.place is not None)


class Surroundings:
    """Arrays and plain values at one moment, to tell later which of them have changed, or to put them back.

    Args:
        found: gives them, each with its path and place, whenever it is called.
    """

    def __init__(self, found: Callable[[], Iterator[Found]]) -> None:
        self._found = found
        self._then = {path: copy.copy(value) if is_a(value, mx.array) else value for path, value, _ in found()}

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """By path, the value then and now of those that are others now. New ones are not: a list that grows is what a
        loop logs."""
        return {path: (_shown(self._then[path]), _shown(value)) for path, value, _ in self._others()}

    def places(self) -> dict[str, Place]:
        """Where those that are others now stand; without those in whose place nothing else can be put."""
        return {path: place for path, _, place in self._others() if place is not None}

    def put_back(self) -> None:
        """Gives each the value that it had, where something else can be put in its place."""
        for path, _, place in list(self._others()):
            if place is not None:
                place.put(self._then[path])

    def _others(self) -> Iterator[Found]:
        return (
            (path, value, place)
            for path, value, place in self._found()
            if path in self._then and _differs(self._then[path], value) and not _is_inherited(place)
        )


def _is_inherited(place: Place | None) -> bool:
    """The class has another number now, and says so by a path of its own."""
    return place is not None and place.kind == INHERITED


class _Named(str):
    """Stands in a sentence for a value of a class of one's own, without asking that for a text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _shown(value: Any) -> Any:
    kind = type(value)
    return _Named(f"{name_of(kind)}({plain_value(value)!r})") if defined_in_python(kind) else value


def _differs(then: Any, now: Any) -> bool:
    if not is_a(then, mx.array) or not is_a(now, mx.array):
        if type(then) is not type(now):
            return True
        one, other = plain_value(then), plain_value(now)
        return one is not other and one != other and one == one  # NaN is no change
    if then.shape != now.shape or then.dtype != now.dtype:
        return True
    try:
        one, other = raw_views([then, now])
    except (RuntimeError, ValueError):  # an array of a trace that is over: the step left it there
        return True
    return one.ctypes.data != other.ctypes.data and one.tobytes() != other.tobytes()
