"""A state that a run has saved, held against what the run logged of it."""

from __future__ import annotations

from ..checkpoints import checkpoint_reader
from ..errors import CheckpointError
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..snapshot import State


def saved_state(run: Run, step: int, segment: int) -> State:
    """Reads a checkpoint. One whose digests were repaired after a change still contradicts what the run logged.

    Raises:
        CheckpointError: it is damaged, or not the state that telemetry recorded.
    """
    state = checkpoint_reader.read(run.path / CHECKPOINTS, step, segment, run.manifest.run)
    evidence = run.state_evidence(step, segment)
    lanes = {f"state.{lane}": value for lane, value in state.lanes(run.manifest.fingerprint).items()}
    unlike = [lane for lane, value in lanes.items() if evidence.get(lane, value) != value]
    if unlike:
        raise CheckpointError(
            f"checkpoint {state.step} of {run.path} is not the state that its telemetry recorded: "
            f"{', '.join(unlike)} differ."
        )
    return state
