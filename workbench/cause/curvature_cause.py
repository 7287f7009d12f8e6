"""Is it the curvature: a step too long for the loss it went down on, though rate, batch and moments are usual?

Along one update θ + α·Δ a step that is too long falls first and has risen at α = 1. Gradient descent does so where the
sharpness exceeds 2 / lr, and training hovers about there: the edge of stability (Cohen et al. 2021, arXiv:2103.00065;
of preconditioned methods such as Adam: 2022, arXiv:2207.14484). Its trace is a zigzag, successive updates that point
against each other. Knows an inquiry.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..number_text import number
from .inquiry import Conclusion, Inquiry, setting
from .walk import Walk

SHORT = (0.1, 0.5)  # of the update
SHORTER = 6  # step-times that are kept for the steps after
GRADUAL = 4  # steps before the worst one that are made shorter too, where no single one did it
ZIGZAG = -0.1  # cosine of successive updates: momentum alone makes it positive, about beta1, and SGD's noise leaves 0


@dataclass(frozen=True)
class Along:
    """The loss along an update, on a batch: before it, at the lowest of the points between, and after it."""

    step: int
    batch: int
    start: float
    short: float
    full: float

    @property
    def too_long(self) -> bool:
        """It raised the loss that a shorter one lowers."""
        return self.short < self.start and (self.full > self.start or math.isnan(self.full))

    @property
    def ends(self) -> str:
        return f"from {number(self.start)} to {number(self.full)}"

    @property
    def past_its_lowest(self) -> bool:
        """It went on beyond the lowest point on its way."""
        return self.short < self.full or math.isnan(self.full)


def examine(inquiry: Inquiry, found: Walk, usual: int | None = None) -> Conclusion | None:
    """The conclusion where the update was too long, and shorter ones lead to no spike.

    Args:
        usual: the step whose batch is a usual one. The update's own is what it was made to fit, so that a step that is
            too long for all others may look right on it.
    """
    step, turn = found.update, None
    along: Along | None = None
    for batch in dict.fromkeys([step, *([] if usual is None else [usual])]):
        cost = len(SHORT) + 2 + sum(map(inquiry.distance, (step - 1, step)))
        if not inquiry.affords(cost, "the loss along the update", kept=SHORTER):
            return None
        turn = cosine(inquiry, step) if batch == step else turn
        along = _along(inquiry, step, batch)
        if _said(inquiry, along, turn):
            break
    else:
        inquiry.refute("curvature", f"update {step} was not too long for the loss on any batch, and no zigzag is seen")
        return None
    assert along is not None
    return _shorter(inquiry, found, along)


def _said(inquiry: Inquiry, along: Along, turn: float | None) -> bool:
    """Whether the update was too long on a batch; it is noted."""
    turns = turn is not None and turn < ZIGZAG
    too_long = along.too_long or (along.batch == along.step and along.past_its_lowest and turns)
    turned = "" if turn is None or along.batch != along.step else f"; its cosine with the update before is {turn:.2f}"
    where = "its own batch" if along.batch == along.step else f"the batch of step {along.batch}"
    inquiry.found(
        "along the update",
        f"On {where} update {along.step} takes the loss {along.ends}; a shorter one would reach {number(along.short)}"
        f"{turned}.",
        "curvature" if too_long else "unknown",
        start=along.start,
        short=along.short,
        full=along.full,
        cosine=turn,
    )
    return too_long


def _shorter(inquiry: Inquiry, found: Walk, along: Along) -> Conclusion | None:
    """The conclusion where shorter steps take the rise away: that update alone, or some before it too."""
    scene, step = inquiry.scene, found.update
    gradual = max(inquiry.earliest + 1, step - GRADUAL)
    for first in dict.fromkeys([step, gradual] if found.single else [gradual]):
        redone = inquiry.tried("shorter steps", first, "lr=0.1x", steps=range(first, scene.step), kept=SHORTER)
        if redone is None:
            return None
        steps = f"step {first}" if first == inquiry.last else f"steps {first} to {inquiry.last}"
        what = f"With a tenth of the learning rate in {steps}"
        sentence = f"{what}, step {scene.step} has {inquiry.comparison(redone[-1])}"
        if inquiry.gone(redone[-1]):
            value = inquiry.value(redone[-1])
            inquiry.found("shorter steps", f"{sentence}: the rise is gone.", "curvature", redone=value)
            return _concluded(inquiry, along, first)
        inquiry.refute("curvature", f"{sentence}: the rise stays")
    return None


def _concluded(inquiry: Inquiry, along: Along, first: int) -> Conclusion:
    step = along.step
    where = "its own batch" if along.batch == step else f"the batch of step {along.batch}"
    return Conclusion(
        "curvature",
        f"Update {step} was too long for the curvature of the loss, at a usual learning rate: it took {where} "
        f"{along.ends}, and a shorter one would have reached {number(along.short)}.",
        {"step": step},
        f"a loss that falls along the whole of update {step}, or the same rise at step {inquiry.step} with shorter "
        "steps",
        [setting(change, first) for change in ("lr=0.5x", "lr=0.1x", "clip=0.1")],
    )


def _along(inquiry: Inquiry, step: int, batch: int) -> Along:
    scene, trials = inquiry.scene, inquiry.trials
    start = float(scene.moment(step).loss) if batch == step else trials.shot(step - 1, batch).loss
    short = [one.loss for one in trials.along(step, SHORT, batch)]
    full = trials.shot(step, batch).loss
    lowest = min([value for value in short if math.isfinite(value)], default=math.inf)
    return Along(step, batch, start, lowest, full)


def cosine(inquiry: Inquiry, step: int) -> float | None:
    """Of an update and the one before; None where one is not held or is all zeros."""
    scene = inquiry.scene
    if step - 2 < scene.first:
        return None
    product = [mx.array(0.0)] * 3
    for path in scene.result.gradients:
        one, two, three = (scene.state(step - back).weights[path].astype(mx.float32) for back in (2, 1, 0))
        left, right = two - one, three - two
        parts = (mx.sum(left * right), mx.sum(left * left), mx.sum(right * right))
        product = [total + part for total, part in zip(product, parts, strict=True)]
    dot, first, second = np.array(mx.stack(product), np.float64).tolist()
    return dot / math.sqrt(first * second) if first * second > 0 and math.isfinite(first * second) else None
