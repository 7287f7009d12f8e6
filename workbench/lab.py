"""`workbench lab`: a working copy of the notebooks, and JupyterLab on it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from .errors import RunError
from .share import shared


def open_lab(run: Path | None, folder: Path, options: Sequence[str]) -> None:
    """Copies the notebooks into `folder` (never over a person's edits) and becomes JupyterLab.

    Args:
        run: a run to open the panel on; its path is handed to the notebook as WORKBENCH_RUN.
        folder: the working folder.
        options: further options for JupyterLab. It listens on loopback with its token unless they say otherwise.

    Raises:
        RunError: `run` is not a run's folder.
    """
    if run is not None:
        if not (run / "run.json").exists():
            raise RunError(f"{run} is not a run folder (no run.json in it); expected the folder of a run")
        os.environ["WORKBENCH_RUN"] = str(run.resolve())
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in sorted(shared("notebooks").glob("*.ipynb")):
        if not (folder / notebook.name).exists():
            shutil.copyfile(notebook, folder / notebook.name)
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}"]
    command += ["--LabApp.default_url=/lab/tree/investigate.ipynb", *options]
    sys.stdout.flush()
    os.execv(sys.executable, command)
