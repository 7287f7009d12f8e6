"""`workbench bench record`: what recording costs."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo, terminal
from .page import print_json


@click.command("record", short_help="What recording costs a compiled step.")
@click.option("--preset", type=click.Choice(["tiny", "small", "huge", "xl"]), default="tiny", show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="[default: the plays that come with the workbench]")
@click.option("--rounds", type=click.IntRange(3), default=12, show_default=True, help="Turns of each variant.")
@click.option("--burst", type=click.IntRange(1), default=4, show_default=True, help="Steps a turn.")
@click.option("--json", "as_json", is_flag=True)
def bench_record(preset: str, corpus: Path | None, rounds: int, burst: int, as_json: bool) -> None:
    """Recording beside the bare compiled step, in turns; ratios of medians."""
    from rich.table import Table

    from ..bench.problem import of_preset
    from ..bench.recording_cost import recording_cost

    cost = recording_cost(*of_preset(preset, corpus), rounds=rounds, burst=burst)
    if as_json:
        print_json(cost)
        return
    table = Table("variant", "median ms a step", "ratio to bare", title=f"{preset}, {rounds} rounds of {burst} steps")
    for name, ratio in (
        ("bare", 1.0),
        ("control (bare again)", cost.control),
        ("unrecorded", cost.unrecorded),
        ("recorded", cost.recorded),
        ("recorded, no black box", cost.boxless),
    ):
        table.add_row(name, f"{cost.bare_ms * ratio:.2f}", f"{ratio:.3f}")
    terminal(highlight=False).print(table)
    blas = cost.environment["blas"]
    echo(f"mlx {cost.environment['mlx']}, {cost.environment['device']}, {blas['library'] if blas else 'GPU'}")
