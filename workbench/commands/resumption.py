"""`workbench resumption`: does a checkpoint lead back onto the run's own way?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo_json
from .options import FACTORY, OTHER_ENVIRONMENT, RUN
from .page import page
from .progress import doing


@click.command()
@RUN
@click.option("--from", "checkpoint", type=click.IntRange(0), required=True, help="The checkpoint of this step.")
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="So many steps after it, at most.")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
@click.option("--segment", type=int, help="Where several segments go on from the checkpoint and differ.")
@FACTORY
@OTHER_ENVIRONMENT
def resumption(run: Path, checkpoint: int, as_json: bool, **options: Any) -> None:
    """Does a checkpoint lead back onto the run's own way?

    Restores it and goes on, beside the same run as it went on past that checkpoint. The restored state and the steps
    from it on are judged apart, and of each the first difference is named. Writes nothing.
    """
    from ..run import open_run

    with doing("restoring") as progress:
        found = open_run(run).resumption(checkpoint, progress=progress, **options)
    if as_json:
        echo_json(found.to_json())
    else:
        page(140).print(str(found))
