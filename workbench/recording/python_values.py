"""Python values that a step reads and no checkpoint holds, and which parameters are trained: whether they change.

A compiled step reads them once, when it is traced; a replay of one that is not begins with those of the start. They
are looked at when a checkpoint is due: one that is changed and changed back between two is not seen. Knows experiments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..bare_objects import is_a
from ..experiment import Experiment
from ..ignored import ignored
from ..outside_state import outside
from ..reachable import Found, Surroundings

_SHOWN = 6  # names that a sentence is made for each time


class PythonValues:
    """Those of an experiment as it is handed over; but for the `ignore`d ones (see `workbench.ignored`)."""

    def __init__(self, experiment: Experiment, ignore: Collection[str] = ()) -> None:
        self._experiment, self._ignore = experiment, ignore
        self._told: set[str] = set()
        self._begin(0)

    def _begin(self, step: int) -> None:
        self._then, self._trained, self._unchanged = Surroundings(self._plain), self._trainable(), step

    def at_first_step(self, step: int) -> list[str]:
        """Before the first step, which comes after `step`: a sentence on each that is another one than when the
        recorder was made. From here on they count from now."""
        others, moved = self._then.changed().items(), self._moved()
        self._begin(step)
        of_trained = (
            f"other parameters are trainable at the first step than when the recorder was made ({moved}). A script "
            "that is replayed is run up to its recorder: freeze and unfreeze before that line"
        )
        return [of_trained] * bool(moved) + [
            (
                f"{name} is {now!r} at the first step, and was {then!r} when the recorder was made. A script that is "
                "replayed is run up to its recorder, so it will have the latter: set it before that line"
            )
            for name, (then, now) in list(others)[:_SHOWN]
        ]

    def leave_out_changed(self) -> None:
        """Says nothing of those that are others now."""
        self._told |= self._then.changed().keys()

    def changed(self, step: int) -> Iterator[str]:
        """After a step: a sentence on each that is another one than at the start, once."""
        known, compiled = self._unchanged, self._experiment.options.compile
        self._unchanged = step
        for name, (then, now) in self._some():
            now_and_then = f"{name} is {now!r} now, but "
            if compiled:
                yield (
                    f"{now_and_then}the compiled step read it when it was traced, as {then!r}, and goes on with that: "
                    "it is not what your loop would do uncompiled. Pass compile=False, or hand it over as an array in "
                    "`extra`"
                )
            else:
                yield (
                    f"{now_and_then}no checkpoint holds it, and a replay starts with {then!r}, its first value: steps "
                    f"after {known} that depend on it will not replay exactly. Hand it over in `extra`, as an array or "
                    "in an object with state_dict and load_state_dict, and call open_segment() after the loop has "
                    "changed it"
                )
        if "" not in self._told and (moved := self._moved()):
            self._told.add("")
            yield self._of_trained(moved, known)

    def _moved(self) -> str:
        """Names of the parameters that are trainable only now, or no longer."""
        names = sorted(self._trainable() ^ self._trained)
        return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")

    def _of_trained(self, shown: str, known: int) -> str:
        if self._experiment.options.compile:
            return (
                f"other parameters are trainable now than at the start ({shown}), but the compiled step was traced "
                "with those of the start, and goes on with them: it is not what your loop would do uncompiled. Pass "
                "compile=False, or go on in a fork (workbench.fork_point)"
            )
        return (
            f"other parameters are trainable now than at the start ({shown}), and no checkpoint holds which: steps "
            f"after {known} will not replay exactly. Go on in a fork, with a script that freezes the same ones before "
            "its recorder (workbench.fork_point)"
        )

    def _some(self) -> list[tuple[str, tuple[object, object]]]:
        others = [(name, values) for name, values in self._then.changed().items() if name not in self._told]
        self._told |= {name for name, _ in others[:_SHOWN]}
        return others[:_SHOWN]

    def _plain(self) -> Iterator[Found]:
        for path, value, place in outside(self._experiment):
            if is_a(value, mx.array) or path.endswith("._initialized"):  # the latter MLX's: of a replaced state
                continue
            if not ignored(path, self._ignore):
                yield path, value, place

    def _trainable(self) -> set[str]:
        trained: dict[str, Any] = dict(tree_flatten(self._experiment.model.trainable_parameters()))
        return set(trained)
