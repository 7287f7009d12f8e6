"""The spikes of a whole run as a table: what `SpikeDetector` would say of each row of a telemetry frame."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ..errors import WorkbenchError
from ..spikes import SpikeSettings
from .whole_series import spikes_of

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("step", "segment", "rule", "value", "threshold", "moving_average", "explanation")


def find_spikes(frame: pd.DataFrame, settings: SpikeSettings | None = None) -> pd.DataFrame:
    """Every spike of a run, in the order of the frame.

    The detector starts afresh with each segment: after a resume that went back, the rows before it belong to a course
    that the run left, or repeat steps that come again and would count twice. So the rules are silent for the first
    `window` steps of a segment (`non_finite` is not).

    Args:
        frame: one row a step, in file order: `step` (int), `loss` (float), and if there are any `segment` (int, else
            0) and `grad_norm` (float). NaN means non-finite, except where `<name>_recorded` is False; None and
            pandas.NA mean not recorded.
        settings: the thresholds; the defaults of `SpikeSettings` if None.

    Returns:
        One row a spike: step (int64), segment (int64), rule (one of `RULES`), value (float64, the loss or gradient
        norm), threshold (float64, in the same unit; NaN for `non_finite`), moving_average (float64, NaN before the
        first loss) and explanation, a sentence fragment.

    Raises:
        WorkbenchError: the frame lacks `step` or `loss`.
    """
    import pandas as pd

    missing = [name for name in ("step", "loss") if name not in frame]
    if missing:
        raise WorkbenchError(f"The frame has no column {missing[0]!r}; it has {list(frame.columns)}.")
    losses, grad_norms = _numbers(frame, "loss"), _numbers(frame, "grad_norm")
    there = recorded(frame, "loss"), recorded(frame, "grad_norm")
    steps = frame["step"].to_numpy()
    segments = frame["segment"].to_numpy() if "segment" in frame else np.zeros(len(frame), np.int64)
    afresh = 1 + np.flatnonzero((segments[1:] != segments[:-1]) | (steps[1:] <= steps[:-1]))
    rows = []
    for start, end in itertools.pairwise([0, *afresh.tolist(), len(frame)]):
        own = slice(start, end)
        seen = there[0][own], there[1][own]
        for place, reading in spikes_of(losses[own], grad_norms[own], seen, settings or SpikeSettings()):
            numbers = (reading.value, reading.threshold, reading.moving_average)
            rows.append((steps[start + place], segments[start + place], reading.rule, *numbers, reading.explanation))
    integers, floats = ("step", "segment"), ("value", "threshold", "moving_average")
    types = dict.fromkeys(integers, "int64") | dict.fromkeys(floats, "float64")
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(types)


def recorded(frame: pd.DataFrame, name: str) -> np.ndarray:
    """Which rows have a value of `name`, finite or not: bool, shape (rows,).

    All False without the column. Where a column `<name>_recorded` stands beside it, that decides; otherwise only None
    and pandas.NA are absent, and NaN is a value.
    """
    import pandas as pd

    if name not in frame:
        return np.zeros(len(frame), dtype=bool)
    if f"{name}_recorded" in frame:
        return frame[f"{name}_recorded"].to_numpy(dtype=bool)
    return np.array([value is not None and value is not pd.NA for value in frame[name].tolist()], dtype=bool)


def _numbers(frame: pd.DataFrame, name: str) -> np.ndarray:
    if name not in frame:
        return np.full(len(frame), np.nan)
    return frame[name].to_numpy(dtype=float, na_value=np.nan)
