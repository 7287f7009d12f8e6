"""What stands where in a run's folder, and what must not stand there."""

from __future__ import annotations

from pathlib import Path

from .. import manifest as manifests
from ..errors import RunError

TELEMETRY, CHECKPOINTS, TRACES, BATCHES = "telemetry.jsonl", "checkpoints", "traces", "batches"


def refuse_existing(path: Path) -> None:
    """A run is never written over, nor mixed with what is left of one, nor written to where nobody would read it.

    Raises:
        RunError: the folder holds a run, or a part of one, or a link in the place of a part.
    """
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file; expected a folder for the run, new or empty")
    refuse_links_out(path)  # which may lead to nothing yet
    for name in (manifests.NAME, TELEMETRY, CHECKPOINTS):
        if (path / name).exists():
            raise RunError(
                f"{path} already holds a run ({name}); choose another folder, or go on with it: --out {path} --resume "
                "(a Recorder: resume=True)"
            )


def refuse_links_out(path: Path) -> None:
    """What is read or written by its name in a run's folder must be in it: the folder may be one that someone sent.

    A checkpoint's file may be a link anywhere: it is read only if its SHA-256 is the committed one. And the folder
    itself may be one.

    Raises:
        RunError: a part of the run is a link that leads out of it.
    """
    for name in (manifests.NAME, TELEMETRY, CHECKPOINTS, TRACES, BATCHES):
        part = path / name
        if part.is_symlink() and not part.resolve().is_relative_to(path.resolve()):
            raise RunError(
                f"{part} is a link that leads out of the run, to {part.resolve()}; expected the run's own {name}. "
                "Move the whole run there and link to that, or put a copy in place of the link."
            )
