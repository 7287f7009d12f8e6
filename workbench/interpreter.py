"""A Python process of our own code, and of none that lies in the working folder: it may be a run that someone sent."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` looks for every module in the working folder first. -P (Python 3.11) leaves it out; then this package must
# be found where it is. `alter_sys`: errors and usage name the module, as `python -m` has it.
_RUN = (
    "import runpy, sys; sys.path.append(sys.argv.pop(1)); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def python_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a new process.

    A factory beside the user is found nevertheless, once they named it: see `rebuild`.
    """
    return [sys.executable, "-P", "-c", _RUN, str(Path(__file__).resolve().parent.parent), module, *arguments]
