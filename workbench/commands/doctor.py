"""`workbench doctor`: is replay bit-exact on this machine?"""

from __future__ import annotations

import os
from pathlib import Path

import click

from ..printed import echo_json
from .options import FACTORY
from .page import page
from .progress import doing


@click.command(short_help="Is replay bit-exact on this machine?")
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@FACTORY
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="[default: $WORKBENCH_DEVICE, or what MLX prefers]")
def doctor(run: Path | None, as_json: bool, factory: str | None, device: str | None) -> None:
    """Is replay bit-exact on this machine? Repeats operations and whole steps, and counts the results.

    With RUN: that run's own model, optimizer and batch, on the device that recorded it.
    """
    from .. import doctor as doctors  # imports MLX
    from ..run import open_run

    if run is None and factory is not None:
        raise click.UsageError("--factory goes with a RUN.")
    if run is not None and device is not None:
        raise click.UsageError("--device does not go with a RUN, which is examined on the device that recorded it.")
    with doing("starting") as progress:
        if run is None:
            report = doctors.examine(progress, device=device or os.environ.get("WORKBENCH_DEVICE"))
        else:
            report = doctors.examine_run(open_run(run), factory=factory, progress=progress)
    if as_json:
        echo_json(report.to_json())
    else:
        page(100).print(report)
