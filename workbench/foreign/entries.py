"""What a log of another program holds, in the workbench's words: entries by step, in segments, with notices.

Every reader of a format makes `Entries` of it, and `gathered` makes one table of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

VALUES = ("loss", "grad_norm", "lr", "ma", "step_per_s")  # of a training step
COLUMNS = (
    *("segment", "step", "loss", "loss_recorded", "grad_norm", "grad_norm_recorded", "lr", "ma"),
    *("step_per_s", "spike", "spike_rule", "val_loss", "first_step"),
)


@dataclass
class Entries:
    """Entries in the order of the log.

    Attributes:
        step: int64, one an entry.
        values: float64 by name: some of `VALUES`, and "val_loss". NaN where the entry has none.
        present: bool by name, for each of `values`: where the entry has one, be it finite or not.
        windows: each logged loss is a mean over the steps since the entry before it; no step's own.
        mapping: the workbench's names, and what the log calls them.
        keys: all that could be in the mapping; empty where a format has its own.
        notices: sentences on what had to be tolerated or left out.
        decimals: of the printed loss; None: all of them.
    """

    step: np.ndarray
    values: dict[str, np.ndarray]
    present: dict[str, np.ndarray] = field(default_factory=dict)
    windows: bool = False
    mapping: dict[str, str] = field(default_factory=dict)
    keys: Sequence[str] = ()
    notices: list[str] = field(default_factory=list)
    decimals: int | None = None

    def __post_init__(self) -> None:
        for name, numbers in self.values.items():
            self.present.setdefault(name, ~np.isnan(numbers))

    def training(self) -> np.ndarray:
        """Which entries say something of a training step: bool."""
        return self._any(VALUES)

    def useful(self) -> np.ndarray:
        """Which entries have a value at all: bool."""
        return self._any((*VALUES, "val_loss"))

    def _any(self, names: tuple[str, ...]) -> np.ndarray:
        found = np.zeros(len(self.step), bool)
        for name in names:
            found |= self.present.get(name, False)
        return found


def gathered(entries: Entries) -> pd.DataFrame:
    """One row a step and segment.

    Entries of one step that follow one another and do not contradict are one row. A step that is not higher than the
    one before starts the next segment, as a resume that went back does. A validation belongs to the segment in which
    it was logged.

    Returns:
        The columns of `Run.steps`, and first_step (int64): the logged loss is the mean of the steps from this one to
        `step`; `step` itself where it is that step's own.
    """
    useful = entries.useful()
    step, training = entries.step[useful], entries.training()[useful]
    values = {name: numbers[useful] for name, numbers in entries.values.items()}
    present = {name: there[useful] for name, there in entries.present.items()}
    if training.all() and (np.diff(step) > 0).all():
        segment = np.zeros(len(step), np.int64)
    else:
        rows, segment = _placed(step, training, present)
        order = np.lexsort((step, segment, rows))  # entries of a row are neighbours
        starts = np.flatnonzero(np.diff(rows[order], prepend=-1))
        merged, there = {}, {}
        for name, numbers in values.items():
            there[name] = np.maximum.reduceat(present[name][order], starts) if len(starts) else present[name]
            merged[name] = np.full(len(starts), np.nan)
            own = np.flatnonzero(present[name])
            place = np.searchsorted(rows[order][starts], rows[own])
            merged[name][place] = numbers[own]
        step, segment, values, present = step[order][starts], segment[order][starts], merged, there
        rising = np.lexsort((step, segment))
        step, segment = step[rising], segment[rising]
        values = {name: numbers[rising] for name, numbers in values.items()}
        present = {name: found[rising] for name, found in present.items()}
    return _frame(step, segment, values, present, entries.windows)


def _placed(step: np.ndarray, training: np.ndarray, present: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Row and segment of each entry."""
    rows, segments = np.empty(len(step), np.int64), np.empty(len(step), np.int64)
    names = list(present)
    kinds = np.stack([present[name] for name in names], axis=1) if names else np.zeros((len(step), 0), bool)
    where: dict[int, tuple[int, set[int]]] = {}  # of this segment: step to its row, and which values that has
    segment, row, highest = 0, -1, -1
    for index, (number, trains) in enumerate(zip(step.tolist(), training.tolist(), strict=True)):
        own = set(np.flatnonzero(kinds[index]).tolist())
        known = where.get(number)
        if known is not None and not known[1] & own and (number == highest or not trains):
            known[1].update(own)
            rows[index], segments[index] = known[0], segment
            continue
        if (trains and number <= highest) or known is not None:
            segment, highest, where = segment + 1, -1, {}
        row += 1
        where[number] = (row, own)
        rows[index], segments[index] = row, segment
        highest = max(highest, number) if trains else highest
    return rows, segments


def _frame(
    step: np.ndarray, segment: np.ndarray, values: dict[str, np.ndarray], present: dict[str, np.ndarray], windows: bool
) -> pd.DataFrame:
    count = len(step)
    found: dict[str, np.ndarray] = {"segment": segment, "step": step}
    for name in (*VALUES, "val_loss"):
        found[name] = values.get(name, np.full(count, np.nan))
        if name in ("loss", "grad_norm"):
            found[f"{name}_recorded"] = present.get(name, np.zeros(count, bool))
    found["spike"], found["spike_rule"] = np.zeros(count, bool), np.full(count, None, object)
    first = step.copy()
    if windows:
        logged = np.flatnonzero(found["loss_recorded"])
        same = np.diff(segment[logged], prepend=-1) == 0  # not the first of its segment
        first[logged[same]] = step[logged[np.flatnonzero(same) - 1]] + 1
        first[logged[~same]] = np.minimum(1, step[logged[~same]])
    found["first_step"] = first
    return pd.DataFrame({name: found[name] for name in COLUMNS})
