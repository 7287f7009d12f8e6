"""`workbench train`: the trainer that comes with the workbench."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo
from .options import together
from .page import print_json
from .progress import TrainingProgress, follows
from .replay import replay_and_print

_SHAPE = together(
    click.option(
        "--preset", type=click.Choice(["tiny", "small", "huge", "xl"]), help="Model and batch. [default: tiny]"
    ),
    click.option("--depth", type=int, help="Instead of a preset: N layers, width 64·N, N heads."),
    click.option("--batch", type=int, help="Rows in a micro-batch."),
    click.option("--ctx", type=int, help="Tokens in a row."),
    click.option("--accum", type=int, help="Micro-batches in a step. [default: 1]"),
    click.option("--dropout", type=float, help="[default: 0]"),
    click.option("--tied/--untied", default=None, help="Share the head with the embedding. [default: tied]"),
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="[default: float32]"),
)
_OPTIMIZER = together(
    click.option("--grad-clip", type=float, help="Global gradient norm; 0 switches clipping off. [default: 1.0]"),
    click.option("--beta1", type=float, help="[default: 0.9]"),
    click.option("--beta2", type=float, help="[default: 0.95]"),
    click.option("--eps", type=float, help="[default: 1e-8; 1e-4 in float16, where 1e-8 is zero]"),
    click.option("--weight-decay", type=float, help="[default: 0.1]"),
    click.option("--bias-correction/--no-bias-correction", default=None, help="[default: on]"),
)
_SCHEDULE = together(
    click.option("--lr-schedule", type=click.Choice(["cosine", "wsd", "constant"]), help="[default: cosine]"),
    click.option("--warmup", type=int, help="Updates of linear warm-up. [default: a twentieth of the steps]"),
    click.option("--max-lr", type=float, help="[default: 1e-3]"),
    click.option("--min-lr", type=float, help="[default: 0]"),
    click.option("--decay-steps", type=int, help="Length of the decay of wsd. [default: a fifth of the steps]"),
    click.option("--decay-shape", type=click.Choice(["1-sqrt", "cosine", "linear"]), help="[default: 1-sqrt]"),
)
_RUNNING = together(
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
_FORK = together(
    click.option("--fork", type=click.Path(path_type=Path), help="Start a new run from a state of this one …"),
    click.option("--from", "from_", help="… after this step (200, or 200.s1 for that of segment 1) …"),
    click.option("--skip-batch", type=int, multiple=True, help="… without the batch of this step …"),
    click.option("--set", "set_", multiple=True, help="… with this changed: lr=0.5x, clip=off, reset=m,v, eps=1e-6."),
)
_RECORDING = together(
    click.option("--save-every", type=int, help="Steps between checkpoints; 0: first and last only. [default: 100]"),
    click.option("--keep-last", type=int, help="Thin checkpoints: keep the last K …"),
    click.option("--keep-every", type=int, help="… and those of every M-th step. [default: keep all]"),
    click.option("--black-box", type=int, help="Spikes whose state before them is saved; 0: none. [default: 8]"),
    click.option(
        "--auto-rollback",
        type=click.Choice(["off", "warn", "on"]),
        help="What an unstable step (gradient norm above 3 times its median, or not finite) leads to; on: back to a "
        "state 10 steps before it, and on at half the learning rate. [default: warn]",
    ),
    click.option("--rollback-skip-batch", is_flag=True, help="Go back, and leave out its batch instead."),
    click.option("--spike-factor", type=float, help="[default: 3.0]"),
    click.option("--spike-window", type=int, help="[default: 50]"),
    click.option("--no-spike-detect", is_flag=True, help="Do not look for spikes."),
    click.option("--log-jsonl", type=click.Path(path_type=Path), help="A second copy of the telemetry."),
    click.option("--no-record", is_flag=True, help="Train without telemetry or checkpoints."),
)


@click.command(context_settings={"show_default": False}, short_help="Train a transformer on a corpus, recorded.")
@click.option(
    "--corpus",
    multiple=True,
    help="Text or bytes; or uint16 tokens as .bin or .npy. Several are mixed by weight: --corpus A=0.7 --corpus B=0.3.",
)
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
        replay_and_print(given["replay_from"], str(given["replay_step"]))
        return
    from ..run import open_run
    from ..trainer import training

    if given["fork"] is not None:
        from ..forking import forked

        job = forked(given)
    else:
        job = training.resumed(given) if given["resume"] is not None else training.fresh(given)
    end = job.config.schedule.steps
    if job.config.steps > end and job.config.schedule.kind != "constant":
        echo(f"The schedule ends at step {end}; the learning rate stays at its minimum from there.", err=True)
    if follows():  # of several ranks that train together, the first speaks for all
        job.run(training.Quiet())
        return
    with TrainingProgress(job.config.steps) as watcher:
        step, lanes = job.run(watcher)
    if not watcher.steps:
        echo(f"{job.out} is at step {step} already, so there was nothing to do; go on with --steps M", err=True)
    elif job.out is not None:
        start = open_run(job.out).manifest.segments[0].start
        recorded = f"steps {start + 1} to {step}" if start else f"{step} steps"
        said = f"{job.out}: {recorded} recorded, {watcher.spikes} spike{'s' if watcher.spikes != 1 else ''}"
        echo(said if watcher.spikes else f"{said}. {open_run(job.out).unjudged()}".removesuffix(". "), err=True)
    if given["print_fingerprint"]:
        print_json({"step": step, **lanes})
