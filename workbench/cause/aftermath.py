"""Does a step alone contradict its replay, or do those after it as well? They are performed again from the run's own
states, so that what the step left does not matter.

A fault that comes and goes leaves the steps after it alone. A value outside the state that is another than it was, such
as a module's number that the loop sets, stays for as long as it is set, and no replay has it either: the two look alike
in the step itself. Knows an inquiry.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..bare_objects import is_a, is_number
from ..checkpoints import checkpoint_reader
from ..enumeration import some
from ..errors import WorkbenchError
from ..outside_state import outside
from ..recorded.layout import CHECKPOINTS
from ..replay import replay_steps
from ..replaying.preparation import other_files
from ..replaying.suspicion import suspicion
from ..snapshot import State
from .inquiry import Inquiry

STEPS = 3  # to perform again from each state
STATES = 4  # to start from: enough for those that a recorder keeps around an alarm
NAMED = 8  # values in a sentence
# Runs whose loop and step are the workbench's own: what their step reads is in the state or the manifest.
OURS = ("trainer", "mlx-lm")


@dataclass(frozen=True)
class Performed:
    """Steps performed again from a state that the run itself left.

    Attributes:
        state: the one that they start from.
        steps: performed, up to the first that differs.
        item: what differs first in the last of them; None: all have the logged bits.
    """

    state: int
    steps: range
    item: str | None


def objection(inquiry: Inquiry, *, kept: bool, one_bit: bool) -> str:
    """What speaks against step N being the only one that its replay contradicts, in a sentence or more; "" if nothing
    does. What was measured is noted.

    Args:
        kept: whether the state that the step left has the logged bits.
        one_bit: whether the log and the replay differ in one bit, as a number that a loop sets would hardly make them.
    """
    scene, run, step = inquiry.scene, inquiry.run, inquiry.step
    others = bool(other_files(run, scene.segment, step))
    said = []
    noted = suspicion(run, scene.segment, step + 1, others)
    if noted is not None:
        said.append(noted)
    performed = list(_performed(inquiry, kept))
    differing = next((one for one in performed if one.item is not None), None)
    own = run.manifest.rebuild.get("kind") in OURS
    if differing is not None:
        again = differing.steps[-1]
        sentence = (
            f"step {again} is contradicted as well, by itself: performed again from the run's own state "
            f"{differing.state}, it differs from the log in {differing.item}"
        )
        inquiry.found("steps after", f"{sentence[0].upper()}{sentence[1:]}.", "unknown", step=again)
        said.insert(0, f"{sentence[0].upper()}{sentence[1:]}. A fault of one step would not do that.")
    elif not performed:
        why = f"no state from step {step} on is held that has a logged step after it"
        inquiry.skip("the steps after", f"{why}, so that whether they have the logged bits is not known")
        if not own:
            said.insert(0, f"Whether step {step} alone differs can't be checked: {why}.")
    else:
        _agree(inquiry, performed)
        first = performed[0].state
        if first > step and not own:
            gap = f"step {first}" if first == step + 1 else f"steps {step + 1} to {first}"
            said.insert(0, f"Whether {gap} would differ too can't be checked: the run kept no state among them.")
    values = [] if own else read(inquiry)
    if not values or (one_bit and not said):
        return " ".join(said)
    if not said:
        said.append(
            f"Step {step} alone differs, and that may be a fault, or a loop that had another value for one step."
        )
    named = f"Beside its state the step reads {some(values, NAMED)}"
    said.append(f"{named}: where the loop sets one of these, no replay has its value (hand it over in `extra`).")
    return " ".join(said)


def read(inquiry: Inquiry) -> list[str]:
    """Paths of the numbers and arrays that the user's loss and step function read beside the state."""
    return [
        path
        for path, value, _ in outside(inquiry.scene.stepper.experiment)
        if path.startswith(("step_fn.", "loss_fn.")) and (is_number(value) or is_a(value, (mx.array, np.ndarray)))
    ]


def _agree(inquiry: Inquiry, performed: list[Performed]) -> None:
    steps = sorted({step for one in performed for step in one.steps})
    states = some([one.state for one in performed], STATES)
    of, have = ("Step", "has") if len(steps) == 1 else ("Steps", "have")
    inquiry.found(
        "steps after",
        f"{of} {some(steps, NAMED)}, performed again from the run's own state{'s' if len(performed) > 1 else ''} "
        f"{states}, {have} the logged bits.",
        "transient-fault",
        steps=len(steps),
    )


def _performed(inquiry: Inquiry, kept: bool) -> Iterator[Performed]:
    """From each of the run's own states after the step, up to one after which a step differs."""
    scene, run = inquiry.scene, inquiry.run
    for state in _states(inquiry, kept):
        last = state.step
        while last < state.step + STEPS and run.line(last + 1, scene.segment) is not None:
            last += 1
        if not inquiry.affords(last - state.step, f"the steps after state {state.step}"):
            return
        found = _from(inquiry, state, range(state.step + 1, last + 1))
        if found is not None:
            yield found
            if found.item is not None:
                return


def _states(inquiry: Inquiry, kept: bool) -> Iterator[State]:
    scene, run = inquiry.scene, inquiry.run
    if kept and run.line(inquiry.step + 1, scene.segment) is not None:
        yield scene.state(inquiry.step)
        return
    later = [number for number, segment in run.checkpoints if segment == scene.segment and number >= inquiry.step]
    for number in [one for one in later if run.line(one + 1, scene.segment) is not None][:STATES]:
        try:
            yield checkpoint_reader.read(run.path / CHECKPOINTS, number, scene.segment, run.manifest.run)
        except WorkbenchError as error:
            inquiry.skip(f"the steps after checkpoint {number}", str(error))


def _from(inquiry: Inquiry, state: State, steps: range) -> Performed | None:
    """None where the steps can't be performed, which is noted, or where the state is not the logged one."""
    scene, run = inquiry.scene, inquiry.run
    seen = scene.moment(inquiry.step).seen
    with scene.at_rest():
        try:
            for outcome in replay_steps(
                scene.stepper.experiment,
                state,
                steps,
                lambda step: run.evidence(step, scene.segment),
                layers=scene.layers,
                method=None if seen is None else seen.method,
                edits=lambda step: run.edits(step, scene.segment),
                with_probe=False,
                repeat=lambda step: False,
                hold=False,
            ):
                scene.computed += 1
                departed = outcome.first_difference
                if departed is not None and departed.where == "restored state":
                    inquiry.skip(f"the steps after state {state.step}", "it has not the logged bits")
                    return None
                if departed is not None:
                    return Performed(state.step, range(steps.start, departed.step + 1), departed.item)
        except WorkbenchError as error:
            inquiry.skip(f"the steps after state {state.step}", str(error))
            return None
    return Performed(state.step, steps, None)
