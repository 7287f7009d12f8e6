"""Every spike and drift in recorded telemetry, by every rule, and where each began.

Knows columns; nothing of files. What the recorder says while a run is trained is `spikes`; this is for any log, after
the fact, and all rules at once: a million steps take a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from ..errors import WorkbenchError
from ..number_text import number
from .rules import FORMER, QUANTITIES, THRESHOLD_RULES, Departure, DetectionSettings, by_drift, by_threshold
from .spike_table import recorded

if TYPE_CHECKING:
    from ..run import Run

ALL_RULES = ("non_finite", *THRESHOLD_RULES, "drift")
FOUND = (
    *("segment", "onset", "step", "peak", "last", "rule", "quantity", "value", "threshold", "level"),
    *("peak_value", "event", "explanation"),
)  # columns of what is found


def detect_spikes(
    telemetry: pd.DataFrame | Run, rules: Sequence[str] | None = None, settings: DetectionSettings | None = None
) -> pd.DataFrame:
    """Every departure of loss and gradient norm from their own past that one of the rules finds.

    Args:
        telemetry: a run, or a frame with one row a step, in file order: `step` (int), and if there are any `loss`,
            `grad_norm` (float), `segment` (int) and `first_step` (int; the row is the mean of the steps from it to
            `step`). NaN means non-finite, except where `<name>_recorded` is False. In a frame each segment stands for
            itself; a segment of a run has the steps that led to it as its past.
        rules: some of `ALL_RULES`; None: all of them.
        settings: their thresholds; the defaults of `DetectionSettings` if None.

    Returns:
        One row a departure, in the order of their onset: segment, onset (the first step of the unbroken departure),
        step (where the rule fired), peak (where it was largest), last (the last step of it), rule, quantity ("loss" or
        "grad_norm"), value, threshold and level (float64: what was compared at `step`, with what, and the level it
        departed from; see `rules`), peak_value, event (departures with the same number overlap, or are at most half a
        window apart; see `first_departures`) and explanation, a sentence fragment. `attrs["notices"]` says which rules
        had too few values to speak at all, and `attrs["silent"]` lists those.

    Raises:
        WorkbenchError: a rule is unknown, or the frame lacks `step`.
    """
    asked = ALL_RULES if rules is None else tuple(FORMER.get(name, name) for name in rules)
    if isinstance(rules, str) or (unknown := [name for name in asked if name not in ALL_RULES]):
        named = repr(rules) if isinstance(rules, str) else repr(unknown[0])
        raise WorkbenchError(f"{named} is no list of rules; expected some of {', '.join(ALL_RULES)}")
    settings = settings or DetectionSettings()
    rows: list[dict[str, Any]] = []
    longest: dict[str, int] = dict.fromkeys(QUANTITIES, 0)
    event = 0
    for segment, frame, begins in _segments(telemetry, settings):
        found = []
        for quantity in QUANTITIES:
            series = _series(frame, quantity)
            longest[quantity] = max(longest[quantity], len(series.values))
            found += _of_series(series, quantity, asked, settings)
        found = [(row, place) for row, place in found if row["step"] > begins]
        found.sort(key=lambda pair: (pair[0]["onset"], pair[0]["step"], ALL_RULES.index(pair[0]["rule"])))
        reached = -1
        for row, (first, last) in found:
            event += first > reached + settings.window // 2 or reached < 0
            reached = max(reached, last)
            rows.append(row | {"segment": segment, "event": event})
    table = pd.DataFrame(rows, columns=list(FOUND))
    whole, numbers = (
        ("segment", "onset", "step", "peak", "last", "event"),
        ("value", "threshold", "level", "peak_value"),
    )
    table = table.astype(dict.fromkeys(whole, "int64") | dict.fromkeys(numbers, "float64"))
    silent = _silent(asked, longest, settings)
    table.attrs["notices"], table.attrs["silent"] = list(silent.values()), list(silent)
    return table


def first_departures(found: pd.DataFrame) -> pd.DataFrame:
    """One row an event: what departed first, and when, and which rule saw most.

    Gradient norms often move some steps before the loss does (OLMo 2, arXiv:2501.00656, section 3), and a drift long
    before the spike that it ends in: the largest jump is seldom where it began.

    Args:
        found: of `detect_spikes`.

    Returns:
        event, segment, first (the earliest onset), first_rule, first_quantity, step (where a rule first fired), rules
        (all that fired, in the order of their onset), last, and explanation (of the rule that departed first).
    """
    names = ("event", "segment", "first", "first_rule", "first_quantity", "step", "rules", "last", "explanation")
    rows = []
    for event, group in found.groupby("event", sort=True):
        head = group.iloc[0]
        rows.append(
            (event, head["segment"], head["onset"], head["rule"], head["quantity"], group["step"].min())
            + (", ".join(dict.fromkeys(group["rule"])), group["last"].max(), head["explanation"])
        )
    return pd.DataFrame(rows, columns=list(names)).astype(
        dict.fromkeys(("event", "segment", "first", "step", "last"), "int64")
    )


class _Series(NamedTuple):
    """What a segment logged of one quantity: the finite values, and the rows that they stand in; the rows that were not
    finite, and their values; and of all rows `first_step` and `step`."""

    values: np.ndarray
    rows: np.ndarray
    broken: np.ndarray
    broken_values: np.ndarray
    firsts: np.ndarray
    steps: np.ndarray


def _segments(telemetry: Any, settings: DetectionSettings) -> list[tuple[int, pd.DataFrame, int]]:
    """Number, rows, and the last step that is only past, of each segment."""
    if isinstance(telemetry, pd.DataFrame):
        if "step" not in telemetry:
            raise WorkbenchError(f"The frame has no column 'step'; it has {list(telemetry.columns)}.")
        if "segment" not in telemetry:
            return [(0, telemetry, -1)]
        groups = telemetry.groupby("segment", sort=False)
        return [(int(number), frame, -1) for number, frame in groups]
    frame = telemetry.steps
    found = []
    reach = 2 * max(settings.window, settings.sigma_window, settings.drift_window)
    for entry in telemetry.manifest.segments:
        own = frame[frame["segment"] == entry.segment]
        past = telemetry.history(entry.segment, entry.start, reach) if entry.start > 0 else own.iloc[:0]
        past = past[(past["step"] <= entry.start) & (past["segment"] != entry.segment)]
        found.append((entry.segment, pd.concat([past, own]) if len(past) else own, entry.start if len(past) else -1))
    return found


def _series(frame: pd.DataFrame, quantity: str) -> _Series:
    steps = frame["step"].to_numpy(np.int64)
    firsts = frame["first_step"].to_numpy(np.int64) if "first_step" in frame else steps
    if quantity not in frame:
        there, numbers = np.zeros(len(frame), bool), np.full(len(frame), np.nan)
    else:
        plain = f"{quantity}_recorded" not in frame and frame[quantity].dtype.kind in "fiu"
        there = np.ones(len(frame), bool) if plain else recorded(frame, quantity)
        numbers = frame[quantity].to_numpy(dtype=float, na_value=np.nan)
    finite = np.isfinite(numbers)
    rows, broken = np.flatnonzero(there & finite), np.flatnonzero(there & ~finite)
    return _Series(numbers[rows], rows, broken, numbers[broken], firsts, steps)


def _of_series(
    series: _Series, quantity: str, asked: Sequence[str], settings: DetectionSettings
) -> list[tuple[dict[str, Any], tuple[int, int]]]:
    """Rows of the table, each with its first and last row of the segment."""
    found = []
    for name in asked:
        departures: list[Departure] = []
        values, rows = series.values, series.rows
        if name == "non_finite":
            values, rows = series.broken_values, series.broken
            departures = _stretches(series, quantity)
        elif name == "drift":
            if quantity == "grad_norm":
                positive = values > 0
                values, rows = values[positive], rows[positive]
            departures = by_drift(quantity, values, settings)
        elif THRESHOLD_RULES[name].quantity == quantity:
            departures = by_threshold(name, values, settings)
        for departure in departures:
            onset, fired, peak, last = (int(rows[place]) for place in departure[:4])
            text = departure.text
            if series.firsts[fired] < series.steps[fired]:
                text += f" (a mean of steps {series.firsts[fired]} to {series.steps[fired]})"
            row = {
                "onset": int(series.firsts[onset]),
                "step": int(series.steps[fired]),
                "peak": int(series.steps[peak]),
                "last": int(series.steps[last]),
                "rule": name,
                "quantity": quantity,
                "value": departure.value,
                "threshold": departure.threshold,
                "level": departure.level,
                "peak_value": float(values[departure.peak]),
                "explanation": text,
            }
            found.append((row, (onset, last)))
    return found


def _stretches(series: _Series, quantity: str) -> list[Departure]:
    """Rows in a row that are not finite, as one departure each."""
    if not len(series.broken):
        return []
    starts = np.flatnonzero(np.diff(series.broken, prepend=-2) > 1)
    ends = [*(starts[1:] - 1).tolist(), len(series.broken) - 1]
    found = []
    for start, end in zip(starts.tolist(), ends, strict=True):
        value = float(series.broken_values[start])
        text = f"{QUANTITIES[quantity]} is {number(value)}"
        text += "" if start == end else f", the first of {end - start + 1} in a row that are not finite"
        found.append(Departure(start, start, start, end, value, np.nan, np.nan, text))
    return found


def _silent(asked: Sequence[str], longest: dict[str, int], settings: DetectionSettings) -> dict[str, str]:
    """A sentence for each rule that had too few values."""
    notices = {}
    for name in asked:
        if name == "non_finite":
            continue
        quantity = THRESHOLD_RULES[name].quantity if name in THRESHOLD_RULES else "loss"
        needed = settings.drift_window if name == "drift" else getattr(settings, THRESHOLD_RULES[name].needs)
        if longest[quantity] <= needed:
            many = f"has {longest[quantity]} finite values" if longest[quantity] else "is not recorded"
            notices[name] = f"{name} is silent: the {QUANTITIES[quantity]} {many}, and it needs more than {needed}."
    return notices
