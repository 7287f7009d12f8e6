"""`workbench spikes`: the spikes of one run, or those that several have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..enumeration import some
from ..printed import echo
from .page import page, print_json, records

if TYPE_CHECKING:
    import pandas as pd

    from ..detection.rules import DetectionSettings
    from ..run import Run


@click.command(short_help="List the spikes of a run, or of another program's log.")
@click.argument("runs", type=click.Path(path_type=Path), nargs=-1, required=True, metavar="RUN [RUN]...")
@click.option("--rule", "rules", multiple=True, help="A rule to look with, as above, or all; repeatable.")
@click.option("--window", type=click.IntRange(4), help="Steps to look back on. [default: the run's own, or 50]")
@click.option("--near", type=click.IntRange(0), help="Several runs: steps apart that are the same. [default: 2]")
@click.option("--format", "format_", metavar="F", help="Of a log: as what to read it. [default: by its content]")
@click.option(
    "--columns",
    metavar="NAME=KEY,...",
    multiple=True,
    help="Of a log: its keys for step, loss, lr, grad_norm, val_loss; step=: none. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def spikes(
    runs: tuple[Path, ...],
    rules: tuple[str, ...],
    window: int | None,
    near: int | None,
    format_: str | None,
    columns: tuple[str, ...],
    as_json: bool,
) -> None:
    """List the spikes of a run or of another program's log, with the rule that found each.

    Without --rule a single run is judged as its recorder did. With it, by rules that also say where each departure
    began: non_finite, moving_average (the posttrainllm trainer's), loss_z, six_sigma, grad_norm_median, drift (slow
    ones, by CUSUM). With several runs, by these, and the steps at which more than one of them spiked are named.

    A rule is silent until it has as many steps to look back on as --window says: take a smaller one for a short run,
    or where few losses are logged.

    As what a log was recognised, and which key was taken for the loss, is said on standard error. Where that is wrong,
    set it: --format csv, say, and --columns loss=train/ce,step=global_step.
    """
    from ..errors import TelemetryError
    from ..foreign.logged_run import without_loss

    asked = None if not rules or "all" in rules else rules
    opened = [_opened(path, format_, columns) for path in runs]
    if len(runs) > 1:
        _common(opened, asked, window, near, as_json)
        return
    if near is not None:
        raise click.UsageError("--near goes with several runs.")
    if without_loss(opened[0]) and (not rules or _unread(runs[0], opened[0]) is not None):
        raise TelemetryError(opened[0].unjudged(window))
    if (unread := _unread(runs[0], opened[0])) is not None:
        echo(unread, err=as_json)
        if not as_json:
            return
    if not rules:
        _recorders(opened[0], window, as_json)
        return
    from ..detection.detecting import detect_spikes

    found = detect_spikes(opened[0], asked, _thresholds(window))
    if as_json:
        print_json(records(found))
        return
    for notice in found.attrs["notices"]:
        echo(notice, err=True)
    if found.empty:
        echo("no spikes. The first steps were not judged, as many as a rule's window; only non_finite speaks there.")
    for _, group in found.groupby("event", sort=True):
        head = group.iloc[0]
        if len(group) > 1 or head["onset"] < head["step"]:
            echo(f"from step {head['onset']} (segment {head['segment']}):")
        for row in group.itertuples():
            echo(f"step {row.step} (segment {row.segment}), {row.rule}: {row.explanation}{_extent(row)}")


def _recorders(run: Run, window: int | None, as_json: bool) -> None:
    """The spikes by the rules that a recorder judges with."""
    found = run.spikes(window)
    if as_json:
        print_json(records(found))
        return
    unjudged, silent = run.unjudged(window), run.unstable()
    if found.empty:
        echo(" ".join(filter(None, ["no spikes.", unjudged])))
    for first, last in _stretches(found):
        which = f"step {first.step}" if last.step == first.step else f"steps {first.step} to {last.step}"
        at = "" if last.step == first.step or first.explanation == last.explanation else f"at step {first.step}, "
        echo(f"{which} (segment {first.segment}), {first.rule}: {at}{first.explanation}")
    half = (window or (run.manifest.spikes or {}).get("window", 50)) // 2  # for which a rule that fired is silent
    near = [
        any(row.segment == one.segment and 0 <= row.step - one.step <= half for one in found.itertuples())
        for row in silent.itertuples()
    ]
    if len(silent := silent[[not one for one in near]]):
        steps = some(dict.fromkeys(silent["step"]), 8)
        one = len(silent) == 1
        echo(
            f"No rule names step{'' if one else 's'} {steps}, which the recorder called unstable when it logged "
            f"{'it' if one else 'them'}: {silent['explanation'].iloc[0]}. `workbench autopsy --examine` looks into one."
        )
    if len(found) and unjudged:
        echo(unjudged, err=True)


def _stretches(found: pd.DataFrame) -> Iterator[tuple[Any, Any]]:
    """The first and the last row of each unbroken row of steps that one rule names."""
    first = last = None
    for row in found.itertuples():
        if last is not None and (row.rule, row.segment, row.step - 1) == (last.rule, last.segment, last.step):
            last = row
            continue
        if first is not None:
            yield first, last
        first = last = row
    if first is not None:
        yield first, last


def _thresholds(window: int | None) -> DetectionSettings:
    from ..detection.rules import DetectionSettings

    return DetectionSettings() if window is None else DetectionSettings(window=window)


def _unread(path: Path, run: Run) -> str | None:
    """Why there is nothing to find a spike in; None: there is something."""
    frame = run.steps
    if frame.empty:
        return f"there are no steps in {path}"
    if not frame[["loss_recorded", "grad_norm_recorded"]].to_numpy().any():
        return run.unjudged()
    return None


def _opened(path: Path, format_: str | None, columns: Sequence[str]) -> Run:
    """A run or a log of another program; what its reader had to tolerate is said, and as what it read a log."""
    from ..errors import WorkbenchError
    from ..foreign.logged_run import LoggedRun
    from ..run import open_run

    run = open_run(path, format_, _columns(columns))
    if not isinstance(run, LoggedRun) and (format_ is not None or columns):
        raise WorkbenchError(f"{path} is a recorded run; --format and --columns go with logs of other programs")
    for notice in run.telemetry.notices:
        echo(notice if notice.startswith(str(path)) else f"{path}: {notice}", err=True)
    return run


def _columns(texts: Sequence[str]) -> dict[str, str | None] | None:
    if not texts:
        return None
    found: dict[str, str | None] = {}
    for part in ",".join(texts).split(","):
        name, sign, key = (word.strip() for word in part.partition("="))
        if not sign or not name:
            expected = "expected NAME=KEY,... such as loss=train/ce,step=global_step"
            raise click.BadParameter(f"{part!r} is no pair; {expected}", param_hint="'--columns'")
        if name in found:
            raise click.BadParameter(f"{name!r} is named twice; expected each name once", param_hint="'--columns'")
        found[name] = key or None
    return found


def _extent(row: Any) -> str:
    began = f"began at {row.onset}" if row.onset < row.step else ""
    largest = f"largest at {row.peak}" if row.peak > row.step else ""
    said = ", ".join(part for part in (began, largest) if part)
    return f" [{said}]" if said else ""


def _common(
    runs: Sequence[Run], rules: tuple[str, ...] | None, window: int | None, near: int | None, as_json: bool
) -> None:
    from ..detection.shared_spikes import NEAR, compare_spikes

    found = compare_spikes(runs, rules, _thresholds(window), near=NEAR if near is None else near)
    if as_json:
        print_json(found.to_json())
        return
    from rich.table import Table

    for notice in found.notices:
        echo(notice, err=True)
    console = page(140)
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
