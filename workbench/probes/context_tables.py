"""The tables of `workbench replay --context` for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from ..number_text import number
from .neighbours import THRESHOLD, Context

SHOWN = 12  # rows of a table; JSON and Python have all


def context_tables(context: Context) -> Iterator[Table]:
    """The numbers of the step that stand farthest from its neighbours, and where it began."""
    far = context.scores[context.scores["z"].abs() > THRESHOLD]
    title = f"Step {context.step} beside its healthy neighbours: {_of(far)} beyond {THRESHOLD:g} robust deviations"
    table = Table(title=title, title_justify="left")
    for name in ("path", "kind", "statistic"):
        table.add_column(name, overflow="fold")  # a path that is cut off names no layer
    for name in ("value", "neighbours", "z"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in far.head(SHOWN).to_dict("records"):
        cells = (_number(row["value"]), _number(row["median"]), f"{row['z']:+.1f}")
        table.add_row(Text(row["path"] or "(step)"), row["kind"], row["statistic"], *cells)
    if len(far):
        yield table
    onset = context.onset()
    table = Table("step", "kind", title=f"Order of onset: {_of(onset)} norms", title_justify="left")
    table.add_column("layer", overflow="fold")
    table.add_column("z", justify="right", no_wrap=True)
    for row in onset.head(SHOWN).to_dict("records"):
        table.add_row(str(row["step"]), row["kind"], Text(row["layer"] or "(model)"), f"{row['z']:+.1f}")
    if len(onset):
        yield table


def context_json(context: Context) -> dict[str, Any]:
    """For `--json`: scores of the step, and the onset. Not finite is null."""
    return {
        "steps": context.steps,
        "flagged": [step for step in context.flagged if step in context.steps],
        "notices": context.notices,
        "sentence": context.sentence(),
        "scores": context.scores.to_dict("records"),
        "onset": context.onset().to_dict("records"),
    }


def _of(rows: pd.DataFrame) -> str:
    return f"{SHOWN} of {len(rows)}" if len(rows) > SHOWN else str(len(rows))


def _number(value: float) -> str:
    return number(value)
