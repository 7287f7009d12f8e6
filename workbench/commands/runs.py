"""`workbench runs`: the runs under a folder."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
def runs(folder: Path) -> None:
    """List the runs under a folder."""
    from ..run import list_runs

    frame = list_runs(folder)
    echo(frame.to_string(index=False) if len(frame) else f"no runs in {folder}")
