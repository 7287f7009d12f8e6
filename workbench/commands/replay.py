"""`workbench replay`: a step performed again, and compared with what the run recorded."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from ..kind_names import moment_names
from ..printed import echo
from .options import CHECKPOINT, FACTORY, OTHER_ENVIRONMENT, RUN, SEGMENT
from .page import page, print_json
from .printed_trace import print_trace
from .progress import doing, follows

SHARE = 0.65  # of a training process' memory: the rest is Python's, a recorder's and a checkpoint's on its way


@click.command()
@RUN
@click.option("--step", required=True, help="A step, or a range such as 4210..4220.")
@click.option("--json", "as_json", is_flag=True, help="Print the trace (or a list of them) as JSON.")
@SEGMENT
@FACTORY
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where traces go. [default: the run's traces/]")
@CHECKPOINT
@OTHER_ENVIRONMENT
@click.option("--probe/--no-probe", default=True, help="Make the probe pass. [default: on]")
@click.option("--repeat/--no-repeat", default=True, help="Perform it twice, for the badge 'repeatable'. [default: on]")
@click.option("--quick", is_flag=True, help="--no-probe --no-repeat: the step once, compared with the run's.")
@click.option(
    "--fresh-process/--no-fresh-process", default=None, help="Repeat in a new process. [default: if in doubt]"
)
@click.option(
    "--context",
    type=click.IntRange(1),
    help="Also replay this many steps before it, and compare: 4 or more to score it by, 8 say.",
)
def replay(run: Path, step: str, as_json: bool, **options: Any) -> None:
    """Replay a step, and compare it with what the run recorded.

    Exit code 0: exact; 1: not exact; 2: it could not be done.
    """
    replay_and_print(run, step, as_json, **options)


def replay_and_print(path: Path, step: str, as_json: bool = False, **options: Any) -> None:
    """Replays, prints, and exits with 0 or 1.

    Args:
        options: those of the command, under their names there; a missing one has its default.
    """
    from .. import short_lived

    short_lived.importing()
    from .. import kernel_cache, read_ahead, warm_heap
    from ..recorded.layout import CHECKPOINTS
    from ..run import open_run

    run = open_run(path)
    steps = _steps(step)
    segment = options.pop("segment", None)
    before = options.pop("context", None)
    if options.pop("quick", False):
        options |= {"probe": False, "repeat": False}
    whole = options.get("probe", True) and options.get("repeat", True)
    if before is not None and not (isinstance(steps, int) and whole):
        raise click.UsageError("--context goes with a single --step, the probe pass, and the repetition.")
    leads = not follows()  # of several ranks that replay together, the first speaks for all
    passes = 1 + sum(options.get(name, True) for name in ("probe", "repeat"))
    plan = run.plan(steps, segment, passes, checkpoint=options.get("checkpoint"))
    backend = run.manifest.segments[run.manifest.lineage(plan.segment, plan.steps[0])].environment.get("backend", "cpu")
    if backend == "cpu":
        warm_heap.warm(_memory(run, plan))  # before the first thread
    read_ahead.begin_checkpoint(run.path / CHECKPOINTS, *plan.checkpoint)
    if leads:
        for notice in plan.notices:
            echo(notice, err=True)
        echo(f"{path}: {plan.sentence()}", err=True)
    if options.get("other_environment") and leads:
        _name_differences(run, plan.segment, settable=options.get("factory") is None)
    kernels = kernel_cache.count(backend)
    if (said := kernel_cache.empty(backend)) is not None:
        echo(said, err=True)
    options["with_probe"] = options.pop("probe", True)
    with doing("restoring") as progress:
        from .. import session  # noqa: F401  # with all that it imports, MLX too

        short_lived.imported()
        if before is not None and isinstance(steps, int):
            for name in ("with_probe", "repeat"):
                options.pop(name, None)
            context = run.context(steps, before, segment=segment, progress=progress, **options)
            traces = context.trace
        else:
            context, traces = None, run.replay(steps, segment=segment, progress=progress, **options)
    if (said := kernel_cache.added(backend, kernels)) is not None:
        echo(said, err=True)
    traces = traces if isinstance(traces, list) else [traces]
    names = moment_names(run.manifest.optimizer)
    if not leads:
        pass
    elif context is not None:
        _print_context(context, as_json, names, plan.notices)
    elif as_json:
        documents = [_document(trace) for trace in traces]
        print_json(documents[0] if isinstance(steps, int) else documents)
    else:
        for trace in traces:
            print_trace(trace, full=len(traces) == 1, names=names, said=plan.notices)
    short_lived.ending()
    sys.exit(0 if not leads or all(trace.exact for trace in traces) else 1)


def _document(trace: Any) -> dict[str, Any]:
    """For `--json`: what the trace file holds, where that is, and whether it says anything of the run."""
    record: dict[str, Any] = msgspec.to_builtins(trace.record)
    return record | {"trace": str(trace.path), "informational": trace.informational}


def _memory(run: Any, plan: Any) -> int:
    """Bytes that a replay of a step needs, by what its training took at the most; 0: that was not recorded."""
    line = run.line(plan.steps[0], plan.segment)
    peak = getattr(line, "peak_rss_mb", None)
    return int(peak * 1e6 * SHARE) if isinstance(peak, (int, float)) else 0


def _print_context(context: Any, as_json: bool, names: Mapping[str, str], said: Collection[str]) -> None:
    from ..probes.context_tables import context_json, context_tables

    trace = context.trace
    if as_json:
        print_json(_document(trace) | {"context": context_json(context)})
        return
    print_trace(trace, full=True, names=names, said=said)
    console = page(140)
    for table in context_tables(context):
        console.print(table)
    for notice in context.notices:
        console.print(notice, markup=False)
    console.print(context.sentence(), markup=False)


def _name_differences(run: Any, segment: int, *, settable: bool) -> None:
    from ..environment import differences, numeric_environment

    recorded = run.manifest.segments[segment].environment
    for difference in differences(recorded, numeric_environment(), settable=settable):
        echo(f"this machine differs from the run's: {difference}", err=True)


def _steps(text: str) -> int | range:
    first, dots, last = text.partition("..")
    numbers = [int(part) for part in ((first, last) if dots else (first,)) if part.isdecimal() and len(part) < 19]
    if len(numbers) == (2 if dots else 1):
        return range(numbers[0], numbers[1] + 1) if dots else numbers[0]
    raise click.BadParameter(
        f"{text!r} is not a step; expected a number or a range such as 4210..4220", param_hint="--step"
    )
