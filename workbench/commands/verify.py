"""`workbench verify`: is a run whole, and is it what it says?"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..printed import echo, echo_json
from .options import FACTORY, OTHER_ENVIRONMENT, RUN
from .page import page
from .progress import doing


@click.command(short_help="Check a run: its digests, telemetry, fingerprints, some steps.")
@RUN
@click.option(
    "--replay", type=click.IntRange(0), default=0, help="Prove so many steps, spread over the run, by replay."
)
@click.option("--workers", type=click.IntRange(1), help="Processes to prove them in. [default: this one]")
@click.option("--seed", type=int, default=0, help="Of the sample of steps. [default: 0]")
@FACTORY
@OTHER_ENVIRONMENT
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
def verify(run: Path, as_json: bool, **options: Any) -> None:
    """Check a run: every digest, the continuity of its telemetry, and the chain of fingerprints. Writes nothing.

    Exit code 0: nothing contradicts the record (what could not be verified is said); 1: something is damaged or
    missing, or a replayed step is not exact; 2: it could not be done.
    """
    from rich.table import Table

    from ..run import open_run

    with doing("reading") as progress:
        found = open_run(run).verify(progress=progress, **options)
    if as_json:
        echo_json(found.to_json())
        sys.exit(0 if found.exact else 1)
    from ..verification import failures

    console = page(140)
    console.print(found.sentence(), soft_wrap=True)
    if (storage := found.storage()) is not None:
        console.print(storage, soft_wrap=True)
    for notice in found.notices:
        echo(notice, err=True)
    table = Table("kind", "exact", "mismatch", "unverified")
    for row in found.summary.itertuples(index=False):
        table.add_row(*map(str, row))
    console.print(table)
    if wrong := failures(found):
        names = {"mismatch": "Contradicts the record", "unverified": "Could not be verified"}
        title = " / ".join(names[verdict] for verdict in dict.fromkeys(one.verdict for one in wrong))
        details = Table("kind", "what", "verdict", "detail", title=title, title_justify="left")
        for one in wrong[:40]:
            details.add_row(one.kind, one.what, one.verdict, one.detail)
        console.print(details)
        if len(wrong) > 40:
            console.print(f"and {len(wrong) - 40} more: --json lists all")
    for limit in found.limits():
        echo(f"Not proven: {limit}")
    sys.exit(0 if found.exact else 1)
