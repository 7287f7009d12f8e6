"""An examination shared out over processes that work at once, for devices whose kernels are compiled at run time.

On CUDA MLX compiles kernels when they are first used, a second or more for each, and keeps them on disk for all
processes: alone, one process would need minutes for those of an examination. Each process here counts the results of
some operations of the catalogue and performs whole steps in some settings; being fresh processes, what they find is
evidence too. `python -m workbench.examination.shards SHARD` is such a process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import mlx.core as mx
import msgspec

from ..errors import ReplayError
from ..interpreter import python_command
from ..memory import memory
from . import operations as counting
from .catalogue import CATALOGUE, FLOATS
from .diagnosis import OperationRow
from .operations import REPEATS, Operation, disturbance
from .repeats import PATIENCE, Digests, Setting, fresh_experiments, perform, small_transformer

SETTINGS = [Setting(dtype, compiled, det) for dtype in FLOATS for compiled in (False, True) for det in (True, False)]
PROCESSES = 16
ROOM = 2 << 30  # bytes of the device that a process may need, its context included


class Shard(msgspec.Struct):
    """Indices into `SETTINGS` and the catalogue, and how many steps to perform."""

    device: str
    settings: list[int]
    operations: list[int]
    steps: int


class Found(msgspec.Struct):
    """What a process found, in the order of its shard."""

    digests: list[Digests]
    counted: list[OperationRow]


def shards(device: str, steps: int, count: int) -> list[Shard]:
    """All settings and operations, each in one of `count` shards. A whole step takes longest, so shards with a setting
    get no operation while others can take it."""
    made = [Shard(device, [], [], steps) for _ in range(max(count, 1))]
    for number in range(len(SETTINGS)):
        made[number % len(made)].settings.append(number)
    free = [shard for shard in made if not shard.settings] or made
    for number in range(len(CATALOGUE)):
        free[number % len(free)].operations.append(number)
    return made


def process_count() -> int:
    """As many processes as there are processors, and as the device has room for."""
    return max(1, min(PROCESSES, os.cpu_count() or 1, memory() // ROOM))


def examine_shards(given: Sequence[Shard], say: Callable[[str], None]) -> tuple[list[OperationRow], list[Digests]]:
    """Rows of the catalogue and digests of each setting, in their order.

    A process that fails is tried once more when the others are done: two that compile the same kernel write the same
    file, and one may have read it half-written.

    Raises:
        ReplayError: one failed twice.
    """
    rows: dict[int, OperationRow] = {}
    digests: dict[int, Digests] = {}
    with contextlib.ExitStack() as stack:
        running = [(shard, _started(shard, stack)) for shard in given]
        again = []
        for number, (shard, child) in enumerate(running):
            say(f"kernels are compiled and examined in {len(given)} processes, {number} of them done")
            try:
                _take(shard, _answer(child), rows, digests)
            except ReplayError:
                again.append(shard)
        for shard in again:
            say("once more, in one process")
            _take(shard, _answer(_started(shard, stack)), rows, digests)
    return [rows[number] for number in sorted(rows)], [digests[number] for number in sorted(digests)]


def _take(shard: Shard, found: Found, rows: dict[int, OperationRow], digests: dict[int, Digests]) -> None:
    rows |= dict(zip(shard.operations, found.counted, strict=True))
    digests |= dict(zip(shard.settings, found.digests, strict=True))


def _started(shard: Shard, stack: contextlib.ExitStack) -> subprocess.Popen[str]:
    command = python_command("workbench.examination.shards", msgspec.json.encode(shard).decode())
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    stack.enter_context(child)
    stack.callback(child.kill)
    return child


def _answer(child: subprocess.Popen[str]) -> Found:
    try:
        out, _ = child.communicate(timeout=PATIENCE)
        return msgspec.json.decode(out, type=Found)
    except subprocess.TimeoutExpired:
        child.kill()
        raise ReplayError(f"a process of the examination did not answer within {PATIENCE:.0f} s") from None
    except msgspec.MsgspecError as error:
        raise ReplayError(f"a process of the examination ended with code {child.returncode}") from error


def count(operation: Operation, disturb: Callable[[int], None]) -> OperationRow:
    """An operation's row: how many different results it gave, or why it could not be done."""
    try:
        distinct = counting.count_distinct(operation.make(), REPEATS, disturb)
        remedy = operation.remedy if distinct > 1 else None
    except (RuntimeError, ValueError, TypeError) as error:  # not every backend has every operation in every dtype
        distinct, remedy = 0, "MLX can't do it here: " + str(error).partition("\n")[0].rstrip(".")
    return OperationRow(operation.name, operation.dtype, REPEATS, distinct, remedy)


def answer(shard: Shard) -> Found:
    """Does a shard in this process."""
    mx.set_default_device(mx.Device(mx.DeviceType.cpu if shard.device == "cpu" else mx.DeviceType.gpu))
    subject, disturb = fresh_experiments(small_transformer), disturbance()
    return Found(
        [perform(*subject(SETTINGS[number]), shard.steps) for number in shard.settings],
        [count(CATALOGUE[number], disturb) for number in shard.operations],
    )


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        found = answer(msgspec.json.decode(sys.argv[1], type=Shard))
    sys.stdout.write(msgspec.json.encode(found).decode())
