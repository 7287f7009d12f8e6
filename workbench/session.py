"""One replay of a recorded run: environment checked, experiment rebuilt, steps replayed, traces written.

The bridge between run folders and the core; the core knows nothing of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from . import kernel_cache
from .alongside import Alongside
from .batches.batch_files import as_numpy
from .broken_state import begun, broken_before
from .experiment import Experiment
from .ranks import launching
from .ranks.attendance import attended
from .ranks.joined import joined
from .ranks.world import barrier, world
from .recorded.plan import Plan
from .replay import Progress, replay_steps
from .replaying.fallback import entered
from .replaying.legs import ONE_EXPERIMENT, legs_of
from .replaying.preparation import Prepared, refuse_changed_by_hand, undisturbed
from .replaying.reasons import of_hashes, reasons
from .replaying.second_process import independently_recorded, other_process, with_other_process
from .replaying.trace_assembly import assembled
from .run import Run
from .snapshot import State
from .trace import Trace, TraceRecord
from .traces import put, write_kept


def replay_run(run: Run, steps: int | range, **options: Any) -> list[Trace]:
    """See `Run.replay`."""
    if launching.needed(run.manifest):
        return launching.replay_launched(run, steps, **options)
    with undisturbed():
        return _replay_run(attended(run), steps, **options)


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
    legs = legs_of(run, plan, checkpoint)
    for leg in legs:
        refuse_changed_by_hand(run, leg)  # all, before the first is begun
    asked = [step for step in plan.steps if whole(step)]
    passes = {step: 1 + int(repeat and whole(step)) + int(with_probe) for step in plan.steps}
    lengths = [leg.rolled + leg.steps[-1] + 1 - leg.steps[0] - len(leg.steps) + _sum(passes, leg) for leg in legs]
    traces: list[Trace] = []
    with ExitStack() as stack:
        child = None
        if experiment is None and world().size == 1:
            child = stack.enter_context(other_process(run, plan, factory, other_environment, checkpoint))
            doubtful = [
                step for step in asked if fresh_process or (repeat and not independently_recorded(run, plan, step))
            ]
            if doubtful and fresh_process is not False:
                child.start(doubtful[0])
        reported, reports = (0, 1), 0
        for number, leg in enumerate(legs):
            before = sum(lengths[:number])

            def report(done: int, total: int, what: str, before: int = before) -> None:
                nonlocal reported, reports
                reported, reports = (before + done, sum(lengths)), reports + 1
                if child is not None and reports == 2:  # the first step is done
                    child.go()
                progress(*reported, what)

            with ExitStack() as within:
                ready = entered(
                    within,
                    run,
                    leg,
                    instead=checkpoint is None and world().size == 1,
                    damaged=number > 0,
                    further=sum(lengths),
                    experiment=experiment,
                    factory=factory,
                    other_environment=other_environment,
                    whole=plan,
                )
                lengths[number] += ready.plan.rolled - leg.rolled
                leg = ready.plan
                notices, looked = ready.notices, dict[int, Alongside[list[str]]]()

                def look(before: State, looked: dict[int, Alongside[list[str]]] = looked) -> None:
                    looked[before.step + 1] = begun(run, before)

                if experiment is not None and number and run.manifest.rebuild["kind"] != "trainer":
                    notices.append(ONE_EXPERIMENT)
                if not number and (empty := kernel_cache.empty(ready.backend)) is not None:
                    progress(0, 1, empty)
                outcomes = replay_steps(
                    ready.experiment,
                    ready.begin(),
                    leg.steps,
                    ready.evidence,
                    layers=run.manifest.layers,
                    method=ready.method,
                    edits=ready.edits,
                    checkpoint=ready.committed,
                    with_probe=with_probe,
                    repeat=lambda step: repeat and whole(step),
                    hold=False,
                    looked=look,
                    progress=report,
                )
                began = time.perf_counter()
                for outcome in outcomes:
                    if outcome.step in ready.damaged:
                        outcome.items["checkpoint"].detail = "it is damaged"
                    if whole(outcome.step):
                        outcome = with_other_process(
                            run, leg, outcome, child, fresh_process, lambda what: progress(*reported, what)
                        )
                    record = assembled(
                        run, leg, outcome, ready.experiment, ready.here, ready.unlike, time.perf_counter() - began
                    )
                    record = joined(run, record)
                    mine = whole(outcome.step) and world().rank == 0
                    path, where = _write(record, trace_dir, run) if mine else (None, [])
                    batch = as_numpy(outcome.batch)
                    broken = broken_before(run, plan.segment, outcome.step, looked.pop(outcome.step).result())
                    traces.append(Trace(record, path, batch, _noted(ready, leg, record) + broken + notices + where))
                    began = time.perf_counter()
                    del outcome, record, batch  # before the next step needs room
                ready.end()
                del outcomes, ready  # and the next experiment
        barrier()  # of several ranks none ends before the first has written what all of them found
    return traces


def _sum(passes: Mapping[int, int], leg: Plan) -> int:
    return sum(passes[step] for step in leg.steps)


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
    for number, leg in enumerate(legs_of(run, plan, checkpoint)):
        with ExitStack() as stack:
            ready = entered(
                stack,
                run,
                leg,
                instead=checkpoint is None,
                damaged=True,
                further=2**62,  # as the process that asked has decided
                experiment=None,
                factory=factory,
                other_environment=other_environment,
            )
            leg = ready.plan
            if not number:
                begin()
            for outcome in replay_steps(
                ready.experiment,
                ready.begin(),
                leg.steps,
                lambda step: {},
                layers=run.manifest.layers,
                method=ready.method,
                edits=ready.edits,
                with_probe=False,
                repeat=lambda step: False,
            ):
                yield outcome.step, outcome.observation.evidence()


def _noted(ready: Prepared, plan: Plan, record: TraceRecord) -> list[str]:
    """What may be the reason, of a replay that is not exact on a machine that is, or not repeatable."""
    if record.environment_differences:
        return []
    if record.first_difference is not None:
        return reasons(ready, plan.segment, record.first_difference.step)
    if record.gates.repeatable.verdict == "mismatch" and (said := of_hashes(ready, plan.segment, record.step)):
        return [said]
    return []


def _write(record: TraceRecord, trace_dir: Path | None, run: Run) -> tuple[Path, list[str]]:
    return put(run, trace_dir, lambda folder, notices: write_kept(record, folder, notices))
