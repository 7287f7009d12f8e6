"""Python values that a step reads and no checkpoint holds: whether they change.

A compiled step reads them once, when it is traced; a replay of one that is not begins with those of the start. They
are looked at when a checkpoint is due: one that is changed and changed back between two is not seen. What no code of
the step reads by its name is left out. Knows experiments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn

from ..bare_objects import attributes, is_a
from ..enumeration import some
from ..experiment import Experiment
from ..ignored import ignored
from ..object_graph import Place
from ..outside_state import containers, outside
from ..rate_scale import Scaled
from ..reachable import INHERITED
from . import outer_modes
from .held_marks import FILLED, Mark, Marks
from .name_uses import NameUses
from .outer_modes import MODE

_SHOWN = 6  # names that a sentence is made for each time; the others share one, of
_NAMED = 20  # names
BY_MLX = ("._initialized", "._schedulers")  # of a replaced state; and of a rate that is set
OF_MODULE = (MODE, "._no_grad")


class Seen(NamedTuple):
    """
    Attributes:
        filled: it is a container, which a step may only put something in.
    """

    mark: Mark
    place: Place | None
    filled: bool


class Other(NamedTuple):
    name: str
    then: Mark
    now: Mark

    @property
    def is_mode(self) -> bool:
        return self.name.endswith(MODE)

    @property
    def is_code(self) -> bool:
        """A function or a class."""
        return (self.now.said or "").startswith("the ")


class PythonValues:
    """Those of an experiment as it is handed over; but for the `ignore`d ones (see `workbench.ignored`)."""

    def __init__(self, experiment: Experiment, ignore: Collection[str] = ()) -> None:
        self._experiment, self._ignore = experiment, ignore
        self._told: set[str] = set()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._then, self._unchanged = {path: seen.mark for path, seen in self._look().items()}, step

    def at_first_step(self, step: int) -> list[str]:
        """Before the first step, which comes after `step`: a sentence on each that is another one than when the
        recorder was made. Of those no more is said; the others count from now."""
        others = [one for one in self._others()[0] if not one.now.is_longer(one.then)]  # the loop got going
        self._begin(step)
        said = [_at_first_step(one) for one in others[:_SHOWN]]
        if more := some((one.name for one in others[_SHOWN:]), _NAMED):
            said.append(f"{more}: what stands there at the first step is not what it was then, either")
        return said

    def leave_out_changed(self) -> None:
        """Says nothing of those that are others now."""
        self._told |= self._changed().keys()

    def changed(self, step: int) -> Iterator[tuple[str, int]]:
        """After a step: a sentence on each that is another one than at the start, once; and the last step at which it
        was not."""
        known, compiled = self._unchanged, self._experiment.options.compile
        self._unchanged = step
        others, certain = self._others()
        for one in others[:_SHOWN]:
            yield self._sentence(one, known, certain), known
        if more := some((one.name for one in others[_SHOWN:]), _NAMED):
            end = "the compiled step goes on with those of the start"
            if not compiled:
                end = f"no checkpoint holds them: steps after {known} that depend on them will not replay exactly"
            yield f"{more}: what stands there is not what it was at the start, either, and {end}", known

    def _sentence(self, one: Other, known: int, certain: bool) -> str:
        compiled = self._experiment.options.compile
        if one.is_mode:
            return outer_modes.changed(one.name, one.now.value, known, compiled=compiled)
        now_and_then = f"{one.name} is {one.now.beside(one.then)} now, but "
        if compiled:
            return (
                f"{now_and_then}the compiled step read it when it was traced, as {one.then.text}, and goes on with "
                "that: it is not what your loop would do uncompiled. Pass compile=False, or hand it over as an array "
                "in `extra`"
            )
        steps = "that depend on it will not" if certain else "may not, if they depend on it,"
        way = (
            "Hand it over in `extra`, as an array or in an object with state_dict and load_state_dict, and call "
            "open_segment() after the loop has changed it"
        )
        if one.is_code:
            way = "Put it there before the recorder is made"
        return (
            f"{now_and_then}no checkpoint holds it, and a replay starts with {one.then.text}, its first value: steps "
            f"after {known} {steps} replay exactly. {way}"
        )

    def _others(self) -> tuple[list[Other], bool]:
        """Those that the step may read and that are others now, of which nothing is said from now on; and whether it
        does read them by name."""
        changed = {name: seen for name, seen in self._changed().items() if name not in self._told}
        if not changed:
            return [], True
        uses = NameUses(self._experiment)
        read = {
            name: seen
            for name, seen in changed.items()
            if name.endswith(MODE)
            or (uses.reads_contents(name, seen.place) if seen.filled else uses.reads(name, seen.place))
        }
        self._told |= read.keys()
        return [
            Other(name, self._then[name], read[name].mark) for name in outer_modes.outermost(list(read))
        ], uses.known

    def _changed(self) -> dict[str, Seen]:
        return {
            path: seen
            for path, seen in self._look().items()
            if path in self._then
            and self._then[path].content != seen.mark.content
            # The class has another number now, and says so by a path of its own.
            and not (seen.place is not None and seen.place.kind == INHERITED)
        }

    def _look(self) -> dict[str, Seen]:
        """Each value as it is now, by its path."""
        found: dict[str, Seen] = {}
        marks, known = Marks(), set(containers(self._experiment))
        own = {id(attributes(module)) for module in self._experiment.model.modules()}
        for path, value, place in outside(self._experiment, (object,)):
            if is_a(value, (mx.array, nn.Module)) or path.endswith(BY_MLX) or ignored(path, self._ignore):
                continue
            if path.endswith(OF_MODULE) and (place is None or id(place.holder) in own):
                continue  # `modes` tells of them
            if is_a(value, Scaled):  # by the recorder, for a rollback
                value = value.schedule
            filled = is_a(value, FILLED)
            if filled and id(value) in known:  # of the state; or a container that another path has, too
                continue
            if filled:
                known.add(id(value))
            if path not in found and (mark := marks.of(value)) is not None:
                found[path] = Seen(mark, place, filled)
        for path, training in outer_modes.modes_of(self._experiment.extra):
            found[path] = Seen(Mark(training, value=training), None, False)
        return found


def _at_first_step(one: Other) -> str:
    if one.is_mode:
        return outer_modes.at_first_step(one.name, one.now.value)
    return (
        f"{one.name} is {one.now.beside(one.then)} at the first step, and was {one.then.text} when the recorder was "
        "made. A script that is replayed is run up to its recorder, so it will have the latter: set it before that line"
    )
