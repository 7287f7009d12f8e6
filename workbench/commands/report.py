"""`workbench report`: what is known of a step, as a file to attach to an issue."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo
from .options import FACTORY, RUN, SEGMENT, STEP, OutFile
from .progress import doing


@click.command(short_help="Write what is known of a step to one HTML file.")
@RUN
@STEP
@click.option("--out", required=True, type=OutFile(), help="The HTML file to write.")
@SEGMENT
@FACTORY
def report(run: Path, step: int, out: Path, segment: int | None, factory: str | None) -> None:
    """Write what is known of a step to one HTML file: no scripts, nothing to load.

    Timeline, badges, norms of each layer and where they left their usual range, rows of the batch, verdict,
    experiments and environment, as far as replay, autopsy and whatif have found them; it computes nothing itself,
    unless --factory names the code of a loop of your own: then a step that was not replayed yet is replayed first.
    """
    from ..run import open_run
    from ..step_report import write_report

    opened = open_run(run)
    if factory is not None and opened.trace(step, segment) is None:
        with doing("restoring") as progress:
            opened.replay(step, segment=segment, factory=factory, progress=progress)
    path = write_report(opened, step, out, segment=segment)
    holds = "text of the run's data" if opened.unverifiable() is None else "numbers, keys and the path of the log"
    echo(f"{path}: {path.stat().st_size / 1e3:,.0f} kB. It holds {holds}: look before you share it.")
