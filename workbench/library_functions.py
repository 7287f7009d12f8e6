"""The functions of libraries that a step calls: by name in their modules, and in the classes of layers and optimizers.

A loop may put another in the place of one: `nn.losses.mse_loss = mine`, `nn.Tanh.__call__ = mine`. What calls them is
told by the names that code uses. Knows functions and modules; runs nothing of them.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from typing import Any

from .bare_objects import MISSING, attributes, full_name, is_a, module_of, names_of, of_class, order_of
from .code_names import chains, globals_used
from .object_graph import IN_C, Place, closed_over, held_in_c, ours, own_module

LIBRARY = "library"  # kind of a place: nothing else is put there
_MOST = 2_000  # functions

Called = tuple[str, Any, Place]


def by_name(function: types.FunctionType) -> Iterator[Called]:
    """Those that a function's code calls as attributes of modules: path, function and place."""
    for names in chains(function.__code__):
        holder: Any = function.__globals__.get(names[0], MISSING)
        for at, name in enumerate(names[1:], 1):
            if not is_a(holder, types.ModuleType):
                break
            space = attributes(holder) or {}
            value = space.get(name, MISSING)
            if not is_a(value, types.ModuleType):
                if not own_module(holder) and _is_called(value):
                    yield ".".join(names[: at + 1]), value, Place(space, name, LIBRARY)
                break
            holder = value


def of_classes(classes: Iterable[tuple[str, type]]) -> Iterator[Called]:
    """The methods of classes that are not the user's, with what they close over and the functions of their own library
    that they call.

    Args:
        classes: each with a path.
    """
    seen: set[int] = set()
    todo: list[Called] = []
    for path, kind in classes:
        methods = names_of(kind).items()
        todo += [(f"{path}.{name}", one, Place(kind, name, LIBRARY)) for name, one in methods if _is_function(one)]
    todo.reverse()
    for _ in range(_MOST):
        if not todo:
            return
        path, value, place = todo.pop()
        yield path, value, place
        if is_a(value, types.FunctionType) and id(value) not in seen:
            seen.add(id(value))
            todo += reversed(list(_called(path, value)))


def _called(path: str, function: types.FunctionType) -> Iterator[Called]:
    for edge in closed_over(f"{path}.", function):
        if edge.place is not None and (inner := _within(edge.value)) is not MISSING:
            yield edge.path, inner, Place(edge.place.holder, edge.place.key, LIBRARY)
    space = function.__globals__
    if ours(space.get("__name__")):
        return  # that of the user's is followed elsewhere
    for name in globals_used(function.__code__):
        if (inner := _within(space.get(name, MISSING))) is not MISSING:
            yield f"{space.get('__name__')}.{name}", inner, Place(space, name, LIBRARY)
    for _, value, place in by_name(function):
        yield f"{place.holder.get('__name__')}.{place.key}", value, place


def _within(value: Any) -> Any:
    """A function, or the one that an object written in C calls, such as a compiled one; `MISSING` if it is none."""
    if full_name(type(value)) in IN_C:
        return next((one for one in held_in_c(value) if is_a(one, types.FunctionType)), MISSING)
    return value if _is_function(value) else MISSING


def _is_function(value: Any) -> bool:
    return is_a(value, (types.FunctionType, types.BuiltinFunctionType)) or full_name(type(value)) in _OF_MLX


def _is_called(value: Any) -> bool:
    return value is not MISSING and of_class(type(value), "__call__") is not MISSING


def library_bases(kind: type) -> list[type]:
    """A class and those that it is derived from, as far as they are MLX's and have methods of their own kind: without
    `nn.Module`, which keeps a tree and computes nothing."""
    return [one for one in order_of(kind) if module_of(one).startswith("mlx.") and full_name(one) != _BASE]


_OF_MLX = ("nanobind.nb_func", "nanobind.nb_method")
_BASE = "mlx.nn.layers.base.Module"
