"""`workbench spikes`: the spikes of one run, or those that several have in common."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ..printed import echo, echo_json, terminal

if TYPE_CHECKING:
    import pandas as pd


@click.command()
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN [RUN]...")
@click.option("--rule", "rules", multiple=True, help="A rule to look with, or all; repeatable. See below.")
@click.option("--near", type=click.IntRange(0), help="Several runs: steps apart that are the same. [default: 2]")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def spikes(runs: tuple[Path, ...], rules: tuple[str, ...], near: int | None, as_json: bool) -> None:
    """List the spikes of a run or of another program's log, with the rule that found each.

    Without --rule a single run is judged as its recorder did. With it, by rules that also say where each departure
    began: non_finite, moving_average (the posttrainllm trainer's), robust_z, six_sigma, grad_norm_median, drift (slow
    ones, by CUSUM). With several runs, by these, and the steps at which more than one of them spiked are named.
    """
    from ..run import open_run

    asked = None if not rules or "all" in rules else rules
    if len(runs) > 1:
        _common(runs, asked, near, as_json)
        return
    if near is not None:
        raise click.UsageError("--near goes with several runs.")
    if not rules:
        found = open_run(runs[0]).spikes()
        if as_json:
            echo_json(msgspec.json.format(msgspec.json.encode(found.to_dict("records"))))
            return
        if found.empty:
            echo("no spikes")
        for row in found.itertuples():
            echo(f"step {row.step} (segment {row.segment}), {row.rule}: {row.explanation}")
        return
    from ..detection.detecting import detect_spikes

    found = detect_spikes(open_run(runs[0]), asked)
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(_records(found))))
        return
    for notice in found.attrs["notices"]:
        echo(notice, err=True)
    if found.empty:
        echo("no spikes")
    for _, group in found.groupby("event", sort=True):
        head = group.iloc[0]
        if len(group) > 1 or head["onset"] < head["step"]:
            echo(f"from step {head['onset']} (segment {head['segment']}):")
        for row in group.itertuples():
            echo(f"step {row.step} (segment {row.segment}), {row.rule}: {row.explanation}{_extent(row)}")


def _extent(row: Any) -> str:
    began = f"began at {row.onset}" if row.onset < row.step else ""
    largest = f"largest at {row.peak}" if row.peak > row.step else ""
    said = ", ".join(part for part in (began, largest) if part)
    return f" [{said}]" if said else ""


def _common(runs: tuple[Path, ...], rules: tuple[str, ...] | None, near: int | None, as_json: bool) -> None:
    from ..detection.shared_spikes import NEAR, compare_spikes

    found = compare_spikes(runs, rules, near=NEAR if near is None else near)
    if as_json:
        echo_json(msgspec.json.format(msgspec.json.encode(found.to_json())))
        return
    from rich.table import Table

    for notice in found.notices:
        echo(notice, err=True)
    console = terminal(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(found.sentence, soft_wrap=True)
    if found.frame.empty:
        return
    table = Table("step", *found.names, "rules")
    for row in found.frame.to_dict("records"):
        cells = [_cell(row[name], row[f"{name}:first"]) for name in found.names]
        table.add_row(f"{row['step']}", *cells, row["rules"])
    console.print(table)


def _cell(step: Any, first: Any) -> str:
    import pandas as pd

    if pd.isna(step):
        return ""
    return f"{step}" if first >= step else f"{step}, from {first}"


def _records(found: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as JSON can hold them: a threshold that there is not, as of `non_finite`, is null."""
    return [{key: None if value != value else value for key, value in row.items()} for row in found.to_dict("records")]
