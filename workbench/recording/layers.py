"""Which layers a model is made of: whether a loop has put another in a place, between two steps, or made it another.

`model.layers[1] = nn.Tanh()` changes no array, and no checkpoint holds it: a replay has the layer that its script
builds. Attributes of a layer that stays are looked at elsewhere (`python_values`). Knows modules; nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import is_
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..bare_objects import attributes, defined_in_python, is_a, plain_value
from ..object_graph import of_partial

_ROOT = "the model"
_PLAIN = (bool, int, float, str, type(None))


class Layers:
    """Those of some modules, as they were when last `noted`."""

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []
        self._kinds: list[type] = []
        self._paths: list[str] = []
        self._functions: list[Any] = []  # that are attributes of a layer, such as an activation …
        self._places: list[tuple[dict[str, Any], str]] = []  # … where each stands, and its path
        self._named: list[str] = []

    def note(self, roots: Mapping[str, nn.Module]) -> None:
        """
        Args:
            roots: by the name that comes before the paths of its layers; "" of the model.
        """
        found = _found(roots)
        self._paths, self._modules = list(found), list(found.values())
        self._kinds = list(map(type, self._modules))
        self._functions, self._places, self._named = [], [], []
        for path, one in found.items():
            held = attributes(one) or {}
            for key, value in held.items():
                if not is_a(value, (mx.array, set, *_PLAIN)) and callable(value):
                    self._functions.append(value)
                    self._places.append((held, key))
                    self._named.append(key if path == _ROOT else f"{path}.{key}")

    def same(self) -> bool:
        """Whether each that was there is of the class that it was of, and has the functions that it had."""
        return list(map(type, self._modules)) == self._kinds and all(map(is_, self._now(), self._functions))

    def _now(self) -> list[Any]:
        return [held.get(key) for held, key in self._places]

    def holds(self, module: Any) -> int:
        """How many references to a module this keeps."""
        return sum(one is module for one in self._modules)

    def changed(self, roots: Mapping[str, nn.Module]) -> str | None:
        """The first layer that does something else now, in words; None: none, as far as its attributes tell."""
        now = _found(roots)
        for path, then, kind in zip(self._paths, self._modules, self._kinds, strict=True):
            one = now.get(path)
            if one is None:
                return f"{path} (a layer that is gone)"
            if type(one) is not kind:
                return f"{path} (a {kind.__name__} before, a {type(one).__name__} now)"
            if one is not then and (name := _other_attribute(then, one)) is not None:
                return f"{path} (another {kind.__name__}, whose {name} is another)"
        functions = zip(self._named, self._functions, self._now(), strict=True)
        if (other := next((path for path, then, one in functions if not _alike(then, one)), None)) is not None:
            return f"{other} (another function)"
        new = next((path for path in now if path not in set(self._paths)), None)
        return None if new is None else f"{new} (a new {type(now[new]).__name__})"


def _found(roots: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    return {
        f"{name}.{path}".strip(".") or _ROOT: one
        for name, root in roots.items()
        for path, one in sorted(root.named_modules(), key=lambda pair: pair[0])
    }


def _other_attribute(then: nn.Module, now: nn.Module) -> str | None:
    """The name of a plain value or a function that is another one in a layer that stands in another's place."""
    before, after = _own(then), _own(now)
    others = (name for name in sorted(before.keys() | after.keys()) if not _alike(before.get(name), after.get(name)))
    return next(others, None)


def _own(module: nn.Module) -> dict[str, Any]:
    held = dict.items(module), (attributes(module) or {}).items()
    return {key: value for items in held for key, value in items if not is_a(value, (mx.array, dict, list, tuple))}


def _alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if is_a(one, _PLAIN) or is_a(other, _PLAIN):
        if type(one) is not type(other):
            return False
        left, right = plain_value(one), plain_value(other)
        return left == right or (left != left and right != right)
    if is_a(one, (set, frozenset)) and is_a(other, (set, frozenset)):
        return set(one) == set(other)
    if type(one) is not type(other):
        return False
    if is_a(one, partial):
        return all(map(_alike, of_partial(one), of_partial(other)))
    if is_a(one, (list, tuple)):
        return len(one) == len(other) and all(map(_alike, one, other))
    if is_a(one, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    code = getattr(one, "__code__", None)  # a function that is made anew each time
    return code is getattr(other, "__code__", None) and (code is not None or defined_in_python(type(one)))
