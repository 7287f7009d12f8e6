"""The scene of a step: the states, batches and observations around it, rolled forward once and held for experiments.

    scene = Scene.open(run, 4218)
    scene.exact                            # did the way there, and the step, have the run's bits?
    intervene(scene, "drop-row=3").loss    # beside scene.baseline.loss

The bridge between a run's folder and interventions; these know nothing of folders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..batches.redraw import redraw
from ..bits import float_bits
from ..checkpoints import checkpoint_reader
from ..compare import Item, compare_evidence, overall
from ..environment import on_device
from ..errors import ReplayError
from ..experiment import Batch, Experiment, as_batch, batch_hash, random_key, read_cursor
from ..memory import memory, state_size
from ..observe import Observation, edit, learning_rates, observe
from ..own_scripts.users_code import performing
from ..recorded.layout import CHECKPOINTS
from ..recorded.plan import Plan
from ..replay import Progress
from ..replaying.as_found import left_as_found
from ..replaying.preparation import Prepared, prepared, undisturbed
from ..run import Run
from ..snapshot import State, capture, restore
from ..step import Stepper, StepResult
from ..trace import Difference, difference_at
from .attempt import put
from .effect import Effect, effect

if TYPE_CHECKING:
    from typing import Self

CONTEXT = 8  # steps before N
NEXT_STEPS = 8  # after it: enough to see a loss come back, or not
MEMORY_SHARE = 4  # states may fill this part of the machine's memory: a quarter


@dataclass(frozen=True)
class Moment:
    """What a step took beside the state, enough to perform it again on another one; and what came of it.

    Attributes:
        key: the random state when the step began, after its batch was drawn.
        rates: the learning rates that it used, as bits; one an optimizer, None for one without.
        cursor: where the data stream stood after its batch.
        loss: float32.
        seen: what telemetry logs of it; None for a step after N.
    """

    batch: Batch
    key: tuple[int, int]
    rates: list[str | None]
    cursor: dict[str, Any]
    loss: np.float32
    seen: Observation | None


class Scene:
    """Made by `Scene.open`. Nothing that is done with it moves a bit of the run, of this thread's random state, or of
    an experiment that was handed in: that is at rest in its owner's state.

    Attributes:
        run, step, segment: what was opened.
        first: the earliest state of the scene; up to N-1 they are as the next step found them.
        stepper: the run's own step function.
        layers: layer paths in the run's order.
        result: of step N, untouched; without its activations.
        items: step N compared with the run's record, item by item.
        first_difference: the earliest difference from the run, on the way or at step N.
        draws: whether step N draws random numbers.
        checkpoint: step of the checkpoint that was restored.
        rolled: steps that led from there to state N-1.
        computed: steps performed since, step N and those of interventions included.
        next_steps: steps after N that an intervention performs unless told otherwise.
        environment, unlike: the numeric environment, and in what it differs from the run's.
        notices: what the user should know.
    """

    @classmethod
    def open(
        cls,
        run: Run,
        step: int,
        *,
        context: int = CONTEXT,
        next_steps: int = NEXT_STEPS,
        segment: int | None = None,
        experiment: Experiment | None = None,
        factory: str | None = None,
        checkpoint: int | None = None,
        other_environment: bool = False,
        memory_budget: int | None = None,
        progress: Progress = lambda done, total, what: None,
    ) -> Self:
        """Restores a checkpoint at or before state N-1-context and rolls forward once, to state N.

        Args:
            context: steps before N whose states, batches and observations are kept; fewer where the run or its
                checkpoints begin later.
            next_steps: steps after N to perform when an effect on them is asked for.
            segment, experiment, factory, checkpoint, other_environment, progress: as `Run.replay`.
            memory_budget: bytes that states may take; None: a quarter of the machine's memory. Where they don't fit,
                only states N-1 and N are held, and an earlier one is computed again when it is asked for.

        Raises:
            ReplayError, CheckpointError, DataError, ExperimentError, EnvironmentMismatch: as `Run.replay`.
        """
        plan = _plan(run, step, segment, context, checkpoint)
        there = prepared(run, plan, experiment=experiment, factory=factory, other_environment=other_environment)
        with undisturbed(), there as ready:
            return cls(ready, context, next_steps, memory_budget, progress)

    def __init__(
        self, ready: Prepared, context: int, next_steps: int, memory_budget: int | None, progress: Progress
    ) -> None:
        self._ready = replace(ready, start=replace(ready.start, weights={}, optimizer={}))  # not held twice
        self.run, self.segment, self.step = ready.run, ready.plan.segment, ready.plan.steps[-1]
        self.next_steps, self.environment, self.unlike = next_steps, ready.here, ready.unlike
        self.notices, self.layers = ready.notices, ready.run.manifest.layers
        self.stepper = Stepper(ready.experiment, self.layers)
        self.first = max(ready.start.step, self.step - 1 - context)
        self.checkpoint, self.rolled, self.computed = ready.start.step, self.step - 1 - ready.start.step, 0
        self._states: dict[int, State] = {}
        self._moments: dict[int, Moment] = {}
        self._after: list[Moment] = []
        self._lent = False  # whether an experiment that was handed in is being worked on
        self._ended = False  # the data stream, somewhere after step N
        restore(ready.experiment, ready.start)
        budget = memory() // MEMORY_SHARE if memory_budget is None else memory_budget
        self._holds_all = (self.step - self.first + 1) * state_size(ready.experiment) <= budget
        lanes = {f"state.{lane}": value for lane, value in ready.start.lanes(ready.method).items()}
        self.first_difference = self._difference(ready.start.step, lanes, "restored state")
        self._roll(ready.start.step, progress)

    # ---- what there is

    @property
    def exact(self) -> bool:
        """The restored state, every step on the way and step N have the run's bits."""
        return self.first_difference is None and overall(self.items) == "exact"

    @property
    def baseline(self) -> Effect:
        """The untouched step: what an `Effect` stands beside."""
        return self.untouched(self.next_steps)

    @property
    def holds_all(self) -> bool:
        """Whether every state of the scene is in memory; if not, an earlier one takes a roll-forward of its own."""
        return self._holds_all

    def untouched(self, next_steps: int) -> Effect:
        """`baseline`, with another number of steps after N."""
        following = self.after(next_steps)
        with self.at_rest():
            found = effect(None, self.result, self.state(self.step - 1).weights, self.state(self.step).weights)
        compiled = self.stepper.experiment.options.compile
        losses = [moment.loss for moment in following]
        return replace(found, next_losses=losses, steps=1 + len(losses), compiled=compiled)

    def before(self) -> tuple[State, Moment]:
        """The state that step N starts from, and what else it takes."""
        return self.state(self.step - 1), self.moment(self.step)

    def state(self, step: int) -> State:
        """State `step`, from `first` to N.

        Raises:
            ReplayError: it is out of that range.
        """
        if step in self._states:
            return self._states[step]
        if not self.first <= step <= self.step:
            raise ReplayError(
                f"state {step} is not in this scene, which has states {self.first} to {self.step}; "
                "open it with more context (--context K, context=K)"
            )
        with self.at_rest():
            return self._recomputed(step)

    def moment(self, step: int) -> Moment:
        """What step `step`, after `first` and up to N or a step computed after it, took beside the state.

        Raises:
            ReplayError: it is out of that range.
        """
        if step > self.step and step - self.step <= len(self._after):
            return self._after[step - self.step - 1]
        if step not in self._moments:
            raise ReplayError(
                f"step {step} is not in this scene, which has steps {self.first + 1} to {self.step + len(self._after)}"
            )
        return self._moments[step]

    def after(self, count: int) -> list[Moment]:
        """The untouched steps after N; fewer where the data stream ends."""
        if len(self._after) < count and not self._ended:
            with self.at_rest():
                self._go_on(count)
        return self._after[:count]

    def batch(self, step: int) -> Batch:
        """The batch of any step of the run: the scene's own, or drawn again from the sampler, and then verified.

        Raises:
            ReplayError, CheckpointError: the run has no such step, or its batch can't be drawn again.
        """
        if step in self._moments or 0 < step - self.step <= len(self._after):
            return self.moment(step).batch
        segment = self.segment if self.run.line(step, self.segment) else self.run.segment_of(step)[0]
        with self.at_rest():
            return redraw(self.run, self.stepper.experiment.sampler, step, segment, self.notices)

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Within: work on the run's device. After: the experiment is at state N, whatever was done to it; one that was
        handed in is so only within another of these, and otherwise as its owner left it."""
        with on_device(self._ready.backend), undisturbed(), self._borrowed():
            try:
                yield
            finally:
                if self.step in self._states:
                    put(self.stepper.experiment, self._states[self.step])

    @contextmanager
    def _borrowed(self) -> Iterator[None]:
        if self._lent or not self._ready.given:
            yield
            return
        with left_as_found(self.stepper.experiment):
            if self.step in self._states:
                put(self.stepper.experiment, self._states[self.step])
            self._lent = True
            try:
                yield
            finally:
                self._lent = False

    # ---- rolling forward

    def _roll(self, start: int, progress: Progress) -> None:
        experiment, total = self.stepper.experiment, self.step - start
        for step in range(start + 1, self.step + 1):
            progress(step - start - 1, total, f"step {step} of {self.step}, rolling forward")
            self._edit(step)
            if step > self.first and (self._holds_all or step == self.step):
                self._states[step - 1] = capture(experiment, step - 1, read_cursor(experiment.sampler))
            moment, result = self._perform(step, observed=True)
            assert moment.seen is not None
            items = compare_evidence(self._ready.evidence(step), moment.seen.evidence(), self.layers)
            where: Literal["step", "roll-forward"] = "step" if step == self.step else "roll-forward"
            self.first_difference = self.first_difference or difference_at(items, step, where)
            if step > self.first:
                self._moments[step] = moment
        self.computed = 1
        self.items: dict[str, Item] = items
        self.result: StepResult = replace(result, activations={})  # they are large, and no intervention needs them
        self.draws = random_key() != moment.key
        self._states[self.step] = capture(experiment, self.step, moment.cursor)

    def _edit(self, step: int) -> None:
        """What the run's loop itself changed in the state before a step."""
        if (edits := self._ready.edits(step)) is not None:
            edit(self.stepper.experiment, edits)

    def _perform(self, step: int, *, observed: bool) -> tuple[Moment, StepResult]:
        experiment = self.stepper.experiment
        try:
            with performing(step):
                batch = as_batch(next(experiment.sampler))
        except StopIteration:
            raise ReplayError(f"the sampler ran out before step {step}; rebuild it with the run's data") from None
        cursor, key = read_cursor(experiment.sampler), random_key()
        with performing(step):
            result = self.stepper(batch)
        seen = observe(self.stepper, batch, result, cursor, self._ready.method) if observed else None
        return Moment(batch, key, learning_rates(experiment), cursor, result.loss, seen), result

    def _difference(
        self, step: int, evidence: Mapping[str, Any], where: Literal["restored state"]
    ) -> Difference | None:
        return difference_at(compare_evidence(self._ready.evidence(step), evidence, self.layers), step, where)

    def _recomputed(self, step: int) -> State:
        """A state that did not fit, from the checkpoint again."""
        key, experiment = self._ready.plan.checkpoint, self.stepper.experiment
        put(experiment, checkpoint_reader.read(self.run.path / CHECKPOINTS, *key, self.run.manifest.run))
        for number in range(key[0] + 1, step + 1):
            self._edit(number)
            self._perform(number, observed=False)
            self.computed += 1
        self._edit(step + 1)
        return capture(experiment, step, read_cursor(experiment.sampler))

    def _go_on(self, count: int) -> None:
        put(self.stepper.experiment, self._states[self.step])
        found: list[Moment] = []
        while len(found) < count:
            step = self.step + len(found) + 1
            self._edit(step)
            try:
                moment, result = self._perform(step, observed=False)
            except ReplayError:
                self._ended = True
                break
            self.computed += 1
            found.append(moment)
            seen = {"batch_hash": batch_hash(moment.batch), "loss": float_bits(result.loss)}
            self._compare_after(step, seen)
        self._after = found

    def _compare_after(self, step: int, seen: Mapping[str, str]) -> None:
        recorded = self._ready.evidence(step) if self.run.line(step, self.segment) else {}
        if unlike := [name for name, value in seen.items() if recorded.get(name, value) != value]:
            verb = "differs" if len(unlike) == 1 else "differ"
            notice = f"the untouched step {step} is not the run's: {' and '.join(unlike)} {verb}"
            if notice not in self.notices:
                self.notices.append(notice)


def _plan(run: Run, step: int, segment: int | None, context: int, checkpoint: int | None) -> Plan:
    """From the last checkpoint that leaves room for the context, or the earliest there is."""
    if context < 0:
        raise ReplayError(f"context is {context}; expected 0 steps or more")
    plan = run.plan(step, segment, checkpoint=checkpoint)
    if checkpoint is not None:
        return plan
    before = [number for number, _ in run.checkpoints_before(plan.steps[0], plan.segment)]
    roomy = [number for number in before if number < plan.steps[0] - context]
    chosen = run.plan(step, plan.segment, checkpoint=roomy[-1] if roomy else before[0])
    return replace(chosen, notices=list(dict.fromkeys(plan.notices + chosen.notices)))
