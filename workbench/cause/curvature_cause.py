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

from .inquiry import Conclusion, Inquiry, setting
from .walk import Walk

SHORT = (0.1, 0.5)  # of the update
SHORTER = 6  # step-times that are kept for the steps after
GRADUAL = 4  # steps before the worst one that are made shorter too, where no single one did it
ZIGZAG = -0.1  # cosine of successive updates: momentum alone makes it positive, about beta1, and SGD's noise leaves 0


@dataclass(frozen=True)
class Along:
    """The loss along an update, on its own batch: before it, at the lowest of the points between, and after it."""

    step: int
    start: float
    short: float
    full: float

    @property
    def too_long(self) -> bool:
        """It raised the loss that a shorter one lowers."""
        return self.short < self.start and (self.full > self.start or math.isnan(self.full))

    @property
    def past_its_lowest(self) -> bool:
        """It went on beyond the lowest point on its way."""
        return self.short < self.full or math.isnan(self.full)


def examine(inquiry: Inquiry, found: Walk) -> Conclusion | None:
    """The conclusion where the update was too long, and shorter ones lead to no spike."""
    scene, step = inquiry.scene, found.update
    cost = len(SHORT) + 1 + sum(map(inquiry.distance, (step - 1, step)))
    if not inquiry.affords(cost, "the loss along the update", kept=SHORTER):
        return None
    along, turn = _along(inquiry, step), cosine(inquiry, step)
    turns = turn is not None and turn < ZIGZAG
    too_long = along.too_long or (along.past_its_lowest and turns)
    turned = "" if turn is None else f"; its cosine with the update before is {turn:.2f}"
    ends = f"from {along.start:.4g} to {along.full:.4g}"
    inquiry.found(
        "along the update",
        f"On its own batch update {step} takes the loss {ends}; a shorter one would reach {along.short:.4g}{turned}.",
        "curvature" if too_long else "unknown",
        start=along.start,
        short=along.short,
        full=along.full,
        cosine=turn,
    )
    if not too_long:
        inquiry.refute("curvature", f"update {step} lowered the loss of its own batch, and no zigzag is seen")
        return None
    first = step if found.single else max(inquiry.earliest + 1, step - GRADUAL)
    redone = inquiry.tried("shorter steps", first, "lr=0.1x", steps=range(first, scene.step), kept=SHORTER)
    if redone is None:
        return None
    steps = f"step {first}" if first == inquiry.last else f"steps {first} to {inquiry.last}"
    sentence = f"With a tenth of the learning rate in {steps}, step {scene.step} has {inquiry.comparison(redone[-1])}"
    if not inquiry.gone(redone[-1]):
        inquiry.refute("curvature", f"{sentence}: the rise stays")
        return None
    inquiry.found("shorter steps", f"{sentence}: the rise is gone.", "curvature", redone=inquiry.value(redone[-1]))
    return Conclusion(
        "curvature",
        f"Update {step} was too long for the curvature of the loss, at a usual learning rate: it took its own batch "
        f"{ends}, and a shorter one would have reached {along.short:.4g}.",
        {"step": step},
        f"a loss that falls along the whole of update {step}, or the same rise at step {scene.step} with shorter steps",
        [setting(change, first) for change in ("lr=0.5x", "lr=0.1x", "clip=0.1")],
    )


def _along(inquiry: Inquiry, step: int) -> Along:
    scene, trials = inquiry.scene, inquiry.trials
    start = float(scene.moment(step).loss)
    short = [one.loss for one in trials.along(step, SHORT, step)]
    full = trials.shot(step, step).loss
    return Along(step, start, min([value for value in short if math.isfinite(value)], default=math.inf), full)


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
