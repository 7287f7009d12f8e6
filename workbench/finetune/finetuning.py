"""Recording the fine-tuning that `mlx_lm.lora` would do: fresh, or going on with a run."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from .. import manifest as manifests
from ..errors import ExperimentError
from ..files import commit, sync_file, temporary_beside
from ..interrupts import Interrupted, interrupts
from ..ranks.attendance import refuse_launched
from ..rebuild import locate
from ..record import Recorder
from ..recorded.layout import refuse_existing
from ..run import Run
from ..spikes import Reading, SpikeSettings
from .pinned import pin
from .settings import complete, mlx_lm, read_settings, updates
from .tuned import Tuning, description, rebuilt

ADAPTERS = "adapters"  # in the run's folder


class Watcher(Protocol):
    """What the job tells while it runs."""

    def on_begin(self, step: int, steps: int) -> None: ...
    def on_step(self, step: int, loss: float, reading: Reading | None) -> None: ...
    def on_validation(self, step: int, loss: float) -> None: ...
    def on_notice(self, text: str) -> None: ...


class _Silent:
    def on_begin(self, step: int, steps: int) -> None: ...
    def on_step(self, step: int, loss: float, reading: Reading | None) -> None: ...
    def on_validation(self, step: int, loss: float) -> None: ...
    def on_notice(self, text: str) -> None: ...


def fine_tune(
    config: str | Path | Mapping[str, Any] | None,
    out: str | Path,
    steps: int | None = None,
    *,
    resume: bool | int = False,
    watcher: Watcher | None = None,
    compile: bool = True,
    deterministic: bool = True,
    save_every: int | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
) -> Run:
    """Does the fine-tuning of a configuration of `mlx_lm.lora`, recorded: `workbench mlx-lm`, from Python.

    The weights of every step have the bits of mlx-lm's own training (proven on the CPU; on a GPU with
    `deterministic=False` as far as the GPU repeats itself). At the end the trained weights are written as mlx-lm does:
    to the configuration's `adapter_path`, or to `adapters` in the run's folder if it names none.

    Args:
        config: the file, or its entries; None with `resume`, for the manifest has it.
        out: the run's folder.
        steps: stop after this optimizer update and go on later with `resume`; None: at the end of the job, which is
            `iters` divided by `grad_accumulation_steps`. The job, and so every batch, is the same either way.
        resume: True: go on from the last checkpoint; a number: from the checkpoint of that step.
        watcher: told of each step.
        compile, deterministic: see `StepOptions`; of a new run only. mlx-lm compiles its steps.
        save_every: steps between checkpoints; None: mlx-lm's `save_every`, or on resume the run's.
        keep_last, keep_every: see `Recorder`.

    Raises:
        ExperimentError: the configuration can't be recorded, or mlx-lm is missing or refuses it.
        RunError: the folder already holds a run, or (resuming) holds none of mlx-lm.
        Interrupted: Ctrl-C or SIGTERM came; the step under way was finished and the run's state saved.
    """
    refuse_launched("fine-tuning as mlx-lm does")
    out, watcher = Path(out), _Silent() if watcher is None else watcher
    keeping: dict[str, Any] = {"keep_last": keep_last, "keep_every": keep_every}
    spikes: SpikeSettings | None = SpikeSettings()
    if resume is False:
        if config is None:
            raise ExperimentError("the configuration is missing; expected the file that mlx_lm.lora --config takes")
        refuse_existing(out)
        settings = complete(config) if isinstance(config, Mapping) else read_settings(config)
        names, data = pin(settings)
        began = datetime.datetime.now().isoformat(timespec="seconds")
        options = {"compile": compile, "deterministic": deterministic}
        rebuild = description(settings, names, began, options)
        tuning = rebuilt(rebuild, [Path(entry.path) for entry in data])
        rebuild["began"] = began if tuning.dated else None
        keeping["save_every"] = save_every or max(1, settings["save_every"] // settings["grad_accumulation_steps"])
    else:
        if config is not None:
            raise ExperimentError(f"the configuration is decided by the manifest of {out} on resume; leave it out")
        manifest = manifests.read(out)
        if manifest.rebuild.get("kind") != "mlx-lm":
            raise ExperimentError(f"{out} was not recorded by `workbench mlx-lm`; resume it as it was begun")
        rebuild, data = manifest.rebuild, manifest.data
        tuning = rebuilt(rebuild, [locate(entry, out) for entry in data])
        spikes = None if manifest.spikes is None else SpikeSettings(**manifest.spikes)
        keeping = {name: value or getattr(manifest, name) for name, value in keeping.items()}
        keeping["save_every"] = save_every or manifest.save_every
    last = _last_step(tuning.settings, steps)
    experiment = tuning.experiment
    mlx_lm("utils").maybe_set_recommended_wired_limit()
    with interrupts() as interrupted:
        recorder = Recorder(
            out,
            experiment.model,
            experiment.optimizer,
            experiment.loss_fn,
            experiment.sampler,
            **msgspec.to_builtins(experiment.options),
            resume=resume,
            data=data,
            rebuild=rebuild,
            spikes=spikes,
            **keeping,
        )
        with recorder:
            _announce(tuning, recorder.step_number, last, watcher)
            began_at = recorder.step_number
            for batch in recorder.batches(last):
                _validate(tuning, recorder, watcher)
                loss = recorder.step(batch)
                watcher.on_step(recorder.step_number, loss, recorder.reading)
                if number := interrupted():
                    raise Interrupted(
                        f"interrupted after step {recorder.step_number}; all is saved; go on with --out {out} --resume",
                        number,
                    )
            if began_at < last == updates(tuning.settings):
                _validate(tuning, recorder, watcher)  # where iters is no multiple of the accumulation
    if began_at < last:
        _conclude(tuning, out, last, watcher)
    return Run(out)


def _last_step(settings: Mapping[str, Any], steps: int | None) -> int:
    whole = updates(settings)
    if steps is not None and not 1 <= steps <= whole:
        raise ExperimentError(
            f"steps is {steps}, and this job has {whole} (iters {settings['iters']}, grad_accumulation_steps "
            f"{settings['grad_accumulation_steps']}); expected 1 to {whole}, or more iters in the configuration"
        )
    return whole if steps is None else steps


def _announce(tuning: Tuning, step: int, last: int, watcher: Watcher) -> None:
    watcher.on_begin(step, last)
    if tuning.validation is None:
        watcher.on_notice("There is no validation set (valid.jsonl), or val_batches is 0: nothing is evaluated.")
    if tuning.settings["report_to"]:
        watcher.on_notice(f"report_to ({tuning.settings['report_to']}) is not followed: the record is the run's own.")


def _validate(tuning: Tuning, recorder: Recorder, watcher: Watcher) -> None:
    """The evaluations that mlx-lm makes between the last step and the next."""
    first, accumulate = recorder.step_number * tuning.settings["grad_accumulation_steps"], tuning.sampler.accumulate
    for iteration in range(first + 1, min(first + accumulate, tuning.settings["iters"]) + 1):
        loss = tuning.validation_loss(iteration)
        if loss is not None:
            watcher.on_validation(recorder.step_number, loss)
            recorder.log_validation(loss)


def _conclude(tuning: Tuning, out: Path, step: int, watcher: Watcher) -> None:
    settings = tuning.settings
    if cut := len(tuning.sampler.batches.truncated):
        watcher.on_notice(
            f"{cut} of the examples used have more than max_seq_length ({settings['max_seq_length']}) tokens, and were "
            "cut off, as mlx-lm does."
        )
    folder = Path(settings["adapter_path"]).expanduser() if settings["adapter_path"] else out / ADAPTERS
    write_adapters(tuning, folder)
    watcher.on_notice(f"The weights that were trained, as of step {step}, are in {folder}, for mlx_lm --adapter-path.")
    if settings["test"] and step == updates(settings):
        if tuning.test is None:
            raise ExperimentError("test is true, and the data has no test.jsonl; everything else is recorded")
        loss = tuning.test_loss()
        watcher.on_notice(f"Test loss {loss:.3f}, perplexity {math.exp(loss):.3f}.")


def write_adapters(tuning: Tuning, folder: str | Path) -> Path:
    """Writes the trained weights and their configuration as mlx-lm does, for `mlx_lm.generate --adapter-path` and
    `mlx_lm.fuse`. Each file is whole or absent.

    Returns:
        The folder, which holds adapters.safetensors and adapter_config.json.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = tuning.settings | {"adapter_path": str(folder)}
    if settings["fine_tune_type"] == "full":
        settings["lora_parameters"] = None  # as mlx-lm has it
    weights = dict(tree_flatten(tuning.experiment.model.trainable_parameters()))
    for name, write in (
        ("adapters.safetensors", lambda path: mx.save_safetensors(str(path), weights)),
        ("adapter_config.json", lambda path: mlx_lm("utils").save_config(settings, path)),
    ):
        temporary = temporary_beside(folder / name)
        try:
            write(temporary)
            sync_file(temporary)
            commit(temporary, folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    return folder
