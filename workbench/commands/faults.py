"""`workbench faults`: what can be planted."""

from __future__ import annotations

import click

from .page import page, print_json


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def faults(as_json: bool) -> None:
    """List the faults that `workbench train --fault` can plant.

    data, schedule and option faults are part of the run's description, which a replay rebuilds; state faults are
    committed as a checkpoint; transient ones no replay reproduces.
    """
    from rich.table import Table
    from rich.text import Text

    from ..faults import table

    found = table()
    if as_json:
        print_json(found.to_dict("records"))
    else:
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="")
        for name in found.columns:
            shown.add_column(name, no_wrap=name not in ("keys", "what"), overflow="fold")
        for line in found.itertuples(index=False):
            shown.add_row(*map(Text, line))
        page(100).print(shown)
