"""`workbench diverge`: where the bits of a step depend on how it is performed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo_json
from .options import FACTORY, OTHER_ENVIRONMENT, RUN, SEGMENT, STEP
from .page import page
from .progress import doing


@click.command()
@RUN
@STEP
@click.option("--json", "as_json", is_flag=True, help="Print the ladder as JSON.")
@click.option("--from", "checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]")
@click.option("--bisect", is_flag=True, help="Find the first step from there at which each intervention departs.")
@click.option("--rung", "rungs", multiple=True, help="Only this one, such as 'fresh process' or compile; repeatable.")
@click.option("--env", "variables", multiple=True, help="A further rung: a fresh process with NAME=VALUE; repeatable.")
@SEGMENT
@FACTORY
@OTHER_ENVIRONMENT
def diverge(
    run: Path, step: int, as_json: bool, rungs: tuple[str, ...], variables: tuple[str, ...], **options: Any
) -> None:
    """Where do the bits of a step depend on how it is performed?

    Performs it again in this process, in another thread and in a fresh process, then with one thing changed: compiled
    or eager, deterministic or stock operations, the other device. Names the first tensor that differs, in order of
    execution, and by how many ULP. Writes nothing.
    """
    from ..run import open_run

    if odd := [text for text in variables if not text.partition("=")[0] or "=" not in text]:
        raise click.UsageError(f"--env is {odd[0]!r}; expected NAME=VALUE.")
    with doing("restoring") as progress:
        pairs = dict((name, value) for name, _, value in (text.partition("=") for text in variables))
        ladder = open_run(run).diverge(step, rungs=rungs or None, variables=pairs, progress=progress, **options)
    if as_json:
        echo_json(ladder.to_json())
    else:
        page(140).print(ladder)
