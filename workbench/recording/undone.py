"""What a loop changes between making a recorder that goes on with a run and handing over its first batch.

A script that is rerun does to the state what it did before its first step when the run was new, weights that it loads
for example. That is not to be done to a trained state, and need not be told: what it leaves is the run's first state.
Anything else is a change that the user means. Learning rates are left out: many loops set one before each step, and
telemetry logs it. Knows states and experiments; nothing of folders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx

from ..experiment import Experiment, kept_arrays, weight_arrays
from ..observe import rate_paths
from ..snapshot import State, same_arrays
from .by_hand import Arrays, named


def _unlike(then: State, weights: Arrays, kept: Arrays) -> Iterator[tuple[str, bool, mx.array]]:
    """Arrays that have other bits than in a state, or another form: path, whether it is none of the weights, and
    itself. One that has come or gone is none of these: it can't be put back."""
    for beside, before, now in ((False, then.weights, weights), (True, then.optimizer, kept)):
        for path in before.keys() & now.keys():
            if not _same(before[path], now[path]):
                yield path, beside, now[path]


def changed_in(then: State, now: State) -> str | None:
    """The first array that is another in a state than in one before, in words; None: none is."""
    found = min(((beside, path) for path, beside, _ in _unlike(then, now.weights, now.optimizer)), default=None)
    return None if found is None else named(found[1], found[0])


def changed(then: State, experiment: Experiment, first: Callable[[], State | None]) -> str | None:
    """An array that is another than in the state that the recorder had put in place, in words; None: none is.

    Args:
        first: gives the first state of the run, whose arrays count as none that was changed; None: it is not known.
    """
    rates, now = rate_paths(experiment), (weight_arrays(experiment), kept_arrays(experiment))
    found = [one for one in _unlike(then, *now) if not (one[1] and one[0] in rates)]
    if not found:
        return None
    beginning = first()
    for path, beside, array in sorted(found, key=lambda one: (one[1], one[0])):
        known = None if beginning is None else (beginning.optimizer if beside else beginning.weights).get(path)
        if known is None or not _same(known, array):
            return named(path, beside)
    return None


def _same(one: mx.array, other: mx.array) -> bool:
    return one is other or same_arrays({"": one}, {"": other})
