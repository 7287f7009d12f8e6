"""A step's layers beside the run's own healthy neighbours. Knows tables only; nothing of runs, files or MLX."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ..detection.spike_table import recorded


def beside_neighbours(layers: pd.DataFrame, logged: pd.DataFrame, step: int) -> pd.DataFrame:
    """Which layers moved, and how far.

    Args:
        layers: rows layer, kind, l2, recorded, as `Trace.layers`; l2 is pandas.NA where nothing was replayed.
        logged: telemetry of the steps nearby, rows step, layer, kind, recorded, as `Run.norms`.
        step: the step of `layers`; its own rows of `logged` are no neighbours.

    Returns:
        layer, kind, l2, recorded, neighbours (median of the others' `recorded`, without values that are not finite) and
        ratio (l2, or where that is missing `recorded`, to neighbours; NaN where either has no value above 0).
    """
    others = logged[(logged["step"] != step) & np.isfinite(logged["recorded"])]
    medians = others.groupby(["layer", "kind"])["recorded"].median().rename("neighbours").reset_index()
    table = layers[["layer", "kind", "l2", "recorded"]].merge(medians, on=["layer", "kind"], how="left")
    value = table["l2"].where(recorded(table, "l2"), table["recorded"]).astype("float64")
    usable = np.isfinite(value) & (value > 0) & (table["neighbours"] > 0)
    return table.assign(ratio=(value / table["neighbours"]).where(usable))
