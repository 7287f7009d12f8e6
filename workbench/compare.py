"""The checker: recorded evidence against replayed evidence, item by item, bit by bit; and the proof that it can fail.

Evidence is a mapping of item names to bits: a hexadecimal string, or a list of them (None where undefined).
Knows no MLX, no files and no steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from .bits import bits_float, flip_bit, ulp_distance

Verdict = Literal["exact", "within tolerance", "mismatch", "unverified"]
Evidence = Mapping[str, Any]

# In execution order, so that the first mismatch is a cause and the later ones may be its consequences.
ITEMS = (
    "batch_hash",
    "per_layer_act_norms",
    "loss",
    "per_layer_grad_norms",
    "grad_norm",
    "lr",
    "adam_m_norms",
    "adam_v_norms",
    "state.adam_m",
    "state.adam_v",
    "state.weights",
    "state.other",
    "state.rng",
    "state.cursor",
    "checkpoint",
)

ESSENTIAL = ("batch_hash", "loss", "state.weights")  # what went in, what came out, and what it left behind


class Item(msgspec.Struct, forbid_unknown_fields=True):
    """One compared item. `detail` names the first differing layer and both values, or says why nothing was compared."""

    recorded: Any
    replayed: Any
    verdict: Verdict
    detail: str = ""


def compare_evidence(recorded: Evidence, replayed: Evidence, layers: Sequence[str] = ()) -> dict[str, Item]:
    """Compares every item; equal bits are `exact`, anything else is a `mismatch`, and what one side lacks `unverified`.

    Args:
        recorded: what the run logged.
        replayed: what was measured now.
        layers: names of the entries of per-layer arrays.
    """
    return {name: _compare(name, recorded.get(name), replayed.get(name), layers) for name in ITEMS}


def _compare(name: str, recorded: Any, replayed: Any, layers: Sequence[str]) -> Item:
    if recorded is None or replayed is None:
        return Item(recorded, replayed, "unverified", "not recorded" if recorded is None else "not measured")
    if recorded == replayed:
        return Item(recorded, replayed, "exact")
    return Item(recorded, replayed, "mismatch", _difference(name, recorded, replayed, layers))


def _difference(name: str, recorded: Any, replayed: Any, layers: Sequence[str]) -> str:
    if isinstance(recorded, list) and isinstance(replayed, list):
        if len(recorded) != len(replayed):
            return f"{len(recorded)} entries recorded, {len(replayed)} replayed"
        where = [i for i, pair in enumerate(zip(recorded, replayed, strict=True)) if pair[0] != pair[1]]
        # Gradients flow backwards: the last differing layer was computed first.
        first = where[-1] if name == "per_layer_grad_norms" else where[0]
        layer = layers[first] if first < len(layers) else f"entry {first}"
        return f"{len(where)} of {len(recorded)} layers, first {layer}: {_both(recorded[first], replayed[first])}"
    if name == "lr" and any(np.isnan(bits_float(bits)) for bits in (recorded, replayed)):  # a line has null for both
        values = [bits_float(bits) for bits in (recorded, replayed)]
        ours, theirs = ("no finite rate" if np.isnan(value) else str(value) for value in values)
        return f"recorded {ours}, replayed {theirs}"
    if isinstance(recorded, str) and isinstance(replayed, str) and recorded.startswith("0x"):
        return _both(recorded, replayed)
    return f"recorded {str(recorded)[:16]}, replayed {str(replayed)[:16]}"


def _both(recorded: str | None, replayed: str | None) -> str:
    if recorded is None or replayed is None:
        return f"recorded {recorded or 'undefined'}, replayed {replayed or 'undefined'}"
    distance = ulp_distance(recorded, replayed)
    apart = "" if distance is None else f", {distance} ULP apart"
    ours, theirs = (str(bits_float(bits)).replace("nan", "NaN") for bits in (recorded, replayed))
    return f"recorded {ours} ({recorded}), replayed {theirs} ({replayed}){apart}"


def mismatches(items: Mapping[str, Item]) -> list[str]:
    """Names of the items that differ, in execution order."""
    return [name for name in ITEMS if name in items and items[name].verdict == "mismatch"]


def overall(items: Mapping[str, Item]) -> Verdict:
    """`mismatch` if any item differs; `exact` if all that were compared agree and every `ESSENTIAL` one was compared;
    else `unverified`: a loss alone that agrees says little about the state."""
    verdicts = {item.verdict for item in items.values()}
    if "mismatch" in verdicts:
        return "mismatch"
    if "within tolerance" in verdicts:
        return "within tolerance"
    essential = [items[name].verdict for name in ESSENTIAL if name in items]
    return "exact" if essential == ["exact"] * len(ESSENTIAL) else "unverified"


def with_one_bit_flipped(value: Any, entry: int = 0) -> Any:
    """A copy of an item's evidence that differs in one bit: the lowest bit of a number or of a digest's last digit."""
    if isinstance(value, list):
        defined = [i for i, bits in enumerate(value) if bits is not None]
        where = defined[entry % len(defined)]
        return [with_one_bit_flipped(bits) if i == where else bits for i, bits in enumerate(value)]
    if value.startswith("0x"):
        return flip_bit(value)
    return value[:-1] + f"{int(value[-1], 16) ^ 1:x}"


def with_bits(evidence: Evidence) -> list[str]:
    """The items in which a bit can be changed: not those that are undefined, as the moments of an optimizer without."""
    return [
        name
        for name, value in evidence.items()
        if value is not None and not (isinstance(value, list) and all(entry is None for entry in value))
    ]


def missed_flips(evidence: Evidence) -> list[str]:
    """Shows the checker a one-bit change in each item; returns the items for which it did not go red, or not alone.

    An empty answer is the proof that a green verdict means something.
    """
    missed = []
    for name in with_bits(evidence):
        flipped = {**evidence, name: with_one_bit_flipped(evidence[name])}
        if mismatches(compare_evidence(flipped, evidence)) != [name]:
            missed.append(name)
    return missed
