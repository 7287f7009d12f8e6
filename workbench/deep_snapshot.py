"""All that can be reached from some objects, as it is at one moment: told apart from what it is later, and put back.

Every list, dict, set, deque, numpy array, attribute, closure and generator of random numbers is put back in place, the
same objects with what they held. What can't be (an iterator, an open file, an object written in another language) is
listed by its path and its places. Knows Python objects; nothing of experiments.
"""

from __future__ import annotations

import collections
import gc
import io
import queue
import socket
import threading
import types
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .bare_objects import (
    MISSING,
    PLAIN,
    base_in_c,
    defined_in_python,
    full_name,
    is_a,
    is_plain,
    items_of,
    module_of,
    name_of,
    of_class,
    order_of,
)
from .contents import KNOWN, Held, Kinds
from .object_graph import BOUND, CACHED, Edge, Names, Place, Slots, walk

BUDGET = 256 << 20  # bytes of numpy arrays that are copied; larger ones are made read-only meanwhile
ITEMS = 20_000_000  # items of lists, dicts and sets that are noted

_HARMLESS = {
    *("builtins", "nanobind", "mlx", "numpy", "types", "functools", "operator", "_operator", "re", "datetime"),
    *("decimal", "_decimal", "fractions", "pathlib", "uuid", "enum", "abc", "_abc", "typing", "weakref", "_weakref"),
    *("_thread", "threading", "logging", "inspect", "_struct", "zoneinfo", "ast", "time", "dataclasses"),
}
# Written in Python, with what they stand for elsewhere: in memory that processes share, in another process or machine.
_ELSEWHERE = {
    *("multiprocessing.sharedctypes.SynchronizedBase", "multiprocessing.shared_memory.SharedMemory"),
    *("multiprocessing.shared_memory.ShareableList", "multiprocessing.connection._ConnectionBase", "subprocess.Popen"),
    *("multiprocessing.queues.Queue", "multiprocessing.queues.SimpleQueue", "multiprocessing.process.BaseProcess"),
    *("multiprocessing.synchronize.SemLock", "multiprocessing.synchronize.Event", "multiprocessing.pool.Pool"),
    *("multiprocessing.managers.BaseProxy", "multiprocessing.managers.BaseManager", "http.client.HTTPConnection"),
    *("multiprocessing.synchronize.Condition", "concurrent.futures.process.ProcessPoolExecutor"),
}
_FUNCTIONS = {"cython_function_or_method", "builtin_function_or_method", "instancemethod", "fused_cython_function"}
_COMMON = set(map(id, (list, dict, tuple, set, np.ndarray, types.FunctionType, types.CellType)))
_STREAM: Any = order_of(io.BytesIO)[-2]  # that of C: io.IOBase is an abstract one
_STARTED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)


@dataclass
class Opaque:
    """What can't be looked into.

    Attributes:
        what: "iterator" (handing out its next item moves it on), "stream" (taking from it does), "sink" (only written
            to: it is left out of what can't be put back), "cache", or "unknown".
        places: where another object can be put in its place.
        fixed: it also stands where that is not possible.
    """

    path: str
    value: Any
    what: str
    places: list[Place] = field(default_factory=list)
    fixed: bool = False

    def __str__(self) -> str:
        return f"{self.path} (a {full_name(type(self.value))})"


class DeepSnapshot:
    """
    Args:
        roots: objects with their paths.
        skip: ids of objects that are not looked into.
        state: ids of arrays that are put back by others.
        own: ids of the dicts and lists in which they are: where one of them stands there, any array may stand later.

    Attributes:
        opaque: what can't be looked into, by its id.
        left_out: paths of what was not noted, as it is too much.
    """

    def __init__(
        self,
        roots: Iterable[tuple[str, Any]],
        skip: Collection[int] = (),
        state: Collection[int] = (),
        own: Collection[int] = (),
    ) -> None:
        self._held: list[Held] = []
        self._large: list[Held] = []
        self._alive: list[Any] = []  # an id must not be given to another object meanwhile
        self._bound: set[tuple[str, int]] = set()
        self.opaque: dict[int, Opaque] = {}
        self.left_out: list[str] = []
        noted: set[Any] = set(skip)
        kinds, size, items = Kinds(state, own), 0, 0
        shared: set[int] = set()  # arrays of the state that stand elsewhere, too
        for edge in _without_collecting(walk(roots, skip)):
            thing = edge.value
            if thing is MISSING:
                self.left_out.append(edge.path)
                continue
            if is_plain(thing) or id(thing) in skip:
                continue
            if (what := opaque(thing)) is not None:
                self._note(edge, what)
                continue
            if edge.place is not None and kinds.belongs(thing, edge.place.holder):
                continue
            key = (type(thing), id(thing[0]), thing[1]) if is_a(thing, (Names, Slots)) else id(thing)
            if key in noted or (kind := kinds.of(thing)) is None:
                continue
            noted.add(key)
            if id(thing) in state:
                shared.add(id(thing))
            self._alive.append(thing)
            items += (count := _length(thing))
            if items > ITEMS:
                items -= count
                self.left_out.append(edge.path)
            elif (size := size + kind.size(thing)) <= BUDGET:
                self._held.append(Held(edge.path, thing, kind, kind.read(thing)))
            else:
                size -= kind.size(thing)
                self._large.append(Held(edge.path, thing, kind, None))
        self._linked = [one for held in self._held if shared and (one := kinds.linked(held, shared)) is not None]
        self.left_out += [one.path for one in self._large if not is_a(one.thing, np.ndarray)]

    def _note(self, edge: Edge, what: str) -> None:
        bound = is_a(edge.value, BOUND)
        if what == "sink" and (bound or edge.place is None):
            return
        if edge.place is None and not bound and (edge.path, id(edge.value)) in self._bound:
            return  # the object of a bound method, which has a place itself
        if bound:
            self._bound.add((edge.path, id(edge.value.__self__)))
        found = self.opaque.setdefault(id(edge.value), Opaque(edge.path, edge.value, what))
        if edge.place is None:
            found.fixed = True
        else:
            found.places.append(edge.place)

    def changed(self) -> list[Held]:
        """What holds something else now than it did, as it was noted."""
        return [one for one in self._held if one.differs()]

    def put_back(self) -> list[str]:
        """Gives everything what it held. Returns the paths of what could not be."""
        failed = []
        for one in [*reversed(self.changed()), *self._linked]:  # parts before the wholes that hold them
            try:
                one.put_back()
            except (ValueError, TypeError, AttributeError, RuntimeError):
                failed.append(one.path)
        return failed

    @contextmanager
    def read_only(self) -> Iterator[None]:
        """Meanwhile the numpy arrays that are too large to be copied can't be written to."""
        arrays = [one.thing for one in self._large if is_a(one.thing, np.ndarray) and one.thing.flags.writeable]
        for one in arrays:
            one.flags.writeable = False
        try:
            yield
        finally:
            for _ in range(2):  # a view only after what it is a view of
                for one in arrays:
                    with suppress(ValueError):
                        one.flags.writeable = True

    @property
    def large(self) -> list[str]:
        """Paths of the numpy arrays that are made read-only."""
        return [one.path for one in self._large if is_a(one.thing, np.ndarray)]


def _length(thing: Any) -> int:
    if is_a(thing, dict):
        return dict.__len__(thing)
    return len(items_of(thing)) if is_a(thing, (list, set, collections.deque)) else 0


def _reads(stream: Any) -> bool:
    base: Any = base_in_c(type(stream))
    try:
        return not of_class(base, "closed").__get__(stream) and base.readable(stream)
    except (OSError, ValueError, AttributeError):  # of a class of one's own, which is no stream to read from
        return False


def _without_collecting(edges: Iterator[Edge]) -> Iterator[Edge]:
    """The collector of cyclic garbage would go through all that is noted again and again."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield from edges
    finally:
        if on:
            gc.enable()


def opaque(value: Any) -> str | None:
    """What an object is that can't be put back (see `Opaque`); None if it can, or never changes."""
    kind = type(value)
    if id(kind) in _COMMON:
        return None
    if is_a(value, KNOWN + PLAIN + (type, types.FunctionType, types.MethodType, types.ModuleType, Names, Slots)):
        return None
    if is_a(value, CACHED):
        return "cache"
    if is_a(value, BOUND):
        return opaque(value.__self__)
    structs = any(module_of(one).partition(".")[0] == "msgspec" for one in order_of(kind))
    if name_of(kind) in _FUNCTIONS or structs or module_of(kind).startswith("workbench."):
        return None
    if is_a(value, _STREAM):
        return "stream" if _reads(value) else "sink"
    if full_name(kind) == "_csv.writer":
        return "sink"
    if is_a(value, (socket.socket, queue.Queue, queue.SimpleQueue)):
        return "stream"
    if is_a(value, threading.local):
        return "unknown"
    if any(full_name(one) in _ELSEWHERE for one in order_of(kind)):
        return "unknown"
    step = of_class(kind, "__next__")
    if is_a(value, _STARTED) or not (step is MISSING or step is None or is_a(step, types.FunctionType)):
        return "iterator"
    base: Any = base_in_c(kind)
    if base is object or issubclass(base, KNOWN + PLAIN):
        return None
    known = module_of(base).partition(".")[0] in _HARMLESS and not defined_in_python(base)
    return None if known else "unknown"
