"""A verdict for a terminal: sentences, the table of what was tried, and the command to copy."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import indent
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

from ..number_text import number
from ..verdict import Remedy, Verdict

STYLE = {"no-spike": "bold green", "unknown": "bold yellow"}


class Hanging:
    """A line that is indented by two columns, and what is wrapped of it by four.

    Args:
        text: of it; also read by who prints it elsewhere.
    """

    def __init__(self, text: Text) -> None:
        self.text = text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for place, line in enumerate(self.text.wrap(console, max(20, options.max_width - 4))):
            yield Text.assemble("    " if place else "  ", line)


def verdict_parts(verdict: Verdict) -> Iterator[Table | Text | Hanging | str]:
    """What to print, in order: the answer, the evidence, what it refuted, what is left, the way out."""
    yield Text(verdict.sentence(), style=STYLE.get(verdict.verdict, "bold red"))
    if which := verdict.which():
        yield Text(which)
    for title, lines in (
        ("evidence", [one.sentence for one in verdict.evidence]),
        ("would have been refuted by", [verdict.would_refute] if verdict.would_refute else []),
        ("refuted", [f"{one.cause}: {one.sentence}" for one in verdict.refuted]),
        ("stands out", [one.sentence for one in verdict.outliers]),
        ("not checked", [f"{one.what}: {one.why}" for one in verdict.unchecked]),
        ("notice", verdict.besides()),
    ):
        for line in lines:
            yield Hanging(Text.assemble((f"{title}: ", "dim"), line))
    if verdict.remedies:
        yield _remedies(verdict)
        for one in verdict.remedies:
            if one.note:
                yield Hanging(Text.assemble((f"{one.change}: ", "dim"), one.note))
    best = verdict.remedy
    if best is not None and best.command:
        way = best.change if best.change.startswith("from ") else f"with {best.change}"
        yield f"To go on {way}:\n{indent(best.command, '  ')}"  # unwrapped, to be copied
    if said := verdict.no_way_out():
        yield Text(said, style="bold")
    yield Text(verdict.footer(), style="dim")


def _remedies(verdict: Verdict) -> Table:
    of = f"losses of steps {verdict.remedies[0].steps[0]} …" if verdict.remedies[0].steps else "losses after it"
    table = Table(title=f"Tried: what step {verdict.began} and the {of} would have been", title_justify="left")
    table.add_column("change", overflow="fold", min_width=min(24, max(len(one.change) for one in verdict.remedies)))
    count = max(len(one.steps) for one in verdict.remedies)
    for name in ("from state", "loss", "grad norm", f"mean of next {count}", f"highest of next {count}", "helps"):
        table.add_column(name, justify="right")
    first = verdict.remedies[0]
    names = ("loss", "grad_norm", "next_mean", "next_max")
    table.add_row("untouched", "", *(_number(first, f"{name}_untouched") for name in names), "")
    for one in verdict.remedies:
        cells = (_number(one, name) for name in names)
        table.add_row(Text(one.change), str(one.state), *cells, "yes" if one.helps else "no")
    return table


def _number(remedy: Remedy, name: str) -> str:
    value: Any = remedy.numbers[name] if name in remedy.numbers.values else None
    return "-" if value is None else number(value)
