"""How much memory there is, and how much a state takes of it."""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from .experiment import Experiment, kept_arrays


def memory() -> int:
    """Bytes of memory of MLX's default device: its own where it says how much that is, else the host's."""
    info = mx.device_info()
    own = info.get("memory_size", info.get("total_memory"))
    return int(own) if own else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def state_size(experiment: Experiment) -> int:
    """Bytes that each further state takes, from its trained weights and the optimizer's arrays: what is not trained is
    the same buffer in all of them."""
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    return sum(array.nbytes for array in (*trained.values(), *kept_arrays(experiment).values()))
