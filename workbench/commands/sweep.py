"""`workbench sweep`: many steps, of one run or several, replayed over processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ..printed import echo
from .options import FACTORY, OTHER_ENVIRONMENT, SEGMENT
from .page import page, print_json, records
from .progress import doing

_PART = re.compile(r"(\d{1,15})(?:(?:\.\.|:)(\d{1,15})(?::(\d{1,9}))?)?", re.ASCII)


@click.command(short_help="Replay many steps, of one run or several, as a table.")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN...")
@click.option(
    "--steps", help="Such as 4218, 4210..4220, 100:200:10 (each tenth; the last one included), or a list: 5,9."
)
@click.option("--spikes", is_flag=True, help="The steps at which each run's own rule of spike detection fires.")
@click.option("--workers", type=click.IntRange(0), help="Processes; 0: this one. [default: a processor each]")
@SEGMENT
@FACTORY
@OTHER_ENVIRONMENT
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, a row a step.")
def sweep(
    runs: tuple[Path, ...], steps: str | None, spikes: bool, workers: int | None, as_json: bool, **options: Any
) -> None:
    """Replay many steps, of one run or several, and print a verdict each. Writes nothing.

    Steps with the same nearest checkpoint share one roll-forward; the roll-forwards are spread over processes. A step
    that can't be replayed is a row that says why.

    Exit code 0: the table was made, whatever it says; 2: it could not be.
    """
    from ..many import replay_many
    from ..run import open_run

    if steps is None and not spikes:
        raise click.UsageError("--steps or --spikes says which steps are to be replayed; expected one of them or both.")
    asked = [] if steps is None else parse_steps(steps)
    items = []
    for path in dict.fromkeys(runs):
        run = open_run(path)
        found = set(asked) | (set(map(int, run.spikes()["step"])) if spikes else set())
        items += [(run, step) for step in sorted(found)]
    with doing("planning") as progress:
        frame = replay_many(items, workers=workers, progress=progress, **options)
    if as_json:
        print_json(records(frame))
        return
    _print(frame, several=len(set(runs)) > 1)


def parse_steps(text: str) -> list[int]:
    """The steps of "5,9", "4210..4220" and "100:200:10", ascending; the last of a range is one of them."""
    found: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last, stride = (None, None, None) if match is None else match.groups()
        if first is None or int(first) < 1 or (last and int(last) < int(first)) or (stride and not int(stride)):
            raise click.BadParameter(
                f"{part.strip()!r} is no step; expected a number from 1, or a range such as 4210..4220 or 100:200:10",
                param_hint="--steps",
            )
        steps = range(int(first), int(last or first) + 1, int(stride or 1))
        if len(steps) > 10**6:
            raise click.BadParameter(f"{part.strip()!r} is {len(steps)} steps; expected at most 1,000,000",
                                     param_hint="--steps")  # fmt: skip
        found |= set(steps)
    return sorted(found)


def _print(frame: Any, several: bool) -> None:
    from rich.table import Table

    counts = frame["verdict"].fillna("not replayed").value_counts()
    names = [*(["run"] if several else []), "step", "segment", "verdict", "loss", "checkpoint", "rolled", "detail"]
    table = Table(*names)
    for row in frame.itertuples(index=False):
        failed = row.error is not None
        detail = row.error or row.first_difference or f"{row.compared} recorded items"
        cells = [
            row.step,
            *(("", "not replayed", "", "", "") if failed else
              (row.segment, row.verdict, f"{row.loss:.6g}", row.checkpoint, row.rolled)),
            detail,
        ]  # fmt: skip
        table.add_row(*([row.run] if several else []), *map(str, cells))
    page(160).print(table)
    echo(", ".join(f"{number} {verdict}" for verdict, number in counts.items()) or "no step fits")
