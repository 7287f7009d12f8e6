"""What a process that performs one command of ours, and ends, need not do: look for garbage among its modules.

In a process of somebody else's, such as a notebook's, nothing here has an effect.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path


def ours() -> bool:
    """Whether this process was started as `workbench` or `python -m workbench`."""
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return bool(spec.name == f"{__package__}.__main__")
    return Path(getattr(main, "__file__", None) or "").stem == "workbench"


def importing() -> None:
    """Modules will be imported, and nothing else done: of their objects none becomes garbage."""
    if ours():
        gc.disable()


def imported() -> None:
    """From here on garbage is looked for, but no longer among the modules."""
    if ours():
        gc.freeze()
        gc.enable()


def ending() -> None:
    """All that is left goes with the process: Python need not look for cycles in it."""
    if ours():
        gc.freeze()
