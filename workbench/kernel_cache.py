"""MLX's compiled kernels on the disk: whether they are there already, for making them takes longer than a step.

`mx.compile` on a Linux CPU builds each fused kernel with g++ (16 s for a step of 77 tensors, measured); CUDA compiles
kernels when they are first used. Both keep them for all processes, by MLX's version.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

# Where C++'s std::filesystem::temp_directory_path, which MLX asks, looks for its folder. Python's `tempfile` has
# another in the process that works for a panel.
_TEMPORARY = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")


def folder(backend: str) -> Path | None:
    """Where they are for a backend ("cpu", "cuda", "metal"); None: there is no such folder."""
    own = os.environ.get("MLX_PTX_CACHE_DIR")
    if backend == "cuda" and own:
        return Path(own)
    kind = {"cuda": "ptx", "cpu": "cpu" if platform.system() == "Linux" else None}.get(backend)
    if kind is None:
        return None
    temporary = next((os.environ[name] for name in _TEMPORARY if os.environ.get(name)), "/tmp")
    return Path(temporary) / "mlx" / importlib.metadata.version("mlx") / kind


def count(backend: str) -> int:
    """How many there are."""
    place = folder(backend)
    try:
        return 0 if place is None else sum(name.endswith((".so", ".ptx")) for name in os.listdir(place))
    except OSError:
        return 0


def empty(backend: str) -> str | None:
    """What to say before a step if there are none; None: there are some, or the backend keeps none there."""
    place = folder(backend)
    if place is None or count(backend):
        return None
    return f"MLX has no compiled kernels in {place} yet: the first step takes longer, as it compiles them"


def added(backend: str, before: int) -> str | None:
    """What to say after steps that were waited for; None: no kernels were compiled meanwhile.

    Args:
        before: `count` before them.
    """
    made = count(backend) - before
    if made <= 0:
        return None
    kernels = "1 kernel was" if made == 1 else f"{made} kernels were"
    return f"{kernels} compiled meanwhile, and MLX keeps them in {folder(backend)}: the same again takes less time"
