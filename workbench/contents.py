"""What one object holds by itself at one moment: read, compared with what it holds later, and put back in place.

Knows Python's containers, and buffers by name; nothing of experiments.
"""

from __future__ import annotations

import array
import collections
import copy
import io
import operator
import random
import types
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from .bare_objects import (
    MISSING,
    all_plain,
    class_names,
    is_a,
    is_plain,
    items_of,
    names_of,
    plain_numpy,
    set_slot,
    slot,
)
from .buffers import (
    bits_of,
    read_bytes,
    read_mlx,
    read_numpy,
    read_random,
    read_stream,
    same_mlx,
    same_state,
    write_bytes,
    write_generator,
    write_mlx,
    write_numpy,
    write_random,
    write_stream,
)
from .object_graph import ENVIRONMENT, Names, Slots


class Held(NamedTuple):
    """An object and what it held."""

    path: str
    thing: Any
    kind: Kind
    then: Any

    def differs(self) -> bool:
        return not self.kind.same(self.then, self.kind.read(self.thing))

    def put_back(self) -> None:
        """
        Raises:
            ValueError: it can't be.
        """
        self.kind.write(self.thing, self.then)
        if self.differs():
            raise ValueError(f"{self.path} can't be put back")


class Kind(NamedTuple):
    """How objects of one kind are read, compared and written."""

    name: str
    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    write: Callable[[Any, Any], None]
    size: Callable[[Any], int] = lambda thing: 0


class StateArray:
    """Stands for an array of the state where it belongs, which is put back by itself; all are alike.

    Args:
        array: which one it was, where that is to be the same object as another that stands elsewhere.
    """

    def __init__(self, array: mx.array | None = None) -> None:
        self.array = array

    def __call__(self, now: Any) -> Any:
        """What stands there, put back: `now` does."""
        return now if self.array is None else self.array


STATE = StateArray()


class Kinds:
    """How to read and write objects of every kind.

    Args:
        state: ids of the arrays of the state.
        own: ids of the dicts and lists that the state consists of. An array of it that stands anywhere else is kept as
            any other array: an average of the weights may begin as the weights themselves.
    """

    def __init__(self, state: Collection[int] = (), own: Collection[int] = ()) -> None:
        self._state, self._own = state, own
        self._dict = Kind("dict", self._pairs, _same_pairs, _write_dict)
        self._list = Kind("list", self._items, _same_items, _write_list)

    def of(self, thing: Any) -> Kind | None:
        """That of one object; None if it holds nothing by itself that could change."""
        if is_a(thing, dict):
            return self._dict
        if is_a(thing, list):
            return self._list
        if type(thing) is ENVIRONMENT:
            return _ENVIRONMENT
        return None if type(thing) is tuple else next((kind for kinds, kind in _SIMPLE if is_a(thing, kinds)), None)

    def belongs(self, array: Any, holder: Any) -> bool:
        """Whether that is an array of the state, where it is put back by others."""
        return id(array) in self._state and id(holder) in self._own

    def linked(self, one: Held, shared: Collection[int]) -> Held | None:
        """A dict or list of the state with those of its arrays that also stand elsewhere; None if there are none.

        Args:
            shared: ids of the arrays that do.
        """
        if id(one.thing) not in self._own:
            return None
        if is_a(one.thing, dict):
            now = {key: item for key, item in dict.items(one.thing) if id(item) in shared}
            then: list[Any] = [(key, StateArray(now[key]) if key in now else item) for key, item in one.then]
        else:
            items = items_of(one.thing)
            now = {at: item for at, item in enumerate(items) if id(item) in shared}
            then = [StateArray(now[at]) if at in now else item for at, item in enumerate(one.then)]
        return one._replace(then=then) if now else None

    def _shown(self, value: Any) -> Any:
        return STATE if id(value) in self._state else value

    def _pairs(self, value: dict[Any, Any]) -> list[tuple[Any, Any]]:
        pairs = list(_dict(value).items(value))
        return [(key, self._shown(item)) for key, item in pairs] if id(value) in self._own else pairs

    def _items(self, value: list[Any]) -> list[Any]:
        items = items_of(value)
        return [self._shown(item) for item in items] if id(value) in self._own and not all_plain(items) else items


def _alike(one: Any, other: Any) -> bool:
    return one is other or (
        type(one) is StateArray
        and (type(other) is StateArray or is_a(other, mx.array))
        or type(one) is type(other)
        and is_plain(one)
        and (one == other or one != one and other != other)
        and (type(one) not in (float, complex) or repr(one) == repr(other))  # 0.0 and -0.0 are equal
        or type(one) is type(other) is tuple  # MLX makes new ones where it traces a step
        and len(one) == len(other)
        and all(_alike(a, b) or _same_arrays(a, b) for a, b in zip(one, other, strict=True))
    )


def _same_arrays(one: Any, other: Any) -> bool:
    return is_a(one, mx.array) and is_a(other, mx.array) and same_mlx(one, other)


def _same_items(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and (all(map(operator.is_, one, other)) or all(map(_alike, one, other)))


def _same_pairs(one: list[tuple[Any, Any]], other: list[tuple[Any, Any]]) -> bool:
    return len(one) == len(other) and all(_alike(a[0], b[0]) and _alike(a[1], b[1]) for a, b in zip(one, other))  # noqa: B905


def _dict(thing: dict[Any, Any]) -> Any:
    """The class whose methods do to a dict what those of a class of one's own may not."""
    return collections.OrderedDict if is_a(thing, collections.OrderedDict) else dict


def _write_dict(thing: dict[Any, Any], then: list[tuple[Any, Any]]) -> None:
    kept = {key: value(dict.get(thing, key, MISSING)) if type(value) is StateArray else value for key, value in then}
    _dict(thing).clear(thing)
    _dict(thing).update(thing, {key: value for key, value in kept.items() if value is not MISSING})


def _write_list(thing: list[Any], then: list[Any]) -> None:
    now = items_of(thing)
    now += [MISSING] * (len(then) - len(now))
    kept = [value(now[at]) if type(value) is StateArray else value for at, value in enumerate(then)]
    list.__setitem__(thing, slice(None), [value for value in kept if value is not MISSING])


def _write_deque(thing: collections.deque[Any], then: list[Any]) -> None:
    collections.deque.clear(thing)
    collections.deque.extend(thing, then)


def _write_set(thing: set[Any], then: list[Any]) -> None:
    # What was added is taken out one by one: another order of the elements is another one for a loop over them.
    for extra in set(items_of(thing)) - set(then):
        set.discard(thing, extra)
    set.update(thing, then)


def _named(read: Callable[[Any, str], Any]) -> Callable[[Any], list[tuple[str, Any]]]:
    return lambda part: [(name, read(part[0], name)) for name in part[1]]


def _read_slots(part: Slots) -> list[tuple[str, Any]]:
    if is_a(part.owner, type):
        own = names_of(part.owner)
        return [(name, own[name]) for name in class_names(part.owner)]
    return [(name, slot(part.owner, name)) for name in part.names]


def _write_slots(part: Slots, then: list[tuple[str, Any]]) -> None:
    wanted, now = dict(then), dict(_read_slots(part))
    for name in now.keys() | wanted.keys():
        value = wanted.get(name, MISSING)
        if value is now.get(name, MISSING):
            continue
        if not is_a(part.owner, type):
            set_slot(part.owner, name, value)
        elif value is MISSING:
            type.__delattr__(part.owner, name)
        else:
            type.__setattr__(part.owner, name, value)


def _write_names(part: Names, then: list[tuple[str, Any]]) -> None:
    for name, value in then:
        if value is MISSING:
            part.space.pop(name, None)
        elif part.space.get(name, MISSING) is not value:
            part.space[name] = value


def _read_cell(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return [MISSING]


def _write_cell(cell: types.CellType, then: list[Any]) -> None:
    if then[0] is MISSING:
        del cell.cell_contents
    else:
        cell.cell_contents = then[0]


def _same_numpy(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.dtype == object:
        return all(map(_alike, one.flat, other.flat))
    return one.tobytes() == other.tobytes()


def _write_environment(thing: Any, then: dict[str, str]) -> None:
    for name in [name for name in thing if name not in then]:
        del thing[name]
    for name, value in then.items():
        if thing.get(name) != value:
            thing[name] = value


RANDOM = "random numbers"
_ENVIRONMENT = Kind("mapping", dict, dict.__eq__, _write_environment)
_SIMPLE: list[tuple[Any, Kind]] = [
    (mx.array, Kind("array", read_mlx, same_mlx, write_mlx)),
    (np.ndarray, Kind("numpy array", read_numpy, _same_numpy, write_numpy, lambda thing: plain_numpy(thing).nbytes)),
    (collections.deque, Kind("deque", items_of, _same_items, _write_deque)),
    (set, Kind("set", items_of, _same_items, _write_set)),
    (
        (bytearray, array.array),
        Kind("buffer", read_bytes, bytes.__eq__, write_bytes, lambda thing: memoryview(thing).nbytes),
    ),
    (types.CellType, Kind("variable", _read_cell, _same_items, _write_cell)),
    (Names, Kind("variables", _named(lambda space, name: space.get(name, MISSING)), _same_pairs, _write_names)),
    (Slots, Kind("attributes", _read_slots, _same_pairs, _write_slots)),
    ((io.BytesIO, io.StringIO), Kind("stream", read_stream, _same_items, write_stream)),
    (random.Random, Kind(RANDOM, read_random, list.__eq__, write_random)),
    (
        (np.random.Generator, np.random.BitGenerator),
        Kind(RANDOM, lambda thing: copy.deepcopy(bits_of(thing).state), same_state, write_generator),
    ),
    (
        np.random.RandomState,
        Kind(RANDOM, lambda thing: thing.get_state(legacy=False), same_state, np.random.RandomState.set_state),
    ),
]
KNOWN = (
    *(mx.array, np.ndarray, dict, list, tuple, set, frozenset, collections.deque, bytearray, array.array),
    *(types.CellType, io.BytesIO, io.StringIO, random.Random, np.random.Generator, np.random.BitGenerator),
    *(np.random.RandomState, BaseException, types.SimpleNamespace),
)
