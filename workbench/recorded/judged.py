"""The steps of a run that the rules of spike detection judge: where one fires, and from where on one can.

A segment is judged with the steps that led to it as its past, as the trainer did.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ..detection.spike_table import find_spikes, recorded
from ..spikes import SpikeSettings

if TYPE_CHECKING:
    import pandas as pd

    from .recorded_run import RecordedRun


def spikes_of(run: RecordedRun, window: int | None = None) -> pd.DataFrame:
    """The columns of `find_spikes`, of all segments.

    Args:
        window: of the rules, instead of the run's own.
    """
    import pandas as pd

    settings = _settings(run, window)
    frame = run.steps
    found = []
    for entry in run.manifest.segments:
        own = frame[frame["segment"] == entry.segment]
        past = run.history(entry.segment, entry.start, 6 * settings.window)
        spikes = find_spikes(pd.concat([past, own]).assign(segment=entry.segment), settings)
        found.append(spikes[spikes["step"] > entry.start])
    return pd.concat(found, ignore_index=True)


def unjudged(run: RecordedRun, window: int | None = None) -> str:
    """A sentence on the steps at the start that no rule could judge; "" if there are none."""
    own, finite = _first_segment(run)
    needs = f"a rule needs the {_settings(run, window).window} losses before a step"
    if own.empty:
        return ""
    if (last := judged_after(run, window)) == math.inf:
        if len(own) == 1:
            return f"The only step was not judged: {needs}."
        there = "there is 1" if len(finite) == 1 else f"there are {len(finite)}"
        return f"None of these {len(own):,} steps was judged: {needs}, and {there} in all."
    return f"Steps {own['step'].iloc[0]} to {last} were not judged: {needs}."


def judged_after(run: RecordedRun, window: int | None = None) -> float:
    """The last step of the first segment that `unjudged` is about; infinite, if no step was judged."""
    _, finite = _first_segment(run)
    window = _settings(run, window).window
    return math.inf if len(finite) <= window else finite[window - 1].item()


def _settings(run: RecordedRun, window: int | None) -> SpikeSettings:
    """Those that the run was recorded with, with another window if one is given."""
    given = run.manifest.spikes
    own = SpikeSettings() if given is None else SpikeSettings(**given)
    return own if window is None else replace(own, window=window)


def _first_segment(run: RecordedRun) -> tuple[pd.DataFrame, np.ndarray]:
    """The rows of `steps` in the first segment, and the steps there with a finite loss."""
    frame = run.steps
    own = frame[frame["segment"] == run.manifest.segments[0].segment]
    losses = own["loss"].to_numpy(dtype=float, na_value=np.nan) if "loss" in own else np.full(len(own), np.nan)
    return own, own["step"].to_numpy()[recorded(own, "loss") & np.isfinite(losses)]
