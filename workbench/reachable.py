"""What can be reached from a model or a function beside a model's parameters: arrays and plain values, by path.

MLX looks for parameters in modules, dicts and lists, under names that do not start with `_`. Whatever else holds an
array (a tuple, an object, a closure) is neither trained nor saved. Knows MLX and Python objects; not experiments.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .host import raw_views
from .object_graph import class_names, globals_used, ours, slots
from .trees import state_arrays

Found = tuple[str, Any, tuple[Any, Any] | None]

_LIMIT = 20_000  # objects visited, and
_LONG = 1_000  # items of a list: enough for any model, and no walk through a data set
_PLAIN = (int, float, str, bool, type(None))
_FOREIGN = ("builtins", "mlx", "numpy", "workbench", "threading", "collections", "functools", "itertools", "types")


def unseen(model: nn.Module) -> list[str]:
    """Paths of the arrays that are reachable from the model but not in `parameters()`; without those below a name that
    starts with `_`, which is how MLX's own layers keep a constant."""
    return [path for path, value in beside(model) if isinstance(value, mx.array) and not _private(path)]


def beside(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Arrays and plain values that are reachable from the model, but for its parameters, each with its path."""
    known = {id(array) for array in state_arrays(model).values()}
    return ((path, value) for path, value in walk(model, "") if id(value) not in known)


def _private(path: str) -> bool:
    return any(part.startswith("_") for part in path.replace("[", ".").split("."))


def walk(root: Any, path: str, skip: Collection[int] = ()) -> Iterator[tuple[str, Any]]:
    """Arrays and plain values below an object, each with its path; objects with an id in `skip` are left out."""
    return ((found, value) for found, value, _ in visit(root, path, skip))


def visit(root: Any, path: str, skip: Collection[int] = ()) -> Iterator[Found]:
    """As `walk`, and the place of each: what holds it, and the key there; None where nothing else can be put."""
    seen = set(skip)
    todo: list[Found] = [(path, root, None)]
    for _ in range(_LIMIT):
        if not todo:
            return
        path, value, place = todo.pop()
        if isinstance(value, (mx.array, *_PLAIN)):
            yield path, value, place
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        todo += reversed(list(_children(path, value)))


def _children(path: str, value: Any) -> Iterator[Found]:
    dot = f"{path}." if path else ""
    if isinstance(value, nn.Module):
        for holder in (value, vars(value)):
            yield from ((f"{dot}{key}", item, (holder, key)) for key, item in holder.items() if key != "_no_grad")
    elif isinstance(value, Mapping):
        held = [(key, item) for key, item in list(value.items()) if isinstance(key, (str, int))]
        yield from ((f"{dot}{key}", item, (value, key)) for key, item in held)
    elif isinstance(value, functools.partial):
        yield from (
            (path, value.func, None),
            (f"{dot}args", value.args, None),
            (f"{dot}keywords", value.keywords, None),
        )
    elif isinstance(value, (list, tuple)):
        if len(value) > _LONG:
            return
        holds = isinstance(value, list)
        yield from ((f"{path}[{at}]", item, (value, at) if holds else None) for at, item in enumerate(value))
        yield from _attributes(dot, value)
    elif isinstance(value, types.MethodType):
        yield from ((f"{dot}self", value.__self__, None), (path, value.__func__, None))
    elif isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] not in _FOREIGN:
            yield from ((f"{dot}{name}", item, place) for name, item, place in _of_function(value))
    elif isinstance(value, type):
        if ours(value.__module__):
            yield from ((f"{dot}{name}", vars(value)[name], (value, name)) for name in _class_values(value))
    elif not isinstance(value, types.ModuleType) and type(value).__module__.partition(".")[0] not in _FOREIGN:
        yield from _attributes(dot, value)


def _attributes(dot: str, value: Any) -> Iterator[Found]:
    held = getattr(value, "__dict__", {})
    yield from ((f"{dot}{key}", item, (held, key)) for key, item in list(held.items()))
    kind: Any = type(value)
    for name in slots(kind):
        if hasattr(value, name):
            yield f"{dot}{name}", getattr(value, name), (value, name)
    for one in kind.__mro__:
        if ours(one.__module__):
            yield f"{dot}{one.__name__}", one, None


def _class_values(kind: type) -> list[str]:
    return [name for name in class_names(kind) if not callable(vars(kind)[name])]


def _of_function(function: types.FunctionType) -> Iterator[Found]:
    """What it closes over, its defaults, and the global variables that its code reads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents, (cell, "cell_contents")
        except ValueError:  # not assigned yet
            continue
    yield from ((f"default {number}", item, None) for number, item in enumerate(function.__defaults__ or ()))
    yield from ((key, item, (function.__dict__, key)) for key, item in function.__dict__.items())
    for name in globals_used(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name], (function.__globals__, name)


class Surroundings:
    """Arrays and plain values at one moment, to tell later which of them have changed, or to put them back.

    Args:
        found: gives them, each with its path and place, whenever it is called.
    """

    def __init__(self, found: Callable[[], Iterator[Found]]) -> None:
        self._found = found
        self._then = {path: copy.copy(value) for path, value, _ in found()}

    def changed(self) -> dict[str, tuple[Any, Any]]:
        """By path, the value then and now of those that are others now. New ones are not: a list that grows is what a
        loop logs."""
        return {path: (self._then[path], value) for path, value, _ in self._others()}

    def put_back(self) -> None:
        """Gives each the value that it had, where something else can be put in its place."""
        for path, _, place in list(self._others()):
            if place is None:
                continue
            holder, key = place
            if isinstance(holder, types.CellType):
                holder.cell_contents = self._then[path]
            elif isinstance(key, str) and not isinstance(holder, Mapping):
                setattr(holder, key, self._then[path])
            else:
                holder[key] = self._then[path]

    def _others(self) -> Iterator[Found]:
        return (one for one in self._found() if one[0] in self._then and _differs(self._then[one[0]], one[1]))


def _differs(then: Any, now: Any) -> bool:
    if not isinstance(then, mx.array) or not isinstance(now, mx.array):
        return type(then) is not type(now) or (then != now and then == then)  # NaN is no change
    if then.shape != now.shape or then.dtype != now.dtype:
        return True
    try:
        one, other = raw_views([then, now])
    except (RuntimeError, ValueError):  # an array of a trace that is over: the step left it there
        return True
    return one.ctypes.data != other.ctypes.data and one.tobytes() != other.tobytes()
