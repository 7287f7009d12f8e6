"""The layer norms that a run logged, tidy, and those that are the yardstick of a step.

Knows telemetry lines and tables; imports no MLX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..bits import bits_float
from ..lines.line import ARRAYS
from .neighbours import COLUMNS

if TYPE_CHECKING:
    from ..lines.line import Line
    from ..run import Run

LOGGED = dict(zip(("activation", "gradient", "adam_m", "adam_v"), ARRAYS, strict=True))  # kind: telemetry's name
# Steps before the first that is judged, where they are logged. Eight steps are no yardstick for what grows over eight
# steps; and sigma of 24 values is known to within 24 %, of eight to within 41 % (see `onsets.freedom`).
YARDSTICK = 24


def of_line(layers: Sequence[str], line: Line | None) -> Iterator[tuple[str, str, float]]:
    """(layer, kind, norm) of each that was logged at a step; NaN and inf as they were."""
    evidence = {} if line is None else line.evidence()
    for kind, name in LOGGED.items():
        for layer, bits in zip(layers, evidence.get(name, ()), strict=False):
            if bits is not None:  # None: the quantity is undefined
                yield layer, kind, float(bits_float(bits))


def logged_norms(run: Run, first: int, last: int, segment: int) -> pd.DataFrame:
    """The L2 norms logged at steps first … last, as far as there are any: step, layer, path, kind, statistic, value."""
    rows = [
        (step, layer, layer, kind, "l2", value)
        for step in range(max(1, first), last + 1)
        for layer, kind, value in of_line(run.manifest.layers, run.line(step, segment))
    ]
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype({"value": "float64"})
