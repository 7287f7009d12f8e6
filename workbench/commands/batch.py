"""`workbench batch`: which data was in a step."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo
from .options import FACTORY, RUN, SEGMENT
from .page import page, print_json, records
from .progress import aside


@click.command(short_help="Which data was in a step, and in the step before it?")
@RUN
@click.option("--step", required=True, type=click.IntRange(1), help="The step that consumed the batch.")
@click.option("--rows", type=click.IntRange(1), help="Only the first K rows of each batch. [default: all]")
@SEGMENT
@FACTORY
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def batch(run: Path, step: int, rows: int | None, segment: int | None, factory: str | None, as_json: bool) -> None:
    """Which data was in a step, and in the step before it? Text, origin, and what is odd in each row.

    Draws the batch again from the run's data files, of a run of mlx-lm too, or reads the one that the run stored; loads
    no weights. Where only the sampler of your own program has it, name that program with --factory. If the step was
    replayed, rows stand by their share of its loss; otherwise the most unlike the run's other rows come first.
    """
    from ..run import open_run

    opened = open_run(run)
    with aside():  # a factory or a sampler may print
        facts = opened.batch_facts(step, segment=segment, factory=factory)
    notices = facts.attrs["notices"]
    facts = facts.groupby("step", sort=False).head(rows) if rows else facts
    if as_json:
        print_json({"step": step, "notices": notices, "rows": records(facts)})
        return
    for notice in notices:
        echo(notice, err=True)
    from ..interventions.tables import batch_tables
    from ..recorded.planted import explained

    console = page(160)
    for table in batch_tables(facts, console.width):
        console.print(table)
    if opened.unverifiable() is None and (said := explained(opened.manifest, facts["source"])) is not None:
        console.print(said, soft_wrap=True)
