"""A state that holds NaN or an infinity before its next step: said plainly, with the step to look at instead.

Such a step is replayed all the same: whether it has the run's bits is a question with an answer, also where these bits
are NaN. But it is not where anything went wrong. Knows states and run folders; changes neither.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .alongside import Alongside
from .capture import is_floating
from .errors import WorkbenchError
from .extras import owns
from .norms import square_sums
from .recorded.first_sign import first_sign
from .snapshot import State

if TYPE_CHECKING:
    from .run import Run

NAMED = 2  # tensors that the sentence names


def begun(run: Run, state: State) -> Alongside[list[str]]:
    """Begins to look for what is not finite in a state of a run, while something else is computed: see `_broken`.

    A weight that no step trains may hold -inf, as a mask does, and what a loop keeps outside of model and optimizer may
    be anything.
    """
    trained = {path for paths in run.manifest.owned.values() for path in paths}
    return Alongside(lambda: list(_broken(state, trained)))


def broken_before(run: Run, segment: int, step: int, broken: Sequence[str]) -> list[str]:
    """Two sentences on the state before a step, if it is not finite: in what, and where to look; none if it is.

    Args:
        segment: on the way to which the step is replayed.
        broken: what `begun` found.
    """
    if not broken:
        return []
    more = f" and {len(broken) - NAMED} more tensors" if len(broken) > NAMED else ""
    named = ", ".join(broken[:NAMED])
    said = f"The state before step {step} already held values that are not finite: {named}{more}."
    return [f"{said} {_where_to_look(run, segment, step - 1)}"]


def _where_to_look(run: Run, segment: int, state: int) -> str:
    """The step to replay instead. A step's line shows the moments that it left, and its weights only one step later."""
    if state <= run.manifest.segments[0].start:
        parent = run.manifest.parent
        return "The run began with it" + (f", as a fork of {parent.path}." if parent is not None else ".")
    sign = first_sign(run, segment, state)
    if sign is None:
        step, why = state, f"No line up to step {state} shows it: an update or a change between steps left it so."
    else:
        step, why = sign[0], f"The telemetry first shows it at step {sign[0]} ({sign[1]})."
    own = run.manifest.lineage(segment, step)
    command = f"--step {step}" + (f" --segment {own}" if len(run.telemetry.segments_with(step)) > 1 else "")
    try:
        cost = f" ({run.plan(step, own).sentence()})"
    except WorkbenchError:
        cost = ""
    return f"{why} Replay step {step} to see where it began: {command}{cost}."


def _broken(state: State, trained: set[str]) -> Iterator[str]:
    """Such as "adam_v of a.weight (3 NaN of 4,096)", weights first."""
    tensors = {f"weight {path}": array for path, array in state.weights.items()}
    tensors |= {f"{path} of the optimizer": array for path, array in state.optimizer.items() if not owns(path)}
    tensors = {name: array for name, array in tensors.items() if is_floating(array)}
    # A sum of squares is not finite if an element is not, and costs a tenth of looking at each: which comes then.
    tensors = {name: tensors[name] for name, total in square_sums(tensors).items() if not math.isfinite(total)}
    masks = {f"weight {path}" for path in state.weights if path not in trained}
    sound = {
        name: mx.all(mx.isfinite(array) | mx.isneginf(array) if name in masks else mx.isfinite(array))
        for name, array in tensors.items()
    }
    mx.eval(sound)
    for name in (name for name, good in sound.items() if not good.item()):
        array = tensors[name]
        counts = {"NaN": mx.isnan(array).sum().item(), "infinite": mx.isinf(array).sum().item()}
        found = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        yield f"{name} ({found} of {array.size:,})"
