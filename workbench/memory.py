"""How much memory there is, and how much a state takes of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .experiment import Experiment, kept_arrays


def memory() -> int:
    """Bytes of memory of MLX's default device: its own where it says how much that is, else the host's, or as much of
    it as a container that this process is in may use."""
    info = mx.device_info()
    own = info.get("memory_size", info.get("total_memory"))
    if own and mx.default_device().type != mx.DeviceType.cpu:
        return int(own)
    host = int(own) if own else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([host, *container_limits()])


def container_limits(root: Path = Path("/")) -> list[int]:
    """Bytes that the control groups of this process may use, each with those that it is in (Linux's cgroups: version 2,
    `memory.max`, and version 1, `memory.limit_in_bytes`; see cgroups(7)). Empty where there are none.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except (OSError, ValueError):
        return []
    found: list[int] = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "":
            tree, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = tree / path.strip("/")
        for group in (
            own,
            *own.parents,
        ):  # inside a container the path may be the host's, and only the tree's root is there
            if group != tree and tree not in group.parents:
                break
            with contextlib.suppress(OSError, ValueError):  # "max" is no limit
                found.append(int((group / name).read_text()))
    return [one for one in found if one > 0]


def state_size(experiment: Experiment) -> int:
    """Bytes that each further state takes, from its trained weights and the optimizer's arrays: what is not trained is
    the same buffer in all of them."""
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    return sum(array.nbytes for array in (*trained.values(), *kept_arrays(experiment).values()))
