"""Replaying steps: restore, roll forward under check, run, repeat, probe, and compare with the evidence.

Knows experiments, states and evidence; nothing of run folders, manifests, models, data or trainers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from . import gates
from .alongside import Alongside
from .compare import Evidence, Item, compare_evidence, overall
from .errors import ReplayError
from .experiment import Batch, Experiment, as_batch, read_cursor
from .lines.line import Edits
from .observe import Observation, edit, measure_alongside, observe
from .own_scripts.users_code import performing
from .probe import Probe, certified_probe
from .probes.measure import parameter_rows, parameter_updates
from .probes.measured import NonFinite, Row, Update
from .probes.nonfinite import first_nonfinite
from .snapshot import State, capture, first_difference, restore
from .step import Stepper, StepResult
from .token_loss import of_rows
from .trace import Difference, Gate, Gates, difference_at

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what is being done; may raise to cancel
# The run's own checkpoint of a state, compared with it: the first tensor that differs, "" if none does, None if the
# checkpoint can't be read.
Comparison = Callable[[State], str | None]


@dataclass(frozen=True)
class Outcome:
    """One replayed step.

    Attributes:
        held: state N-1; None: nobody needed it, and the step could use its memory.
        after: state N.
        result: of the exact pass; with a probe pass, which has them too, without activations.
        items: compared item by item, in execution order.
        first_difference: the earliest difference, on the way or at the step itself.
        rows: every measured tensor; empty without a probe pass.
        updates: how each parameter was updated; empty without a probe pass.
        first_nonfinite: None if all is finite, or without a probe pass.
    """

    step: int
    held: State | None
    after: State
    batch: Batch
    result: StepResult
    observation: Observation
    items: dict[str, Item]
    first_difference: Difference | None
    gates: Gates
    probe: Probe | None
    rows: list[Row]
    updates: list[Update]
    first_nonfinite: NonFinite | None

    @property
    def before(self) -> State:
        """State N-1. Raises ReplayError: it was not held."""
        if self.held is None:
            raise ReplayError(f"state {self.step - 1} was not held; replay step {self.step} with hold=True")
        return self.held

    @property
    def exact(self) -> bool:
        """Every recorded item has the run's bits, so had every step on the way, and the checker can tell."""
        agrees = self.first_difference is None and overall(self.items) == "exact"
        return agrees and self.gates.sensitive.verdict == "exact"


def replay_steps(
    experiment: Experiment,
    start: State,
    steps: Sequence[int],
    evidence: Callable[[int], Evidence],
    *,
    layers: Sequence[str],
    method: str | None = None,
    checkpoint: Callable[[int], State | Comparison | None] = lambda step: None,
    edits: Callable[[int], Edits | None] = lambda step: None,
    with_probe: bool = True,
    repeat: Callable[[int], bool] = lambda step: True,
    hold: bool = True,
    looked: Callable[[State], None] = lambda before: None,
    progress: Progress = lambda done, total, what: None,
) -> Iterator[Outcome]:
    """Replays steps of one segment from the state before the first of them or an earlier one.

    Args:
        experiment: rebuilt as the run had it; its state is overwritten.
        start: a checkpoint's state.
        steps: ascending, all after `start.step`.
        evidence: what the run logged at a step (for `start.step`: the lanes of the state, if known).
        layers: layer paths in the run's order.
        method: of the run's fingerprints; None: the one that costs least here.
        checkpoint: the run's own checkpoint of a step, if it has one, or what compares it.
        edits: what the run's loop changed in the state before a step.
        with_probe: make the probe pass.
        repeat: whether to perform a step twice, for the repeatable gate, which is otherwise unverified.
        hold: keep state N-1 in the outcome, also where it is needed neither to repeat nor to probe the step: that takes
            as much memory as the state, which the step would use otherwise.
        looked: called with state N-1 before step N.
        progress: called before each piece of work, and when a step is done.

    Raises:
        ReplayError: a step is not after the start, the sampler ran dry, or code of the user's raised an exception.
    """
    if not steps or steps[0] <= start.step or list(steps) != sorted(set(steps)):
        raise ReplayError(
            f"steps {list(steps)} can't be replayed from state {start.step}; expected ascending later steps"
        )
    # Restored first: a model's initial weights are lazy, and in its place none of them are ever computed.
    restore(experiment, start)
    stepper = measure_alongside(Stepper(experiment, layers))
    first = start.step
    lanes = Alongside(partial(start.lanes, method))
    departed: Difference | None = None
    del start  # what nobody asks for any more is let go at once, here and below: it would stand beside what is computed
    extra = {step: int(repeat(step)) + int(with_probe) for step in steps}
    total = steps[-1] - first + sum(extra.values())
    done = 0
    for step in range(first + 1, steps[-1] + 1):
        target = step in steps
        progress(done, total, f"step {step}" + ("" if target else f" of {steps[-1]}, rolling forward"))
        if (changed := edits(step)) is not None:
            edit(experiment, changed)
        before = capture(experiment, step - 1, read_cursor(experiment.sampler)) if target else None
        if before is not None:
            looked(before)
            before = before if hold or with_probe or repeat(step) else None
        with performing(step):
            batch, cursor = _next_batch(experiment, step)
            result = stepper(batch)
        if step == first + 1:
            found = {"state": lanes.result()}
            departed = _departure(evidence(first), found, first, "restored state", layers)
        after = capture(experiment, step, cursor) if target else None
        comparison = _compared(checkpoint(step), after)
        observation = observe(stepper, batch, result, cursor, method)
        done += 1
        if after is None:
            del result
            departed = departed or _departure(
                evidence(step), observation.evidence(), step, "roll-forward", stepper.layers
            )
            continue
        if with_probe:
            result = replace(result, activations={})
        yield _examine(
            stepper,
            before,
            after,
            batch,
            result,
            observation,
            evidence(step),
            comparison,
            departed,
            with_probe,
            repeat(step),
            partial(_report, progress, done, total, step),
        )
        del before, after, result
        done += extra[step]
        departed = departed or _departure(evidence(step), observation.evidence(), step, "roll-forward", stepper.layers)


def _report(progress: Progress, done: int, total: int, step: int, what: str, number: int) -> None:
    progress(done + number, total, f"step {step}, {what}")


def _compared(committed: State | Comparison | None, after: State | None) -> Alongside[str | None] | None:
    """Begins to compare state N with the run's own checkpoint of it."""
    if committed is None or after is None:
        return None
    if isinstance(committed, State):
        return Alongside(lambda: first_difference(committed, after) or "")
    return Alongside(partial(committed, after))


def _next_batch(experiment: Experiment, step: int) -> tuple[Batch, dict[str, Any]]:
    try:
        batch = as_batch(next(experiment.sampler))
    except StopIteration:
        raise ReplayError(
            f"the sampler ran out before step {step}; rebuild it with the data that the run had"
        ) from None
    return batch, read_cursor(experiment.sampler)


def _departure(
    recorded: Evidence,
    replayed: Mapping[str, Any],
    step: int,
    where: Literal["restored state", "roll-forward", "step"],
    layers: Sequence[str],
) -> Difference | None:
    if "state" in replayed:  # lanes only
        replayed = {f"state.{lane}": value for lane, value in replayed["state"].items()}
    return difference_at(compare_evidence(recorded, replayed, layers), step, where)


def _examine(
    stepper: Stepper,
    before: State | None,
    after: State,
    batch: Batch,
    result: StepResult,
    observation: Observation,
    recorded: Evidence,
    comparison: Alongside[str | None] | None,
    departed: Difference | None,
    with_probe: bool,
    with_repeat: bool,
    progress: Callable[[str, int], None],
) -> Outcome:
    """Repeats, probes and compares one performed step; leaves the experiment at state N."""
    experiment = stepper.experiment
    result = replace(result, token_loss=of_rows(result.token_loss))
    sensitive = gates.sensitive(batch, after, observation)
    repeatable = Gate(verdict="unverified", explanation="not repeated")
    if with_repeat:
        assert before is not None
        progress("again, for the repeatable badge", 0)
        repeatable = _repeated(stepper, before, observation)
    measured: Probe | None = None
    rows: list[Row] = []
    updates: list[Update] = []
    broken: NonFinite | None = None
    if with_probe:
        assert before is not None
        state = before
        progress("probe pass", int(with_repeat))
        exact, beside = result, list[Alongside[tuple[list[Row], list[Update]]]]()

        def of_parameters() -> tuple[list[Row], list[Update]]:
            return parameter_rows(state, after, exact.gradients), parameter_updates(experiment, state, after, exact)

        with performing(after.step):
            measured = certified_probe(
                stepper,
                state,
                batch,
                result,
                lambda: beside.append(Alongside(of_parameters, here=experiment.step_fn is not None)),
            )
        parameters, updates = beside[0].result() if beside else of_parameters()
        rows = measured.rows + parameters
        if result.token_loss is None and measured.certified:  # of a step of the user's own
            result = replace(result, token_loss=measured.token_loss)
        broken = first_nonfinite(stepper, state, after, batch, result, rows, forward=not measured.unmade)
    progress("compared", int(with_repeat) + int(with_probe))
    if with_repeat or with_probe:
        restore(experiment, after)
    items = _items(recorded, observation, comparison, stepper.layers)
    return Outcome(
        step=after.step,
        held=before,
        after=after,
        batch=batch,
        result=result,
        observation=observation,
        items=items,
        first_difference=departed or difference_at(items, after.step, "step"),
        gates=gates.shown(repeatable, gates.faithful(items, departed), sensitive),
        probe=measured,
        rows=rows,
        updates=updates,
        first_nonfinite=broken,
    )


def _items(
    recorded: Evidence,
    observation: Observation,
    comparison: Alongside[str | None] | None,
    layers: Sequence[str],
) -> dict[str, Item]:
    """What the run logged beside what was observed, and its checkpoint, as far as that was compared."""
    replayed, recorded = dict(observation.evidence()), dict(recorded)
    differing = None if comparison is None else comparison.result()
    if differing is not None:
        recorded["checkpoint"] = "equal"
        replayed["checkpoint"] = f"differs at {differing}" if differing else "equal"
    items = compare_evidence(recorded, replayed, layers)
    if differing:
        items["checkpoint"].detail = f"first differing tensor: {differing}"
    return items


def _repeated(stepper: Stepper, before: State, observation: Observation) -> Gate:
    """Performs the step once more, from the same state."""
    restore(stepper.experiment, before)
    with performing(before.step + 1):
        batch, cursor = _next_batch(stepper.experiment, before.step + 1)
        result = stepper(batch)
    repeated = observe(stepper, batch, result, cursor, observation.method).evidence()
    first = observation.evidence()
    return gates.repeatable([name for name, value in repeated.items() if value != first[name]])
