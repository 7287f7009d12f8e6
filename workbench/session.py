"""One replay of a recorded run: environment checked, experiment rebuilt, steps replayed, traces written.

The bridge between run folders and the core; the core knows nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np

from . import kernel_cache, snapshot, trace
from .batches.batch_files import as_numpy
from .bits import json_float
from .broken_state import broken_before
from .capture import layers_of
from .environment import PROCESS, differences, numeric_environment, on_device
from .errors import CheckpointError, EnvironmentMismatch, ExperimentError
from .experiment import Experiment, random_key, set_random_key
from .fingerprint import known_method
from .fresh_replay import Asked, FreshProcess
from .hyperparameters import describe_optimizer, other_parts
from .norms import method_here
from .ranks import launching
from .ranks.attendance import attended, other_wiring, refuse_ranks
from .ranks.joined import joined
from .ranks.rank_run import RankRun
from .ranks.world import barrier, world
from .rebuild import rebuild, software_differences
from .replay import Outcome, Progress, replay_steps
from .run import CHECKPOINTS, Plan, Run
from .snapshot import State
from .sources import changed, code_of
from .stored_batches import with_stored_batches
from .telemetry import ARRAYS, Edits
from .trace import Gate, Trace, TraceRecord
from .traces import traces_folder, writing


def replay_run(run: Run, steps: int | range, **options: Any) -> list[Trace]:
    """See `Run.replay`."""
    if launching.needed(run.manifest):
        return launching.replay_launched(run, steps, **options)
    with undisturbed():
        return _replay_run(attended(run), steps, **options)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leaves this thread's random state as it was: a training that goes on here must not notice."""
    key = random_key()
    try:
        yield
    finally:
        set_random_key(key)


@dataclass(frozen=True)
class Prepared:
    """What a replay works on.

    Attributes:
        start: the state that the plan's checkpoint holds.
        method: of the run's fingerprints.
        backend: the device that recorded.
        here: the numeric environment.
        unlike: in what it differs from the run's.
        notices: what the user should know.
    """

    run: Run
    plan: Plan
    experiment: Experiment
    start: State
    method: str
    backend: str
    here: dict[str, Any]
    unlike: list[str]
    notices: list[str]

    def evidence(self, step: int) -> dict[str, Any]:
        """What the run logged at a step, without the norms if they were measured in another way than ours."""
        run, segment = self.run, self.plan.segment
        at_start = step == self.plan.checkpoint[0]
        found = run.state_evidence(*self.plan.checkpoint) if at_start else run.evidence(step, segment)
        alike = run.manifest.norms_of(run.manifest.lineage(segment, step)) == method_here()
        return found if alike else {name: found[name] for name in found if name not in ARRAYS}

    def edits(self, step: int) -> Edits | None:
        """What the run's loop changed in the state before a step, and what its rollbacks made of learning rates."""
        found, segments = self.run.edits(step, self.plan.segment), self.run.manifest.segments
        if all(entry.rate_factor == 1 for entry in segments):
            return found
        factor = segments[self.run.manifest.lineage(self.plan.segment, step)].rate_factor
        return msgspec.structs.replace(found or Edits(), rate_factor=factor)


@contextmanager
def prepared(
    run: Run, plan: Plan, *, experiment: Experiment | None, factory: str | None, other_environment: bool
) -> Iterator[Prepared]:
    """On the device that recorded: environment compared, checkpoint read, experiment rebuilt and compared.

    Raises:
        EnvironmentMismatch: this machine differs from the run's and `other_environment` is not set.
        CheckpointError, DataError, ExperimentError: the state or the experiment can't be had.
    """
    if not isinstance(run, RankRun):
        refuse_ranks(run.manifest, run.path, "an autopsy, a what-if or a ladder")
    performed = {run.manifest.lineage(plan.segment, step) for step in range(plan.checkpoint[0] + 1, plan.steps[-1] + 1)}
    recorded = [run.manifest.segments[segment].environment for segment in sorted(performed)]
    method = known_method(run.manifest.fingerprint, run.path)
    backend = recorded[-1].get("backend", "cpu")
    with on_device(backend):
        here = numeric_environment()
        unlike = list(dict.fromkeys(phrase for one in recorded for phrase in differences(one, here)))
        unlike += software_differences(run.manifest) if experiment is None else []
        unlike += other_wiring(run.manifest)
        if unlike and not other_environment:
            raise EnvironmentMismatch(
                f"this machine computes differently from the one that recorded {run.name}: {'; '.join(unlike)}. Replay "
                "where it was recorded, or go on with --other-environment (other_environment=True): the result is then "
                "informational only."
            )
        try:
            start = _checkpoint(run, *plan.checkpoint)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Start from an earlier one: --checkpoint STEP (checkpoint=STEP)") from error
        if experiment is None:
            experiment = rebuild(run.manifest, run.path, factory)
        experiment = with_stored_batches(run, experiment, plan.segment)
        refuse_another(run, experiment)
        code = changed(
            (run.manifest.segments[segment].code for segment in sorted(performed)),
            code_of(experiment, run.manifest.rebuild),
        )
        if code and not other_environment:
            raise EnvironmentMismatch(
                f"the code that performs the steps of {run.name} is not the one that recorded it: {'; '.join(code)} "
                "(comments and docstrings do not count). Put back what it was, or go on with --other-environment "
                "(other_environment=True): the result is then informational only."
            )
        unlike += code
        notices = list(plan.notices)
        between = range(plan.checkpoint[0] + 1, plan.steps[-1])
        if missing := [step for step in between if run.line(step, plan.segment) is None]:
            notices.append(f"not checked on the way, as the telemetry lacks their lines: steps {missing}")
        if other := {run.manifest.norms_of(segment) for segment in performed} - {method_here()}:
            notices.append(
                f"the run's norms were added in another way ({', '.join(sorted(other))}): they are not compared"
            )
        yield Prepared(run, plan, experiment, start, method, backend, here, unlike, notices)


def _replay_run(
    run: Run,
    steps: int | range,
    *,
    segment: int | None,
    experiment: Experiment | None,
    factory: str | None,
    other_environment: bool,
    with_probe: bool,
    fresh_process: bool | None,
    trace_dir: Path | None,
    checkpoint: int | None,
    progress: Progress,
    repeat: bool = True,
    whole: Callable[[int], bool] = lambda step: True,
) -> list[Trace]:
    """`whole`: which steps are replayed for their own sake; others are not repeated, and their traces not written."""
    plan = run.plan(steps, segment, checkpoint=checkpoint)
    asked = [step for step in plan.steps if whole(step)]
    with ExitStack() as stack:
        child = None
        if experiment is None and world().size == 1:
            child = stack.enter_context(_other_process(run, plan, factory, other_environment, checkpoint))
            doubtful = [step for step in asked if fresh_process or (repeat and not _independent(run, plan, step))]
            if doubtful and fresh_process is not False:
                child.start(doubtful[0])
        ready = stack.enter_context(
            prepared(run, plan, experiment=experiment, factory=factory, other_environment=other_environment)
        )
        notices, damaged, reported = ready.notices, set[int](), (0, 1)
        reports = 0
        if (empty := kernel_cache.empty(ready.backend)) is not None:
            progress(0, 1, empty)

        def report(done: int, total: int, what: str) -> None:
            nonlocal reported, reports
            reported, reports = (done, total), reports + 1
            if child is not None and reports == 2:  # the first step is done
                child.go()
            progress(done, total, what)

        outcomes = replay_steps(
            ready.experiment,
            ready.start,
            plan.steps,
            ready.evidence,
            layers=run.manifest.layers,
            method=ready.method,
            edits=ready.edits,
            checkpoint=lambda step: _checkpoint_of(run, step, plan.segment, notices, damaged),
            with_probe=with_probe,
            repeat=lambda step: repeat and whole(step),
            progress=report,
        )
        traces, began = [], time.perf_counter()
        for outcome in outcomes:
            if outcome.step in damaged:
                outcome.items["checkpoint"].detail = "it is damaged"
            if whole(outcome.step):
                outcome = _with_other_process(
                    run, plan, outcome, child, fresh_process, lambda what: progress(*reported, what)
                )
            record = _record(
                run, plan, outcome, ready.experiment, ready.here, ready.unlike, time.perf_counter() - began
            )
            record = joined(run, record)
            mine = whole(outcome.step) and world().rank == 0
            path, where = _write(record, trace_dir, run) if mine else (None, [])
            batch = as_numpy(outcome.batch)
            broken = broken_before(run, plan.segment, outcome.before)
            traces.append(Trace(record, path, batch, broken + notices + where))
            began = time.perf_counter()
        barrier()  # of several ranks none ends before the first has written what all of them found
    return traces


def performed(
    run: Run,
    steps: range,
    *,
    segment: int,
    checkpoint: int | None,
    factory: str | None,
    other_environment: bool,
    begin: Callable[[], None],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Each step, and what it measured, as bits: a second witness, which compares nothing and writes nothing.

    Args:
        begin: called when all is read, before the first step.
    """
    plan = run.plan(steps, segment, checkpoint=checkpoint)
    with prepared(run, plan, experiment=None, factory=factory, other_environment=other_environment) as ready:
        begin()
        for outcome in replay_steps(
            ready.experiment,
            ready.start,
            plan.steps,
            lambda step: {},
            layers=run.manifest.layers,
            method=ready.method,
            edits=ready.edits,
            with_probe=False,
            repeat=lambda step: False,
        ):
            yield outcome.step, outcome.observation.evidence()


def _other_process(
    run: Run, plan: Plan, factory: str | None, other_environment: bool, checkpoint: int | None
) -> FreshProcess:
    return FreshProcess(
        Asked(
            run=str(run.path),
            first=plan.steps[0],
            last=plan.steps[-1],
            segment=plan.segment,
            checkpoint=checkpoint,
            factory=factory,
            other_environment=other_environment,
        )
    )


def _independent(run: Run, plan: Plan, step: int) -> bool:
    """Whether another process recorded this step, so that it is a witness of its own."""
    meta = run.telemetry.meta_before(step, run.manifest.lineage(plan.segment, step))
    return meta is not None and isinstance(meta.process, str) and meta.process != PROCESS


def _checkpoint(run: Run, step: int, segment: int) -> State:
    return snapshot.read(run.path / CHECKPOINTS, step, segment, run.manifest.run)


def _checkpoint_of(run: Run, step: int, segment: int, notices: list[str], damaged: set[int]) -> State | None:
    """The run's own checkpoint of the replayed step, for comparison; a damaged one is no reason not to replay."""
    key = (step, run.manifest.lineage(segment, step))
    if key not in run.checkpoints:
        return None
    try:
        return _checkpoint(run, *key)
    except CheckpointError as error:
        notices.append(f"checkpoint {step} was not compared: {error}")
        damaged.add(step)
        return None


def refuse_another(run: Run, experiment: Experiment) -> None:
    """Options and hyperparameters come from the run, never from defaults."""
    have = msgspec.to_builtins(experiment.options) | {"optimizer": describe_optimizer(experiment.optimizer)}
    want = run.manifest.options | {"optimizer": run.manifest.optimizer}
    unlike = [f"{key} is {have.get(key)}, recorded {want.get(key)}" for key in want if have.get(key) != want.get(key)]
    owned = layers_of(experiment.model)
    if owned.keys() == run.manifest.owned.keys() and owned != run.manifest.owned:  # other layers: `Stepper` names them
        unlike.append("the model's layers own other parameters than recorded")
    unlike += other_parts(experiment, run.manifest)
    if unlike:
        raise ExperimentError(f"this is not the experiment that {run.name} recorded: {'; '.join(unlike)}")


def _with_other_process(
    run: Run, plan: Plan, outcome: Outcome, child: FreshProcess | None, wanted: bool | None, say: Callable[[str], None]
) -> Outcome:
    """Completes the repeatable gate with another process: the recording one where that suffices, else a fresh one."""
    gate = outcome.gates.repeatable
    independent = _independent(run, plan, outcome.step)
    if wanted is None:
        wanted = gate.verdict == "exact" and not (outcome.exact and independent)
    if not wanted:
        if outcome.exact and independent and gate.verdict == "unverified":
            gate = _extended(gate, "but the recording process, another one, had the same bits")
        elif outcome.exact and independent:
            gate = _extended(gate, "and the recording process, another one, had them too")
        else:
            gate = _extended(gate, "another process was not tried")
    elif child is None:
        gate = _extended(gate, "another process was not tried: this experiment exists only here")
    else:
        theirs, ours = child.evidence(outcome.step, say), outcome.observation.evidence()
        unequal = [name for name, value in ours.items() if theirs.get(name) != value]
        if unequal:
            gate = Gate(verdict="mismatch", explanation=f"a fresh process gave other bits: {', '.join(unequal)}")
        else:
            gate = _extended(gate, "and in a fresh process")
    return replace(outcome, gates=msgspec.structs.replace(outcome.gates, repeatable=gate))


def _extended(gate: Gate, more: str) -> Gate:
    return Gate(verdict=gate.verdict, explanation=f"{gate.explanation}, {more}")


def _record(
    run: Run, plan: Plan, outcome: Outcome, experiment: Experiment, here: dict, unlike: list[str], seconds: float
) -> TraceRecord:
    row_loss, token_loss = _token_losses(outcome)
    forward = None if outcome.probe is None else outcome.probe.forward
    return msgspec.convert(
        outcome.observation.fields()
        | {
            "run": run.manifest.run,
            "step": outcome.step,
            "segment": run.manifest.lineage(plan.segment, outcome.step),
            "exact": outcome.exact,
            "first_difference": outcome.first_difference,
            "gates": outcome.gates,
            "certified_probe": None if outcome.probe is None else outcome.probe.certified,
            "items": outcome.items,
            "layers": run.manifest.layers,
            "owned": run.manifest.owned,
            "rows": outcome.rows,
            "row_loss": row_loss,
            "token_loss": token_loss,
            "targets": _targets(run, outcome),
            "updates": outcome.updates,
            "attention": None if forward is None else forward.attention,
            "logits": None if forward is None else forward.logits,
            "certified_forward": None if outcome.probe is None else outcome.probe.certified_forward,
            "first_nonfinite": outcome.first_nonfinite,
            "checkpoint": plan.checkpoint[0],
            "rolled": outcome.step - 1 - plan.checkpoint[0],
            "environment": here,
            "environment_differences": unlike,
            "options": msgspec.to_builtins(experiment.options),
            "wall_s": round(seconds, 3),
        },
        type=TraceRecord,
    )


def _token_losses(outcome: Outcome) -> tuple[list[float | None] | None, list[list[float | None]] | None]:
    tokens = outcome.result.token_loss
    if tokens is None:
        return None, None
    table = np.array(tokens.astype(mx.float32))
    table = table.reshape(table.shape[0], -1)
    rows = [json_float(np.float32(row.sum(dtype=np.float64))) for row in table]
    return rows, [[json_float(value) for value in row] for row in table]


def _targets(run: Run, outcome: Outcome) -> int | None:
    """As the loss function's extras or weights say; of the built-in trainer, the targets that are a token."""
    if run.manifest.rebuild.get("kind") == "trainer":
        return int(np.count_nonzero(np.asarray(outcome.batch[1]) >= 0))
    forward = None if outcome.probe is None else outcome.probe.forward
    return None if forward is None else forward.targets


def _write(record: TraceRecord, trace_dir: Path | None, run: Run) -> tuple[Path, list[str]]:
    folder, notices = traces_folder(run, trace_dir)
    with writing(folder):
        return trace.write(record, folder), notices
