"""`workbench bench telemetry`: what opening a long telemetry file costs."""

from __future__ import annotations

import click

from .page import page, print_json, records


@click.command("telemetry", short_help="How long a telemetry file takes to open.")
@click.option("--lines", type=click.IntRange(1), default=10**6, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True, help="Fresh processes of each way.")
@click.option("--strict", is_flag=True, help="Also the strict reader, line by line: half a minute for a million.")
@click.option("--json", "as_json", is_flag=True)
def bench_telemetry(lines: int, repeats: int, strict: bool, as_json: bool) -> None:
    """Opening a telemetry file with all its columns: the first time, and with the cache."""
    from rich.table import Table

    from ..bench.telemetry_load import telemetry_load

    found = telemetry_load(lines, repeats, strict)
    if as_json:
        print_json(records(found))
        return
    table = Table("way", "median s", "fastest s", "CPU s", "peak MB", title=f"{lines:,} lines")
    for row in found.itertuples(index=False):
        table.add_row(row.way, *(f"{value:.3f}" for value in row[1:4]), f"{row.peak_mb:.0f}")
    page(80).print(table)
