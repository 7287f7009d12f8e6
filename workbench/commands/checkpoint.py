"""`workbench checkpoint`: files of tensors that another program saved, and what a run's own checkpoints take."""

from __future__ import annotations

from pathlib import Path

import click

from .page import page, print_json, records


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("other", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, a row a tensor.")
def checkpoint(file: Path, other: Path | None, as_json: bool) -> None:
    """Norms of each tensor in a .safetensors or .npz file; with OTHER: where the two differ, bit for bit.

    Says what the file lacks for a state that can be replayed. Formats that would run code are refused. Of a run's
    folder instead: what each of its checkpoints takes on the disk, and the bytes of the tensors of its state, which are
    the least it could take.
    """
    from rich.table import Table

    from ..foreign.loose_checkpoint import compare_checkpoints, open_checkpoint

    if other is None and (file / "run.json").exists():
        from ..recorded.checkpoint_sizes import checkpoint_sizes, size_frame, size_sentence
        from ..run import open_run

        sizes = checkpoint_sizes(open_run(file))
        frame, told = size_frame(sizes), [size_sentence(sizes)] if sizes else []
    elif other is None:
        opened = open_checkpoint(file)
        frame, told = opened.frame(), [opened.sentence()]
    else:
        frame = compare_checkpoints(file, other)
        counts = frame["verdict"].value_counts()
        told = [*frame.attrs["notices"], ", ".join(f"{number} {verdict}" for verdict, number in counts.items())]
    if as_json:
        print_json(records(frame))
        return
    table = Table(*frame.columns)
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row))
    console = page(160)
    console.print(table)
    for text in told:
        console.print(text, soft_wrap=True)
