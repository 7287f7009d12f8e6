"""`workbench lab`: a working copy of the notebooks, and JupyterLab on it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from . import manifest
from .errors import ExperimentError, RunError
from .own_scripts.named_script import named
from .share import shared


def open_lab(run: Path | None, folder: Path, options: Sequence[str], factory: str | None = None) -> None:
    """Copies the notebooks into `folder` (never over a person's edits) and becomes JupyterLab.

    Args:
        run: a run to open the panel on, or a log of another program: a notebook of its own is made and shown. Other
            notebooks find its path in WORKBENCH_RUN.
        folder: the working folder.
        options: further options for JupyterLab. It listens on loopback with its token unless they say otherwise.
        factory: what rebuilds a run of the user's own loop, as for `Panel`. It is written into the notebook, and not
            run here.

    Raises:
        RunError: `run` is neither a run's folder nor a log.
        ExperimentError: the factory is none, or not that of this run.
        TelemetryError: it is a log that can't be read, or is of no known kind.
    """
    if run is not None:
        if not (run / "run.json").exists():
            if not run.exists():
                raise RunError(f"{run} is not there; expected the folder of a run (with run.json in it) or a log")
            from .run import open_run

            open_run(run)  # a log, or an error that says what was expected
        os.environ["WORKBENCH_RUN"] = str(run.resolve())
    if factory is not None:
        factory = _checked(run, factory)
    folder.mkdir(parents=True, exist_ok=True)
    for notebook in sorted(shared("notebooks").glob("*.ipynb")):
        with contextlib.suppress(FileExistsError), open(folder / notebook.name, "xb") as copy:  # and through no link
            copy.write(notebook.read_bytes())
    first = "investigate.ipynb" if run is None else _notebook_of(run.resolve(), folder, factory)
    # -P: not a module of that name in the working folder. Loopback, whatever a configuration file says.
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}"]
    if not any(option.partition("=")[0] in ("--ip", "--ServerApp.ip") for option in options):
        command += ["--ServerApp.ip=127.0.0.1"]
    command += [f"--LabApp.default_url=/lab/tree/{quote(first)}", *options]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _checked(run: Path | None, factory: str) -> str:
    """The factory as the notebook names it, which is run in another folder: a script by its whole path."""
    if run is None or not (run / "run.json").exists():
        what = "no run is given" if run is None else f"{run} is a log, in which no step can be performed"
        raise ExperimentError(f"--factory {factory} names what rebuilds a run, and {what}; leave it out")
    rebuild = manifest.read(run).rebuild
    known, kind = rebuild.get("factory"), rebuild.get("kind")
    if kind not in ("factory", "none"):
        raise ExperimentError(f"{run} was recorded by `workbench` and is rebuilt by it; leave --factory {factory} out")
    if known is not None and factory != known:
        raise ExperimentError(f"{run} names the factory {known!r}, not {factory!r}")
    if named(factory, rebuild) is None or not factory.endswith(".py"):
        return factory
    if not Path(factory).is_file():
        raise ExperimentError(f"the script {factory} is not there; expected the one that recorded {run}")
    return factory if known is not None else str(Path(factory).resolve())


def _notebook_of(run: Path, folder: Path, factory: str | None) -> str:
    """The name of a notebook in `folder` that opens this run: the one made before, edited or not, or a new one."""
    stem = re.sub(r"[^\w.-]", "-", run.name).strip(".-") or "run"
    path = repr(str(run)) if factory is None else f"{str(run)!r}, factory={factory!r}"
    modules = None if factory is None or factory.endswith(".py") else os.getcwd()
    for number in itertools.count(1):
        name = f"{stem}.ipynb" if number == 1 else f"{stem}-{number}.ipynb"
        try:
            with open(folder / name, "xb") as file:  # never over a file, and through no link
                file.write(_notebook(path, modules).encode())
            return name
        except FileExistsError:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # it is no notebook
                if path in _code(json.loads((folder / name).read_bytes())):
                    return name
    raise AssertionError("numbers have no end")


def _notebook(path: str, modules: str | None) -> str:
    """`modules`: a folder in which a factory's module is looked for."""
    told = (
        "Run the cell below (Shift+Enter). Choose a spike or a step, and press **Find the cause**. "
        "[investigate.ipynb](investigate.ipynb) explains what is seen."
    )
    found = "" if modules is None else f"import sys\n\nsys.path.insert(0, {modules!r})\n"
    code = f"{found}import workbench as wb\n\npanel = wb.Panel(run={path})\npanel"
    cells = [
        {"cell_type": "markdown", "id": "told", "metadata": {}, "source": told},
        {
            "cell_type": "code",
            "id": "panel",
            "metadata": {},
            "source": code,
            "execution_count": None,
            "outputs": [],
        },
    ]
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return json.dumps({"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}, indent=1) + "\n"


def _code(notebook: Any) -> str:
    """What the cells of a notebook hold, as text."""
    return "\n".join("".join(cell["source"]) for cell in notebook["cells"])
