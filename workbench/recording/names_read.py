"""The names of variables and attributes that a step's code may read: of the functions that it calls, by their names.

A value that only the loop reads (the best loss so far, say) stands beside those that the step reads, often in the same
object. Which functions a step calls is told by the names that its code uses, so that this is rather too much than too
little. Knows code and objects; performs nothing.
"""

from __future__ import annotations

import types
from typing import Any

from ..bare_objects import MISSING, attributes, is_a, is_plain, module_of, names_of, order_of
from ..code_names import attributes_used, globals_used
from ..experiment import Experiment
from ..library_functions import LIBRARY
from ..object_graph import Place, ours, walk
from ..outside_state import known_to
from ..own_scripts.users_code import bare

_ANY = {"vars", "eval", "exec", "globals", "locals", "asdict", "astuple"}  # functions that read whatever there is
_ONCE = {"__init__", "__new__", "__post_init__", "__repr__", "__str__", "__init_subclass__", "__class_getitem__"}


class NamesRead:
    """Of an experiment as it is now.

    Attributes:
        known: whether they are all known: no code asks for whatever names there are.
    """

    def __init__(self, experiment: Experiment) -> None:
        name = "loss_fn" if experiment.step_fn is None else "step_fn"
        function = bare(getattr(experiment, name))
        roots = [("model", experiment.model), ("optimizer", experiment.optimizer), (name, function)]
        functions: list[tuple[str, types.FunctionType]] = []
        self._names: set[str] = set()
        self._of_objects: set[int] = set()  # ids of the dicts that hold attributes or variables
        self.known = True
        kinds: dict[int, Any] = {}  # by id: a class may have a hash of its own
        for edge in walk(roots, known_to(experiment) - {id(experiment.model), id(experiment.optimizer)}):
            value = edge.value
            if value is MISSING:
                self.known = False
            elif is_a(value, types.FunctionType):
                functions.append((edge.path, value))
                self._of_objects.add(id(value.__globals__))
            elif not is_plain(value):
                kinds[id(type(value))] = type(value)
                if (held := attributes(value)) is not None:
                    self._of_objects.add(id(held))
        for kind in kinds.values():
            self._names |= _of_library(kind)
        self._follow(functions, name)

    def reads(self, path: str, place: Place | None) -> bool:
        """Whether the step may read the value that stands there.

        Args:
            path: such as "step_fn.self.best".
        """
        parts = [part.partition("[")[0] for part in path.split(".")]
        if parts[0] in ("model", "optimizer") or not self.known or (place is not None and place.kind == LIBRARY):
            return True
        attribute = place is not None and (place.kind != "item" or id(place.holder) in self._of_objects)
        if attribute and "[" not in path.rpartition(".")[2]:
            return parts[-1] in self._names
        return any(part in self._names for part in parts[1:] if part != "self") or len(parts) < 3

    def _follow(self, functions: list[tuple[str, types.FunctionType]], root: str) -> None:
        """From the step's own function to those whose names it uses, and so on."""
        waiting = functions
        while waiting:
            called = [one for one in waiting if self._called(*one, root)]
            waiting = [one for one in waiting if not self._called(*one, root)]
            for _, function in called:
                found = {*attributes_used(function.__code__), *_texts(function.__code__)}
                self._names |= found
                whole = set(globals_used(function.__code__)) & _ANY or "__dict__" in found
                if whole and ours(function.__module__):
                    self.known = False
            if not called:
                return

    def _called(self, path: str, function: types.FunctionType, root: str) -> bool:
        path = path.removesuffix(".__wrapped__")  # who wraps it calls it: `nn.value_and_grad(model, self.loss)`
        parts = path.split(".")
        name = function.__name__
        if name in _ONCE:  # of an object that is made: `super().__init__` stands in any library
            return len(parts) > 1 and parts[-2] in self._names
        if name.startswith("__") and name.endswith("__") or name == "<lambda>":
            return True  # an operator calls it, or somebody who has it from anywhere
        return path == root or parts[-1] in self._names or name in self._names


def _texts(code: types.CodeType) -> set[str]:
    """Keys and names that stand in the code as texts, and what it closes over."""
    found = {*code.co_freevars, *(one for one in code.co_consts if type(one) is str and len(one) < 80)}
    for one in code.co_consts:
        if isinstance(one, tuple):
            found |= {item for item in one if type(item) is str}
        elif isinstance(one, types.CodeType):
            found |= _texts(one)
    return found


def _of_library(kind: Any) -> set[str]:
    """The names that the methods of a class use which is not one's own: of MLX's layers and optimizers, say."""
    return {
        name
        for one in order_of(kind)
        if not ours(module_of(one)) and module_of(one).partition(".")[0] not in ("builtins", "workbench")
        for method in names_of(one).values()
        if type(method) is types.FunctionType
        for name in attributes_used(method.__code__)
    }
