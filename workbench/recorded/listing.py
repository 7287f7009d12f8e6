"""The runs under a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from .. import manifest as manifests
from ..errors import RunError, WorkbenchError
from .recorded_run import RecordedRun

if TYPE_CHECKING:
    import pandas as pd


def list_runs(folder: str | os.PathLike[str] = "runs") -> pd.DataFrame:
    """One row a run directly under `folder`: run (folder name), steps, last_loss, spikes, created, problem.

    Steps are those that it has itself: of a fork, the ones after the state that it started from.

    Raises:
        RunError: the folder does not exist.
    """
    import pandas as pd

    root = Path(folder)
    if not root.is_dir():
        raise RunError(f"{root} does not exist; expected a folder that holds runs (workbench runs FOLDER)")
    if (root / manifests.NAME).exists():
        raise RunError(f"{root} is itself a run; expected the folder that holds it: {root.resolve().parent}")
    rows = []
    for path in sorted(entry for entry in root.iterdir() if (entry / manifests.NAME).exists()):
        try:
            run = RecordedRun(path)
            steps = run.steps
            last = float(steps["loss"].iloc[-1]) if len(steps) else float("nan")
            rows.append((path.name, steps["step"].nunique(), last, len(run.spikes()), _when(run.manifest.created), ""))
        except WorkbenchError as error:
            rows.append((path.name, 0, float("nan"), 0, "", str(error)))
    return pd.DataFrame(rows, columns=["run", "steps", "last_loss", "spikes", "created", "problem"])


def _when(t: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(t))
    except (OverflowError, ValueError, OSError):  # a time that no calendar has
        return ""
