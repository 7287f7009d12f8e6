"""The random state of MLX: a key of two words, and each thread's own. Knows nothing else."""

from __future__ import annotations

from typing import Any, cast

import mlx.core as mx

from .errors import ExperimentError


def random_state() -> mx.array:
    """This thread's random state: uint32[2]. MLX's own object has no type for its only item."""
    state: Any = mx.random.state
    return state[0]


def random_key() -> tuple[int, int]:
    """The two words of this thread's random state.

    Raises:
        ExperimentError: it holds no numbers.
    """
    try:
        high, low = cast(list[int], random_state().tolist())
    except RuntimeError as error:
        raise ExperimentError(
            "the random state of this thread holds no numbers: a compiled function drew from mx.random without "
            "mx.random.state among its inputs and outputs. Name it there, and call mx.random.seed(n) before going on"
        ) from error
    return high, low


def set_random_key(key: tuple[int, int]) -> None:
    """Restores the random state. `mx.random.state` refuses assignment, but `key(seed)` is the seed's two words."""
    high, low = key
    mx.random.seed((high << 32) | low)
