"""Is it attention whose logits ran away? Their largest value by head, now and some steps ago, and the same step with
that head group's queries scaled back.

Scaling the query scales every logit of its attention call: what QK-clip does to weights (Kimi Team 2025,
arXiv:2507.20534, section 2.1) is done here to one forward and backward pass. Knows an inquiry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from ..capture import ModuleCalls
from ..deterministic import attention_calls
from ..experiment import Experiment, set_random_key
from ..interventions.attempt import Attempt, put
from ..probes.measured import Attention
from ..probes.watch import FUSED, Watch
from ..step import Stepper, forward_backward
from .counterfactual import Shot, shot
from .inquiry import Conclusion, Inquiry, setting

# A softmax gives all but e^-30 of its weight to one position when its logit is 30 above the rest. Dehghani et al. 2023
# (arXiv:2302.05442, section 2) saw logits of thousands and one-hot attention before divergence; Kimi K2 clips at 100;
# in preset tiny, trained for 300 steps, they stay below 20. What is claimed rests on the experiment, not on this.
LARGE = 30.0
GROWN = 1.5  # times the largest logit of the earliest held state: it is growing; or it had run away by then
PASS = 0.7  # of a step that a watched forward and backward pass takes, no update being made


@dataclass(frozen=True)
class Head:
    """The largest attention logit of a head, now and in the earlier state.

    Attributes:
        entropy: of its attention, now, in nats.
        fused: whether the call can be made again with other queries.
    """

    path: str
    head: int
    now: float
    then: float
    entropy: float | None
    fused: bool

    @property
    def ran_away(self) -> bool:
        return self.now > LARGE and (self.now > GROWN * self.then or self.then > LARGE)

    @property
    def name(self) -> str:
        return f"head {self.head} of {self.path or 'the model'}"


def examine(inquiry: Inquiry, batch: int) -> Conclusion | None:
    """The conclusion where scaling the queries back takes the rise away.

    Args:
        batch: a usual one, on which the states are compared.
    """
    step, last, earliest = inquiry.step, inquiry.last, inquiry.earliest
    if not inquiry.affords(2 * PASS + 2 + inquiry.distance(earliest), "attention logits"):
        return None
    heads = list(_heads(*(_watched(inquiry, state, batch) for state in (last, earliest))))
    if not heads:
        inquiry.skip("attention logits", "no attention call was seen in the model")
        return None
    worst = max(heads, key=lambda one: one.now)
    past = f", and was {worst.then:.4g} in state {earliest}" if earliest < last else ""
    if not worst.ran_away:
        what = f"the largest attention logit of state {last} is {worst.now:.3g} ({worst.name}){past}"
        inquiry.refute("attention-logits", what)
        return None
    inquiry.found(
        "attention logits",
        f"The largest attention logit of {worst.name} is {worst.now:.4g} in state {last}{past}.",
        "attention-logits",
        now=worst.now,
        then=worst.then,
        entropy=worst.entropy,
    )
    if not worst.fused:
        inquiry.skip("the step with smaller attention logits", f"attention in {worst.path} is no call of {FUSED}")
        return None
    found = _scaled_back(inquiry, heads)
    if found is None:
        return None
    return Conclusion(
        "attention-logits",
        f"Attention logits ran away: {worst.now:.4g} in {worst.name}"
        + (f", {worst.then:.4g} {last - earliest} steps before." if earliest < last else "."),
        {"step": step, "layer": worst.path, "head": worst.head},
        f"the same rise at step {step} with attention logits {found}",
        [setting(change, earliest + 1) for change in ("lr=0.1x", "clip=0.1")],
    )


def _scaled_back(inquiry: Inquiry, heads: list[Head]) -> str | None:
    """In words, how small the logits are with which the rise is gone; None: it stays.

    As small as they were some steps ago first; where they had run away by then, no larger than `LARGE`.
    """
    step, earliest = inquiry.step, inquiry.earliest
    for least, words in ((False, f"no larger than in state {earliest}"), (True, f"no larger than {LARGE:g}")):
        factors: dict[str, float] = {}
        for one in heads:
            limit = LARGE if least else min(one.then, one.now)
            if one.ran_away and (limit < one.then or not least):
                factors[one.path] = min(limit / one.now, factors.get(one.path, 1.0))
        if not factors or not inquiry.affords(1, f"the step with attention logits {words}"):
            continue
        scaled = _scaled(inquiry, factors)
        layers = ", ".join(path or "the model" for path in factors)
        sentence = (
            f"With the queries of {layers} scaled so that its logits are {words}, step {step} has "
            f"{inquiry.comparison(scaled)}"
        )
        if inquiry.gone(scaled):
            value = inquiry.value(scaled)
            inquiry.found("scaled queries", f"{sentence}: the rise is gone.", "attention-logits", scaled=value)
            return words
        inquiry.refute("attention-logits", f"{sentence}: the rise stays")
    return None


def _heads(now: list[Attention], then: list[Attention]) -> Iterator[Head]:
    before = {(one.path, one.call): one.logit_max for one in then}
    for one in now:
        past = before.get((one.path, one.call), [None] * len(one.logit_max))
        for head, (large, small) in enumerate(zip(one.logit_max, past, strict=False)):
            if large is not None and small is not None:
                yield Head(one.path, head, large, max(small, 1e-6), one.entropy[head], one.source == FUSED)


def _watched(inquiry: Inquiry, state: int, batch: int) -> list[Attention]:
    """An uncompiled pass: its numbers need not be those of the exact one to the last bit."""
    scene = inquiry.scene
    experiment: Experiment = scene.stepper.experiment
    watch = Watch(experiment.model, experiment.loss_fn)
    with scene.at_rest():
        put(experiment, scene.state(state))
        set_random_key(scene.moment(scene.step).key)
        with watch:
            loss, _, _, _ = forward_backward(
                replace(experiment, loss_fn=watch.loss_fn), scene.batch(batch), scene.layers
            )
        seen = [one.arrays for one in watch.seen]
        mx.eval(loss, seen)
        inquiry.extra += PASS
        return watch.forward(seen).attention


def _scaled(inquiry: Inquiry, factors: dict[str, float]) -> Shot:
    """Step N, with the queries of the attention calls in some modules times a factor; uncompiled."""
    scene = inquiry.scene
    with scene.at_rest():
        attempt = Attempt(scene, *scene.before(), scene.stepper)
        loss_fn = attempt.experiment.loss_fn
        modules = ModuleCalls.of_all(
            attempt.experiment.model, lambda path, perform, args, kwargs: perform(*args, **kwargs)
        )

        def scaled_loss(model: Any, *batch: mx.array) -> Any:
            with modules, _scaling(modules, factors):
                return loss_fn(model, *batch)

        attempt.with_options()
        attempt.stepper = Stepper(replace(attempt.stepper.experiment, loss_fn=scaled_loss), scene.layers)
        put(attempt.stepper.experiment, attempt.state)
        return shot(scene.step, attempt.perform(attempt.moment))


@contextmanager
def _scaling(modules: ModuleCalls, factors: dict[str, float]) -> Iterator[None]:
    def call(perform: Callable[..., mx.array], q: mx.array, *args: Any, **options: Any) -> mx.array:
        factor = factors.get(modules.path)
        return perform(q if factor is None else (q * factor).astype(q.dtype), *args, **options)

    with attention_calls(call):
        yield
