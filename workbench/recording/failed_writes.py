"""What a recorder says of what could not be written. A full disk stops no training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..checkpointer import Failure


def of_checkpoint(failure: Failure, path: Path) -> str:
    return (
        f"{failure.what} was not saved to {path}: {failure.error}. Training goes on; the checkpoints "
        "before it are untouched, and the next one is tried when it is due."
    )


def of_checkpoint_without_batches(step: int, path: Path, error: OSError) -> str:
    return (
        f"checkpoint {step} was not saved to {path}, since batches can't be: {error}. "
        "Training goes on; the next one is tried when it is due."
    )


def of_batch(step: int, error: OSError) -> str:
    return (
        f"the batch of step {step} was not stored, so that step can't be replayed: {error}. Training goes on; further "
        "ones are counted, and told when one can be stored again"
    )


def of_batches(first: int, last: int, count: int) -> str:
    """Once some could be stored again, or at the end."""
    return (
        f"{count} batches of steps {first} to {last} were not stored, so that these can't be replayed, nor any step "
        "between them and the checkpoint after them"
    )


def of_resume(step: int, path: Path, error: OSError) -> str:
    return (
        f"nothing can be written to {path} ({error.strerror or error}), so that step {step} is not recorded, and the "
        "run is as it was: make room there, and start again"
    )


def of_cut_off_step(step: int, path: Path) -> str:
    return (
        f"checkpoint {step} was not saved to {path}: its step was interrupted before, and the state was changed since. "
        "Training goes on; the next one is tried when it is due."
    )


def of_start(step: int, segment: int, path: Path) -> str:
    return (
        f"the state that segment {segment} starts from, after step {step}, is in no checkpoint of {path}: from step "
        f"{step + 1} to the next checkpoint no step can be replayed, and a replay will say so"
    )


def of_rollback(step: int, error: Exception) -> str:
    return f"step {step} is unstable, and was not taken back: {error}. Training goes on from it."


def of_one_step(path: Path) -> str:
    """Of a recording that was refused after its first step was logged."""
    return (
        f"(The first step of this attempt is in {path} already: remove that folder, or name another one, before the "
        "corrected script is run)"
    )
