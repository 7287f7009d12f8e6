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
from .trees import state_arrays

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
    seen, todo = set(skip), [(path, root)]
    for _ in range(_LIMIT):
        if not todo:
            return
        path, value = todo.pop()
        if isinstance(value, (mx.array, *_PLAIN)):
            yield path, value
            continue
        if id(value) in seen:
            continue
        seen.add(id(value))
        todo += reversed(list(_children(path, value)))


def _children(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    dot = f"{path}." if path else ""
    if isinstance(value, nn.Module):
        yield from ((f"{dot}{key}", item) for key, item in [*value.items(), *vars(value).items()] if key != "_no_grad")
    elif isinstance(value, Mapping):
        yield from ((f"{dot}{key}", item) for key, item in list(value.items()) if isinstance(key, (str, int)))
    elif isinstance(value, functools.partial):
        yield from ((path, value.func), (f"{dot}args", value.args), (f"{dot}keywords", value.keywords))
    elif isinstance(value, (list, tuple)):
        if len(value) > _LONG:
            return
        yield from ((f"{path}[{number}]", item) for number, item in enumerate(value))
        yield from ((f"{dot}{key}", item) for key, item in getattr(value, "__dict__", {}).items())
    elif isinstance(value, types.MethodType):
        yield from ((f"{dot}self", value.__self__), (path, value.__func__))
    elif isinstance(value, types.FunctionType):
        if value.__module__.partition(".")[0] not in _FOREIGN:
            yield from ((f"{dot}{name}", item) for name, item in _of_function(value))
    elif not isinstance(value, (type, types.ModuleType)) and type(value).__module__.partition(".")[0] not in _FOREIGN:
        yield from ((f"{dot}{key}", item) for key, item in list(getattr(value, "__dict__", {}).items()))


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What it closes over, its defaults, and the global variables that its code names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((f"default {number}", item) for number, item in enumerate(function.__defaults__ or ()))
    for name in function.__code__.co_names:
        if name in function.__globals__:
            yield name, function.__globals__[name]


class Surroundings:
    """Arrays and plain values at one moment, to tell later which of them have changed.

    Args:
        found: gives them, each with its path, whenever it is called.
    """

    def __init__(self, found: Callable[[], Iterator[tuple[str, Any]]]) -> None:
        self._found = found
        self._then = {path: copy.copy(value) for path, value in found()}

    def changed(self) -> list[str]:
        """Paths of those that are others now. New ones are not: a list that grows is what a loop logs."""
        return [path for path, value in self._found() if path in self._then and _differs(self._then[path], value)]


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
