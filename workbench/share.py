"""Where the notebooks and the example data are: beside the package in a checkout, inside it when installed."""

from __future__ import annotations

from pathlib import Path

from .errors import WorkbenchError


def shared(name: str) -> Path:
    """The folder `notebooks` or `data`.

    Raises:
        WorkbenchError: it is not there.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "_share" / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise WorkbenchError(f"the folder {name} is neither in {package} nor beside it; install the package again")
