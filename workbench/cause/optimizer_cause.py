"""Is it the optimizer's settings: elements that moved farther than Adam's usual ones can move them?

The same states with every such update limited to the learning rate, or made with a usual second moment, say so. Knows
an inquiry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from ..bits import bits_float
from ..interventions.attempt import Attempt, put
from ..lines.line import Restart
from ..number_text import number
from . import displacement, usual_adam
from .adam import USUAL_BETA1, USUAL_BOUND, Settings, excess, limited, settings
from .counterfactual import shot
from .inquiry import Conclusion, Inquiry, setting

LEAST_BETA2 = 0.95  # of the values in common use
FAR = 20  # steps before N from which another setting is tried: moved elements have to be far back on their way


@dataclass(frozen=True)
class Reach:
    """The farthest that an element of a parameter moved in a step, in units of the learning rate."""

    step: int
    path: str
    times: float


def without_bound(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion where elements moved farther than Adam's usual settings can move them, and that is the spike."""
    scene, what = inquiry.scene, "Adam's updates beside their bound"
    if not scene.holds_all:
        inquiry.skip(what, "the states before do not fit in memory (memory_budget)")
        return None
    known = settings(inquiry.run.manifest.optimizer, scene.state(inquiry.last))
    if not known:
        inquiry.skip(what, f"{inquiry.run.manifest.optimizer.get('class')} follows another rule")
        return None
    worst = max(_reaches(inquiry), key=lambda one: one.times, default=None)
    if worst is None:
        inquiry.skip(what, "no earlier state is held")
        return None
    if not worst.times > USUAL_BOUND:
        inquiry.refute(
            "optimizer",
            f"in steps {scene.first + 1} to {inquiry.last} no element moved by more than "
            f"{number(worst.times, 3)} times the learning rate, and Adam's usual settings allow "
            f"{number(USUAL_BOUND, 3)}",
        )
        return None
    one = settings(inquiry.run.manifest.optimizer, scene.state(worst.step))[worst.path]
    free = math.isinf(one.bound)
    rule = f"its settings allow {number(one.bound, 3)}"
    if free:
        rule = f"beta1² = {number(one.beta1**2, 3)} is not below beta2 = {number(one.beta2, 3)}, so nothing bounds m/√v"
    inquiry.found(
        "updates beyond the learning rate",
        f"In step {worst.step} an element of {worst.path} moved by {number(worst.times)} times the learning rate; "
        f"{rule}.",
        "optimizer",
        times=worst.times,
        bound=one.bound,
        beta1=one.beta1,
        beta2=one.beta2,
    )
    if not _proven(inquiry, known, free):
        return None
    option = {"option": "beta1" if one.beta1 > USUAL_BETA1 and one.beta2 >= LEAST_BETA2 else "beta2"} if free else {}
    far = max(scene.first + 1, scene.step - FAR)
    return Conclusion(
        "optimizer",
        f"The optimizer moved elements of {worst.path} by up to {number(worst.times)} times the learning rate: {rule}.",
        {"step": worst.step, "layer": worst.path.rpartition(".")[0], "parameter": worst.path} | option,
        f"the same rise at step {scene.step} with no element moved by more than the learning rate",
        [setting("beta2=0.95" if one.beta2 != 0.95 else "beta2=0.999", far), setting("lr=0.1x", far)],
    )


def own_steps(inquiry: Inquiry) -> list[int]:
    """Held steps whose update is the difference of two held states: before others the loop changed the state."""
    run, scene = inquiry.run, inquiry.scene
    return [
        step
        for step in range(scene.first + 1, scene.step)
        if not isinstance(run.edits(step + 1, scene.segment), Restart)
    ]


def _moves(inquiry: Inquiry) -> Iterator[tuple[int, str, mx.array, mx.array, float, float]]:
    """Step, path, the parameter before and after, the learning rate and the decay, of every held step."""
    scene = inquiry.scene
    for step in own_steps(inquiry):
        before, after, rates = scene.state(step - 1), scene.state(step), scene.moment(step).rates
        for path, one in settings(inquiry.run.manifest.optimizer, after).items():
            bits = rates[one.member] if one.member < len(rates) else None
            if bits is not None:
                yield step, path, before.weights[path], after.weights[path], float(bits_float(bits)), one.decay


def _reaches(inquiry: Inquiry) -> Iterator[Reach]:
    for step, path, before, after, rate, decay in _moves(inquiry):
        yield Reach(step, path, excess(before, after, rate, decay))


def _proven(inquiry: Inquiry, known: Mapping[str, Settings], free: bool) -> bool:
    """Whether the rise is gone on state N-1 without what updates moved too far; it is noted.

    With the last update limited first, then with more and more of them: what came of a longer one long ago may have
    been learnt around since, so that taking it back does harm of its own; and an element that was moved out of place
    long ago, before the held states, may be what harms. Where nothing bounds m/√v, elements whose gradient is rare go
    on moving at that limit for tens of steps, and the last trial is with updates that come to rest as m does.
    """
    scene = inquiry.scene
    for start in dict.fromkeys([inquiry.last - 1, inquiry.earliest, scene.first]):
        what = f"every update since state {start} limited to the learning rate"
        if _without(inquiry, _beyond_limit(inquiry, start), what, start):
            return True
    start, before = displacement.beyond(inquiry, known)
    if before:
        what = f"every update since state {start} limited to the learning rate"
        if _without(inquiry, _sum(before, _beyond_limit(inquiry, scene.first)), what, start):
            return True
    steps = own_steps(inquiry)
    if free and (over := usual_adam.beyond(inquiry, steps)):
        what = f"the updates since state {steps[0] - 1} made with the mean of g² over them for v"
        return _without(inquiry, over, what, steps[0] - 1)
    return False


def _without(inquiry: Inquiry, over: Mapping[str, mx.array], what: str, start: int) -> bool:
    """Whether batch N on state N-1 without some of its weights' changes is free of the rise.

    Args:
        over: them, float32, by path.
        what: they are left out for, in words; start: the state from which on.
    """
    scene, (last, moment) = inquiry.scene, inquiry.scene.before()
    if not inquiry.affords(1, what):
        return False
    weights = {
        path: (last.weights[path].astype(mx.float32) - beyond).astype(last.weights[path].dtype)
        for path, beyond in over.items()
    }
    with scene.at_rest():
        attempt = Attempt(scene, replace(last, weights=last.weights | weights), moment, scene.stepper)
        put(attempt.stepper.experiment, attempt.state)
        found = shot(scene.step, attempt.perform(moment))
    sentence = f"On state {inquiry.last} with {what}, batch {scene.step} has {inquiry.comparison(found)}"
    if not inquiry.gone(found):
        inquiry.refute("optimizer", f"{sentence}: the rise stays")
        return False
    numbers = {"limited": inquiry.value(found), "since": start}
    inquiry.found("limited updates", f"{sentence}: the rise is gone.", "optimizer", **numbers)
    return True


def _beyond_limit(inquiry: Inquiry, start: int) -> dict[str, mx.array]:
    """What the held updates since state `start` moved beyond the learning rate, float32, by path."""
    over: dict[str, mx.array] = {}
    for step, path, before, after, rate, decay in _moves(inquiry):
        if step > start:
            over = _sum(over, {path: limited(before, after, rate, decay)})
            mx.eval(over[path])
    return over


def _sum(left: Mapping[str, mx.array], right: Mapping[str, mx.array]) -> dict[str, mx.array]:
    return {**left, **{path: left[path] + array if path in left else array for path, array in right.items()}}
