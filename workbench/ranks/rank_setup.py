"""Who trained together, as a manifest says it. Knows the format; nothing of MLX."""

from __future__ import annotations

import msgspec


class RankSetup(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The processes of a data-parallel run. A run of one process has none of this in its manifest.

    Attributes:
        size: how many ranks there were.
        backend: of MLX's collective operations, which decides the order in which gradients are added.
        connections: of the ring, between two neighbours.
        hosts: the host of each rank.
    """

    size: int
    backend: str
    connections: int = 1
    hosts: list[str]
