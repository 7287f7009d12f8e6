"""What the benchmark suite found: a row a question, beside what was to be reached, the physical limit and the peers.

Knows numbers only; runs nothing and imports no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

OURS = "workbench"
COLUMNS = ("row", "what", "unit", "contender", "value", "ours_to_it", "goal", "limit", "verdict", "why")


@dataclass(frozen=True)
class Measured:
    """One row of the suite. Smaller is better in every one of them.

    Attributes:
        row: its name, as `--only` takes it; several may share one.
        what: was measured, in words.
        unit: of the values: "× bare step", "s", "MB", …
        value: ours: a median, or a ratio of medians.
        goal: what was to be reached (issue 8); None: the row is there for comparison.
        limit: the physical one, where it is known or was measured.
        noise: how far from 1 a ratio of two equal things came out beside it (the A/A control); 0: not known.
        peers: the same of each peer, in the same unit.
        failed: peers that have the row and could not be measured, each with its reason.
        parts: what the value is made of, as measured, by name, in `parts_unit`.
        remark: on how to read the row.
    """

    row: str
    what: str
    unit: str
    value: float
    goal: float | None = None
    limit: float | None = None
    noise: float = 0.0
    peers: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)
    parts_unit: str = "ms"
    remark: str = ""

    @property
    def verdict(self) -> str:
        """`reached`, `missed`, or `within noise`: above the goal by no more than two equal things differ here; empty
        without a goal."""
        if self.goal is None:
            return ""
        if self.value <= self.goal:
            return "reached"
        return "within noise" if self.value <= self.goal * (1 + self.noise) else "missed"

    @property
    def lost_to(self) -> list[str]:
        """The peers that are better by more than the noise, the best first."""
        ahead = [name for name, value in self.peers.items() if value * (1 + self.noise) < self.value]
        return sorted(ahead, key=lambda name: self.peers[name])

    @property
    def why(self) -> str:
        """One line about a row that misses its goal or is lost to a peer, out of what was measured; else empty."""
        lost = self.lost_to
        if self.verdict != "missed" and not lost:
            return ""
        said = [f"{name} has {_number(self.peers[name])} {self.unit}" for name in lost]
        if self.parts:
            named = (f"{name} {_number(value)} {self.parts_unit}" for name, value in self.parts.items())
            said.append("measured by itself: " + ", ".join(named))
        return "; ".join([*said, self.remark] if self.remark else said)


def table(rows: Sequence[Measured]) -> pd.DataFrame:
    """One line a contender of each row, ours first.

    Returns:
        Columns row, what, unit, contender, value (NaN: it failed), ours_to_it (ours / its value), goal, limit, verdict
        (of ours), why.
    """
    lines: list[tuple[Any, ...]] = []
    for one in rows:
        fixed = (one.row, one.what, one.unit)
        lines.append((*fixed, OURS, one.value, 1.0, one.goal, one.limit, one.verdict, one.why))
        for name, value in sorted(one.peers.items(), key=lambda entry: entry[1]):
            lines.append((*fixed, name, value, one.value / value if value > 0 else float("nan"), None, None, "", ""))
        for name, reason in one.failed.items():
            lines.append((*fixed, name, None, None, None, None, "failed", reason))
    frame = pd.DataFrame(lines, columns=list(COLUMNS))
    numeric = ["value", "ours_to_it", "goal", "limit"]
    return frame.astype(dict.fromkeys(numeric, float))


def printed(rows: Sequence[Measured]) -> list[tuple[str, ...]]:
    """The lines of the printed table: row, what (with its remark, unless an explanation has it), ours, goal, limit,
    verdict, and each peer's value with the ratio of ours to it."""
    found = list[tuple[str, ...]]()
    for one in rows:
        peers = [
            f"{name} {_number(value)}" + (f" ({_number(one.value / value)})" if value > 0 else "")
            for name, value in sorted(one.peers.items(), key=lambda entry: entry[1])
        ]
        peers += [f"{name}: {reason}" for name, reason in one.failed.items()]
        found.append(
            (
                one.row,
                f"{one.what}; {one.remark}" if one.remark and not one.why else one.what,
                f"{_number(one.value)} {one.unit}",
                "" if one.goal is None else f"≤ {_number(one.goal)}",
                "" if one.limit is None else _number(one.limit),
                one.verdict,
                "\n".join(peers),
            )
        )
    return found


def _number(value: float) -> str:
    """Four figures around 1, where they tell ratios apart; three elsewhere."""
    return f"{value:.3f}" if 0.9 <= value < 10 else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
