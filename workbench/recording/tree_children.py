"""Everything that the containers of a state hold, as one list: to tell in microseconds that nothing was put elsewhere.

Knows dicts, lists and MLX's arrays; nothing of paths or steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

import mlx.core as mx


class TreeChildren:
    """What the containers below some roots held when it was last asked to `look`.

    Attributes:
        walks: how often the containers had to be found, for they are others or stand elsewhere.
    """

    def __init__(self) -> None:
        self.walks = 0
        self._roots: list[Any] = []
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Sequence[Any]] = []
        self._kinds: list[type] = []  # of everything that they hold, in order …
        self._inner_places: list[int] = []  # … where the containers are in it, and the arrays
        self._array_places: list[int] = []
        self._inner: list[Any] = []
        self._seen: list[Any] = []

    def look(self, roots: Sequence[Any]) -> list[mx.array]:
        """Notes what is there now. Returns the arrays."""
        found = self._children()
        if not (_same(roots, self._roots) and list(map(type, found)) == self._kinds and self._holds_inner(found)):
            self._walk(roots)
            found = self._children()
            self._kinds = list(map(type, found))
            self._array_places = [place for place, kind in enumerate(self._kinds) if kind is mx.array]
            self._inner_places = [place for place, one in enumerate(found) if isinstance(one, (dict, list, tuple))]
            self._inner = [found[place] for place in self._inner_places]
        self._seen = found
        return list(map(found.__getitem__, self._array_places))

    def _holds_inner(self, found: list[Any]) -> bool:
        """Whether the containers stand where they stood."""
        return all(map(is_, map(found.__getitem__, self._inner_places), self._inner))

    def same(self, roots: Sequence[Any]) -> bool:
        """Whether each place holds the object that it held then."""
        return _same(roots, self._roots) and _same(self._children(), self._seen)

    def holds(self, container: Any) -> int:
        """How many references to a container this keeps."""
        return sum(one is container for one in chain(self._roots, self._dicts, self._lists, self._inner, self._seen))

    def forget(self) -> None:
        """Lets go of what was noted, but for the containers."""
        self._seen = []

    def _children(self) -> list[Any]:
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(self._lists)]

    def _walk(self, roots: Sequence[Any]) -> None:
        self.walks += 1
        self._roots, self._dicts, self._lists = list(roots), [], []
        todo, known = list(roots), set[int]()
        while todo:
            one = todo.pop()
            if id(one) in known or not isinstance(one, (dict, list, tuple)):
                continue
            known.add(id(one))
            if isinstance(one, dict):
                self._dicts.append(one)
                held: Iterable[Any] = dict.values(one)
            else:
                self._lists.append(one)
                held = one
            todo += [child for child in held if isinstance(child, (dict, list, tuple))]


def _same(left: Sequence[Any], right: Sequence[Any]) -> bool:
    return len(left) == len(right) and all(map(is_, left, right))
