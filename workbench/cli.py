"""The command line. It parses, calls, and prints; every answer is also one call away in Python.

Exit codes: 0 the question was answered, whatever the answer; 1 `replay` found a step not exact; 2 bad input;
130 or 143 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from . import __version__
from .errors import WorkbenchError

if TYPE_CHECKING:
    from .trace import Trace


class _Group(click.Group):
    """Turns every error of ours into one sentence and exit code 2; a traceback reaches nobody."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            _usage(error, context)

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except click.UsageError as error:
            _usage(error, context)
        except WorkbenchError as error:
            click.echo(f"workbench: {error}", err=True)
            context.exit(2)
        except BrokenPipeError:
            # The reader went away, as `head` does. What is still buffered goes nowhere, so no complaint at exit either.
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
            context.exit(128 + signal.SIGPIPE)  # as any command: neither "exact" nor "not exact"
        except OSError as error:
            click.echo(f"workbench: {error.filename or 'a file'}: {error.strerror or error}", err=True)
            context.exit(2)
        except KeyboardInterrupt as error:
            click.echo(f"workbench: {error}" if str(error) else "workbench: interrupted", err=True)
            context.exit(128 + getattr(error, "number", signal.SIGINT))


def _console(**settings: Any) -> Any:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:  # rich would exit with 1, which means "not exact"
            raise BrokenPipeError

    return Plain(**settings)


def _usage(error: click.UsageError, context: click.Context) -> NoReturn:
    command = (error.ctx or context).command_path
    click.echo(f"workbench: {error.format_message()} See {command} --help.", err=True)
    context.exit(2)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="workbench")
def main() -> None:
    """Replay the training step where the loss spiked, bit for bit, and see what happened."""


# ---------------------------------------------------------------------------------------------------------------- train


def _options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


_SHAPE = _options(
    click.option("--preset", type=click.Choice(["tiny", "small", "huge", "xl"]), help="Model and batch. [default: tiny]"),
    click.option("--depth", type=int, help="Instead of a preset: N layers, width 64·N, N heads."),
    click.option("--batch", type=int, help="Rows in a micro-batch."),
    click.option("--ctx", type=int, help="Tokens in a row."),
    click.option("--accum", type=int, help="Micro-batches in a step. [default: 1]"),
    click.option("--dropout", type=float, help="[default: 0]"),
    click.option("--tied/--untied", default=None, help="Share the head with the embedding. [default: tied]"),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="[default: float32]"),
)
_OPTIMIZER = _options(
    click.option("--grad-clip", type=float, help="Global gradient norm; 0 switches clipping off. [default: 1.0]"),
    click.option("--beta1", type=float, help="[default: 0.9]"),
    click.option("--beta2", type=float, help="[default: 0.95]"),
    click.option("--eps", type=float, help="[default: 1e-8; 1e-4 in float16, where 1e-8 is zero]"),
    click.option("--weight-decay", type=float, help="[default: 0.1]"),
    click.option("--bias-correction/--no-bias-correction", default=None, help="[default: on]"),
)
_SCHEDULE = _options(
    click.option("--lr-schedule", type=click.Choice(["cosine", "wsd", "constant"]), help="[default: cosine]"),
    click.option("--warmup", type=int, help="Updates of linear warm-up. [default: a twentieth of the steps]"),
    click.option("--max-lr", type=float, help="[default: 1e-3]"),
    click.option("--min-lr", type=float, help="[default: 0]"),
    click.option("--decay-steps", type=int, help="Length of the decay of wsd. [default: a fifth of the steps]"),
    click.option("--decay-shape", type=click.Choice(["1-sqrt", "cosine", "linear"]), help="[default: 1-sqrt]"),
)
_RUNNING = _options(
    click.option("--seed", type=int, help="[default: 0]"),
    click.option("--val-split", type=float, help="Share of the corpus held out. [default: 0.05]"),
    click.option("--val-every", type=int, help="[default: 0, never]"),
    click.option("--sample-every", type=int, help="Print a sample of text. [default: 0, never]"),
    click.option("--prefetch", type=int, help="Batches drawn ahead by a thread. [default: 0]"),
    click.option(
        "--device", type=click.Choice(["cpu", "gpu"]), help="[default: $WORKBENCH_DEVICE, or what MLX prefers]"
    ),
    click.option("--compile/--no-compile", "compile_", default=None, help="Compile the step. [default: on]"),
    click.option(
        "--deterministic/--no-deterministic",
        default=None,
        help="On a GPU: gradients that repeat bit for bit. [default: on]",
    ),
    click.option("--fault", "faults", multiple=True, help="Plant a spike: garbage@N:rows=1. See `workbench faults`."),
)
_FORK = _options(
    click.option("--fork", type=click.Path(path_type=Path), help="Start a new run from a state of this one …"),
    click.option("--from", "from_", help="… after this step (200, or 200.s1 for that of segment 1) …"),
    click.option("--skip-batch", type=int, multiple=True, help="… without the batch of this step …"),
    click.option("--set", "set_", multiple=True, help="… with this changed: lr=0.5x, clip=off, reset=m,v, eps=1e-6."),
)
_RECORDING = _options(
    click.option("--save-every", type=int, help="Steps between checkpoints; 0: first and last only. [default: 100]"),
    click.option("--keep-last", type=int, help="Thin checkpoints: keep the last K …"),
    click.option("--keep-every", type=int, help="… and those of every M-th step. [default: keep all]"),
    click.option("--black-box", type=int, help="Spikes whose state before them is saved; 0: none. [default: 8]"),
    click.option("--spike-factor", type=float, help="[default: 3.0]"),
    click.option("--spike-window", type=int, help="[default: 50]"),
    click.option("--no-spike-detect", is_flag=True, help="Do not look for spikes."),
    click.option("--log-jsonl", type=click.Path(path_type=Path), help="A second copy of the telemetry."),
    click.option("--no-record", is_flag=True, help="Train without telemetry or checkpoints."),
)


@main.command(context_settings={"show_default": False})
@click.option("--corpus", type=click.Path(path_type=Path), help="Text or bytes; or uint16 tokens as .bin or .npy.")
@click.option("--steps", type=int, help="Optimizer updates.")
@click.option("--out", type=click.Path(path_type=Path), help="The run's folder.")
@click.option("--resume", is_flag=False, flag_value="last", help="Go on from the last checkpoint, or that of a step.")
@_FORK
@_SHAPE
@_OPTIMIZER
@_SCHEDULE
@_RUNNING
@_RECORDING
@click.option("--print-fingerprint", is_flag=True, help="Print the fingerprint of each lane of the final state.")
@click.option("--replay-step", type=int, help="Do not train: replay this step (same as `workbench replay`).")
@click.option("--replay-from", type=click.Path(path_type=Path), help="The run to replay it from.")
def train(**given: Any) -> None:
    """Train a transformer on a corpus, recorded so that any step can be replayed.

    Ctrl-C finishes the step under way, saves a checkpoint, and exits with 130 (SIGTERM: 143); a second one stops at
    once. Go on with --out RUN --resume, which reaches the same bits as if there had been no break.
    """
    if given["replay_step"] is not None or given["replay_from"] is not None:
        if given["replay_step"] is None or given["replay_from"] is None:
            raise click.UsageError("--replay-step N and --replay-from RUN go together")
        _replay(given["replay_from"], str(given["replay_step"]))
        return
    from .trainer import training

    if given["fork"] is not None:
        from .forking import forked

        job = forked(given)
    else:
        job = training.resumed(given) if given["resume"] is not None else training.fresh(given)
    end = job.config.schedule.steps
    if job.config.steps > end and job.config.schedule.kind != "constant":
        click.echo(f"The schedule ends at step {end}; the learning rate stays at its minimum from there.", err=True)
    with _Progress(job.config.steps) as watcher:
        step, lanes = job.run(watcher)
    if not watcher.steps:
        click.echo(f"{job.out} is at step {step} already, so there was nothing to do; go on with --steps M", err=True)
    elif job.out is not None:
        click.echo(
            f"{job.out}: {step} steps recorded, {watcher.spikes} spike{'s' if watcher.spikes != 1 else ''}", err=True
        )
    if given["print_fingerprint"]:
        click.echo(msgspec.json.format(msgspec.json.encode({"step": step, **lanes})).decode())


class _Progress:
    """A progress bar with loss and steps/s; spikes, validation losses and samples above it."""

    def __init__(self, steps: int) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:.1f} steps/s"),
            TimeRemainingColumn(),
        )
        self._bar = Progress(*columns, console=_console(stderr=True))
        self._task = self._bar.add_task("", total=steps, loss=float("nan"), speed=0.0)
        self.spikes = self.steps = 0

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def on_step(self, step: int, loss: float, reading: Any) -> None:
        self.steps += 1
        speed = self._bar.tasks[0].speed or 0.0
        self._bar.update(self._task, completed=step, loss=loss, speed=speed)
        if reading is not None and reading.rule is not None:
            self.spikes += 1
            self._say(f"step {step}: spike ({reading.rule}): {reading.explanation}")

    def on_validation(self, step: int, loss: float) -> None:
        self._say(f"step {step}: validation loss {loss:.4f}")

    def on_sample(self, step: int, text: str) -> None:
        self._say(f"step {step}: {text}")

    def _say(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)


# --------------------------------------------------------------------------------------------------------------- replay


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", required=True, help="A step, or a range such as 4210..4220.")
@click.option("--json", "as_json", is_flag=True, help="Print the trace (or a list of them) as JSON.")
@click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
@click.option("--factory", help="module:function that rebuilds the run; naming it is consent to import it.")
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where traces go. [default: the run's traces/]")
@click.option("--checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]")
@click.option("--other-environment", is_flag=True, help="Go on where this machine computes differently.")
@click.option("--probe/--no-probe", default=True, help="Make the probe pass. [default: on]")
@click.option(
    "--fresh-process/--no-fresh-process", default=None, help="Repeat in a new process. [default: if in doubt]"
)
@click.option("--context", type=click.IntRange(1), help="Also replay this many steps before it, and compare. Say: 8.")
def replay(run: Path, step: str, as_json: bool, **options: Any) -> None:
    """Replay a step, and compare it with what the run recorded.

    Exit code 0: exact; 1: not exact; 2: it could not be done.
    """
    _replay(run, step, as_json, **options)


def _replay(path: Path, step: str, as_json: bool = False, **options: Any) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .run import open_run

    run = open_run(path)
    steps = _steps(step)
    segment = options.pop("segment", None)
    before = options.pop("context", None)
    if before is not None and (not isinstance(steps, int) or not options.get("probe", True)):
        raise click.UsageError("--context goes with a single --step, and with the probe pass.")
    plan = run.plan(steps, segment, checkpoint=options.get("checkpoint"))
    for notice in plan.notices:
        click.echo(notice, err=True)
    click.echo(f"{path}: {plan.sentence()}", err=True)
    if options.get("other_environment"):
        _name_differences(run, plan.segment)
    options["with_probe"] = options.pop("probe", True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("restoring", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        if before is not None and isinstance(steps, int):
            del options["with_probe"]
            context = run.context(steps, before, segment=segment, progress=progress, **options)
            traces = context.trace
        else:
            context, traces = None, run.replay(steps, segment=segment, progress=progress, **options)
    traces = traces if isinstance(traces, list) else [traces]
    if context is not None:
        _print_context(context, as_json)
    elif as_json:
        documents = [msgspec.to_builtins(trace.record) | {"trace": str(trace.path)} for trace in traces]
        click.echo(msgspec.json.format(msgspec.json.encode(documents[0] if isinstance(steps, int) else documents)))
    else:
        for trace in traces:
            _print_trace(trace, full=len(traces) == 1)
    sys.exit(0 if all(trace.exact for trace in traces) else 1)


def _print_context(context: Any, as_json: bool) -> None:
    from .probes.context_tables import context_json, context_tables

    trace = context.trace
    if as_json:
        document = msgspec.to_builtins(trace.record) | {"trace": str(trace.path), "context": context_json(context)}
        click.echo(msgspec.json.format(msgspec.json.encode(document)))
        return
    _print_trace(trace, full=True)
    console = _console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for table in context_tables(context):
        console.print(table)
    for notice in context.notices:
        console.print(notice, markup=False)
    console.print(context.sentence(), markup=False)


def _name_differences(run: Any, segment: int) -> None:
    from .environment import differences, numeric_environment

    for difference in differences(run.manifest.segments[segment].environment, numeric_environment()):
        click.echo(f"this machine differs from the run's: {difference}", err=True)


def _steps(text: str) -> int | range:
    first, dots, last = text.partition("..")
    numbers = [int(part) for part in ((first, last) if dots else (first,)) if part.isdecimal() and len(part) < 19]
    if len(numbers) == (2 if dots else 1):
        return range(numbers[0], numbers[1] + 1) if dots else numbers[0]
    raise click.BadParameter(
        f"{text!r} is not a step; expected a number or a range such as 4210..4220", param_hint="--step"
    )


_STYLE = {"exact": "green", "mismatch": "bold red", "within tolerance": "yellow", "unverified": "dim"}


def _print_trace(trace: Trace, full: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console(highlight=False, width=None if sys.stdout.isatty() else 140)
    console.print(Text(trace.sentence(), style="bold"))
    for notice in (*trace.notices, *trace.findings()):
        console.print(Text(notice))
    if not full:
        return
    for name, verdict, why in trace.badges():
        console.print(Text.assemble((f"  {name:<11}", ""), (f"{verdict:<12}", _STYLE[verdict]), why))
    certified = {True: "yes", False: "no: its numbers are not of this very step", None: "not made"}
    console.print(f"  probe pass certified: {certified[trace.record.certified_probe]}")
    items = trace.items.to_dict("records")
    if unlike := [row for row in items if row["verdict"] not in ("exact", "unverified")]:
        table = Table(
            "item", "verdict", "detail", title="Items that differ, in order of execution", title_justify="left"
        )
        for row in unlike:
            table.add_row(row["item"], Text(row["verdict"], style=_STYLE[row["verdict"]]), row["detail"])
        console.print(table)
    if silent := [f"{row['item']} ({row['detail']})" for row in items if row["verdict"] == "unverified"]:
        console.print(f"  not compared: {', '.join(silent)}")
    console.print(_layer_table(trace, console.width))
    if len(trace.rows):
        worst = trace.rows.iloc[0]
        console.print(
            f"Row {worst.row:.0f} carries {worst.share:.0%} of the step's summed loss ({worst.loss:.3f} a token)."
        )
    console.print(f"trace: {trace.path}", soft_wrap=True)


def _layer_table(trace: Trace, width: int) -> Any:
    """As many columns as fit with whole names and numbers; the trace file has the others."""
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.table import Table

    wide = width >= 110
    kinds = ("activation", "gradient", *(("adam_m", "adam_v", "weight") if wide else ()), "update")
    norms = trace.layers.pivot(index="layer", columns="kind", values="l2")
    title = f"Step {trace.step}: L2 norm of each layer, replayed"
    table = Table(title=title, title_justify="left", box=HEAVY_HEAD if wide else SIMPLE)
    table.add_column("layer", overflow="fold")
    for name in (*kinds, "as logged"):
        table.add_column(name, no_wrap=True)
    digits = 5 if wide else 3
    for index, layer in enumerate(trace.record.layers):
        cells = [
            f"{norms.at[layer, kind]:.{digits}g}" if kind in norms and layer in norms.index else "" for kind in kinds
        ]
        table.add_row(layer or "(model)", *cells, _as_logged(trace, index))
    return table


def _as_logged(trace: Trace, index: int) -> str:
    """Whether the four logged norms of a layer have the run's bits; NaN has bits too."""
    from .telemetry import ARRAYS

    items = [trace.record.items[name] for name in ARRAYS]
    pairs = [
        (item.recorded[index], item.replayed[index])
        for item in items
        if isinstance(item.recorded, list) and index < len(item.recorded)
    ]
    if not pairs:
        return "not recorded"
    return "yes" if all(recorded == replayed for recorded, replayed in pairs) else "no"


# ----------------------------------------------------------------------------------------------------------------- look


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
def runs(folder: Path) -> None:
    """List the runs under a folder."""
    from .run import list_runs

    frame = list_runs(folder)
    click.echo(frame.to_string(index=False) if len(frame) else f"no runs in {folder}")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def spikes(run: Path, as_json: bool) -> None:
    """List the spikes of a run, with the rule that found each."""
    from .run import open_run

    found = open_run(run).spikes()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found.to_dict("records"))))
        return
    if found.empty:
        click.echo("no spikes")
    for row in found.itertuples():
        click.echo(f"step {row.step} (segment {row.segment}), {row.rule}: {row.explanation}")


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=click.IntRange(1), help="The step that consumed the batch.")
@click.option("--rows", type=click.IntRange(1), help="Only the first K rows of each batch. [default: all]")
@click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def batch(run: Path, step: int, rows: int | None, segment: int | None, as_json: bool) -> None:
    """Which data was in a step, and in the step before it? Text, origin, and what is odd in each row.

    Draws the batch again from the run's data files; loads no weights. If the step was replayed, rows stand by their
    share of its loss; otherwise the most unlike the run's other rows come first.
    """
    from .run import open_run

    facts = open_run(run).batch_facts(step, segment=segment)
    notices = facts.attrs["notices"]
    facts = facts.groupby("step", sort=False).head(rows) if rows else facts
    if as_json:
        found = [{name: _json(value) for name, value in row.items()} for row in facts.to_dict("records")]
        click.echo(msgspec.json.format(msgspec.json.encode({"step": step, "notices": notices, "rows": found})))
        return
    for notice in notices:
        click.echo(notice, err=True)
    from .interventions.tables import batch_tables

    console = _console(highlight=False, width=None if sys.stdout.isatty() else 160)
    for table in batch_tables(facts):
        console.print(table)


def _json(value: Any) -> Any:
    """A cell of a table: missing values of any kind as null."""
    import pandas as pd

    return None if pd.isna(value) else value


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=click.IntRange(1), help="The step.")
@click.option("--set", "changes", multiple=True, required=True, help="A change, such as lr=0.5x; each an experiment.")
@click.option("--next", "next_steps", type=click.IntRange(0), default=8, show_default=True, help="Steps after it.")
@click.option("--once", is_flag=True, help="A changed setting holds for this step only. [default: from here on]")
@click.option("--json", "as_json", is_flag=True, help="Print the experiments as JSON.")
@click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
@click.option("--factory", help="module:function that rebuilds the run; naming it is consent to import it.")
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where files go. [default: the run's traces/]")
@click.option("--checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]")
@click.option("--other-environment", is_flag=True, help="Go on where this machine computes differently.")
def whatif(run: Path, step: int, changes: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Experiments on a step: replays with exactly one change each, beside the untouched one.

    \b
    lr=0.5x lr=1e-4          learning rate          drop-row=K      without a row (from 0)
    clip=1.0 clip=off        gradient clipping      batch=STEP      the batch of another step
    reset=m reset=v          Adam's moments to 0    batch=skip      without this step
    reset=m,v                                       state=K         the state of an earlier step
    v=max                    v <- max(v, g²)        rng=SEED        other random numbers
    beta2=0.95 eps=1e-6      Adam's settings        dtype=float32   everything in float32
    compile=on|off           deterministic=on|off
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .interventions import whatif as experiments
    from .run import open_run

    opened = open_run(run)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("restoring", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        found = experiments.experiments(opened, step, changes, progress=progress, **options)
    records, files, notices = found
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(experiments.document(records, files, notices))))
        return
    from .interventions.tables import whatif_table

    for notice in notices:
        click.echo(notice, err=True)
    console = _console(highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(experiments.sentence(records[0]), markup=False)
    console.print(whatif_table(experiments.table(records), step))
    for record in records:
        for note in record.notes:
            console.print(f"{record.change}: {note}", markup=False)
    console.print(f"files: {files[0].parent}/{files[0].name.partition('whatif')[0]}whatif-*.json", soft_wrap=True)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=click.IntRange(1), help="The step.")
@click.option("--json", "as_json", is_flag=True, help="Print the verdict as JSON.")
@click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
@click.option("--factory", help="module:function that rebuilds the run; naming it is consent to import it.")
@click.option("--trace-dir", type=click.Path(path_type=Path), help="Where the file goes. [default: the run's traces/]")
@click.option("--checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]")
@click.option("--other-environment", is_flag=True, help="Go on where this machine computes differently.")
def autopsy(run: Path, step: int, as_json: bool, **options: Any) -> None:
    """Why did the loss spike at this step? The cause, the evidence, and a way out that was tried.

    One of data, optimizer, schedule, curvature, attention-logits, precision, resume, transient-fault, unknown, or
    no-spike. Replays the step and the 8 before it, then experiments on their states.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .run import open_run

    opened = open_run(run)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("restoring", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        verdict = opened.autopsy(step, progress=progress, **options)
    if as_json:
        click.echo(verdict.to_json())
        return
    from .cause.verdict_tables import verdict_parts

    console = _console(highlight=False, width=None if sys.stdout.isatty() else 140)
    for part in verdict_parts(verdict):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)


@main.command()
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--factory", help="module:function that rebuilds RUN; naming it is consent to import it.")
@click.option("--device", type=click.Choice(["cpu", "gpu"]), help="[default: $WORKBENCH_DEVICE, or what MLX prefers]")
def doctor(run: Path | None, as_json: bool, factory: str | None, device: str | None) -> None:
    """Is replay bit-exact on this machine? Repeats operations and whole steps, and counts the results.

    With RUN: that run's own model, optimizer and batch, on the device that recorded it.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from . import doctor as doctors  # imports MLX
    from .run import open_run

    if run is None and factory is not None:
        raise click.UsageError("--factory goes with a RUN.")
    if run is not None and device is not None:
        raise click.UsageError("--device does not go with a RUN, which is examined on the device that recorded it.")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        if run is None:
            report = doctors.examine(progress, device=device or os.environ.get("WORKBENCH_DEVICE"))
        else:
            report = doctors.examine_run(open_run(run), factory=factory, progress=progress)
    if as_json:
        click.echo(report.to_json())
    else:
        _console(highlight=False, width=None if sys.stdout.isatty() else 100).print(report)


@main.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--step", required=True, type=click.IntRange(1), help="The step.")
@click.option("--json", "as_json", is_flag=True, help="Print the ladder as JSON.")
@click.option("--from", "checkpoint", type=int, help="Start from the checkpoint of this step. [default: the nearest]")
@click.option("--bisect", is_flag=True, help="Find the first step from there at which each intervention departs.")
@click.option("--rung", "rungs", multiple=True, help="Only this one, such as 'fresh process' or compile; repeatable.")
@click.option("--env", "variables", multiple=True, help="A further rung: a fresh process with NAME=VALUE; repeatable.")
@click.option("--segment", type=int, help="Where the step stands in several segments that differ.")
@click.option("--factory", help="module:function that rebuilds the run; naming it is consent to import it.")
@click.option("--other-environment", is_flag=True, help="Go on where this machine computes differently.")
def diverge(
    run: Path, step: int, as_json: bool, rungs: tuple[str, ...], variables: tuple[str, ...], **options: Any
) -> None:
    """Where do the bits of a step depend on how it is performed?

    Performs it again in this process, in another thread and in a fresh process, then with one thing changed: compiled
    or eager, deterministic or stock operations, the other device. Names the first tensor that differs, in order of
    execution, and by how many ULP. Writes nothing.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from .run import open_run

    if odd := [text for text in variables if not text.partition("=")[0] or "=" not in text]:
        raise click.UsageError(f"--env is {odd[0]!r}; expected NAME=VALUE.")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("restoring", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        pairs = dict((name, value) for name, _, value in (text.partition("=") for text in variables))
        ladder = open_run(run).diverge(step, rungs=rungs or None, variables=pairs, progress=progress, **options)
    if as_json:
        click.echo(ladder.to_json())
    else:
        _console(highlight=False, width=None if sys.stdout.isatty() else 140).print(ladder)


@main.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("--segment-a", type=int, help="Where steps of RUN_A stand in several segments that differ.")
@click.option("--segment-b", type=int, help="The same for RUN_B.")
def compare(run_a: Path, run_b: Path, as_json: bool, segment_a: int | None, segment_b: int | None) -> None:
    """Two runs beside each other: where they part, and whether one changed setting alone explains it.

    Reads what they logged; computes nothing.
    """
    from .pairs.paired import compare_runs

    found = compare_runs(run_a, run_b, segment_a=segment_a, segment_b=segment_b)
    if as_json:
        click.echo(found.to_json())
    else:
        _console(highlight=False, width=None if sys.stdout.isatty() else 140).print(found)


@main.command()
@click.option("--keep", type=click.Path(path_type=Path), help="Keep the run in this folder. [default: a temporary one]")
def demo(keep: Path | None) -> None:
    """In under a minute: train on Shakespeare with a planted spike, detect it, replay it exactly, find its cause."""
    from .demo import STEPS, run_demo

    with _Progress(STEPS) as watcher:
        trace, verdict, spiked, out = run_demo(keep, watcher)
    click.echo(f"\nSpike detected at step {spiked.step} ({spiked.rule}): {spiked.explanation}.\n")
    _print_trace(trace, full=True)
    click.echo(f"\n{verdict.sentence()}")
    click.echo(f"\nWhere to look next:\n  workbench autopsy {out} --step {spiked.step}")
    click.echo(f"  workbench replay {out} --step {spiked.step} --context 8")
    click.echo(f"  workbench lab {out}")


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def faults(as_json: bool) -> None:
    """List the faults that `workbench train --fault` can plant.

    data, schedule and option faults are part of the run's description, which a replay rebuilds; state faults are
    committed as a checkpoint; transient ones no replay reproduces.
    """
    from .faults import table

    found = table()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(found.to_dict("records"))))
    else:
        lines = [list(found.columns), *found.itertuples(index=False)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(found.columns))]
        for line in lines:
            cells = (text.ljust(width) for text, width in zip(line, widths, strict=True))
            click.echo("  ".join(cells).rstrip())


@main.group()
def bench() -> None:
    """Measure what the workbench costs, and whether its verdicts are right."""


@bench.command()
@click.option("--preset", type=click.Choice(["tiny", "small", "huge", "xl"]), default="tiny", show_default=True)
@click.option("--corpus", type=click.Path(path_type=Path), help="[default: the plays that come with the workbench]")
@click.option("--rounds", type=click.IntRange(3), default=12, show_default=True, help="Turns of each variant.")
@click.option("--burst", type=click.IntRange(1), default=4, show_default=True, help="Steps a turn.")
@click.option("--json", "as_json", is_flag=True)
def record(preset: str, corpus: Path | None, rounds: int, burst: int, as_json: bool) -> None:
    """Recording beside the bare compiled step, in turns; ratios of medians."""
    from rich.table import Table

    from .bench.recording_cost import recording_cost
    from .share import shared
    from .trainer import training

    given = {
        "corpus": corpus or shared("data") / "shakespeare.txt",
        "steps": 10**6,
        "no_record": True,
        "preset": preset,
    }
    job = training.fresh(given)
    cost = recording_cost(job.config, list(job.files), rounds=rounds, burst=burst)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(cost)))
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
    _console(highlight=False).print(table)
    blas = cost.environment["blas"]
    click.echo(f"mlx {cost.environment['mlx']}, {cost.environment['device']}, {blas['library'] if blas else 'GPU'}")


@bench.command("spikes")
@click.option("--faults", help="Only these, as in garbage,lr,healthy. [default: all]")
@click.option("--seeds", help="As in 1000..1003 or 1,2. [default: 1000..1001, from which no rule was derived]")
@click.option("--sizes", help="Sizes of the model, which take turns. [default: tiny,long,wide]")
@click.option("--quick", is_flag=True, help="A dozen small cases with the first seed, in about two minutes.")
@click.option("--out", type=click.Path(path_type=Path), help="Keep the runs here, or go on with an interrupted bench.")
@click.option("--again", is_flag=True, help="Ask about the runs in --out once more; none is trained again.")
@click.option("--processes", type=click.IntRange(1), help="Cases at a time. [default: one for each core]")
@click.option("--json", "as_json", is_flag=True, help="Print figures and outcomes as JSON.")
def bench_spikes(faults: str | None, seeds: str | None, sizes: str | None, as_json: bool, **options: Any) -> None:
    """Is the verdict right? Runs with planted spikes of known cause, and healthy ones.

    Prints a confusion matrix, how often cause and culprit were right, false alarms on healthy steps and seconds a
    verdict, beside what one would say without the workbench. Everything follows from the seeds; those below 1000 are
    for deriving rules, so figures to report come from others.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from .bench.casebook import DEFAULT_SEEDS
    from .bench.spikebench import parse_seeds, run_bench

    if options["again"] and options["out"] is None:
        raise click.UsageError("--again goes with --out, the folder with the runs.")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True) as bar:
        task = bar.add_task("training", total=None)

        def progress(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what or "training")

        found = run_bench(
            seeds=DEFAULT_SEEDS if seeds is None else parse_seeds(seeds),
            sizes=sizes.split(",") if sizes else None,
            faults=faults.split(",") if faults else (),
            progress=progress,
            **options,
        )
    if as_json:
        click.echo(found.to_json())
    else:
        _console(highlight=False, width=None if sys.stdout.isatty() else 160).print(found)


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("run", type=click.Path(path_type=Path), required=False)
@click.option("--dir", "folder", type=click.Path(path_type=Path), default=Path("spike-workbench"), show_default=True)
@click.argument("lab_options", nargs=-1, type=click.UNPROCESSED)
def lab(run: Path | None, folder: Path, lab_options: tuple[str, ...]) -> None:
    """Open JupyterLab on the notebooks. Options after -- go to JupyterLab."""
    from .lab import open_lab

    if run is not None and str(run).startswith("-"):  # an option for JupyterLab, and no run before it
        run, lab_options = None, (str(run), *lab_options)
    open_lab(run, folder, lab_options)
