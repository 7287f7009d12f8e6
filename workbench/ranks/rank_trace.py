"""What a trace says of each rank of a data-parallel run. Knows the format; nothing of MLX."""

from __future__ import annotations

import msgspec


class RankTrace(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """
    Attributes:
        rank: from 0.
        exact: every item that this rank recorded has its bits, and so had every step on its way.
        first_difference: the earliest item that differs, in a sentence; None: none does.
        differing: the items of the step that differ, in the order of execution.
        batch_hash: of its batch.
        loss, loss_bits: of its batch.
        excess: how far that is above the ranks' losses of the steps before, in robust standard deviations; None: not
            known (see `carrier`).
        per_layer_act_norms: of its batch, by the trace's `layers`.
    """

    rank: int
    exact: bool
    first_difference: str | None
    differing: list[str]
    batch_hash: str
    loss: float | None
    loss_bits: str
    excess: float | None = None
    per_layer_act_norms: list[float | None] = []
