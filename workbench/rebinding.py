"""Whether a step puts another object in the place of what was handed over as `extra`, which goes on as it was.

`self.ema = tree_map(...)` changes no array of the dict that the recorder was given: it makes another one. Of that no
checkpoint would know. What the step can reach is looked through before and after it. Knows experiments; performs
nothing.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import mlx.core as mx

from .bare_objects import MISSING, is_a, items_of, name_of
from .errors import ExperimentError
from .experiment import Experiment
from .object_graph import Edge, walk
from .outside_state import containers, known_to
from .own_scripts.users_code import bare


class Handed:
    """The parts of `extra` that the step holds by a name of its own, as they are now: dicts, lists, arrays, and objects
    with `state_dict`."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment = experiment
        self._parts = {id(one.value): one for one in _parts(experiment.extra)}
        self._paths: dict[int, str] = {}  # of those that the step holds: the first path
        for edge in self._edges() if self._parts else ():
            if id(edge.value) in self._parts:
                self._paths.setdefault(id(edge.value), edge.path)
        self._parts = {part: self._parts[part] for part in self._paths}
        self.laid_out()

    def laid_out(self) -> None:
        """Arrays of `extra` may have been replaced by others like them since, by whoever prepares the step."""
        self._now = {part: one.there() for part, one in self._parts.items()}

    def holds(self, part: Any) -> int:
        """How many references to a dict or list this keeps."""
        kept = [item for one in self._parts.values() for item in (one.value, one.holder)] + list(self._now.values())
        return sum(one is part for one in kept)

    def refuse_replaced(self, who: str = "the step puts") -> None:
        """
        Args:
            who: did it, as the first words of a sentence.

        Raises:
            ExperimentError: the step holds one of them nowhere any more, but something else in its place, while
                `extra` still has it.
        """
        gone = {path: part for part, path in self._paths.items() if self._parts[part].there() is self._now[part]}
        if not gone:
            return
        now: dict[str, list[Any]] = {}
        for edge in self._edges():
            if edge.value is MISSING:
                return  # there is more than can be looked through
            if (path := self._paths.get(id(edge.value))) is not None:
                gone.pop(path, None)
            if edge.path in gone and not is_a(edge.value, (types.CellType, type(None))):
                now.setdefault(edge.path, []).append(edge.value)
        for path, part in gone.items():
            then, others = self._parts[part], now.get(path, [])
            if any(is_a(one, mx.array) for one in others) if is_a(then.value, mx.array) else others:
                raise ExperimentError(_sentence(path, then, who))

    def _edges(self) -> Iterator[Edge]:
        own = self._experiment
        skip = known_to(own) | set(containers(own))
        return walk([("loss_fn", bare(own.loss_fn)), ("step_fn", bare(own.step_fn))], skip)


class _Part(NamedTuple):
    """Something in `extra`: under which name, what holds it there, and by which key."""

    name: str
    value: Any
    holder: Any
    key: Any

    def there(self) -> Any:
        """What stands there now; `MISSING` if nothing does."""
        if is_a(self.holder, dict):
            return dict.get(self.holder, self.key, MISSING)
        items = items_of(self.holder)
        return items[self.key] if self.key < len(items) else MISSING


def _parts(extra: dict[str, Any]) -> Iterator[_Part]:
    """What is handed over under each name, and the dicts, lists and arrays in it, each once."""
    seen: set[int] = set()
    todo = [_Part(name, value, extra, name) for name, value in extra.items()]
    while todo:
        one = todo.pop()
        known = is_a(one.value, (dict, list, mx.array)) or one.holder is extra
        if id(one.value) in seen or not known:
            continue
        seen.add(id(one.value))
        yield one
        if is_a(one.value, (dict, list)):
            held = dict.items(one.value) if is_a(one.value, dict) else enumerate(items_of(one.value))
            todo += [_Part(one.name, item, one.value, key) for key, item in held]


def way_in_place(path: str, part: Any) -> str:
    """How to change it in place, as code.

    Args:
        path: "step_fn.self.ema".
    """
    name = path.partition(".")[2] or path
    if is_a(part, dict):
        return f"{name}.update(...)"
    if is_a(part, list):
        return f"{name}[:] = ..."
    return f"{name}[...] = ..." if is_a(part, mx.array) else f"by a method of {name}"


def _sentence(path: str, part: _Part, who: str) -> str:
    kind = "array" if is_a(part.value, mx.array) else name_of(type(part.value))
    whole = f"the {kind} that was handed over as extra" if part.key == part.name else f"the {kind} that stands in extra"
    return (
        f"{who} another object in the place of {whole} {part.name!r} ({path}), and goes on with that one, while the "
        "recorder still holds the first: every checkpoint would have its first values. Change it in place, "
        f"{way_in_place(path, part.value)}, or hand over an object with state_dict and load_state_dict"
    )
