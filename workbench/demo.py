"""`workbench demo`: a planted spike from training to exact replay and its cause, in under a minute on two cores."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path
from typing import Any

from .errors import RunError
from .share import shared
from .trace import Trace
from .trainer.train import Watcher
from .trainer.training import train_run
from .verdict import Verdict

STEPS, SPIKE, WINDOW = 90, 72, 30  # the window fills before the spike, and all fits a minute without a fast BLAS


def run_demo(keep: Path | None, watcher: Watcher) -> tuple[Trace, Verdict, Any, Path]:
    """Trains, detects, replays, finds the cause.

    Returns:
        The trace, the verdict, the row of `Run.spikes()` for the planted step, and the run's folder.

    Raises:
        RunError: `keep` already holds a run.
    """
    out = keep or Path(tempfile.mkdtemp(prefix="workbench-demo-")) / "run"
    run = train_run(
        out,
        shared("data") / "shakespeare.txt",
        STEPS,
        watcher=watcher,
        faults=[f"garbage@{SPIKE}:rows=3"],
        save_every=20,
        spike_window=WINDOW,
        max_lr=2e-3,
    )
    found = next((row for row in run.spikes().itertuples() if row.step == SPIKE), None)
    if found is None:
        raise RunError(
            f"the spike planted at step {SPIKE} of {out} was not detected; look: workbench replay "
            f"{shlex.quote(str(out))} --step {SPIKE}"
        )
    return run.replay(SPIKE), run.autopsy(SPIKE), found, out
