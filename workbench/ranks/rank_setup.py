"""Who trained together, as a manifest says it. Knows the format; nothing of MLX."""

from __future__ import annotations

import msgspec

from .signs import BACKENDS

CONNECTIONS = 1024  # between two neighbours: each takes a port and a thread, so nobody has more


class RankSetup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The processes of a data-parallel run. A run of one process has none of this in its manifest.

    Attributes:
        size: how many ranks there were, 2 or more.
        backend: of MLX's collective operations, which decides the order in which gradients are added.
        connections: of the ring, between two neighbours.
        hosts: the host of each rank.

    Raises:
        ValueError: those are not the processes of a data-parallel run.
    """

    size: int
    backend: str
    connections: int = 1
    hosts: list[str]

    def __post_init__(self) -> None:
        if self.size < 2:
            raise ValueError(f"`size` is {self.size}; expected 2 ranks or more")
        if len(self.hosts) != self.size:
            raise ValueError(f"`hosts` names {len(self.hosts)}; expected as many as `size` says, {self.size}")
        if self.backend not in BACKENDS:
            raise ValueError(f"`backend` is {self.backend!r}; expected one of {', '.join(BACKENDS)}")
        if not 1 <= self.connections <= CONNECTIONS:
            raise ValueError(f"`connections` is {self.connections}; expected 1 to {CONNECTIONS}")
