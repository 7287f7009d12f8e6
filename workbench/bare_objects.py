"""Classes and objects as the interpreter itself has them: what they hold is read and set without running their code.

A class may answer for its attributes, items, length, class or equality by code of its own, which may do anything: move
an iterator on, load a file, print. So everything here goes through the interpreter's own descriptors and methods.
Knows Python's objects and numpy's arrays; nothing of experiments.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MISSING: Any = type("Missing", (), {"__repr__": lambda self: "nothing"})()

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis), range, slice)
_PLAIN = set(map(id, PLAIN))
_IMMUTABLE_TYPE = 1 << 8  # a type's flag: written in C, as far as the interpreter's own are concerned
_OF_TYPES = {name: vars(type)[name].__get__ for name in ("__dict__", "__mro__", "__bases__", "__flags__")}
_OF_TYPES |= {name: vars(type)[name].__get__ for name in ("__module__", "__name__", "__qualname__")}


def is_a(value: Any, kinds: Any) -> bool:
    """As `isinstance`, by the type alone: an object may answer for its class itself, by code of its own.

    Args:
        kinds: classes that have no `__subclasscheck__` (none of the abstract ones).
    """
    return issubclass(type(value), kinds)


def inherits(value: Any, *kinds: Any) -> bool:
    """As `is_a`, for abstract classes and those derived from them: without any that were registered with them."""
    wanted = set(map(id, kinds))
    return any(id(one) in wanted for one in order_of(type(value)))


def names_of(kind: Any) -> Any:
    """The namespace of a class."""
    return _OF_TYPES["__dict__"](kind)


def order_of(kind: Any) -> tuple[type, ...]:
    """A class and its bases, in the order in which they are asked for an attribute."""
    return _OF_TYPES["__mro__"](kind)


def module_of(kind: Any) -> str:
    """The module that a class says it is of."""
    named = _OF_TYPES["__module__"](kind)
    return named if type(named) is str else ""


def name_of(kind: Any) -> str:
    return _OF_TYPES["__name__"](kind)


def full_name(kind: Any) -> str:
    """With the module, if that is not Python's own."""
    where = module_of(kind)
    name = _OF_TYPES["__qualname__"](kind)
    return name if where == "builtins" else f"{where}.{name}"


def of_class(kind: Any, name: str) -> Any:
    """What a class or one of its bases has under a name, as it stands there; `MISSING` if none has."""
    return next((names_of(one)[name] for one in order_of(kind) if name in names_of(one)), MISSING)


def remembered(function: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function of classes that is called once for each; every time for one that has another hash than any class."""
    known = functools.lru_cache(maxsize=4096)(function)
    usual = {name: of_class(type, name) for name in ("__hash__", "__eq__")}

    @functools.wraps(function)
    def found(kind: Any) -> T:
        meta = type(kind)
        if meta is type or all(of_class(meta, name) is own for name, own in usual.items()):
            return known(kind)
        return function(kind)

    return found


def attributes(value: Any) -> dict[str, Any] | None:
    """The dict of an object's attributes, itself; None if it has none."""
    for one in order_of(type(value)):
        getter = names_of(one).get("__dict__")
        if type(getter) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            held = getter.__get__(value)
            return held if is_a(held, dict) else None
    return None


@remembered
def slots(kind: Any) -> dict[str, Any]:
    """By name, the descriptors of the attributes for which classes written in Python have made slots."""
    found: dict[str, Any] = {}
    for one in order_of(kind):
        for name, member in names_of(one).items() if defined_in_python(one) else ():
            if type(member) is types.MemberDescriptorType:
                found.setdefault(name, member)
    return found


def slot(value: Any, name: str) -> Any:
    """What stands in a slot; `MISSING` if nothing does."""
    try:
        return slots(type(value))[name].__get__(value)
    except AttributeError:
        return MISSING


def set_slot(value: Any, name: str, held: Any) -> None:
    """Args:
    held: `MISSING` to take out what stands there."""
    member = slots(type(value))[name]
    if held is not MISSING:
        member.__set__(value, held)
    elif slot(value, name) is not MISSING:
        member.__delete__(value)


def class_names(kind: type) -> tuple[str, ...]:
    """Attributes that a class statement, or an assignment since, has given a class; its methods, too."""
    inner = (types.MemberDescriptorType, types.GetSetDescriptorType)
    return tuple(
        name
        for name, value in names_of(kind).items()
        if (is_a(value, types.FunctionType) or not (name.startswith("__") and name.endswith("__")))
        and not name.startswith("_abc_")
        and not is_a(value, inner)
    )


@remembered
def defined_in_python(kind: Any) -> bool:
    if _OF_TYPES["__flags__"](kind) & _IMMUTABLE_TYPE:
        return False
    own = names_of(kind)
    if "__dict__" in own or "__slots__" in own or any(is_a(one, types.FunctionType) for one in own.values()):
        return True
    return any(defined_in_python(base) for base in _OF_TYPES["__bases__"](kind))


def base_in_c(kind: type) -> type:
    """The first class of a type's order of resolution that was not written in Python."""
    return next(one for one in order_of(kind) if not defined_in_python(one))


def items_of(value: Any) -> list[Any]:
    """The items of a list, tuple, deque or set, whatever a class derived from it does when it is looped over."""
    kinds: Any = (list, tuple, collections.deque, set, frozenset)
    return list(next(kind for kind in kinds if is_a(value, kind)).__iter__(value))


def set_item(holder: Any, key: Any, value: Any) -> None:
    """Puts an item into a dict, list or deque."""
    kinds: Any = (collections.OrderedDict, dict, list, collections.deque)
    next(kind for kind in kinds if is_a(holder, kind)).__setitem__(holder, key, value)


def is_plain(value: Any) -> bool:
    """Whether it is exactly of one of the types of `PLAIN`."""
    return id(type(value)) in _PLAIN


def all_plain(values: Iterable[Any]) -> bool:
    return set(map(id, map(type, values))) <= _PLAIN


def plain_numpy(value: np.ndarray) -> np.ndarray:
    """A view of an array, or of one of a class derived from it, that does what numpy's own do."""
    return value if type(value) is np.ndarray else np.ndarray.view(value, np.ndarray)


def is_number(value: Any) -> bool:
    """Whether it is one of Python's or numpy's numbers, and no truth value."""
    return is_a(value, (int, float, np.number)) and type(value) is not bool


def plain_value(value: Any) -> Any:
    """A number or text without the class derived from it that it may be of; anything else as it is."""
    if is_a(value, float):
        return float.__float__(value)
    if is_a(value, int) and type(value) is not bool:
        return int.__int__(value)
    return str.__str__(value) if is_a(value, str) else value
