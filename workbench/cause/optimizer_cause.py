"""Is it the optimizer's settings: elements that moved farther than Adam's usual ones can move them?

The same states with every such update limited to the learning rate say so. Knows an inquiry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import mlx.core as mx

from ..bits import bits_float
from ..interventions.attempt import Attempt, put
from ..telemetry import Restart
from .adam import USUAL_BOUND, Settings, excess, limited, settings
from .counterfactual import Shot, shot
from .inquiry import Conclusion, Inquiry, setting

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
    worst = max(_reaches(inquiry, known), key=lambda one: one.times, default=None)
    if worst is None:
        inquiry.skip(what, "no earlier state is held")
        return None
    if not worst.times > USUAL_BOUND:
        inquiry.refute(
            "optimizer",
            f"in steps {scene.first + 1} to {inquiry.last} no element moved by more than {worst.times:.3g} times the "
            f"learning rate, and Adam's usual settings allow {USUAL_BOUND:.3g}",
        )
        return None
    one = known[worst.path]
    free = math.isinf(one.bound)
    rule = f"its settings allow {one.bound:.3g}"
    if free:
        rule = f"beta1² = {one.beta1**2:.3g} is not below beta2 = {one.beta2:.3g}, so nothing bounds m/√v"
    inquiry.found(
        "updates beyond the learning rate",
        f"In step {worst.step} an element of {worst.path} moved by {worst.times:.4g} times the learning rate; {rule}.",
        "optimizer",
        times=worst.times,
        bound=one.bound,
        beta1=one.beta1,
        beta2=one.beta2,
    )
    limited_step = _limited(inquiry, known)
    sentence = (
        f"On state {inquiry.last} with every update since state {scene.first} limited to the learning rate, batch "
        f"{scene.step} has {inquiry.comparison(limited_step)}"
    )
    if not inquiry.gone(limited_step):
        inquiry.refute("optimizer", f"{sentence}: the rise stays")
        return None
    inquiry.found("limited updates", f"{sentence}: the rise is gone.", "optimizer", limited=inquiry.value(limited_step))
    option = {"option": "beta2"} if free else {}
    far = max(scene.first + 1, scene.step - FAR)
    return Conclusion(
        "optimizer",
        f"The optimizer moved elements of {worst.path} by up to {worst.times:.4g} times the learning rate: {rule}.",
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


def _moves(inquiry: Inquiry, known: Mapping[str, Settings]) -> Iterator[tuple[int, str, mx.array, mx.array, float]]:
    """Step, path, the parameter before and after, and the learning rate, of every held step."""
    scene = inquiry.scene
    for step in own_steps(inquiry):
        before, after, rates = scene.state(step - 1), scene.state(step), scene.moment(step).rates
        for path, one in known.items():
            bits = rates[one.member] if one.member < len(rates) else None
            if bits is not None:
                yield step, path, before.weights[path], after.weights[path], float(bits_float(bits))


def _reaches(inquiry: Inquiry, known: Mapping[str, Settings]) -> Iterator[Reach]:
    for step, path, before, after, rate in _moves(inquiry, known):
        yield Reach(step, path, excess(before, after, rate, known[path].decay))


def _limited(inquiry: Inquiry, known: Mapping[str, Settings]) -> Shot:
    """Batch N on state N-1 without what its held updates moved beyond the learning rate."""
    scene, (last, moment) = inquiry.scene, inquiry.scene.before()
    over: dict[str, mx.array] = {}
    for _, path, before, after, rate in _moves(inquiry, known):
        beyond = limited(before, after, rate, known[path].decay)
        over[path] = over[path] + beyond if path in over else beyond
        mx.eval(over[path])
    weights = {
        path: (last.weights[path].astype(mx.float32) - beyond).astype(last.weights[path].dtype)
        for path, beyond in over.items()
    }
    with scene.at_rest():
        attempt = Attempt(scene, replace(last, weights=last.weights | weights), moment, scene.stepper)
        put(attempt.stepper.experiment, attempt.state)
        return shot(scene.step, attempt.perform(moment))
