"""`workbench bench checkpoint`: what checkpoints cost."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo, terminal
from .page import print_json


@click.command("checkpoint", short_help="What checkpoints cost, in time and bytes.")
@click.option("--preset", type=click.Choice(["tiny", "small", "huge", "xl"]), default="tiny", show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="[default: the plays that come with the workbench]")
@click.option("--rounds", type=click.IntRange(3), default=12, show_default=True, help="Turns of each variant.")
@click.option("--every", type=click.IntRange(1), default=10, show_default=True, help="Steps to a checkpoint.")
@click.option("--json", "as_json", is_flag=True)
def bench_checkpoint(preset: str, corpus: Path | None, rounds: int, every: int, as_json: bool) -> None:
    """Recorded steps with checkpoints beside those without, in turns; medians, and ratios of medians.

    Bytes are stated beside the limit: parameters x (weights + m + v).
    """
    from rich.table import Table

    from ..bench.checkpoint_cost import checkpoint_cost
    from ..bench.problem import of_preset

    cost = checkpoint_cost(*of_preset(preset, corpus), rounds=rounds, every=every)
    if as_json:
        print_json(cost)
        return
    table = Table("what", "median", "ratio", title=f"{preset}, a checkpoint every {every} steps, {rounds} rounds")
    for name, seconds, ratio, of in (
        ("a recorded step", cost.step_s, None, ""),
        ("the loop held up by a checkpoint", cost.blocked_s, cost.blocked, "of a step"),
        ("until it is durable", cost.durable_s, cost.durable_s / cost.raw_s, "of a raw write"),
        ("of that: compared with the one before", cost.compared_s, cost.compared_s / cost.raw_s, "of a raw write"),
        ("raw write + fsync of as many bytes", cost.raw_s, 1.0, ""),
    ):
        table.add_row(name, f"{seconds * 1000:.2f} ms", "" if ratio is None else f"{ratio:.4f} {of}")
    table.add_row(f"{every} steps with one to {every} without", "", f"{cost.ratio:.4f}")
    table.add_row("control: two without", "", f"{cost.control:.4f}")
    for name, size in (("bytes of a checkpoint", cost.bytes), ("bytes that a later one added", cost.new_bytes)):
        table.add_row(name, f"{size / 1e6:.2f} MB", f"{size / cost.state_bytes:.4f} of weights + m + v")
    terminal(highlight=False).print(table)
    blas = cost.environment["blas"]
    echo(f"mlx {cost.environment['mlx']}, {cost.environment['device']}, {blas['library'] if blas else 'GPU'}")
