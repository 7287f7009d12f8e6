"""`workbench autopsy`: why the loss spiked at a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo_json
from .options import CHECKPOINT, FACTORY, OTHER_ENVIRONMENT, RUN, SEGMENT, STEP
from .page import page
from .progress import doing


@click.command(short_help="Why did the loss spike at this step, and what would have helped?")
@RUN
@STEP
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@SEGMENT
@FACTORY
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where the file goes. [default: the run's traces/]")
@CHECKPOINT
@OTHER_ENVIRONMENT
@click.option("--examine", is_flag=True, help="Look into a step that no rule names, too: why it rose, if it did.")
def autopsy(run: Path, step: int, as_json: bool, **options: Any) -> None:
    """Why did the loss spike at this step? The cause, the evidence, and a way out that was tried.

    One of data, optimizer, schedule, curvature, attention-logits, precision, resume, transient-fault, unknown, or
    no-spike. Replays the step and the 8 before it, then experiments on their states.

    A step that no rule of spike detection names is no-spike, unless --examine asks why it rose; one that no rule could
    judge, for lack of logged steps before it, is always looked into.
    """
    from ..run import open_run

    opened = open_run(run)
    with doing("restoring") as progress:
        verdict = opened.autopsy(step, progress=progress, **options)
    if as_json:
        echo_json(verdict.to_json())
        return
    from ..cause.verdict_tables import verdict_parts
    from ..recorded.planted import explained

    console = page(140)
    for part in verdict_parts(verdict):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    rows = verdict.culprit.get("rows")
    sources = [row["source"] for row in rows if isinstance(row, dict) and "source" in row] if rows else []
    if (said := explained(opened.manifest, sources)) is not None:
        console.print(said, soft_wrap=True, markup=False)
