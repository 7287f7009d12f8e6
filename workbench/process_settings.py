"""What a script may set in its process, and others would find there when it is over: put back as it was.

Knows MLX and BLAS libraries; nothing of experiments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .environment import compile_disabled


@contextlib.contextmanager
def as_before() -> Iterator[None]:
    """Within it code of the user's may switch MLX's compilation off and limit the threads of a BLAS library; at the end
    both are as they were."""
    disabled, threads = compile_disabled(), {name: pool.num_threads for name, pool in _pools().items()}
    try:
        yield
    finally:
        if not disabled and compile_disabled():
            mx.enable_compile()
        for name, pool in _pools().items():
            if threads.get(name, pool.num_threads) != pool.num_threads:
                pool.set_num_threads(threads[name])


def _pools() -> dict[str, Any]:
    """The BLAS libraries that are loaded, by file."""
    from threadpoolctl import ThreadpoolController

    pools: list[Any] = ThreadpoolController().lib_controllers
    return {pool.filepath: pool for pool in pools if pool.user_api == "blas"}
