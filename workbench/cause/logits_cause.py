"""Is it attention whose logits ran away, or are about to? Their largest value by head, now and in earlier states, and
the same step with that head group's queries scaled back.

Scaling the query scales every logit of its attention call: what QK-clip does to weights (Kimi Team 2025,
arXiv:2507.20534, section 2.1) is done here to one forward and backward pass. Knows an inquiry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..capture import ModuleCalls
from ..deterministic import attention_calls
from ..experiment import Experiment, set_random_key
from ..interventions.attempt import Attempt, put
from ..interventions.scene import CONTEXT
from ..number_text import number
from ..probes.measured import Attention
from ..probes.watch import FUSED, Watch
from ..step import Stepper, forward_backward
from .alarm import LEFT
from .counterfactual import Shot, shot
from .inquiry import Conclusion, Inquiry, setting, skipping

# A softmax gives all but e^-30 of its weight to one position when its logit is 30 above the rest. Dehghani et al. 2023
# (arXiv:2302.05442, section 2) saw logits of thousands and one-hot attention before divergence; Kimi K2 clips at 100;
# in preset tiny, trained for 300 steps, they stay below 20. What is claimed rests on the experiment, not on this.
LARGE = 30.0
GROWN = 1.5  # times the largest logit of state N-9: it is growing; or it had run away by then
# Below LARGE a logit is out of line by the run's own healthy steps alone: from state N-9 to N-1 it grew at least FAST
# times, where as many steps before took it to at most GROWN times. Beyond LARGE it is where it is at least FAR times
# what it was in the first state held: a saturated softmax may keep its effect when it is scaled down to LARGE alone.
FAST = GROWN**2
FAR = 10.0
OVERFLOW = float(np.finfo(np.float32).max)
PASS = 0.7  # of a step that a watched forward and backward pass takes, no update being made


@dataclass(frozen=True)
class Head:
    """The largest attention logit of a head, now and in an earlier state.

    Attributes:
        now: inf where it is not finite any more.
        entropy: of its attention, now, in nats.
        fused: whether the call can be made again with other queries.
    """

    path: str
    call: int
    head: int
    now: float
    then: float
    entropy: float | None
    fused: bool

    @property
    def ran_away(self) -> bool:
        return self.now > LARGE and (self.now > GROWN * self.then or self.then > LARGE)

    def factor(self, limit: float) -> float:
        """For its queries, so that no logit is larger than a limit; where they overflowed, by at least as much."""
        return min(1.0, limit / min(self.now, OVERFLOW))

    @property
    def name(self) -> str:
        return f"head {self.head} of {self.path or 'the model'}"


class Look:
    """What is seen of the logits of one inquiry; each state is watched once.

    Args:
        batch: a usual one, on which the states are compared.
    """

    def __init__(self, inquiry: Inquiry, batch: int) -> None:
        self._inquiry, self._batch = inquiry, batch
        self._seen: dict[int, list[Attention]] = {}

    def ran_away(self) -> Conclusion | None:
        """The conclusion where logits are large, and scaling the queries back takes the rise away."""
        inquiry, earliest = self._inquiry, self._inquiry.earliest
        if not inquiry.affords(2 * PASS + 2 + inquiry.distance(earliest), "attention logits"):
            return None
        heads = self._heads(earliest)
        if not heads:
            inquiry.skip("attention logits", "no attention call was seen in the model")
            return None
        worst = max(heads, key=lambda one: one.now)
        if not worst.ran_away:
            past = f", and was {number(worst.then)} in state {earliest}" if earliest < inquiry.last else ""
            what = f"the largest attention logit of state {inquiry.last} is {number(worst.now, 3)} ({worst.name}){past}"
            inquiry.refute("attention-logits", what)
            return None
        _say(inquiry, worst, earliest)
        if not _repeatable(inquiry, worst):
            return None
        found = _scaled_back(inquiry, heads)
        return None if found is None else _concluded(inquiry, worst, earliest, found)

    def out_of_line(self) -> Conclusion | None:
        """The conclusion where logits are out of line with the run's own earlier states, and scaling the queries back
        to what they were there takes the rise away, apart from what the batch has of it on such a state by itself.

        The finer comparison: what else made the batch's share of a rise is no part of the logits'.
        """
        inquiry, first, earliest = self._inquiry, self._inquiry.scene.first, self._inquiry.earliest
        if inquiry.last not in self._seen:
            return None  # what `ran_away` could not see
        if first >= earliest or not inquiry.scene.holds_all:
            inquiry.skip("attention logits long before", f"no state before {earliest} is held")
            return None
        if not inquiry.affords(PASS + 2, "attention logits long before"):
            return None
        before = {(one.path, one.call, one.head): one.then for one in self._heads(first)}
        heads = [(one, before.get((one.path, one.call, one.head))) for one in self._heads(earliest)]
        early = [one for one, past in heads if past is not None and _fast(one, past, earliest - first)]
        far = [
            replace(one, then=past)
            for one, past in heads
            if past is not None and one.now > LARGE >= past and one.now >= FAR * past
        ]
        for state, some in ((earliest, early), (first, far)):
            if some and (found := self._as_in(state, some)) is not None:
                return found
        return None

    def _as_in(self, state: int, heads: list[Head]) -> Conclusion | None:
        inquiry, worst = self._inquiry, max(heads, key=lambda one: one.now / one.then)
        if not _repeatable(inquiry, worst) or not inquiry.affords(2, "logits of earlier states"):
            return None
        _say(inquiry, worst, state)
        factors: dict[str, float] = {}
        for one in heads:
            factors[one.path] = min(one.factor(one.then), factors.get(one.path, 1.0))
        scaled = _scaled(inquiry, factors)
        alone = inquiry.trials.shot(state, inquiry.step)
        own, left = max(0.0, inquiry.alarm.rise(inquiry.value(alone))), inquiry.alarm.rise(inquiry.value(scaled))
        words = f"no larger than in state {state}"
        sentence = (
            f"With the queries of {', '.join(path or 'the model' for path in factors)} scaled so that its logits are "
            f"{words}, step {inquiry.step} has {inquiry.comparison(scaled)}; its batch has "
            f"{number(inquiry.value(alone))} on that state"
        )
        # What is left of the rise, without the part that the batch has where the logits are still as they were.
        if not (own <= LEFT and left - own <= LEFT * (1 - own)):
            inquiry.refute("attention-logits", f"{sentence}: the rise stays")
            return None
        numbers = {"scaled": inquiry.value(scaled), "batch alone": inquiry.value(alone)}
        inquiry.found("scaled queries", f"{sentence}: the rise is gone.", "attention-logits", **numbers)
        return _concluded(inquiry, worst, state, words)

    def _heads(self, state: int) -> list[Head]:
        """Now beside an earlier state."""
        for one in (self._inquiry.last, state):
            if one not in self._seen:
                self._seen[one] = _watched(self._inquiry, one, self._batch)
        return list(_heads(self._seen[self._inquiry.last], self._seen[state]))


def _fast(one: Head, past: float, distance: int) -> bool:
    """Whether a head's logits grow out of line with what they did in as many of the `distance` steps before."""
    pace = (one.then / past) ** min(1.0, CONTEXT / distance)
    return one.then <= LARGE and one.now >= FAST * one.then and pace <= GROWN


def _say(inquiry: Inquiry, worst: Head, state: int) -> None:
    past = f", and was {number(worst.then)} in state {state}" if state < inquiry.last else ""
    inquiry.found(
        "attention logits",
        f"The largest attention logit of {worst.name} is {number(worst.now)} in state {inquiry.last}{past}.",
        "attention-logits",
        now=worst.now,
        then=worst.then,
        entropy=worst.entropy,
    )


def _repeatable(inquiry: Inquiry, worst: Head) -> bool:
    if not worst.fused:
        inquiry.skip("the step with smaller attention logits", f"attention in {worst.path} is no call of {FUSED}")
    return worst.fused


def _concluded(inquiry: Inquiry, worst: Head, state: int, found: str) -> Conclusion:
    past = f", {number(worst.then)} {inquiry.last - state} steps before." if state < inquiry.last else "."
    return Conclusion(
        "attention-logits",
        f"Attention logits ran away: {number(worst.now)} in {worst.name}{past}",
        {"step": inquiry.step, "layer": worst.path, "head": worst.head},
        f"the same rise at step {inquiry.step} with attention logits {found}",
        [*(setting(change, inquiry.earliest + 1) for change in ("lr=0.1x", "clip=0.1")), skipping(inquiry.step)],
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
                factors[one.path] = min(one.factor(limit), factors.get(one.path, 1.0))
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
            if large is None and small is not None and small > LARGE:
                large = math.inf  # it was on its way there
            if large is not None and small is not None:
                yield Head(one.path, one.call, head, large, max(small, 1e-6), one.entropy[head], one.source == FUSED)


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
