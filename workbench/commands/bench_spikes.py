"""`workbench bench spikes`: is the verdict right?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo_json
from .page import page
from .progress import doing


@click.command("spikes", short_help="Is the verdict right? Planted spikes of known cause.")
@click.option("--faults", help="Only these, as in garbage,lr,healthy. [default: all]")
@click.option("--seeds", help="As in 1000..1003 or 1,2. [default: 1000..1001, from which no rule was derived]")
@click.option("--sizes", help="Sizes of the model, which take turns. [default: tiny,long,wide]")
@click.option("--quick", is_flag=True, help="A dozen small cases with the first seed, in about two minutes.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the runs here, or go on with an interrupted bench.")
@click.option("--again", is_flag=True, help="Ask about the runs in --out once more; none is trained again.")
@click.option("--processes", type=click.IntRange(1), help="Cases at a time. [default: one for each core]")
@click.option("--json", "as_json", is_flag=True, help="Print figures and outcomes as JSON.")
def bench_spikes(faults: str | None, seeds: str | None, sizes: str | None, as_json: bool, **options: Any) -> None:
    """Is the verdict right? Runs with planted spikes of known cause, and healthy ones.

    Prints a confusion matrix, how often cause and culprit were right, false alarms on healthy steps and seconds a
    verdict, beside what one would say without the workbench. Everything follows from the seeds; those below 1000 are
    for deriving rules, so figures to report come from others.
    """
    from ..bench.casebook import DEFAULT_SEEDS
    from ..bench.spikebench import parse_seeds, run_bench

    if options["again"] and options["out"] is None:
        raise click.UsageError("--again goes with --out, the folder with the runs.")
    with doing("training", counted=True) as progress:
        found = run_bench(
            seeds=DEFAULT_SEEDS if seeds is None else parse_seeds(seeds),
            sizes=sizes.split(",") if sizes else None,
            faults=faults.split(",") if faults else (),
            progress=lambda done, total, what: progress(done, total, what or "training"),
            **options,
        )
    if as_json:
        echo_json(found.to_json())
    else:
        page(160).print(found)
