"""What elements moved beyond the learning rate before the states that a scene holds, from the run's checkpoints alone.

An update that no element follows farther than its learning rate takes an element at most Σ lr from where it was, over
any stretch of steps. What lies beyond that between two checkpoints was moved by longer ones. Knows an inquiry; performs
no step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import mlx.core as mx

from ..checkpoints import checkpoint_reader
from ..errors import WorkbenchError
from ..lines.line import Restart
from ..recorded.layout import CHECKPOINTS
from ..snapshot import State
from .adam import Settings, limited
from .inquiry import Inquiry

MOST = 8  # checkpoints that are read: the last ones before the scene's first state


def beyond(inquiry: Inquiry, known: Mapping[str, Settings]) -> tuple[int, dict[str, mx.array]]:
    """What each parameter moved beyond Σ lr, summed over the stretches between checkpoints up to the first held state.

    Args:
        known: settings of the optimizer, by parameter.

    Returns:
        The step of the earliest state that was read, and the excess, float32, by path; the first held state and {}
        where nothing can be said, which is then noted.
    """
    scene, what = inquiry.scene, "updates before the held states"
    if len({one.member for one in known.values()}) > 1:
        inquiry.skip(what, "telemetry logs the learning rate of the first optimizer only")
        return scene.first, {}
    over: dict[str, mx.array] = {}
    earliest = scene.first
    for left, right, rate in _stretches(inquiry):
        earliest = min(earliest, left.step)
        for path, one in known.items():
            excess = limited(left.weights[path], right.weights[path], rate, one.decay)
            over[path] = over[path] + excess if path in over else excess
            mx.eval(over[path])
    if not over:
        inquiry.skip(what, "no earlier checkpoint leads there with every learning rate logged")
    return earliest, over


def _stretches(inquiry: Inquiry) -> Iterator[tuple[State, State, float]]:
    """Pairs of states with none in between, and the sum of the learning rates of the steps from one to the other."""
    run, scene = inquiry.run, inquiry.scene
    keys = [key for key in run.checkpoints_before(scene.step, scene.segment) if key[0] <= scene.first][-MOST:]
    states = []
    for key in keys:
        try:
            states.append(checkpoint_reader.read(run.path / CHECKPOINTS, *key, run.manifest.run))
        except WorkbenchError:  # damaged: the stretch over it is longer
            continue
    if not states or states[-1].step != scene.first:
        states.append(scene.state(scene.first))
    for left, right in pairwise(states):
        rates = [_rate(inquiry, step) for step in range(left.step + 1, right.step + 1)]
        if None not in rates:
            yield left, right, float(sum(one for one in rates if one is not None))


def _rate(inquiry: Inquiry, step: int) -> float | None:
    """The logged rate of a step; None also where the loop itself changed the state before it."""
    run, segment = inquiry.run, inquiry.scene.segment
    line = run.line(step, segment)
    if line is None or not isinstance(line.lr, int | float) or isinstance(run.edits(step, segment), Restart):
        return None
    return float(line.lr)
