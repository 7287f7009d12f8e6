"""The processes that train together under MLX's launcher: which of them this one is, and what each tells the others.

A process that no launcher started is alone: nothing is asked of MLX then, and nothing is sent. Knows MLX's collective
operations; nothing of steps, states or runs.
"""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..errors import ExperimentError
from .signs import backend_here

_MAGIC = 0x77625F72616E6B  # "wb_rank": what stands first in each message
_HEAD = 16  # bytes: the magic number, and the length of what follows


@dataclass(frozen=True)
class World:
    """
    Attributes:
        rank: of this process, from 0.
        size: how many processes there are.
        backend: of MLX's collective operations; None: this process is alone.
        connections: of the ring, between two neighbours: they decide which part of an array is added in which order.
        group: MLX's.
    """

    rank: int = 0
    size: int = 1
    backend: str | None = None
    connections: int = 1
    group: Any = None


@functools.cache
def world() -> World:
    """The processes that this one was started with.

    Raises:
        ExperimentError: a launcher started this process, and the others can't be reached.
    """
    backend = backend_here()
    if backend is None:
        return World()
    try:
        # By its name, for a loop may have asked for it so: another name would open the same connections once more.
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise ExperimentError(
            f"this process was started as one of several for the back end {backend!r}, and the others can't be "
            f"reached: {error}"
        ) from error
    if group.size() == 1:
        return World()
    return World(group.rank(), group.size(), backend, _connections() if backend == "ring" else 1, group)


def _connections() -> int:
    try:
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        return max(1, len(hosts[0]))
    except (OSError, ValueError, LookupError, TypeError):
        return 1


_capacity = 4096  # bytes of a message; the same in every process, for each of them sees all lengths


def exchange(payload: bytes) -> list[bytes]:
    """Tells every process what this one has to say, and returns what each had to, by rank. All call it together.

    Raises:
        ExperimentError: another process did not say anything of this kind: it makes other calls than this one.
    """
    global _capacity
    here = world()
    if here.size == 1:
        return [payload]
    while True:
        room = _capacity
        block = np.zeros(_HEAD + room, np.uint8)
        block[:_HEAD] = np.array([_MAGIC, len(payload)], np.uint64).view(np.uint8)
        if len(payload) <= room:
            block[_HEAD : _HEAD + len(payload)] = np.frombuffer(payload, np.uint8)
        try:
            gathered = np.asarray(mx.distributed.all_gather(mx.array(block), group=here.group)).reshape(here.size, -1)
        except RuntimeError as error:
            raise ExperimentError(f"rank {here.rank} has lost another rank, which must have ended: {error}") from error
        heads = gathered[:, :_HEAD].copy().view(np.uint64)
        if silent := [rank for rank in range(here.size) if heads[rank, 0] != _MAGIC]:
            raise ExperimentError(
                f"rank {silent[0]} does not do what rank {here.rank} does just now, so nothing can be told to it: "
                "every rank makes the same recorder, and calls it the same number of times"
            )
        lengths = heads[:, 1].astype(int)
        if lengths.max() <= room:
            return [row[_HEAD : _HEAD + length].tobytes() for row, length in zip(gathered, lengths, strict=True)]
        _capacity = 1 << int(lengths.max() - 1).bit_length()


def exchange_json(value: Any) -> list[Any]:
    """As `exchange`, of a JSON value.

    Raises:
        ExperimentError: as `exchange`; or another process waits for the end (see `barrier`).
    """
    if world().size == 1:
        return [value]
    told = exchange(json.dumps(value).encode())
    if ended := [rank for rank, one in enumerate(told) if not one]:
        raise ExperimentError(
            f"rank {ended[0]} has ended its recording, and rank {world().rank} goes on; every rank performs the same "
            "steps"
        )
    return [json.loads(one) for one in told]


def everywhere(here: bool) -> bool:
    """Whether it is so in every process. All ask together; of what each does next, all decide alike."""
    return here if world().size == 1 else all(one == b"1" for one in exchange(b"1" if here else b"0"))


def anywhere(here: bool) -> bool:
    """Whether it is so in at least one process. All ask together."""
    return not everywhere(not here)


def first_signal(number: int) -> int:
    """The signal by which the first of the processes was asked to stop; 0: none was. So all stop after one step."""
    return number if world().size == 1 else next((one for one in exchange_json(number) if one), 0)


def barrier() -> None:
    """Returns when every process is here."""
    exchange(b"")


def averaged(gradients: Any) -> Any:
    """The mean of each gradient over all processes, by `nn.average_gradients`; of a process alone, what it got."""
    here = world()
    return gradients if here.size == 1 else nn.average_gradients(gradients, here.group)
