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
    from ..recorded.listing import list_runs

    frame = list_runs(folder)
    if as_json:
        print_json(records(frame))
        return
    if not len(frame):
        echo(f"no runs in {folder}")
        return
    # Names and problems stand at the left, and nothing is filled up at the end: long ones widen no other line.
    named = frame["run"].str.len().max()
    shown = frame.assign(run=frame["run"].str.ljust(named), problem="")
    head, *lines = shown.rename(columns={"run": "run".ljust(named)}).to_string(index=False).splitlines()
    said = [f"{line.rstrip()}  {problem}" for line, problem in zip(lines, frame["problem"], strict=True)]
    echo("\n".join(line.rstrip() for line in [head if frame["problem"].any() else head.removesuffix("problem"), *said]))
