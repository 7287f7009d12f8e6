"""Another process as a witness of a replayed step: the one that recorded it or a fresh one, for the repeatable gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from ..environment import PROCESS
from ..fresh_replay import Asked, FreshProcess
from ..recorded.plan import Plan
from ..replay import Outcome
from ..run import Run
from ..trace import Gate


def other_process(
    run: Run, plan: Plan, factory: str | None, other_environment: bool, checkpoint: int | None
) -> FreshProcess:
    """What may be asked to perform the plan's steps once more. It is not started yet."""
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


def independently_recorded(run: Run, plan: Plan, step: int) -> bool:
    """Whether another process recorded this step, so that it is a witness of its own."""
    meta = run.telemetry.meta_before(step, run.manifest.lineage(plan.segment, step))
    return meta is not None and isinstance(meta.process, str) and meta.process != PROCESS


def with_other_process(
    run: Run, plan: Plan, outcome: Outcome, child: FreshProcess | None, wanted: bool | None, say: Callable[[str], None]
) -> Outcome:
    """Completes the repeatable gate with another process: the recording one where that suffices, else a fresh one."""
    gate = outcome.gates.repeatable
    independent = independently_recorded(run, plan, outcome.step)
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
        gate = _with_fresh(gate, unequal)
    return replace(outcome, gates=msgspec.structs.replace(outcome.gates, repeatable=gate))


def _with_fresh(gate: Gate, unequal: list[str]) -> Gate:
    """The gate of this process, with what a fresh one found.

    Args:
        unequal: what had other bits there than when the step was first performed here.
    """
    if gate.verdict == "mismatch":
        there = f"and a fresh process gave other bits, too: {', '.join(unequal)}" if unequal else ""
        return _extended(gate, there or "while a fresh process gave those of the first time")
    if unequal:
        return Gate(verdict="mismatch", explanation=f"a fresh process gave other bits: {', '.join(unequal)}")
    if gate.verdict == "exact":
        return _extended(gate, "and in a fresh process")
    return Gate(verdict="exact", explanation="not repeated in this process, but a fresh process gave the same bits")


def _extended(gate: Gate, more: str) -> Gate:
    return Gate(verdict=gate.verdict, explanation=f"{gate.explanation}, {more}")
