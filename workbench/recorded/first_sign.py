"""The first step whose telemetry has a number that is not finite, on the way to a state. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bits import bits_float
from ..errors import TelemetryError
from ..lines.line import ARRAYS, SCALARS
from ..lines.table import NON_FINITE

if TYPE_CHECKING:
    from .recorded_run import RecordedRun


def first_sign(run: RecordedRun, segment: int, last: int) -> tuple[int, str] | None:
    """The earliest step up to `last` on the way to a segment whose line has NaN or an infinity, and in which item.

    Returns:
        The step, and such as "loss" or "adam_v_norms of blocks.0.mlp.up"; the first in order of execution. None: every
        line on the way is finite, as far as it says something.

    Raises:
        TelemetryError: the telemetry can't be read.
    """
    for step in _suspects(run, segment, last):
        line = run.line(step, segment)
        if line is not None and (item := _item(line.evidence(), run.manifest.layers)) is not None:
            return step, item
    return None


def _suspects(run: RecordedRun, segment: int, last: int) -> Iterator[int]:
    """Steps to be looked at one by one, ascending: a column can't tell NaN from a quantity that is undefined."""
    telemetry = run.telemetry  # once: it is read again when the run has gone on
    steps, segments = telemetry.column("step"), telemetry.column("segment")
    if steps is None or segments is None:
        return
    ways = run.manifest.ways(segment)
    on_way = np.zeros(len(steps), bool)
    for other, low, high in ways:
        on_way |= (segments == other) & (steps > low) & (steps <= min(high, last))
    rows = np.flatnonzero(on_way)
    if not len(rows):
        return
    odd = np.zeros(len(rows), bool)
    odd[int(np.argmin(steps[rows]))] = True  # what is never finite shows no change
    for name in SCALARS:
        kinds = telemetry.column(f"{name}.kind")
        if kinds is not None:
            odd |= kinds[rows] == NON_FINITE
    for name in ARRAYS:
        try:
            values = telemetry.column(name)
        except TelemetryError:  # of several lengths
            odd[:] = True
            continue
        if values is not None:
            broken = ~np.isfinite(values[rows])
            odd |= (broken & ~broken.all(axis=0)).any(axis=1)
    yield from np.sort(steps[rows[odd]]).tolist()


def _item(evidence: dict[str, Any], layers: list[str]) -> str | None:
    for name in ("per_layer_act_norms", "loss", "per_layer_grad_norms", "grad_norm", "adam_m_norms", "adam_v_norms"):
        value = evidence.get(name)
        if isinstance(value, str) and not np.isfinite(bits_float(value)):
            return name
        places = list(enumerate(value)) if isinstance(value, list) else []
        for place, bits in reversed(places) if name == "per_layer_grad_norms" else places:  # in order of execution
            if bits is not None and not np.isfinite(bits_float(bits)):
                return f"{name} of {layers[place]}" if place < len(layers) else name
    return None
