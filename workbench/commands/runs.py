"""`workbench runs`: the runs under a folder."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo
from .page import print_json, records


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, a row a run.")
def runs(folder: Path, as_json: bool) -> None:
    """List the runs under a folder."""
    from ..run import list_runs

    frame = list_runs(folder)
    if as_json:
        print_json(records(frame))
        return
    echo(frame.to_string(index=False) if len(frame) else f"no runs in {folder}")
