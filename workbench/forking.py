"""Forks of the built-in trainer's runs: another recipe, another first state, a job that trains on.

    run = wb.fork("runs/mine", 4217, "runs/without", changes=["lr=0.5x"], skip_batch=[4218])

Settings that change hold from the fork's first step on; the parent is read, and never written to.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from .errors import ExperimentError
from .forks import ForkPoint, changed_state, parent_of, parse_changes, state_at
from .interventions.changes import Change, Times
from .manifest import DataFile
from .rebuild import locate
from .run import Run
from .sabotage.alterations import Repetition
from .sabotage.planters import SOURCES
from .snapshot import State
from .state_edits import cast
from .trainer.asked_recording import recording_as
from .trainer.corpus import Corpus
from .trainer.data import WindowSampler
from .trainer.options import refuse_decided
from .trainer.recipe import TrainConfig, config_from, stream
from .trainer.schedule import RateChange
from .trainer.train import Watcher
from .trainer.training import Job, Quiet, refuse_used

# What may be given with --fork; anything else is in the parent's manifest.
FORKABLE = {"out", "fork", "from_", "skip_batch", "set_", "steps", "prefetch", "log_jsonl", "print_fingerprint"}
FORKABLE |= {"save_every", "keep_last", "keep_every", "black_box", "auto_rollback", "rollback_skip_batch"}


def fork(
    run: Run | str | os.PathLike[str],
    step: int | str,
    out: str | os.PathLike[str],
    *,
    changes: Sequence[str] = (),
    skip_batch: Sequence[int] = (),
    watcher: Watcher | None = None,
    **options: Any,
) -> Run:
    """Trains on from a state of a run, with something changed or nothing: `workbench train --fork`, from Python.

    With nothing changed the fork has the parent's bits. It can be replayed and resumed like any run.

    Args:
        run: the parent, recorded by `workbench train`.
        step: the fork starts from the state after this step; "200.s1": after step 200 of segment 1.
        out: the new run's folder.
        changes: as `--set` has them, such as "lr=0.5x", "clip=off", "reset=m,v".
        skip_batch: steps of the parent whose batches are left out.
        watcher: told of each step.
        options: `steps`, `save_every`, … as the command line has them.

    Raises:
        WorkbenchError: as the command line.
    """
    if unknown := sorted(options.keys() - FORKABLE):
        raise ExperimentError(f"{unknown[0]!r} is no option of a fork; expected {', '.join(sorted(FORKABLE))}")
    path = run.path if isinstance(run, Run) else Path(run)
    given = {"fork": path, "from_": str(step), "set_": tuple(changes), "skip_batch": tuple(skip_batch)}
    forked(options | given | {"out": Path(out)}).run(watcher or Quiet())
    return Run(Path(out))


def forked(given: Mapping[str, Any]) -> Job:
    """A job that starts from a state of the run at `--fork`.

    Raises:
        ExperimentError: an option is missing, or decided by the parent's manifest, or the parent is not one of the
            trainer's.
        ReplayError, CheckpointError, EnvironmentMismatch: the state can't be had; see `fork_point`.
        RunError, DataError: the parent or its data can't be read, or `--out` holds a run already.
    """
    path = Path(given["fork"])
    if given.get("resume") is not None:
        raise ExperimentError("--fork and --resume both say where to start; expected one of them")
    refuse_decided(given, FORKABLE, f"{path} in a fork")
    for name, option in (("out", "--out, the new run's folder"), ("from_", "--from, the step after which it starts")):
        if given.get(name) is None:
            raise ExperimentError(f"--fork needs {option}")
    out = Path(given["out"])
    refuse_used(out)
    step, segment = _place(str(given["from_"]))
    parent = Run(path)
    if parent.manifest.rebuild.get("kind") != "trainer":
        raise ExperimentError(
            f"{path} was not recorded by `workbench train`; fork it from your own loop: Recorder(fork=fork_point(…))"
        )
    changes, skipped = parse_changes(given.get("set_") or ()), sorted(set(given.get("skip_batch") or ()))
    config = config_from(parent.manifest.rebuild.get("config"))
    files = [locate(entry, path) for entry in parent.manifest.data]
    state, holder = state_at(parent, step, segment=segment)
    config, state = _changed(config, state, changes, skipped, [Corpus.open(file) for file in files])
    config = msgspec.structs.replace(
        config, **{key: given[key] for key in ("steps", "prefetch") if given.get(key) is not None}
    )
    if config.steps <= step:
        raise ExperimentError(f"the fork starts after step {step}, and --steps is {config.steps}; expected more")
    noted = [f"--set {change}" for change in changes] + [f"--skip-batch {number}" for number in skipped]
    factor = parent.manifest.segments[holder].rate_factor
    point = ForkPoint(parent_of(parent, step, holder, noted), state, rate_factor=factor)
    recording = recording_as(parent.manifest, given) | {"fork": point}
    data = [_own(entry, file, path, out) for entry, file in zip(parent.manifest.data, files, strict=True)]
    return Job(config, [out / one.path for one in data], out, data, False, recording=recording)


def _place(text: str) -> tuple[int, int | None]:
    """The step of `200`, or step and segment of `200.s1`, as checkpoints are named."""
    match = re.fullmatch(r"(\d{1,15})(?:\.s(\d{1,9}))?", text, re.ASCII)
    if not match:
        raise ExperimentError(f"--from is {text!r}; expected a step such as 200, or 200.s1 for that of segment 1")
    return int(match[1]), None if match[2] is None else int(match[2])


def _own(entry: DataFile, file: Path, parent: Path, out: Path) -> DataFile:
    """The data file as the fork names it. One in the parent's folder is copied: the fork stands on its own."""
    if not file.resolve().is_relative_to(parent.resolve()):
        return DataFile(str(file.absolute()), entry.bytes, entry.sha256)
    place = Path(SOURCES, file.name)
    (out / SOURCES).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(file, out / place)
    return DataFile(str(place), entry.bytes, entry.sha256)


def _changed(
    config: TrainConfig, state: State, changes: Sequence[Change], skipped: Sequence[int], corpora: Sequence[Corpus]
) -> tuple[TrainConfig, State]:
    """The recipe with the changes in it, and the state with those that are of the state."""
    sampler = stream(config, corpora)
    sampler.load_state_dict(state.cursor)
    first = state.step + 1  # of the fork
    for step in skipped:
        config = _skip(config, sampler, step, first)
    for change in changes:
        config = _changed_recipe(config, change, sampler, first)
        if change.name == "dtype":
            state = cast(state, getattr(mx, change.value))
    return config, changed_state(state, changes)


def _number(sampler: WindowSampler, step: int, first: int) -> int:
    """The number, in the ordinary stream, of the batch of a step of the parent's.

    The cursor says where the fork's first step stands; a resume may have moved the stream against the steps.
    """
    number = sampler.step + step - first
    if number < 1:
        raise ExperimentError(f"step {step} has no batch in the stream that leads to step {first}")
    return sampler.number(number)


def _skip(config: TrainConfig, sampler: WindowSampler, step: int, first: int) -> TrainConfig:
    if step < first:
        raise ExperimentError(
            f"--skip-batch is {step}, but the fork starts with step {first}; expected that or a later"
        )
    return msgspec.structs.replace(config, skipped=(*config.skipped, _number(sampler, step, first)))


def _changed_recipe(config: TrainConfig, change: Change, sampler: WindowSampler, first: int) -> TrainConfig:
    def changed(part: Any, **fields: Any) -> Any:
        return msgspec.structs.replace(part, **fields)

    value = change.value
    if change.name == "lr":
        how = {"factor": value.factor} if isinstance(value, Times) else {"rate": value}
        added = RateChange(step=first, **how)
        return changed(config, schedule=changed(config.schedule, changes=(*config.schedule.changes, added)))
    if change.name in ("clip", "compile", "deterministic"):
        return changed(config, **{change.name: value})
    if change.name in ("beta2", "eps"):
        return changed(config, adamw=changed(config.adamw, **{change.name: value}))
    if change.name == "dtype":
        return changed(config, model=changed(config.model, dtype=value))
    if change.name == "batch" and value == "skip":
        return _skip(config, sampler, first, first)
    if change.name == "batch":
        number, of = _number(sampler, first, first), _number(sampler, value, first)
        kept = tuple(one for one in config.repetitions if one.step != number)
        of = next((one.of for one in kept if one.step == of), of)
        return config if of == number else changed(config, repetitions=(*kept, Repetition(number, of)))
    return config  # a change of the state
