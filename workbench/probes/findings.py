"""What stands out in a trace, as sentences. Reads the record; imports no MLX, judges no cause."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import UnsetType

from ..bits import bits_float
from ..compare import mismatches
from ..enumeration import some
from ..number_text import number
from . import untrained

if TYPE_CHECKING:
    from ..trace import TraceRecord

# A fresh model whose logits have standard deviation s starts at about ln(vocabulary) + s²/2: GPT-2's initialisation is
# within 1 % of it. What starts a tenth above it was not initialised so, or does not get the tokens it was made for.
FIRST_LOSS = 1.1


def findings(record: TraceRecord) -> list[str]:
    """Sentences on what is odd in a step, in the order of execution; none if nothing is."""
    return [
        *_targets(record),
        *_first_loss(record),
        *_hidden_queries(record),
        *_nonfinite(record),
        *_masked_loss(record),
        *_zero_gradients(record),
        *([] if isinstance(record.untrained, UnsetType) else [untrained.sentence(record.untrained, record.owned)]),
        *_stuck(record),
        *([] if isinstance(record.carried, UnsetType) else [record.carried]),
    ]


def _targets(record: TraceRecord) -> Iterator[str]:
    if record.targets == 0:
        yield "Zero target tokens: no token of this step counts in the loss; a mean over them is 0/0."


def _first_loss(record: TraceRecord) -> Iterator[str]:
    if record.step != 1 or record.logits is None or record.row_loss is None:
        return
    of_rows = record.row_targets or []
    targets = record.targets if record.targets is not None else sum(count or 0 for count in of_rows)
    if not targets or (record.targets is None and None in of_rows):
        return
    loss = sum(math.inf if value is None else value for value in record.row_loss) / targets
    uniform = math.log(record.logits.vocabulary)
    if loss > FIRST_LOSS * uniform:
        yield (
            f"The first loss, {number(loss)} a token, is above ln({record.logits.vocabulary:,}) = {number(uniform)}, "
            "the loss of a uniform guess."
        )


def _hidden_queries(record: TraceRecord) -> Iterator[str]:
    for one in record.attention or []:
        if one.hidden_queries:
            yield (
                f"{one.hidden_queries:,} of {one.queries:,} queries of attention in {one.path or 'the model'} have all "
                "positions hidden."
            )


def _nonfinite(record: TraceRecord) -> Iterator[str]:
    found = record.first_nonfinite
    if found is None:
        return
    yield found.sentence
    if found.kind in ("weight_before", "optimizer_before"):
        yield (
            f"State {record.step - 1}, from which step {record.step} started, was broken already: replay earlier steps "
            "to find the one that broke it."
        )


def _masked_loss(record: TraceRecord) -> Iterator[str]:
    """A trainer may log something else in place of a NaN. If all else agrees, the replay is of that step."""
    item = record.items.get("loss")
    if item is None or not isinstance(item.recorded, str) or record.loss is not None:
        return
    logged = float(bits_float(item.recorded))
    at_fault = record.first_difference is None or record.first_difference.where == "step"
    if math.isfinite(logged) and at_fault and set(mismatches(record.items)) <= {"loss", "grad_norm"}:
        yield (
            f"Telemetry masks a non-finite loss: it has {number(logged, 6)} for step {record.step}, and that step's "
            f"loss is {number(bits_float(record.loss_bits))}; all else that could be compared agrees."
        )


def _zero_gradients(record: TraceRecord) -> Iterator[str]:
    zero = [layer for layer, norm in zip(record.layers, record.per_layer_grad_norms, strict=True) if norm == 0]
    if zero:
        names = some(layer or "(model)" for layer in zero)
        yield f"The gradient is exactly 0 in {len(zero)} of {len(record.layers)} layers: {names}."


def _stuck(record: TraceRecord) -> Iterator[str]:
    if record.lr == 0:
        yield "The learning rate of this step is 0."
        return
    still = [update for update in record.updates if update.stuck_fraction == 1]
    if still:
        dtypes = ", ".join(dict.fromkeys(update.dtype for update in still))
        yield (
            f"{len(still)} of {len(record.updates)} tensors did not move: each change was under half a unit in "
            f"the last place of its weight ({dtypes}): {some(update.path for update in still)}."
        )
