"""Compiles the kernels that an examination needs in several processes at once, before it begins.

On CUDA MLX compiles kernels at run time, a second or more for each, and keeps them on disk for all processes. One
process alone would need minutes for those of an examination. `python -m workbench.warmup PART PARTS` is such a process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import mlx.core as mx

from . import cuda
from .catalogue import CATALOGUE, FLOATS
from .operations import Operation, count_distinct
from .repeats import Setting, fresh_experiments, perform, small_transformer

SETTINGS = [Setting(dtype, compiled, det) for dtype in FLOATS for compiled in (False, True) for det in (True, False)]
PROCESSES = 16  # each has a CUDA context of its own, some hundred MB on the device
PATIENCE = 90.0  # seconds; what is not compiled by then, the examination compiles


def warm_up() -> None:
    """Compiles on CUDA; elsewhere it does nothing. A process that fails is no harm: it only saved time."""
    parts = min(PROCESSES, os.cpu_count() or 1)
    if not cuda.available() or parts < 2:
        return
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with contextlib.ExitStack() as stack:
        children = []
        for part in range(parts):
            command = [sys.executable, "-m", "workbench.warmup", str(part), str(parts)]
            child = stack.enter_context(subprocess.Popen(command, **quiet))  # type: ignore[call-overload]
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=PATIENCE)


def tasks() -> list[Callable[[], object]]:
    """Everything that an examination performs, once; whole steps first, as they take longest."""
    steps: list[Callable[[], object]] = [partial(_step, setting) for setting in SETTINGS]
    return steps + [partial(_operation, operation) for operation in CATALOGUE]


def _step(setting: Setting) -> None:
    perform(*fresh_experiments(small_transformer)(setting), steps=1)


def _operation(operation: Operation) -> None:
    with contextlib.suppress(RuntimeError, ValueError, TypeError):  # not every backend has every operation
        count_distinct(operation.make(), 1)


def main(arguments: Sequence[str]) -> None:
    part, parts = map(int, arguments)
    mx.set_default_device(mx.Device(mx.DeviceType.gpu))
    for task in tasks()[part::parts]:
        task()


if __name__ == "__main__":
    main(sys.argv[1:])
