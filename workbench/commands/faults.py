"""`workbench faults`: what can be planted."""

from __future__ import annotations

import click

from ..printed import echo
from .page import print_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def faults(as_json: bool) -> None:
    """List the faults that `workbench train --fault` can plant.

    data, schedule and option faults are part of the run's description, which a replay rebuilds; state faults are
    committed as a checkpoint; transient ones no replay reproduces.
    """
    from ..faults import table

    found = table()
    if as_json:
        print_json(found.to_dict("records"))
    else:
        lines = [list(found.columns), *found.itertuples(index=False)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(found.columns))]
        for line in lines:
            cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            echo("  ".join(cells).rstrip())
