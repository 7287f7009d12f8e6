"""`workbench bench suite`: every row of how fast it is to be, beside its peers."""

from __future__ import annotations

from pathlib import Path

import click

from ..printed import echo
from .options import OutFile
from .page import page, records

ROWS = ("recording", "checkpoint", "load", "replay-cold", "replay-live", "roll-forward", "telemetry", "curve")


@click.command("suite", short_help="Every measurement on this machine, beside its goal.")
@click.option("--size", type=click.Choice(["tiny", "small"]), default="small", show_default=True)
@click.option("--only", type=click.Choice(ROWS), multiple=True, help="This row; may be repeated. [default: all]")
@click.option("--rounds", type=click.IntRange(2), default=5, show_default=True, help="Turns of each variant.")
@click.option("--peers", type=click.Path(path_type=Path), help="The folder that tests/peers/install.py filled.")
@click.option("--json", "file", type=OutFile(), help="Also write all of it to this file.")
@click.option("--figure", type=OutFile(), help="Also draw cost against size and steps: some minutes.")
@click.option("--most-steps", type=click.IntRange(100), default=10**5, show_default=True, help="Of the figure's runs.")
def bench_suite(
    size: str,
    only: tuple[str, ...],
    rounds: int,
    peers: Path | None,
    file: Path | None,
    figure: Path | None,
    most_steps: int,
) -> None:
    """Every measurement on this machine, beside its goal, its limit and what people would use instead.

    Recording, checkpoints, replay, telemetry, in turns with the peers: ratios of medians. Put the BLAS that you train
    with before MLX's. Some 12 minutes at `small` with all peers.
    """
    import msgspec
    from rich.table import Table

    from ..bench.suite import benchmark_suite

    def say(what: str) -> None:
        echo(what, err=True)  # a line: a bar would draw itself while the steps are timed

    found = benchmark_suite(size, only=only, rounds=rounds, peers=peers, say=say)
    console = page(190)
    shown = Table(title=f"{size}, {rounds} rounds", show_lines=True)
    for heading in ("row", "what", "ours", "goal", "limit", "verdict", "peers (ours to theirs)"):
        shown.add_column(heading, overflow="fold")
    for line in found.lines:
        shown.add_row(*line)
    console.print(shown)
    for sentence in (*found.explanations, *found.notices):
        echo(sentence)
    for name, value in found.machine.items():
        echo(f"{name}: {value}")
    document = {"machine": found.machine, "rows": [msgspec.to_builtins(one) for one in found.rows]}
    document |= {"table": records(found.table)}
    document |= {"explanations": found.explanations, "notices": found.notices}
    if figure is not None:
        from ..bench.scaling import scaling
        from ..bench.scaling_figure import scaling_figure
        from ..figures import png

        grown = scaling(most_steps=most_steps, rounds=rounds, say=say)
        figure.write_bytes(png(scaling_figure(grown)))
        document["scaling"] = grown.to_dict("records")
        for sentence in grown.attrs["slopes"]:
            echo(sentence)
        echo(f"the figure is in {figure}")
    if file is not None:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(document)))
        echo(f"all of it is in {file}")
