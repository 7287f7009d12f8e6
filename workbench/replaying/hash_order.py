"""Whether a step's code depends, by its names, on how Python hashes texts: each process does that in its own way,
unless the variable PYTHONHASHSEED is set when it begins, and goes through a set of texts in another order.

Knows code and objects; performs nothing.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator

from ..bare_objects import is_a, items_of
from ..enumeration import some
from ..experiment import Experiment
from ..object_graph import walk
from ..outside_state import known_to
from ..own_scripts.users_code import bare
from ..recording.name_uses import NameUses

_LOADS = {"LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FAST", "LOAD_CONST"}
_NOTHING = {"CACHE", "EXTENDED_ARG", "PUSH_NULL", "NOT_TAKEN", "PRECALL"}
_ANY_ORDER = {"sorted", "len", "min", "max", "bool", "any", "all"}
_KEPT = {"add", "discard", "remove", "update", "issubset", "issuperset", "isdisjoint", "clear", "copy"}


def by_hash(experiment: Experiment) -> str | None:
    """What of a step's code shows that it may go by the hashes of texts, as the end of a sentence; None: nothing."""
    uses = NameUses(experiment)
    found: list[str] = []
    for function in uses.functions():
        found += _of_code(function.__code__, function.__name__, function.__globals__)
    name = "loss_fn" if experiment.step_fn is None else "step_fn"
    roots = [("model", experiment.model), (name, bare(getattr(experiment, name)))]
    sets: dict[int, str] = {}
    for edge in walk(roots, known_to(experiment) - {id(experiment.model)}):
        if is_a(edge.value, (set, frozenset)) and _of_texts(edge.value) and uses.reads(edge.path, edge.place):
            last = edge.path.rpartition(".")[2].partition("[")[0]
            if any(_goes_through(one.__code__, last) for one in uses.functions()):
                if "__init__" not in edge.path:  # which is not called by a step
                    sets.setdefault(id(edge.value), f"uses the set {edge.path}")
    found += sets.values()
    return some(list(dict.fromkeys(found)), 4) if found else None


def _of_texts(value: set[object]) -> bool:
    items = items_of(value)
    return len(items) > 1 and any(is_a(one, (str, bytes, tuple)) for one in items)


def _of_code(code: types.CodeType, name: str, variables: dict[str, object]) -> Iterator[str]:
    steps = _steps(code)
    for at, (what, argument) in enumerate(steps):
        before = steps[at - 1] if at else ("", "")
        if what in ("LOAD_GLOBAL", "LOAD_NAME") and argument not in variables:
            if argument == "hash":
                yield f"calls hash() in {name}"
            elif argument in ("set", "frozenset") and not _any_order(before):
                yield f"makes a set in {name}"
        elif what == "BUILD_SET" and not _any_order(before) and argument != "0":
            yield f"makes a set in {name}"
    for inner in code.co_consts:
        if is_a(inner, types.CodeType):
            if inner.co_name == "<setcomp>":
                yield f"makes a set in {name}"
            yield from _of_code(inner, name, variables)


def _goes_through(code: types.CodeType, name: str) -> bool:
    """Whether a set that stands under a name is used there for more than to look something up in it."""
    steps = [*_steps(code), ("", ""), ("", "")]
    for at, (what, argument) in enumerate(steps):
        if what in _LOADS and what != "LOAD_CONST" and argument == name:
            after, before = steps[at + 1], steps[at - 1] if at else ("", "")
            kept = after[0] in ("LOAD_ATTR", "LOAD_METHOD") and after[1] in _KEPT
            if after[0] != "CONTAINS_OP" and not kept and not _any_order(before):
                return True
    return any(_goes_through(inner, name) for inner in code.co_consts if is_a(inner, types.CodeType))


def _steps(code: types.CodeType) -> list[tuple[str, str]]:
    return [(one.opname, str(one.argval)) for one in dis.get_instructions(code) if one.opname not in _NOTHING]


def _any_order(before: tuple[str, str]) -> bool:
    return before[0] == "LOAD_GLOBAL" and before[1] in _ANY_ORDER
