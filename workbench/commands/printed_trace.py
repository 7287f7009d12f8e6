"""What the command line prints of a replayed step: sentence, badges, what differs, norms of each layer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .page import page

if TYPE_CHECKING:
    from ..trace import Trace


_STYLE = {"exact": "green", "mismatch": "bold red", "within tolerance": "yellow", "unverified": "dim"}


def print_trace(trace: Trace, full: bool, names: Mapping[str, str] | None = None, said: Collection[str] = ()) -> None:
    """Prints a trace; not in full: its sentence, notices and findings only.

    Args:
        names: of kinds that are not what they are called (see `kind_names`).
        said: notices that were printed before.
    """
    from rich.table import Table
    from rich.text import Text

    from ..probes.trace_tables import row_shares
    from ..trace import ordered

    console = page(140)
    console.print(Text(trace.sentence(), style="bold"))
    for notice in (*(one for one in trace.notices if one not in said), *trace.findings()):
        console.print(Text(notice))
    if not full:
        return
    only = ", informational" if trace.informational else ""
    for name, verdict, why in trace.badges():
        console.print(Text.assemble((f"  {name:<11}", ""), (f"{verdict + only:<11} ", _STYLE[verdict]), why))
    certified = {True: "yes", False: "no: its numbers are not of this very step", None: "not made"}
    unmade = f": {trace.record.probe_unmade}" if trace.record.probe_unmade else ""
    console.print(f"  probe pass certified: {certified[trace.record.certified_probe]}{unmade}", soft_wrap=bool(unmade))
    items = ordered(trace.record.items)
    if unlike := [(name, item) for name, item in items if item.verdict not in ("exact", "unverified")]:
        table = Table(
            "item", "verdict", "detail", title="Items that differ, in order of execution", title_justify="left"
        )
        for name, item in unlike:
            table.add_row(name, Text(item.verdict, style=_STYLE[item.verdict]), item.detail)
        console.print(table)
    if silent := [f"{name} ({item.detail})" for name, item in items if item.verdict == "unverified"]:
        console.print(f"  not compared: {', '.join(silent)}")
    console.print(layer_table(trace, console.width, names))
    if worst := _worst_row(row_shares(trace.record)):
        console.print(worst)
    console.print(f"trace: {trace.path}", soft_wrap=True)


def _worst_row(rows: Sequence[tuple[int, float, float, int | None]]) -> str:
    """Which row carries most of the loss; "" without any."""
    from ..enumeration import some

    if not rows:
        return ""
    row, loss, share, targets = rows[0]
    if share == share:
        mean = "how many of its tokens count is not known" if targets is None else f"{loss:.3f} a token"
        return f"Row {row} carries {share:.0%} of the step's summed loss ({mean})."
    broken = [one for one, _, its, _ in rows if its != its]
    what = "inf" if loss == float("inf") else "not finite"
    if len(broken) == len(rows) and what != "inf":
        return ""  # losses that are all 0, or none finite
    return f"Row {row}'s loss is {what}." if len(broken) == 1 else f"The losses of rows {some(broken, 8)} are {what}."


def layer_table(trace: Trace, width: int, names: Mapping[str, str] | None = None) -> Any:
    """As many columns as fit with whole names and numbers; the trace file has the others."""
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.table import Table

    from ..probes.trace_tables import layer_rows

    wide = width >= 110
    kinds = ("activation", "gradient", *(("adam_m", "adam_v", "weight") if wide else ()), "update")
    norms = {(row["layer"], row["kind"]): row["l2"] for row in layer_rows(trace.record)}
    measured = {kind for _, kind in norms}
    title = f"Step {trace.step}: L2 norm of each layer, replayed"
    table = Table(title=title, title_justify="left", box=HEAVY_HEAD if wide else SIMPLE)
    table.add_column("layer", overflow="fold")
    kinds = tuple(kind for kind in kinds if not names or kind not in names or kind in measured)
    for name in (*((names or {}).get(kind, kind) for kind in kinds), "as logged"):
        table.add_column(name, no_wrap=True)
    digits = 5 if wide else 3
    for index, layer in enumerate(trace.record.layers):
        cells = [f"{norms[layer, kind]:.{digits}g}" if (layer, kind) in norms else "" for kind in kinds]
        table.add_row(layer or "(model)", *cells, as_logged(trace, index))
    return table


def as_logged(trace: Trace, index: int) -> str:
    """Whether the four logged norms of a layer have the run's bits; NaN has bits too."""
    from ..lines.line import ARRAYS

    items = [trace.record.items[name] for name in ARRAYS]
    pairs = [
        (item.recorded[index], item.replayed[index])
        for item in items
        if isinstance(item.recorded, list) and index < len(item.recorded)
    ]
    if not pairs:
        return "not recorded"
    return "yes" if all(recorded == replayed for recorded, replayed in pairs) else "no"
