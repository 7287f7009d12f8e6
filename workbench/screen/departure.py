"""Which layer left its usual range first, in a sentence: from telemetry alone, or from a replay of the steps before.

Knows tables and runs that are read; performs nothing and imports no MLX.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..plots import KIND_NAMES
from ..probes.neighbours import BEFORE, THRESHOLD, scored
from ..spikes import SMALLEST_WINDOW
from .markup import number

if TYPE_CHECKING:
    from ..run import Run

# In the order in which a step computes them; gradients go from the last layer to the first.
ORDER = ("activation", "activation_gradient", "gradient", "adam_m", "adam_v", "update", "weight")
_BACKWARD = ("activation_gradient", "gradient")


def logged_scores(run: Run, step: int, segment: int, flagged: Collection[int]) -> pd.DataFrame:
    """Robust z of each logged norm of steps N-8 … N against the healthy steps before it; see `neighbours.scored`."""
    logged = run.norms(step, segment, BEFORE)
    rows = logged[logged["step"] <= step].rename(columns={"recorded": "value"})
    rows = rows.dropna(subset=["value"])
    return scored(rows.assign(path=rows["layer"], statistic="l2"), flagged) if len(rows) else rows.assign(z=[])


def departures(scores: pd.DataFrame, layers: Sequence[str]) -> pd.DataFrame:
    """Where each layer's norm of each kind was first far off (|z| above 6): step, layer, kind, z; in the order in which
    it was computed.

    Args:
        scores: rows step, layer, kind, statistic, z.
        layers: in order of execution.
    """
    far = scores[(scores["statistic"] == "l2") & (scores["z"].abs() > THRESHOLD)]
    first = far.sort_values("step", kind="stable").drop_duplicates(["layer", "kind"])
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
    found = departures(own, layers)
    if not len(found):
        return f"No layer's norm left its usual range, {which}."
    row = found.iloc[0]
    here, norms = int((found["step"] == step).sum()), own[["layer", "kind"]].drop_duplicates()
    name = (KIND_NAMES | dict(names or {})).get(row["kind"], row["kind"])
    return (
        f"First to leave its usual range: the {name} of {row['layer'] or 'the model'} at step {row['step']:,} "
        f"(z {number(row['z'], 3)}, beyond {THRESHOLD:g}), {which}. At step {step:,} itself {here} of {len(norms)} "
        "norms left theirs."
    )
