"""One trace of a step that several ranks replayed: what each of them found, told to all.

Knows traces and the world; performs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from ..bits import bits_float, float_bits, json_float
from ..compare import ITEMS, Item, mismatches
from ..run import Run
from ..trace import Difference, Gate, Gates, TraceRecord
from .carrier import carried_in
from .own_line import mean_loss
from .rank_trace import RankTrace
from .world import exchange, world

_WORST = ("mismatch", "unverified", "within tolerance", "exact")


class _Told(msgspec.Struct):
    """What a rank tells of its own replay."""

    trace: RankTrace
    items: dict[str, Item]
    difference: Difference | None
    gates: Gates
    row_loss: list[float | None] | None
    token_loss: list[list[float | None]] | None
    row_targets: list[int | None] | None
    targets: int | None


def joined(run: Run, record: TraceRecord) -> TraceRecord:
    """The trace of all ranks from that of this one; all ranks call it together. A process alone has it already."""
    if world().size == 1:
        return record
    measured = record.row_loss, record.token_loss, record.row_targets, record.targets
    mine = _Told(_of_rank(record), record.items, record.first_difference, record.gates, *measured)
    told = [msgspec.json.decode(one, type=_Told) for one in exchange(msgspec.json.encode(mine))]
    losses = [float(bits_float(one.trace.loss_bits)) for one in told]
    mean = mean_loss(losses)
    found = carried_in(run, record.step, record.segment, losses)
    excess = [None] * len(told) if found is None else [json_float(value) for value in found.excess]
    return msgspec.structs.replace(
        record,
        exact=all(one.trace.exact for one in told),
        first_difference=_earliest([one.difference for one in told]),
        items={name: _item(name, [one.items for one in told]) for name in record.items},
        gates=_gates([one.gates for one in told]),
        row_loss=_in_a_row([one.row_loss for one in told]),
        token_loss=_in_a_row([one.token_loss for one in told]),
        row_targets=_in_a_row([one.row_targets for one in told]),
        targets=sum(known)
        if len(known := [one.targets for one in told if one.targets is not None]) == len(told)
        else None,
        loss=json_float(mean),
        loss_bits=float_bits(mean),
        ranks=[msgspec.structs.replace(one.trace, excess=z) for one, z in zip(told, excess, strict=True)],
        carried=UNSET if found is None else found.sentence(record.step),
    )


def _of_rank(record: TraceRecord) -> RankTrace:
    difference = record.first_difference
    return RankTrace(
        rank=world().rank,
        exact=record.exact,
        first_difference=None
        if difference is None
        else f"{difference.item} at step {difference.step} ({difference.where}): {difference.detail}",
        differing=mismatches(record.items),
        batch_hash=record.batch_hash,
        loss=record.loss,
        loss_bits=record.loss_bits,
        per_layer_act_norms=record.per_layer_act_norms,
    )


def _item(name: str, ranks: Sequence[dict[str, Item]]) -> Item:
    """An item of the first rank in which it differs; else of the first that recorded nothing of it; else of rank 0."""
    found = [items[name] for items in ranks]
    for verdict in _WORST[:-1]:
        for rank, item in enumerate(found):
            if item.verdict == verdict:
                return msgspec.structs.replace(item, detail=f"rank {rank}: {item.detail}")
    return found[0]


def _in_a_row(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The rows of rank 0, then those of rank 1, …; None where a rank has none."""
    known = [part for part in parts if part is not None]
    return [row for part in known for row in part] if len(known) == len(parts) else None


def _earliest(differences: Sequence[Difference | None]) -> Difference | None:
    def place(one: tuple[int, Difference]) -> tuple[int, int, int]:
        rank, difference = one
        order = ITEMS.index(difference.item) if difference.item in ITEMS else len(ITEMS)
        return difference.step, order, rank

    found = [(rank, one) for rank, one in enumerate(differences) if one is not None]
    if not found:
        return None
    rank, first = min(found, key=place)
    return msgspec.structs.replace(first, detail=f"rank {rank}: {first.detail}")


def _gates(ranks: Sequence[Gates]) -> Gates:
    return Gates(**{name: _gate([getattr(one, name) for one in ranks]) for name in Gates.__struct_fields__})


def _gate(ranks: Sequence[Gate]) -> Gate:
    """Green only where it is so on every rank; the words are those of the rank that is worst."""
    worst = min(range(len(ranks)), key=lambda rank: _WORST.index(ranks[rank].verdict))
    if all(one == ranks[0] for one in ranks):
        return Gate(verdict=ranks[0].verdict, explanation=f"{ranks[0].explanation}, on each of {len(ranks)} ranks")
    verdict = ranks[worst].verdict
    where = (
        f"on rank {worst}: " if any(one.verdict != verdict for one in ranks) else f"on {len(ranks)} ranks, such as: "
    )
    return Gate(verdict=verdict, explanation=f"{where}{ranks[worst].explanation}")
