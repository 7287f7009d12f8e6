"""Taking an unstable step back: the state to go back to, and what is said and logged of it.

Knows states and the run that holds them; the recorder that goes back changes itself.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..blackbox import Held
from ..errors import CheckpointError, TrainingUnstable
from ..manifest import Manifest
from ..recovery import Recovery, Trail
from ..run import Run
from .run_manifest import with_segment
from .saved_state import saved_state

log = logging.getLogger("workbench")


@dataclass(frozen=True)
class Rollback:
    """One rollback.

    Attributes:
        step: the step that is taken back.
        left: the segment that performed it.
        reason: why it is unstable.
        held: the state to go back to.
        manifest: the run's, with the segment to go on in.
        rate_factor: what schedules of learning rates are multiplied by from here.
        skip_batch: whether the batch of the unstable step is left out instead.
    """

    step: int
    left: int
    reason: str | None
    held: Held
    manifest: Manifest
    rate_factor: float
    skip_batch: bool

    @property
    def segment(self) -> int:
        """The one to go on in."""
        return len(self.manifest.segments) - 1

    @property
    def rate_change(self) -> float:
        """What the learning rates in the state that is gone back to are multiplied by."""
        return self.rate_factor / self.manifest.segments[self.held.segment].rate_factor

    def fields(self, in_a_row: int) -> dict[str, Any]:
        """Its line in the telemetry.

        Args:
            in_a_row: the how-manieth it is.
        """
        return {
            "type": "rollback",
            "step": self.held.state.step,
            "unstable_step": self.step,
            "left": self.left,
            "reason": self.reason,
            "rate_factor": self.rate_factor,
            "skip_batch": self.skip_batch,
            "in_a_row": in_a_row,
        }

    def say(self) -> None:
        """Logs it for the user."""
        log.warning(
            "step %d was taken back: %s. Training goes on from state %d in segment %d%s.",
            self.step,
            self.reason,
            self.held.state.step,
            self.segment,
            f", without batch {self.step}" if self.skip_batch else f", at {self.rate_factor:g} times the learning rate",
        )

    def too_many(self, in_a_row: int, path: Path) -> TrainingUnstable:
        """The error that ends a run whose rollbacks don't help."""
        return TrainingUnstable(
            f"training is unstable; investigate: step {self.step} of {path} led to rollback {in_a_row} in a row "
            f"({self.reason}). The state that it went back to, {self.held.state.step}, is kept, and so is what led to "
            f"each (workbench autopsy {path} --step {self.step} --segment {self.left})."
        )


def rollback(
    run: Run, segment: int, step: int, reason: str | None, *, recovery: Recovery, trail: Trail, factor: float
) -> Rollback:
    """What taking a step back is; nothing is written or restored yet.

    Args:
        segment: that performed the step.
        reason: why it is unstable.
        trail: the states in memory.
        factor: what schedules of learning rates are multiplied by so far.

    Raises:
        CheckpointError: there is no state to go back to.
    """
    held = _state_before(run, segment, step - recovery.back, trail)
    factor *= 1.0 if recovery.skip_batch else recovery.rate
    manifest = with_segment(run.manifest, segment, held.state.step, parent=held.segment, rate_factor=factor)
    return Rollback(step, segment, reason, held, manifest, factor, recovery.skip_batch)


def _state_before(run: Run, segment: int, step: int, trail: Trail) -> Held:
    """The latest state at or before one of a step, from memory or a checkpoint; or the first one that there is."""
    held = trail.before(step)
    before = run.checkpoints_before(max(step, run.manifest.segments[0].start) + 1, segment)
    for number, one in reversed(before):
        if held is not None and number <= held.state.step:
            break
        try:
            state = saved_state(run, number, one)
        except CheckpointError as error:
            log.warning("state %d can't be gone back to: %s", number, error)
            continue
        return Held(state, one, state.lanes(run.manifest.fingerprint))
    if held is None:
        raise CheckpointError(f"{run.path} has no whole checkpoint before step {step} to go back to")
    return held
