"""`workbench ranks`: whose batch carried a step of a data-parallel run."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo
from .options import RUN, SEGMENT, STEP
from .page import page, print_json, records


@click.command(short_help="Whose batch carried a step of a data-parallel run?")
@RUN
@STEP
@SEGMENT
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
def ranks(run: Path, step: int, segment: int | None, as_json: bool) -> None:
    """Which rank's batch carried a step of a data-parallel run, by what the ranks logged. Needs no launcher."""
    import math

    from rich.table import Table

    from ..ranks.carrier import rank_table
    from ..run import open_run

    table = rank_table(open_run(run), step, segment)
    if as_json:
        print_json({"step": step, "sentence": table.attrs["sentence"], "ranks": records(table)})
        return
    echo(table.attrs["sentence"])
    shown = Table("rank", "host", "loss", "robust deviations", "batch")
    for row in table.to_dict("records"):
        excess = "too few steps before" if math.isnan(row["excess"]) else f"{row['excess']:.1f}"
        batch = "not recorded" if row["batch_hash"] is None else f"{row['batch_hash']:.12}…"
        shown.add_row(str(row["rank"]), row["host"], f"{row['loss']:.4g}", excess, batch)
    page(100).print(shown)
