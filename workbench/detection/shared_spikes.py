"""Several runs beside one another: at which steps more than one of them departed, and what is seen of that.

Coincidence is all that a log can show. Whether a common batch, a common schedule or chance is behind it, it can't say;
how many coincidences chance alone would give is said beside what was seen.
"""

from __future__ import annotations

import html
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..enumeration import listed, some
from ..errors import WorkbenchError
from ..run import Run, open_run
from .detecting import detect_spikes, first_departures
from .rules import DetectionSettings

NEAR = 2  # steps: a spike shows at the step whose batch it is, or in the updates right after it
SPELLED = 4  # events that a sentence names


@dataclass(frozen=True)
class SpikeComparison:
    """What several runs have in common.

    Attributes:
        names: of the runs, in the given order; made different where two are the same.
        spans: first and last logged step of each run.
        near: steps that two spikes may be apart and still be counted as the same.
        frame: one row an event, by step: step (the first at which a rule fired, in any run), runs (how many fired),
            covered (how many runs logged that step), rules, quantity (of the earliest departure) and for each run
            `<name>` and `<name>:first` (Int64; where a rule fired, and where its departure began; NA: nowhere near).
        found: of each run what `detect_spikes` says.
        expected: pairs of spikes that near to each other which chance alone would give, were each run's spikes spread
            evenly over its steps.
        pairs: those that were seen.
        notices: sentences.
    """

    names: list[str]
    spans: list[tuple[int, int]]
    near: int
    frame: pd.DataFrame
    found: dict[str, pd.DataFrame]
    expected: float
    pairs: int
    notices: list[str]

    @property
    def shared(self) -> pd.DataFrame:
        """The rows of `frame` that stand in more than one run."""
        return self.frame[self.frame["runs"] > 1].reset_index(drop=True)

    @property
    def sentence(self) -> str:
        """What was seen, and no more."""
        total, several = len(self.frame), self.shared
        if not total:
            return f"No rule fired in any of {listed(self.names)}."
        head = f"In {listed(self.names)} rules fired at {total} step{'' if total == 1 else 's'} in all"
        if several.empty:
            within = "at the same step" if self.near == 0 else f"within {self.near} steps of each other"
            return f"{head}, and nowhere in more than one run {within}."
        parts = []
        for row in several.head(SPELLED).to_dict("records"):
            inside = [name for name in self.names if not pd.isna(row[name])]
            at = [f"{row[name]:,}" for name in inside]
            where = f"step {at[0]}" if len(set(at)) == 1 else f"steps {listed(at)}"
            parts.append(f"{where} in {listed(inside)} ({row['rules']})")
        spelled = some(parts, SPELLED, total=len(several), joint=";")
        same = "the same spike is seen" if len(several) == 1 else f"{len(several)} of them are seen"
        pairs = f"{self.pairs} pair{'' if self.pairs == 1 else 's'} of runs shared one"
        chance = f"{pairs}, where chance alone would have given {self.expected:.2g}"
        return f"{head}; {same} in more than one run: {spelled}. {chance[:1].upper()}{chance[1:]}."

    def to_json(self) -> dict[str, Any]:
        rows = [
            {key: None if value is pd.NA or value is None else value for key, value in row.items()}
            for row in self.frame.astype(object).to_dict("records")
        ]
        spans = {name: list(span) for name, span in zip(self.names, self.spans, strict=True)}
        return {
            **{"runs": self.names, "spans": spans, "near": self.near, "sentence": self.sentence, "events": rows},
            **{"pairs": self.pairs, "expected_by_chance": self.expected, "notices": self.notices},
        }

    def __repr__(self) -> str:
        return f"SpikeComparison({self.names}, events={len(self.frame)}, shared={len(self.shared)})"

    def _repr_html_(self) -> str:
        return f"<p>{html.escape(self.sentence)}</p>{self.frame.to_html(index=False, na_rep='')}"


def compare_spikes(
    runs: Sequence[Run | str | os.PathLike[str]],
    rules: Sequence[str] | None = None,
    settings: DetectionSettings | None = None,
    near: int = NEAR,
) -> SpikeComparison:
    """The spikes of several runs beside each other: the same one in both seeds is noticed.

    Args:
        runs: two or more; folders of runs, logs of other programs, or opened ones.
        rules, settings: as `detect_spikes`, which is asked about each run.
        near: the largest difference of two steps that count as the same. A log of means has a step only once every so
            many; there it is at least that many.

    Raises:
        WorkbenchError: fewer than two runs, or `near` is negative; and as `open_run` and `detect_spikes`.
    """
    opened = [run if isinstance(run, Run) else open_run(run) for run in runs]
    if len(opened) < 2:
        raise WorkbenchError(f"{len(opened)} run is given; expected two or more to compare")
    if type(near) is not int or near < 0:
        raise WorkbenchError(f"near is {near!r}; expected a whole number of steps, 0 or more")
    names = different([run.name for run in opened])
    found, events, spans, notices = {}, [], [], []
    for name, run in zip(names, opened, strict=True):
        steps = run.steps
        found[name] = detect_spikes(run, rules, settings)
        own = first_departures(found[name])
        events.append(own)
        spans.append((int(steps["step"].min()), int(steps["step"].max())) if len(steps) else (0, 0))
        if "first_step" in steps and len(steps):
            widest = int((steps["step"] - steps["first_step"]).max())
            if widest > near:
                near = widest
                notices.append(
                    f"{name} logs means over up to {widest + 1} steps, so steps at most {near} apart count as the same."
                )
    notices += _silent({name: one.attrs["silent"] for name, one in found.items()})
    for name, span in zip(names, spans, strict=True):
        if span[1] < max(last for _, last in spans):
            notices.append(f"{name} ends at step {span[1]:,}: nothing is known of it after that.")
    frame = _table(names, events, spans, near)
    pairs = int(sum(row * (row - 1) // 2 for row in frame["runs"].tolist()))
    return SpikeComparison(names, spans, near, frame, found, _expected(events, spans, near), pairs, notices)


def _silent(rules: dict[str, list[str]]) -> list[str]:
    """One sentence on all rules that had too few values, and in which runs; what each lacked, `found` has."""
    every = list(dict.fromkeys(rule for own in rules.values() for rule in own))
    places = {rule: [name for name, own in rules.items() if rule in own] for rule in every}
    parts = [
        f"{rule} is silent in {listed(own) if len(own) < len(rules) else 'all runs'}" for rule, own in places.items()
    ]
    return [f"Too few values: {'; '.join(parts)}."] if parts else []


def different(names: Sequence[str]) -> list[str]:
    """Names that differ: of those that are the same, each later one gets a number."""
    found: list[str] = []
    for name in names:
        number, candidate = 1, name
        while candidate in found:
            number += 1
            candidate = f"{name} ({number})"
        found.append(candidate)
    return found


class _Event(NamedTuple):
    step: int
    run: int
    first: int
    rules: str
    quantity: str


def _table(names: list[str], events: list[pd.DataFrame], spans: list[tuple[int, int]], near: int) -> pd.DataFrame:
    pooled = sorted(
        _Event(int(row["step"]), place, int(row["first"]), row["rules"], row["first_quantity"])
        for place, own in enumerate(events)
        for row in own.to_dict("records")
    )
    groups: list[list[_Event]] = []
    for event in pooled:
        close = itertools.takewhile(lambda group: event.step - group[0].step <= near, reversed(groups))  # noqa: B023
        home = next((group for group in close if event.run not in {other.run for other in group}), None)
        if home is None:
            groups.append([event])
        else:
            home.append(event)
    rows = []
    for group in groups:
        step, earliest = group[0].step, min(group, key=lambda event: event.first)
        rules = dict.fromkeys(rule for event in group for rule in event.rules.split(", "))
        row: dict[str, Any] = {
            "step": step,
            "runs": len(group),
            "rules": ", ".join(rules),
            "quantity": earliest.quantity,
        }
        row["covered"] = sum(first <= step <= last for first, last in spans)
        for event in group:
            row[names[event.run]], row[f"{names[event.run]}:first"] = event.step, event.first
        rows.append(row)
    columns = ["step", "runs", "covered", "rules", "quantity", *(part for n in names for part in (n, f"{n}:first"))]
    table = pd.DataFrame(rows, columns=columns)
    own = [part for name in names for part in (name, f"{name}:first")]
    return table.astype({"step": "int64", "runs": "int64", "covered": "int64"} | dict.fromkeys(own, "Int64"))


def _expected(events: list[pd.DataFrame], spans: list[tuple[int, int]], near: int) -> float:
    """Pairs within `near` steps, of spikes spread evenly over the steps that both runs have."""
    total = 0.0
    for a in range(len(events)):
        for b in range(a + 1, len(events)):
            low, high = max(spans[a][0], spans[b][0]), min(spans[a][1], spans[b][1])
            common = high - low + 1
            if common < 1:
                continue
            counts = [int(np.sum((events[run]["step"] >= low) & (events[run]["step"] <= high))) for run in (a, b)]
            total += counts[0] * counts[1] * min(1.0, (2 * near + 1) / common)
    return total
