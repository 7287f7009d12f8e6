"""`workbench checkpoint`: files of tensors that another program saved, and what a run's own checkpoints take."""

from __future__ import annotations

from pathlib import Path

import click

from ..number_text import number
from .page import page, print_json, records

COUNTS = ("differing", "max_ulp")
HEADS = {
    "new_bytes": "new bytes",
    "limit_bytes": "bytes of its tensors",
    "shared_bytes": "shared bytes",
    "l2": "L2",
    "rms": "RMS",
    "max_abs": "max |x|",
    "nonfinite": "non-finite",
    "max_ulp": "max ULP",
}


@click.command(short_help="Norms of tensors in a file, two files compared, a run's sizes.")
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
    table, texts = Table(), ("tensor", "part", "verdict", "dtype", "shape")
    for name in frame.columns:
        table.add_column(HEADS.get(name, name), justify="left" if name in texts else "right")
    for row in frame.to_dict("records"):
        compared = row.get("differing", 0) == row.get("differing", 0)  # else each NaN is a number that there is not
        table.add_row(*(_cell(name, value, compared) for name, value in row.items()))
    console = page(160)
    console.print(table)
    for text in told:
        console.print(text, soft_wrap=True)


def _cell(name: str, value: object, compared: bool) -> str:
    if isinstance(value, int) or (name in COUNTS and isinstance(value, float) and value == value):
        return f"{value:,.0f}"
    if not isinstance(value, float):
        return str(value)
    return number(value, 6) if compared or value == value else "-"
