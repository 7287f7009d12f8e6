"""`workbench compare`: two runs beside each other."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo_json
from .page import page


@click.command(short_help="Where two runs part, and whether a changed setting explains it.")
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("--segment-a", type=int, help="Where steps of RUN_A stand in several segments that differ.")
@click.option("--segment-b", type=int, help="The same for RUN_B.")
def compare(run_a: Path, run_b: Path, as_json: bool, segment_a: int | None, segment_b: int | None) -> None:
    """Two runs beside each other: where they part, and whether one changed setting alone explains it.

    Reads what they logged; computes nothing.
    """
    from ..pairs.paired import compare_runs

    found = compare_runs(run_a, run_b, segment_a=segment_a, segment_b=segment_b)
    if as_json:
        echo_json(found.to_json())
    else:
        page(140).print(found)
