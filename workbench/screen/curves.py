"""What a run has logged, as curves: read on as the log grows, and whose spikes are looked for once. No widgets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from ..detection import rolling
from ..detection.detecting import ALL_RULES, detect_spikes
from ..lines.table import NON_FINITE, NUMBER
from ..run import Run
from ..telemetry import Telemetry
from .curve import GRAD_NORM, LABELS, LOSS, MARKS, VALIDATION, Curve

RECORDED, ALL, NONE = "recorded", "all", "none"  # whose spikes are marked
LONG, GROWN = 100_000, 1.01  # steps of a log that is searched again only once it has grown by a hundredth


class RunCurves:
    """The curves of one run.

    Attributes:
        run: is read again when its log has grown.
        name: by which it is shown.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.name = run, name
        self._telemetry: Any = None
        self._kept: dict[Any, Any] = {}  # what was made of the telemetry, and of the one before it
        self._before: dict[Any, Any] = {}
        self.read()

    def read(self) -> bool:
        """Reads what was logged since the last time; whether there is anything new.

        Raises:
            TelemetryError: the log is gone or damaged. What was read before stays.
        """
        now = self.run.telemetry
        if now is self._telemetry:
            return False
        self._before = {key: value for key, value in (self._before | self._kept).items() if key[0] != "curves"}
        self._telemetry, self._kept = now, {}
        return True

    @property
    def span(self) -> tuple[int, int]:
        """First and last step; (0, 0) where there is none."""
        steps = self._column("step")
        return (0, 0) if steps is None or not len(steps) else (int(steps.min()), int(steps.max()))

    @property
    def segments(self) -> list[tuple[int, int]]:
        """Number and first step of each segment."""
        steps = self._column("step")
        return [(number, int(steps[rows][0])) for number, rows in self._segments() if len(steps[rows])]

    def curves(self, quantity: str) -> list[Curve]:
        """The curve of each segment that has logged anything of it."""
        key = ("curves", quantity)
        if key not in self._kept:
            self._kept[key] = self._made(quantity)
        return self._kept[key]

    def smoothed(self, quantity: str, size: int) -> list[Curve]:
        """The same, each value the mean of itself and the `size - 1` before it; from the `size`-th of a segment on."""
        key = ("smoothed", quantity, size)
        if key not in self._kept:
            for kept in (self._kept, self._before):
                for old in [other for other in kept if other[0] == "smoothed" and other[2] != size]:
                    del kept[old]
            before = {curve.segment: (curve, smooth) for curve, smooth in self._before.pop(key, [])}
            curves = self.curves(quantity)
            self._kept[key] = [(curve, _smooth(curve, size, *before.get(curve.segment, ()))) for curve in curves]
        return [smooth for _, smooth in self._kept[key]]

    def marks(self, by: str) -> pd.DataFrame:
        """Spikes: segment, onset, step, rule, quantity ("loss" or "grad_norm"), value.

        Args:
            by: RECORDED: those that the run's own log names. ALL, or the name of a rule of `detect_spikes`: those
                that it finds. NONE.
        """
        return self._marks(by)[0]

    def looked_up_to(self, by: str) -> int:
        """The last step that `marks` has seen: a log of more than 100,000 steps is searched again only once it has
        grown by a hundredth, for the rules take a second for a million."""
        return self._marks(by)[1]

    def _marks(self, by: str) -> tuple[pd.DataFrame, int, int]:
        """Marks, the last step, and the number of steps then."""
        key, count = ("marks", by), len(self._telemetry)
        if key not in self._kept:
            before = self._before.get(key)
            searched = by not in (RECORDED, NONE)
            if searched and before is not None and LONG < before[2] <= count < GROWN * before[2]:
                self._kept[key] = before
                return before
            if searched:
                found = detect_spikes(self.run, None if by == ALL else [by])
            else:
                found = self._recorded_marks() if by == RECORDED else pd.DataFrame(columns=list(MARKS))
            self._kept[key] = (found[list(MARKS)], self.span[1], count)
        return self._kept[key]

    @property
    def names_spikes(self) -> bool:
        """Whether the log itself says which steps were spikes: a recorder's does, even if it saw none."""
        return isinstance(self._telemetry, Telemetry) and self._column("spike") is not None

    def at(self, step: int) -> dict[str, float]:
        """What was logged at a step, by quantity; of several segments the last one's."""
        steps = self._column("step")
        rows = np.flatnonzero(steps == step) if steps is not None else np.array([], np.int64)
        found = {}
        for quantity in LABELS:
            values = self._column(quantity)
            if len(rows) and values is not None:
                found[quantity] = float(values[rows[-1]])
        return found

    def last(self, quantity: str) -> float:
        """The last value that was logged, also one that is not finite; NaN where there is none."""
        curves = self.curves(quantity)
        if not curves:
            return float("nan")
        steps, broken = curves[-1].steps, curves[-1].broken
        if len(broken) and (not len(steps) or broken[-1] > steps[-1]):
            return self.at(int(broken[-1]))[quantity]
        return float(curves[-1].values[-1])

    def is_broken(self, quantity: str, step: int | None) -> bool:
        """Whether a quantity was logged and not finite at a step; None: at its last."""
        if step is None:
            return self.broken_since(quantity) is not None
        return any(step in curve.broken for curve in self.curves(quantity))

    def broken_since(self, quantity: str) -> int | None:
        """The step from which on a quantity was logged and not finite, up to its last; None: its last value is
        finite, or there is none."""
        curves = self.curves(quantity)
        if not curves or not len(curves[-1].broken):
            return None
        steps, broken = curves[-1].steps, curves[-1].broken
        after = broken if not len(steps) else broken[broken > steps[-1]]
        return int(after[0]) if len(after) else None

    def _column(self, name: str) -> Any:
        return self._telemetry.column(name)

    def _given(self, name: str, otherwise: Any) -> Any:
        found = self._column(name)
        return np.full(len(self._telemetry), otherwise) if found is None else found

    def _segments(self) -> list[tuple[int, Any]]:
        segment = self._column("segment")
        if segment is None or not len(segment):
            return []
        if segment[0] == segment[-1] and (segment == segment[0]).all():
            return [(int(segment[0]), slice(None))]
        return [(int(number), np.flatnonzero(segment == number)) for number in np.unique(segment)]

    def _made(self, quantity: str) -> list[Curve]:
        values = self._column(quantity)
        if values is None:
            return []
        finite = np.isfinite(values)
        kinds, recorded = self._column(f"{quantity}.kind"), self._column(f"{quantity}_recorded")
        if quantity == VALIDATION:
            there = finite
        elif kinds is not None:
            there = (kinds == NUMBER) | (kinds == NON_FINITE)
        else:
            there = finite if recorded is None else recorded
        steps, found = self._column("step"), []
        whole = bool(finite.all())
        for number, rows in self._segments():
            own, numbers = steps[rows], values[rows]
            if not whole:
                keep, lost = finite[rows], there[rows] & ~finite[rows]
                curve = Curve(number, own[keep], numbers[keep].astype(np.float64), own[lost])
            else:
                curve = Curve(number, own, numbers.astype(np.float64), own[:0])
            if len(curve.steps) or len(curve.broken):
                found.append(curve)
        return found

    def _recorded_marks(self) -> pd.DataFrame:
        rows = np.flatnonzero(self._given("spike", False))
        if not len(rows):
            return pd.DataFrame(columns=list(MARKS))
        names = [*getattr(self._telemetry, "rules", []), "not named"]
        codes = self._column("spike_rule")
        rules = [names[-1 if codes is None or codes.dtype.kind not in "iu" else codes[row]] for row in rows]
        steps, loss, norm = (
            self._column("step")[rows],
            self._given(LOSS, np.nan)[rows],
            self._given(GRAD_NORM, np.nan)[rows],
        )
        on_norm = np.array([rule == "grad_norm_z" for rule in rules]) | (np.isfinite(loss) & ~np.isfinite(norm))
        on_norm &= np.array([rule in ("grad_norm_z", "non_finite") for rule in rules])
        columns = (
            *(self._given("segment", 0)[rows], steps, steps, rules),
            *(np.where(on_norm, GRAD_NORM, LOSS), np.where(on_norm, norm, loss)),
        )
        return pd.DataFrame(dict(zip(MARKS, columns, strict=True)))


def _smooth(curve: Curve, size: int, before: Curve | None = None, smooth: Curve | None = None) -> Curve:
    """Args:
    before, smooth: the curve at an earlier time, and smoothed: where it only grew, the rest is done.
    """
    if size == 1:
        return curve
    known = 0 if before is None else len(before.values)
    if (
        before is None
        or smooth is None
        or not len(smooth.values)
        or not np.array_equal(curve.values[:known], before.values)
    ):
        known, done = 0, np.array([])
    else:
        done = smooth.values
    values = curve.values[max(0, known - size + 1) :]
    means = rolling.mean(np.append(values, 0.0), size)[size:]
    return Curve(curve.segment, curve.steps[size - 1 :], np.concatenate([done, means]), curve.broken[:0])


def rules_to_choose() -> list[tuple[str, str]]:
    """Label and value of what `RunCurves.marks` can be asked."""
    each = [(f"by the rule {rule}", rule) for rule in ALL_RULES]
    return [("as each log names them", RECORDED), ("by all rules", ALL), *each, ("none", NONE)]
