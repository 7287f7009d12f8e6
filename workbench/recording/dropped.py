"""Whether the loop has let go of what it handed over as `extra`: it put another object in its place, by all signs.

`ema = tree_map(...)` in a loop makes a new dict, and leaves the recorder alone with the first. Nobody can change that
any more, so it must also have stayed as it was over a step: a step may reach it through the recorder. What the
recorder alone holds from the beginning is none of these. Knows experiments; nothing of folders or telemetry.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx

from ..bare_objects import is_a, name_of
from ..experiment import Experiment
from ..fingerprint import fingerprint, method_here
from ..rebinding import way_in_place
from ..trees import state_arrays

LOOKS = 3  # at the starts of the first steps; then after each checkpoint


class Dropped:
    """Made from an experiment as it is handed over, before anything else refers to its parts."""

    def __init__(self, experiment: Experiment) -> None:
        self._extra, self._compiled = experiment.extra, experiment.options.compile
        self._watched = {
            name for name in self._extra if is_a(self._extra[name], (dict, list)) and _users(self._extra, name) > 0
        }
        self._then: dict[str, str] = {}  # fingerprints of those that nobody held at the last look
        self._looks = LOOKS

    def look(self, *, due: bool, own: Callable[[Any], int]) -> list[str]:
        """Between two steps. A sentence on each that nobody but the recorder has a reference to, once.

        Args:
            due: look also if the first steps are over.
            own: how many references to an object the recorder's parts keep.
        """
        if not self._watched or not (due or self._looks):
            return []
        self._looks = max(self._looks - 1, 0)
        said = []
        for name in list(self._watched):
            then = self._then.pop(name, None)
            if name not in self._extra:
                continue
            more = _users(self._extra, name) - own(self._extra[name])
            if more > 0 and more > (_compiled_with(self._extra[name]) if self._compiled else 0):
                continue
            now = self._then[name] = fingerprint(state_arrays(self._extra[name]), method_here())
            if now == then:
                self._watched -= {name}
                said.append(_sentence(name, self._extra[name]))
        return said


def _users(extra: Mapping[str, Any], name: str) -> int:
    """References to a part, but for those of `extra` itself."""
    own = sum(one is extra[name] for one in extra.values())
    return sys.getrefcount(extra[name]) - _ALONE + 1 - own


_ALONE = (lambda extra, name: sys.getrefcount(extra[name]))({"": {}}, "")  # what only a dict holds


def _compiled_with(part: Any) -> int:
    """How many compiled steps have it among their state, those that are not yet collected as garbage, too."""
    lists = [one for one in gc.get_referrers(part) if type(one) is list]
    return sum(any(item is mx.random.state for item in one) for one in lists)


def _sentence(name: str, part: Any) -> str:
    kind = name_of(type(part))
    return (
        f"nothing but the recorder holds the {kind} any more that was handed over as extra {name!r}, and no step "
        f"changed it since: if your loop puts another one in its place ({name} = tree_map(...)), every checkpoint has "
        f"the first one, and a resume goes on from that. Change it in place, {way_in_place(name, part)}, or hand over "
        "an object with state_dict and load_state_dict"
    )
