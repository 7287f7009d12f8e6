"""Is it the precision: a value that half precision can't hold? The same steps in float32 say so. Knows an inquiry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from ..number_text import number
from ..probes.measured import NonFinite
from ..probes.nonfinite import first_nonfinite
from ..snapshot import State
from .adam import settings
from .inquiry import Conclusion, Inquiry, setting, skipping

HALF = (mx.float16, mx.bfloat16)
SEARCH = 1.5  # step-times that finding the first non-finite tensor takes: an uncompiled pass that counts
BACK = 8  # steps that are performed in float32 where no value is broken: the context of a spike


def halves(inquiry: Inquiry) -> bool:
    """Whether the run keeps weights in half precision."""
    return any(array.dtype in HALF for array in inquiry.scene.state(inquiry.step).weights.values())


def broken_state(inquiry: Inquiry) -> tuple[int, str] | None:
    """The first held state with a weight that is not finite, and that weight; None where all are finite."""
    scene = inquiry.scene
    ordered = [path for layer in scene.layers for path in scene.stepper.owned[layer]]
    for step in range(scene.first, scene.step) if scene.holds_all else (inquiry.last,):
        weights = scene.state(step).weights
        sound = {path: mx.all(mx.isfinite(weights[path])) for path in ordered}
        mx.eval(sound)
        if broken := [path for path in ordered if not sound[path].item()]:
            return step, broken[0]
    return None


def not_finite(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion for a loss or gradient norm that is not finite in half precision, and is in float32."""
    scene = inquiry.scene
    if inquiry.alarm.rule != "non_finite":
        return None
    if not halves(inquiry):
        inquiry.refute("precision", "the run computes in float32 already")
        return None
    broken = broken_state(inquiry)
    first = scene.step if broken is None else broken[0]
    if first <= scene.first:
        inquiry.skip("precision", f"a weight of state {first}, the earliest that is held, is not finite already")
        return None
    redone = inquiry.tried("float32", first, "dtype=float32", steps=range(first, scene.step + 1))
    if redone is None:
        return None
    value = inquiry.value(redone[-1])
    sentence = f"In float32 from state {first - 1} on, step {scene.step} has {inquiry.alarm.phrase} {number(value)}"
    if not math.isfinite(value):
        inquiry.refute("precision", f"{sentence}: float32 makes no difference")
        return None
    inquiry.found("float32", f"{sentence}: it is finite.", "precision", redone=value)
    culprit: dict[str, Any] = {"step": first}
    if broken is not None:
        what = f"The first weight that is not finite is {broken[1]}, in state {first}."
        culprit |= {"tensor": broken[1], "kind": "weight"}
        culprit |= {"parameter": broken[1], "layer": broken[1].rpartition(".")[0]}
    elif (where := _first(inquiry)) is not None:
        what = where.sentence
        culprit |= {"tensor": where.path, "kind": where.kind}
    else:
        what = f"Step {scene.step} is not finite in half precision."
    inquiry.found("first non-finite", what, "precision")
    if _underflow(inquiry, scene.state(max(first - 1, 1)) if scene.first < max(first - 1, 1) else scene.state(first)):
        culprit["option"] = "eps"
    return Conclusion(
        "precision",
        f"{what} In float32 the same step is finite.",
        culprit,
        f"step {scene.step} not finite in float32 either",
        [setting("dtype=float32", first), setting("eps=0.0001", first), skipping(first)],
    )


def _first(inquiry: Inquiry) -> NonFinite | None:
    """The first tensor of step N that is not finite."""
    scene = inquiry.scene
    if not inquiry.affords(SEARCH, "the first non-finite tensor"):
        return None
    before, moment = scene.before()
    with scene.at_rest():
        inquiry.extra += SEARCH
        return first_nonfinite(scene.stepper, before, scene.state(scene.step), moment.batch, scene.result, [])


def _underflow(inquiry: Inquiry, state: State) -> bool:
    """Whether v is 0 in elements that still have a moment: epsilon alone then sets the size of their updates."""
    lost, moving, eps = 0, 0, math.nan
    where: dict[str, int] = {}
    for path, one in settings(inquiry.run.manifest.optimizer, state).items():
        m, v = (_moment(state.optimizer, path, leaf) for leaf in ("m", "v"))
        if m.dtype in HALF:
            counts = mx.sum(mx.logical_and(v == 0, m != 0)), mx.sum(m != 0)
            where[path], here = (int(count.item()) for count in counts)  # type: ignore[arg-type]
            lost, moving, eps = lost + where[path], moving + here, one.eps
    if not lost:
        return False
    most = max(where, key=lambda path: where[path])
    inquiry.found(
        "v underflows",
        f"In state {state.step} v is 0 in {lost:,} of {moving:,} elements that have a moment (most in {most}): their "
        f"updates are m / eps, and eps is {eps:g}.",
        "precision",
        share=lost / moving,
        eps=eps,
    )
    return True


def _moment(optimizer: Mapping[str, mx.array], parameter: str, leaf: str) -> mx.array:
    names = (f"{parameter}.{leaf}", f".{parameter}.{leaf}")  # the second of a MultiOptimizer's member
    return next(array for path, array in optimizer.items() if path == names[0] or path.endswith(names[1]))


def over_steps(inquiry: Inquiry) -> Conclusion | None:
    """The conclusion where the steps before N, in float32, lead to no spike."""
    scene = inquiry.scene
    if not halves(inquiry):
        inquiry.refute("precision", "the run computes in float32 already")
        return None
    first = max(scene.first + 1, scene.step - BACK)
    redone = inquiry.tried("float32 in the steps before", first, "dtype=float32", steps=range(first, scene.step + 1))
    if redone is None:
        return None
    sentence = f"In float32 from state {first - 1} on, step {scene.step} has {inquiry.comparison(redone[-1])}"
    if not inquiry.gone(redone[-1]):
        inquiry.refute("precision", f"{sentence}: the rise stays")
        return None
    inquiry.found("float32", f"{sentence}: the rise is gone.", "precision", redone=inquiry.value(redone[-1]))
    return Conclusion(
        "precision",
        f"{sentence}: the rise is gone.",
        {"step": first},
        f"the same rise at step {scene.step} in float32",
        [setting("dtype=float32", first), setting("lr=0.1x", first)],
    )
