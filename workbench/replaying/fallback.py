"""A leg of a replay whose checkpoint can't be read, begun from an earlier one instead: what was asked for was the
steps, and one bad checkpoint among them, or one that was thinned meanwhile, is no reason to lose all the others.

Never silently: a notice in each trace of the leg names the checkpoint, and what is wrong with it. Performs no step.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ..errors import ChangedByHand, CheckpointError
from ..recorded.plan import Plan
from ..run import Run
from .preparation import Prepared, prepared


def entered(
    stack: ExitStack, run: Run, leg: Plan, *, damaged: bool, instead: bool = True, further: int = 0, **options: Any
) -> Prepared:
    """What `prepared` yields for a leg, or for the same steps from an earlier checkpoint; its `plan` says from which.

    Args:
        stack: ends it.
        damaged: also where the leg's checkpoint is there, and can't be used. Otherwise only where it is gone since the
            leg was planned, as thinning of a run that is being recorded has it.
        instead: whether another checkpoint may be taken at all. Not so where this one was asked for, or where several
            ranks must take the same.
        further: steps that may be rolled forward more where it is gone; two save intervals always may. Thinning leaves
            the first checkpoint and the last ones, and hours may lie between.
        options: of `prepared`.

    Raises:
        CheckpointError: the leg's checkpoint can't be read, and no earlier one may be used, or can be.
        EnvironmentMismatch, DataError, ExperimentError, ChangedByHand: as `prepared`.
    """
    failed: CheckpointError | None = None
    while True:
        try:
            return stack.enter_context(prepared(run, leg, **options))
        except ChangedByHand:
            if failed is None:
                raise
            raise failed from None  # from its own checkpoint it could be replayed
        except CheckpointError as error:
            failed = failed or error
            gone = leg.checkpoint not in run.checkpoints
            before = [key for key in run.checkpoints_before(leg.steps[0], leg.segment) if key[0] < leg.checkpoint[0]]
            if not before or not instead or not (gone or damaged):
                raise failed from failed.__cause__
            back = leg.checkpoint[0] - before[-1][0]
            if gone and back > max(further, 2 * run.manifest.save_every):
                raise CheckpointError(
                    f"checkpoint {leg.checkpoint[0]} of {run.name} is gone since this replay began, as thinning has it "
                    f"while a run is being recorded, and the one before it, {before[-1][0]}, is {back} steps further "
                    f"back. Ask again, or for all of it from there: --checkpoint {before[-1][0]} "
                    f"(checkpoint={before[-1][0]})"
                ) from error
            why = "it is gone since" if gone else f"it can't be used: {error.__cause__ or error}"
            leg = _from_earlier(leg, before[-1], why)


def _from_earlier(leg: Plan, start: tuple[int, int], why: str) -> Plan:
    """The same steps from an earlier checkpoint, with a notice."""
    first, last = leg.steps[0], leg.steps[-1]
    which = f"step {first} was" if first == last else f"steps {first} to {last} were"
    said = f"{which} replayed from an earlier checkpoint than {leg.checkpoint[0]}: {why}"
    return replace(leg, checkpoint=start, rolled=first - 1 - start[0], notices=[*leg.notices, said])
