"""Python values that a step reads and no checkpoint holds: whether they change.

A compiled step reads them once, when it is traced; a replay of one that is not begins with those of the start. They
are looked at when a checkpoint is due: one that is changed and changed back between two is not seen. What no code of
the step reads by its name is left out. Knows experiments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import mlx.core as mx

from ..bare_objects import is_a
from ..experiment import Experiment
from ..ignored import ignored
from ..outside_state import outside
from ..reachable import Found, Surroundings
from .names_read import NamesRead

_SHOWN = 6  # names that a sentence is made for each time
_BY_MLX = ("._initialized", "._training")  # of a replaced state; and `modes` tells of the latter


class PythonValues:
    """Those of an experiment as it is handed over; but for the `ignore`d ones (see `workbench.ignored`)."""

    def __init__(self, experiment: Experiment, ignore: Collection[str] = ()) -> None:
        self._experiment, self._ignore = experiment, ignore
        self._told: set[str] = set()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._then, self._unchanged = Surroundings(self._plain), step

    def at_first_step(self, step: int) -> list[str]:
        """Before the first step, which comes after `step`: a sentence on each that is another one than when the
        recorder was made. Of those no more is said; the others count from now."""
        others, _ = self._read(self._then.changed())
        self._told |= {name for name, _ in others}
        self._begin(step)
        return [
            (
                f"{name} is {now!r} at the first step, and was {then!r} when the recorder was made. A script that is "
                "replayed is run up to its recorder, so it will have the latter: set it before that line"
            )
            for name, (then, now) in others[:_SHOWN]
        ]

    def leave_out_changed(self) -> None:
        """Says nothing of those that are others now."""
        self._told |= self._then.changed().keys()

    def changed(self, step: int) -> Iterator[tuple[str, int]]:
        """After a step: a sentence on each that is another one than at the start, once; and the last step at which it
        was not."""
        known, compiled = self._unchanged, self._experiment.options.compile
        self._unchanged = step
        others, certain = self._some()
        for name, (then, now) in others:
            now_and_then = f"{name} is {now!r} now, but "
            if compiled:
                yield (
                    (
                        f"{now_and_then}the compiled step read it when it was traced, as {then!r}, and goes on with "
                        "that: it is not what your loop would do uncompiled. Pass compile=False, or hand it over as an "
                        "array in `extra`"
                    ),
                    known,
                )
            else:
                steps = "that depend on it will not" if certain else "may not, if they depend on it,"
                yield (
                    (
                        f"{now_and_then}no checkpoint holds it, and a replay starts with {then!r}, its first value: "
                        f"steps after {known} {steps} replay exactly. Hand it over in `extra`, as an array or in an "
                        "object with state_dict and load_state_dict, and call open_segment() after the loop has "
                        "changed it"
                    ),
                    known,
                )

    def _some(self) -> tuple[list[tuple[str, tuple[object, object]]], bool]:
        others, certain = self._read(
            {name: pair for name, pair in self._then.changed().items() if name not in self._told}
        )
        self._told |= {name for name, _ in others[:_SHOWN]}
        return others[:_SHOWN], certain

    def _read(self, changed: dict[str, tuple[object, object]]) -> tuple[list[tuple[str, tuple[object, object]]], bool]:
        """Those that the step may read, and whether it does by name."""
        if not changed:
            return [], True
        names, places = NamesRead(self._experiment), self._then.places()
        return [one for one in changed.items() if names.reads(one[0], places.get(one[0]))], names.known

    def _plain(self) -> Iterator[Found]:
        for path, value, place in outside(self._experiment):
            if is_a(value, mx.array) or path.endswith(_BY_MLX):
                continue
            if not ignored(path, self._ignore):
                yield path, value, place
