"""Replaying a step together with the steps before it, in one roll-forward, so that its numbers have something to be
read against. The bridge between a run, its replay, and `neighbours`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import ReplayError
from ..run import Run
from ..session import replay_run
from .logged_norms import YARDSTICK, logged_norms
from .neighbours import Context, neighbours_notice


def replay_context(
    run: Run, step: int, before: int, *, segment: int | None, trace_dir: Path | None, **options: Any
) -> Context:
    """See `Run.context`; `options` are those of `session.replay_run`."""
    if before < 1:
        raise ReplayError(f"{before} steps before step {step} are no neighbours; expected 1 or more")
    chosen, _ = run.segment_of(step, segment)
    committed = [number for number, _ in run.checkpoints_before(step, chosen)]
    wished = options.get("checkpoint")
    oldest = min(committed, default=step - 1) if wished is None else wished
    first = step
    while first - 1 > oldest and step - first < before and run.line(first - 1, chosen) is not None:
        first -= 1
    steps = range(first, step + 1)
    traces = replay_run(
        run,
        steps,
        segment=segment,
        trace_dir=trace_dir,
        with_probe=True,
        whole=lambda other: other == step,
        **options,
    )
    spikes = run.spikes()
    flagged = [
        other
        for other in range(max(1, first - YARDSTICK), step)
        if ((spikes["step"] == other) & (spikes["segment"] == run.manifest.lineage(chosen, other))).any()
    ]
    notices = neighbours_notice(step, before, steps[:-1], [other for other in flagged if other >= first])
    faithful = {trace.step: trace.record.gates.faithful.verdict for trace in traces if not trace.exact}
    if unlike := [other for other, verdict in faithful.items() if verdict != "unverified"]:
        notices.append(f"not replayed exactly, so not what the run computed: steps {unlike}")
    if unknown := [other for other, verdict in faithful.items() if verdict == "unverified"]:
        notices.append(f"the run logged too little to say whether this is what it computed: steps {unknown}")
    return Context(step, traces, flagged, notices, logged_norms(run, first - YARDSTICK, first - 1, chosen))
