"""What an autopsy has found so far: the scene, the trials made on it, evidence for and against, and how much it cost.

Shared by the modules that look for one cause each. Knows scenes, trials and the record's parts; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..bits import bits_float
from ..errors import WorkbenchError
from ..gates import sensitive
from ..interventions.scene import CONTEXT, Scene
from ..number_text import number
from ..replay import Progress
from ..run import Run
from ..verdict import Cause, Evidence, Numbers, Refuted, Unchecked
from .alarm import Alarm
from .counterfactual import Shot, Trials

LIMIT = 60  # step-times beside the roll-forward: what an autopsy may take
KEPT = 12  # of them are kept for remedies, unless an experiment says otherwise


@dataclass(frozen=True)
class Tried:
    """A remedy to try.

    Attributes:
        change: as `changes.parse_change` reads it; "": nothing but the state is another.
        first: the step that it is made in, from the state before.
        fork: what `--set` of a fork is told; "": a fork without changes, None: no fork can have it.
        skip: the step whose batch a fork leaves out.
        words: the change, for people, where `change` does not say it.
        note: what else is to be known.
    """

    change: str
    first: int
    fork: str | None = None
    skip: int | None = None
    words: str = ""
    note: str = ""


def setting(change: str, first: int, note: str = "") -> Tried:
    """A remedy that a fork is told in the same words."""
    return Tried(change, first, change, note=note)


def skipping(step: int) -> Tried:
    """The remedy of leaving a step's batch out."""
    return Tried("batch=skip", step, "", skip=step)


@dataclass(frozen=True)
class Conclusion:
    """A cause.

    Attributes:
        verdict, reason, culprit, would_refute: as in the record.
        remedies: to try, the most promising first.
        redone: what was performed already from a state that the run had left: it is what the remedy leads to.
        fork_from: that state, as `--from` has it.
    """

    verdict: Cause
    reason: str
    culprit: dict[str, Any]
    would_refute: str
    remedies: list[Tried] = field(default_factory=list)
    redone: list[Shot] = field(default_factory=list)
    fork_from: str | None = None


@dataclass
class Inquiry:
    """See the module's docstring.

    Attributes:
        opening: `experiment`, `factory` as given by the caller.
        flagged: every flagged step on the way, by number.
        progress: told of each experiment before it is made; may raise to cancel.
        extra: step-times taken by what is not a step of the scene, such as a probe pass.
        masked: telemetry hides a loss that is not finite, so that the loss is no item to compare.
    """

    run: Run
    scene: Scene
    trials: Trials
    alarm: Alarm
    flagged: Mapping[int, Alarm]
    opening: dict[str, Any]
    progress: Progress = lambda done, total, what: None
    evidence: list[Evidence] = field(default_factory=list)
    refuted: list[Refuted] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    extra: float = 0.0
    masked: bool = False
    _batches: dict[int, list[np.ndarray]] = field(default_factory=dict)

    # ---- the step

    @property
    def step(self) -> int:
        return self.scene.step

    @property
    def last(self) -> int:
        """The state that the step starts from."""
        return self.scene.step - 1

    @property
    def earliest(self) -> int:
        """State N-9, or the scene's first: where the neighbours begin."""
        return max(self.scene.first, self.last - CONTEXT)

    @cached_property
    def exact(self) -> bool:
        """The way to the step, and it, have the run's bits; and a checker that was shown one-bit changes saw them."""
        scene, seen = self.scene, self.scene.moment(self.step).seen
        assert seen is not None
        return (scene.exact or self.masked) and sensitive(
            self.scene.moment(self.step).batch, scene.state(self.step), seen
        ).verdict == "exact"

    def value(self, shot: Shot) -> float:
        """Of a performed step, what is out of the ordinary at this one: its loss, or its gradient norm."""
        return shot.loss if self.alarm.metric == "loss" else shot.grad_norm

    def own(self) -> float:
        """Of the step itself."""
        return self.value(self.trials.own())

    def gone(self, shot: Shot) -> bool:
        """Whether the rise is gone in a performed step."""
        return self.alarm.gone(self.value(shot))

    def comparison(self, shot: Shot) -> str:
        """Such as "loss 2.68 instead of 3.345"."""
        return f"{self.alarm.phrase} {number(self.value(shot))} instead of {number(self.own())}"

    def healthy(self, losses: Sequence[float]) -> bool:
        """Whether losses are, on average, at most 2 robust standard deviations above the run's usual one."""
        mean = float(np.mean(losses)) if len(losses) else self.alarm.usual_loss
        return bool(np.isfinite(mean)) and not mean > self.alarm.usual_loss + 2 * self.alarm.loss_sigma

    def neutral(self) -> int | None:
        """The step before N-1 whose batch is the most usual: not flagged, its logged value next to the median; None
        where there is none. What is wrong with state N-1 may come from the batch of N-1."""
        usual = {}
        for step in range(max(1, self.last - CONTEXT + 1), self.last):
            bits = self.run.evidence(step, self.scene.segment).get(self.alarm.metric)
            if bits is not None and step not in self.flagged and np.isfinite(bits_float(bits)) and self.drawn(step):
                usual[step] = float(bits_float(bits))
        if not usual:
            return None
        middle = float(np.median(list(usual.values())))
        return min(usual, key=lambda step: abs(usual[step] - middle))

    def drawn(self, step: int) -> bool:
        """Whether the batch of a step can be had."""
        try:
            self.batch(step)
        except WorkbenchError:
            return False
        return True

    def batch(self, step: int) -> list[np.ndarray]:
        """The arrays of a step's batch.

        Raises:
            ReplayError, CheckpointError: it is not the scene's, and can't be drawn again.
        """
        if step not in self._batches:
            self._batches[step] = [np.array(array) for array in self.scene.batch(step)]
        return self._batches[step]

    # ---- what was found

    def found(self, name: str, sentence: str, supports: Cause, **numbers: Any) -> None:
        self.evidence.append(Evidence(name=name, sentence=sentence, supports=supports, numbers=Numbers.of(numbers)))

    def refute(self, cause: Cause, sentence: str) -> None:
        self.refuted.append(Refuted(cause=cause, sentence=sentence))

    def skip(self, what: str, why: str) -> None:
        if all(one.what != what for one in self.unchecked):
            self.unchecked.append(Unchecked(what=what, why=why))

    def settle(self, verdict: Cause) -> None:
        """Moves what spoke against one way in which the verdict could have come true to the evidence."""
        own = [one for one in self.refuted if one.cause == verdict]
        self.refuted = [one for one in self.refuted if one.cause != verdict]
        for one in own:
            self.found("not in this way", f"{one.sentence[0].upper()}{one.sentence[1:]}.", "unknown")

    # ---- what it costs

    @property
    def spent(self) -> float:
        """Step-times beside the roll-forward to state N-9."""
        return self.last - self.earliest + self.scene.computed + self.extra

    def distance(self, state: int) -> int:
        """Steps that it takes to have a state of the scene."""
        return 0 if self.scene.holds_all or state >= self.last else state - self.scene.checkpoint

    def affords(self, steps: float, what: str, kept: float = KEPT) -> bool:
        """Whether there is time for so many steps more, with `kept` left over; if not, it is noted as unchecked."""
        self.progress(int(self.spent), LIMIT, f"step {self.step}: {what}")
        if self.spent + steps + kept <= LIMIT:
            return True
        self.skip(what, f"it takes about {steps:.0f} steps, and an autopsy may take {LIMIT} beside the roll-forward")
        return False

    def tried(self, what: str, first: int, change: Any, *, kept: float = KEPT, **options: Any) -> list[Shot] | None:
        """`Trials.redo`; None, with a note, where that can't be or takes too long."""
        steps = self.distance(first - 1) + self.step - first + 1 + options.get("beyond", 0)
        if not self.affords(steps, what, kept):
            return None
        try:
            return self.trials.redo(first, change, **options)
        except WorkbenchError as error:
            self.skip(what, str(error))
            return None
