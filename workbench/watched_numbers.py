"""Numbers that a step changes outside its state: whether what it computes may depend on them.

While the step is tried once more, a stand-in is in the place of each number. What is calculated from it is followed as
well, may be stored, and may become a text: a timer, a count of tokens, the mean of a meter. If MLX asks for it, or the
code that runs next is chosen by it, the step uses it. Where it is handed on as a number of its own (`float(x)`), what
becomes of it is not known. What loggers and progress bars do with it is no use. A text is not followed any further.
Knows Python's objects and frames; nothing of experiments.
"""

from __future__ import annotations

import dis
import operator
import sys
import threading
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .bare_objects import full_name, is_a, is_number
from .deep_snapshot import DeepSnapshot
from .object_graph import Place
from .report_branches import REPORTERS, only_reports
from .standins import Touched, without_counting

_OURS = __name__
_BY_MLX = "gives it to MLX"


class Used(BaseException):
    """The step uses one of the numbers. No error: a step that catches those must not go on."""


class Watch:
    """
    Attributes:
        used: by the path of each number that the step uses, how, and in which line.
        unclear: the same of those that were handed on.
    """

    def __init__(self) -> None:
        self.used: dict[str, str] = {}
        self.unclear: dict[str, str] = {}
        self._thread, self._over = threading.get_ident(), False

    def put(self, numbers: Mapping[str, tuple[Place, Any]]) -> None:
        """Puts a stand-in in the place of each number."""
        for path, (place, number) in numbers.items():
            place.put(_Number(number, path, self))

    def perform(self, step: Callable[[], Any]) -> Any:
        """What the step returns; None if it uses one of the numbers, or can't do with what stands for them."""
        try:
            return step()
        except Used:
            return None
        except Exception as error:
            trace = error.__traceback__
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = None if trace is None else trace.tb_frame
            found = self.unclear if where is not None and _reports(where) else self.used
            if not self.used:
                said = str(error).partition("\n")[0] or type(error).__name__
                found[""] = f"hands it to something that takes no other number in its place ({said})"
            return None
        finally:
            self._over = True

    @property
    def active(self) -> bool:
        return not self._over and threading.get_ident() == self._thread

    def use(self, path: str, how: str) -> None:
        """
        Raises:
            Used: it is none of what only reports.
        """
        frame = _asking()
        if self.active and not _reports(frame):
            self.used[path] = f"{how} ({_line(frame)})"
            raise Used(path)

    def choose(self, path: str) -> None:
        """As `use`, of a comparison."""
        if self.active and not only_reports(_asking()):
            self.use(path, "compares it")

    def hand_on(self, path: str) -> None:
        frame = _asking()
        if self.active and not _reports(frame) and not _becomes_text(frame):
            self.unclear.setdefault(path, f"hands it on as a number ({_line(frame)})")


def _asking() -> types.FrameType:
    """The frame that asked a stand-in for something."""
    frame: Any = sys._getframe(1)
    while frame.f_globals.get("__name__") == _OURS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _reports(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in REPORTERS


def _becomes_text(frame: types.FrameType) -> bool:
    """Whether the frame is at an operator `%`: with a number on its left it would have asked otherwise."""
    at = next((one for one in dis.get_instructions(frame.f_code) if one.offset == frame.f_lasti), None)
    return at is not None and at.argrepr in ("%", "%=")


def _line(frame: types.FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


class _Number:
    __slots__ = ("_stands_for",)
    __array_ufunc__ = None  # numpy leaves what is calculated with it to it

    def __init__(self, number: Any, path: str, watch: Watch) -> None:
        self._stands_for = number, path, watch

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._stands_for[0])

    def __str__(self) -> str:
        return str(self._stands_for[0])

    def __repr__(self) -> str:
        return repr(self._stands_for[0])

    def __format__(self, form: str) -> str:
        return format(self._stands_for[0], form)

    def __hash__(self) -> int:
        number, path, watch = self._stands_for
        watch.use(path, "looks something up by it")
        return hash(number)

    def __index__(self) -> int:
        number, path, watch = self._stands_for
        watch.use(path, "counts or looks something up by it")
        return operator.index(number)

    def __complex__(self) -> complex:
        number, path, watch = self._stands_for
        watch.use(path, _BY_MLX)  # which asks any object for this, first of all
        return complex(number)

    def __bool__(self) -> bool:
        number, path, watch = self._stands_for
        watch.choose(path)
        return bool(number)

    def __copy__(self) -> _Number:
        return self

    def __deepcopy__(self, memo: Any) -> _Number:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        number, path, watch = self._stands_for
        watch.hand_on(path)
        return type(number), (number,)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __getattr__(self, name: str) -> Any:
        number, path, watch = self._stands_for
        if name == "__mlx_array__":
            watch.use(path, _BY_MLX)
        if name.startswith("__"):
            raise AttributeError(name)
        watch.use(path, f"asks for its {name}")
        return getattr(number, name)


def _followed(result: Any, path: str, watch: Watch) -> Any:
    follow = watch.active and is_number(result)
    return _Number(result, path, watch) if follow else result


def _calculating(function: Callable[..., Any], *, turned: bool = False) -> Any:
    def method(self: _Number, *others: Any) -> Any:
        number, path, watch = self._stands_for
        known = []
        for other in others:
            if type(other) is _Number:
                known.append(other._stands_for[0])
                continue
            if other is not None and not is_a(other, (int, float, np.number)):
                watch.use(path, f"calculates with it and a {full_name(type(other))}")
            known.append(other)
        return _followed(function(*known, number) if turned else function(number, *known), path, watch)

    return method


def _comparing(function: Callable[..., Any]) -> Any:
    def method(self: _Number, other: Any) -> Any:
        number, path, watch = self._stands_for
        watch.choose(path)
        return function(number, other._stands_for[0] if type(other) is _Number else other)

    return method


def _handing_on(function: Callable[..., Any]) -> Any:
    def method(self: _Number) -> Any:
        number, path, watch = self._stands_for
        watch.hand_on(path)
        return function(number)

    return method


_ALONE: dict[str, Callable[..., Any]] = {"neg": operator.neg, "pos": operator.pos, "abs": abs, "round": round}
_OF_ITSELF: dict[str, Callable[..., Any]] = {"int": int, "float": float, "trunc": int}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Number, f"__{_name}__", _calculating(getattr(operator, _name)))
    setattr(_Number, f"__r{_name}__", _calculating(getattr(operator, _name), turned=True))
for _name, _function in _ALONE.items():
    setattr(_Number, f"__{_name}__", _calculating(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Number, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name, _function in _OF_ITSELF.items():
    setattr(_Number, f"__{_name}__", _handing_on(_function))


def uses_of(
    numbers: Mapping[str, tuple[Place, Any]], around: DeepSnapshot, step: Callable[[], Any], seen: Any
) -> Watch:
    """Performs a step that is not to count, and says how it uses the numbers. The state is left as that leaves it.

    Args:
        numbers: by path, where each stands, and what it is.
        around: what the step can reach, as it is now; it is put back.
        seen: what the step returns with the numbers themselves in place.
    """
    watch = Watch()
    try:
        with without_counting(around, around.opaque.values(), begin=lambda: watch.put(numbers)):
            found = watch.perform(step)
        if found not in (None, seen):
            watch.used[""] = "gives other bits with a stand-in in its place"
    except Touched as touched:
        watch.unclear[""] = f"uses {touched.what}, which it did not before"
    finally:
        for place, number in numbers.values():
            place.put(number)
    return watch
