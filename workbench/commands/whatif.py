"""`workbench whatif`: experiments on a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo
from .options import CHECKPOINT, FACTORY, OTHER_ENVIRONMENT, RUN, SEGMENT, STEP
from .page import page, print_json
from .progress import doing


@click.command(short_help="Experiments on a step: replays with one change each.")
@RUN
@STEP
@click.option("--set", "changes", multiple=True, required=True, help="A change, such as lr=0.5x; each an experiment.")
@click.option("--next", "next_steps", type=click.IntRange(0), default=8, show_default=True, help="Steps after it.")
@click.option("--once", is_flag=True, help="A changed setting holds for this step only. [default: from here on]")
@click.option("--json", "as_json", is_flag=True, help="Print the experiments as JSON.")
@SEGMENT
@FACTORY
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where files go. [default: the run's traces/]")
@CHECKPOINT
@OTHER_ENVIRONMENT
def whatif(run: Path, step: int, changes: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Experiments on a step: replays with exactly one change each, beside the untouched one.

    \b
    lr=0.5x lr=1e-4          learning rate          drop-row=K      without a row (from 0)
    clip=1.0 clip=off        gradient clipping      batch=STEP      the batch of another step
    reset=m reset=v          Adam's moments to 0    batch=skip      without this step
    reset=m,v                                       state=K         the state of an earlier step
    v=max                    v <- max(v, g²)        rng=SEED        other random numbers
    beta2=0.95 eps=1e-6      Adam's settings        dtype=float32   everything in float32
    compile=on|off           deterministic=on|off
    """
    from ..interventions import whatif as experiments
    from ..run import open_run

    opened = open_run(run)
    with doing("restoring") as progress:
        found = experiments.experiments(opened, step, changes, progress=progress, **options)
    records, files, notices = found
    if as_json:
        print_json(experiments.document(records, files, notices))
        return
    from ..interventions.tables import whatif_table

    for notice in notices:
        echo(notice, err=True)
    console = page(160)
    console.print(experiments.sentence(records[0]), markup=False)
    console.print(whatif_table(experiments.table(records), step))
    for record in records:
        for note in record.notes:
            console.print(f"{record.change}: {note}", markup=False)
    console.print(f"files: {files[0].parent}/{files[0].name.partition('whatif')[0]}whatif-*.json", soft_wrap=True)
