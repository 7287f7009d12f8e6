"""Whether a step's code reads what stands under a name, or only puts something in: a log that grows.

A list that the loop appends to often has the name of something else, of a module (`nn.losses`) say; and a step may
append to one at every tenth step. So for a container that it is named somewhere is not enough. Knows code; performs
nothing.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

from ..bare_objects import is_a
from ..experiment import Experiment
from ..object_graph import Place, ours
from .names_read import NamesRead

_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF"}
_METHODS = {"LOAD_ATTR", "LOAD_METHOD"}
_KEYS = {"LOAD_CONST", "LOAD_SMALL_INT", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_GLOBAL", "LOAD_DEREF"}
_PUTS = {"append", "appendleft", "extend", "add", "put", "put_nowait"}  # methods that return nothing
_BY_NAME = {"getattr", "attrgetter", "hasattr"}
_NOTHING = {"CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOT_TAKEN"}

Step = tuple[str, str]  # what an instruction does, and to what
_END: Step = ("", "")


class NameUses(NamesRead):
    """Of an experiment as it is now."""

    def __init__(self, experiment: Experiment) -> None:
        self._functions: dict[int, types.FunctionType] = {}
        super().__init__(experiment)

    def _called(self, path: str, function: types.FunctionType, root: str) -> bool:
        called = super()._called(path, function, root)
        if called and ours(function.__module__):
            self._functions[id(function)] = function
        return called

    def functions(self) -> list[types.FunctionType]:
        """The user's own that the step may call."""
        return list(self._functions.values())

    def reads_contents(self, path: str, place: Place | None) -> bool:
        """Whether the step may read what the container that stands there holds."""
        if not self.reads(path, place):
            return False
        parts = [part.partition("[")[0] for part in path.split(".")]
        attribute = place is not None and (place.kind != "item" or id(place.holder) in self._of_objects)
        if attribute and "[" not in path.rpartition(".")[2]:
            return True in self._uses(parts[-1])
        for part in reversed(parts[1:]):
            if uses := set(self._uses(part)):
                return True in uses
        return len(parts) < 3

    def _uses(self, name: str) -> Iterator[bool]:
        """Each use of a name: whether something is read there, and not only put in."""
        for function in self._functions.values():
            yield from _in_code(function.__code__, name, function.__globals__)


def _in_code(code: types.CodeType, name: str, variables: dict[str, object]) -> Iterator[bool]:
    if set(code.co_names) & _BY_NAME and name in code.co_consts:
        yield True
    steps = [(one.opname, str(one.argval)) for one in dis.get_instructions(code) if one.opname not in _NOTHING]
    steps = [_END, *steps, _END, _END, _END]
    for at, (what, argument) in enumerate(steps):
        if what in _LOADS and argument == name:
            before, of = steps[at - 1]
            if what in _METHODS and before == "LOAD_GLOBAL" and is_a(variables.get(of), types.ModuleType):
                continue
            yield not _puts(*steps[at + 1 : at + 4])
    for inner in code.co_consts:
        if is_a(inner, types.CodeType):
            yield from _in_code(inner, name, variables)


def _puts(one: Step, two: Step, three: Step) -> bool:
    """`name.append(…)`, `name[key] = …` and `name[key].append(…)`, by what comes after the name."""
    if _is_put(one):
        return True
    if one[0] not in _KEYS:
        return False
    return two[0] == "STORE_SUBSCR" or (two[0] in ("BINARY_SUBSCR", "BINARY_OP") and _is_put(three))


def _is_put(step: Step) -> bool:
    return step[0] in _METHODS and step[1] in _PUTS
