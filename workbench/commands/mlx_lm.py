"""`workbench mlx-lm`: fine-tuning with mlx-lm, recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..printed import echo
from .progress import TrainingProgress


@click.command(
    "mlx-lm",
    context_settings={"show_default": False},
    short_help="Fine-tune as `mlx_lm.lora --config CONFIG` does, recorded.",
)
@click.argument("config", type=click.Path(path_type=Path), required=False)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="The run's folder.")
@click.option("--steps", type=int, help="Stop after this optimizer update. [default: at the end of the job]")
@click.option("--resume", is_flag=False, flag_value="last", help="Go on from the last checkpoint, or that of a step.")
@click.option("--save-every", type=click.IntRange(1), help="Steps between checkpoints. [default: mlx-lm's save_every]")
@click.option("--keep-last", type=int, help="Thin checkpoints: keep the last K …")
@click.option("--keep-every", type=int, help="… and those of every M-th step. [default: keep all]")
@click.option(
    "--compile/--no-compile", "compile_", default=None, help="Compile the step, as mlx-lm does. [default: on]"
)
@click.option(
    "--deterministic/--no-deterministic",
    default=None,
    help="On a GPU: gradients that repeat bit for bit, in place of mlx-lm's. [default: on]",
)
def mlx_lm(config: Path | None, out: Path, resume: str | None, **options: Any) -> None:
    """Fine-tune as `mlx_lm.lora --config CONFIG` does, recorded so that any step can be replayed.

    CONFIG is mlx-lm's own YAML file, with its keys and defaults; model and data are folders here, and pinned by their
    digests. The adapters are written where the configuration's adapter_path says, or to adapters/ in the run's folder.
    Ctrl-C finishes the step under way and saves it; --out RUN --resume, without CONFIG, goes on to the same bits.
    """
    from ..errors import ExperimentError
    from ..finetune.finetuning import fine_tune

    if resume is not None:
        if resume != "last" and not resume.isdecimal():
            raise ExperimentError(f"--resume is {resume!r}; expected nothing or the step of a checkpoint")
        for name, option in (("compile_", "--compile/--no-compile"), ("deterministic", "--deterministic")):
            if options[name] is not None:
                raise ExperimentError(f"{option} is decided by the manifest of {out} on resume; leave it out")
    options["compile"] = options.pop("compile_")
    switches = {name: options.pop(name) for name in ("compile", "deterministic")}
    options |= {name: value for name, value in switches.items() if value is not None}
    start = False if resume is None else True if resume == "last" else int(resume)
    with _Progress() as watcher:
        fine_tune(config, out, resume=start, watcher=watcher, **options)
    if watcher.steps:
        spikes = f"{watcher.spikes} spike{'s' if watcher.spikes != 1 else ''}"
        echo(f"{out}: {watcher.steps} steps recorded, {spikes}", err=True)
    else:
        echo(f"{out} is at step {watcher.begun} already, so there was nothing to do", err=True)


class _Progress(TrainingProgress):
    """How many steps there are, and where they begin, is known once the model is there; notices stand above the bar."""

    def __init__(self) -> None:
        super().__init__(0)
        self.begun = 0

    def __enter__(self) -> _Progress:
        return self

    def on_begin(self, step: int, steps: int) -> None:
        self.begun = step
        self._bar.update(self._task, total=steps, completed=step)
        self._bar.start()

    def on_notice(self, text: str) -> None:
        self.say(text)
