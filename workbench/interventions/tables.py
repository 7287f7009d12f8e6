"""The tables of `workbench batch` and `workbench whatif` for a terminal: numbers rounded, text cut to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

ODD_Z = 6.0  # robust standard deviations from which a row is marked: as the spike rules
UNLIKE = (
    "unlike: how far a row's tokens (variety, compressibility, frequency) are from those of the 8 steps before, in "
    f"robust standard deviations (the largest |z|); what has {ODD_Z:g} or more stands under odd"
)
TEXT_WIDTH = 60
NARROW = 110  # columns of a terminal, below which a table of a batch leaves out what others of its columns say too


def batch_tables(facts: pd.DataFrame, width: int = 160) -> Iterator[Table]:
    """One table a batch: the rows of `batchfacts.batch_facts`, with what is odd in each in words.

    Args:
        width: columns of the terminal. In a narrow one rows that have a share show neither their loss nor `unlike`.
    """
    wide = width >= NARROW
    for step, rows in facts.groupby("step", sort=False):
        losses, places, texts = (rows[name].notna().any() for name in ("share", "source", "text"))
        losses = losses or rows["loss"].notna().any()
        place, compared = "line" if rows["line"].notna().any() else "offset", rows["outlier"].notna().any()
        order = ", by share of its loss" if losses else ", the most unlike rows first" if compared else ""
        table = Table(title=f"Batch of step {step}{order}", title_justify="left")
        shared = losses and rows["share"].notna().all()
        ranked = compared and (wide or not losses)
        if ranked:
            table.caption, table.caption_justify = UNLIKE, "left"
        # Numbers keep their width. What is left is for the columns of words, of which the widest gives way first.
        table.add_column("row", justify="right", no_wrap=True)
        measured = [*(["loss"] if losses and (wide or not shared) else []), *(["share"] if losses else [])]
        for name in measured:
            table.add_column(name, justify="right", no_wrap=True)
        if places:
            table.add_column("source", overflow="fold")
            table.add_column(place, justify="right", no_wrap=True)
        if ranked:
            table.add_column("unlike", justify="right", no_wrap=True)
        table.add_column("odd", overflow="fold")
        if texts:
            table.add_column("text", max_width=TEXT_WIDTH)
        for row in rows.to_dict("records"):
            cells = [f"{row['row']}"]
            cells += [_number(row[name], {"loss": ".3f", "share": ".1%"}[name]) for name in measured]
            cells += [_known(row["source"]), _known(row[place])] if places else []
            cells += [*([_number(row["outlier"], ".1f")] if ranked else []), "; ".join(oddities(row))]
            text = Text(_known(row["text"]), no_wrap=True, overflow="ellipsis")
            table.add_row(*map(Text, cells), *([text] if texts else []))
        yield table


def oddities(row: dict[str, Any]) -> list[str]:
    """What is odd in a row, in words; empty for an ordinary one."""
    found = []
    if not pd.isna(row["period"]):
        what = "1 token" if row["period"] == 1 else f"{row['period']} tokens"
        found.append(f"{what} repeated {row['repeats']} times from token {row['position']}")
    for name, high, low in (
        ("distinct", "many different tokens", "few different tokens"),
        ("compressed", "hard to compress", "easy to compress"),
        ("log_likelihood", "common tokens", "rare tokens"),
    ):
        if abs(row[f"{name}_z"]) >= ODD_Z:
            found.append(f"{high if row[f'{name}_z'] > 0 else low} (z {row[f'{name}_z']:.1f})")
    if row["follow"] < 1:
        found.append(f"only {row['follow']:.0%} of the targets follow the inputs")
    if not pd.isna(row["copy_of"]):
        found.append(f"same as row {row['copy_of']}")
    if not pd.isna(row["seen_at"]):
        found.append(f"also in step {row['seen_at']}")
    return found


def whatif_table(frame: pd.DataFrame, step: int) -> Table:
    """The table of `whatif.table`, without its notes."""
    table = Table(title=f"Step {step}, and what would have been", title_justify="left")
    table.add_column("change", no_wrap=True)
    heads = ("loss", "grad norm", "update norm", "largest update ratio")
    count = int(frame["steps"].iloc[0]) - 1
    for name in (*heads, f"mean of next {count}", f"highest of next {count}"):
        table.add_column(name, justify="right", overflow="fold")
    for row in frame.to_dict("records"):
        worst = f"{_number(row['worst_ratio'], '.3g')} {row['worst']}" if row["worst"] else "-"
        numbers = [
            _number(row[name], ".4f" if name == "loss" else ".4g") for name in ("loss", "grad_norm", "update_norm")
        ]
        following = [_number(row[name], ".4f") for name in ("next_mean", "next_max")]
        table.add_row(*map(Text, (row["change"], *numbers, worst, *following)))
    return table


def _number(value: Any, form: str) -> str:
    return "-" if pd.isna(value) else format(value, form) if np.isfinite(value) else str(value)


def _known(value: Any) -> str:
    return "" if pd.isna(value) else str(value)
