"""`workbench demo`: from training to the cause of a planted spike, in one go."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..printed import called, echo
from .printed_trace import print_trace
from .progress import TrainingProgress


@click.command(short_help="Train with a planted fault, find the spike, and explain it.")
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the run in this folder. [default: a temporary one]")
def demo(keep: Path | None) -> None:
    """In under a minute: train on Shakespeare with a planted spike, detect it, replay it exactly, find its cause."""
    from ..demo import STEPS, run_demo

    with TrainingProgress(STEPS) as watcher:
        trace, verdict, spiked, out = run_demo(keep, watcher)
    echo(f"\nSpike detected at step {spiked.step} ({spiked.rule}): {spiked.explanation}.\n")
    print_trace(trace, full=True)
    echo(f"\n{verdict.sentence()}")
    where, command = shlex.quote(str(out)), called()
    echo(f"\nWhere to look next:\n  {command} autopsy {where} --step {spiked.step}")
    echo(f"  {command} replay {where} --step {spiked.step} --context 8")
    echo(f"  {command} lab {where}")
