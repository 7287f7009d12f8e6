"""Which layer left its usual range first, in a sentence: from telemetry alone, or from a replay of the steps before.

Knows tables and runs that are read; performs nothing and imports no MLX.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..plots import KIND_NAMES
from ..probes.logged_norms import YARDSTICK, logged_norms
from ..probes.neighbours import BEFORE, THRESHOLD, or_before, scored
from ..probes.onsets import onsets
from ..spikes import SMALLEST_WINDOW
from .markup import number

if TYPE_CHECKING:
    from ..run import Run
    from .opened import Opened

# In the order in which a step computes them; gradients go from the last layer to the first.
ORDER = ("activation", "activation_gradient", "gradient", "adam_m", "adam_v", "update", "weight")
_BACKWARD = ("activation_gradient", "gradient")


def logged_scores(run: Run, step: int, segment: int, flagged: Collection[int]) -> pd.DataFrame:
    """Robust z of each logged norm of steps N-8 … N against the healthy ones of the steps before it, from N-32 on; see
    `neighbours.scored`. One that was logged as NaN is not finite; one that was not logged is left out."""
    first = max(1, step - BEFORE)
    return scored(logged_norms(run, first - YARDSTICK, step, segment), flagged, first)


def flagged_before(opened: Opened, step: int) -> list[int]:
    """Spikes among the steps that are the yardstick of steps N-8 … N, or stand beside them."""
    return opened.flagged(step - BEFORE - YARDSTICK, step - 1)


def departures(scores: pd.DataFrame, layers: Sequence[str], step: int) -> pd.DataFrame:
    """Where each layer's norm of each kind left its usual range (see `onsets`): step, layer, kind, z; in the order in
    which it was computed.

    Args:
        scores: rows step, layer, kind, statistic, healthy, z.
        layers: in order of execution.
        step: the last one.
    """
    first = onsets(scores, step, THRESHOLD)
    place = {layer: number for number, layer in enumerate(layers)}
    order = [
        (row.step, ORDER.index(row.kind), (-1 if row.kind in _BACKWARD else 1) * place.get(row.layer, 0))
        for row in first.itertuples()
    ]
    ordered = sorted(range(len(first)), key=order.__getitem__)
    return first.iloc[ordered][["step", "layer", "kind", "z"]].reset_index(drop=True)


def sentence(
    scores: pd.DataFrame, layers: Sequence[str], step: int, source: str, names: Mapping[str, str] | None = None
) -> str:
    """Which layer left first.

    Args:
        source: what the scores were computed from, such as "telemetry".
        names: of kinds that are not what they are called (see `kind_names`).
    """
    if not len(scores) or not (scores["statistic"] == "l2").any():
        return ""
    own = scores[scores["statistic"] == "l2"]
    first, last = int(own["step"].min()), int(own["step"].max())
    which = f"by the {source} of steps {first:,} to {last:,}"
    if not own["z"].notna().any():
        return (
            f"Which layer left its usual range first can't be told: {SMALLEST_WINDOW} healthy steps before are needed."
        )
    found = departures(own, layers, step)
    if not len(found):
        return f"No layer's norm left its usual range, {which}.{_scatter(own)}"
    row = found.iloc[0]
    here, norms = int((found["step"] == step).sum()), own[["layer", "kind"]].drop_duplicates()
    far = f"z {number(row['z'], 3)}, beyond {THRESHOLD:g}" if math.isfinite(row["z"]) else "not finite"
    name = (KIND_NAMES | dict(names or {})).get(row["kind"], row["kind"])
    return (
        f"First to leave its usual range: the {name} of {row['layer'] or 'the model'} at step {row['step']:,}"
        f"{or_before(row['step'], first)} ({far}), {which}. At step {step:,} itself, {here} of {len(norms)} norms left "
        "theirs."
    )


def _scatter(own: pd.DataFrame) -> str:
    """That there are norms beyond the threshold, all the same: a map shows them."""
    far = int((own["z"].abs() > THRESHOLD).sum())
    if not far:
        return ""
    of = f"{far} of {int(own['z'].notna().sum()):,} norms"
    return f" {of} stood beyond {THRESHOLD:g}, but came back or had been there long before."
