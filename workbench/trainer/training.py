"""From the command line's options to a training job: a fresh run, or one that goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import manifest as manifests
from ..errors import ExperimentError, RunError
from ..faults import KINDS, parse
from ..manifest import DataFile
from ..ranks.attendance import refuse_launched
from ..rebuild import locate
from ..recorded.layout import refuse_existing
from ..run import Run
from ..sabotage.planters import SOURCES
from ..sabotage.planting import LABELS, plant
from ..sabotage.saboteur import Acts
from ..spikes import Reading
from ..untrusted import decode, read_file
from .asked_recipe import mixed, recipe_of
from .asked_recording import recording_as, recording_of
from .corpus import Corpus
from .options import FRESH, RESUMABLE, complete, refuse_decided
from .recipe import TrainConfig, config_from
from .train import Watcher, train


class Quiet:
    """A watcher that says nothing."""

    def on_step(self, step: int, loss: float, reading: Reading | None) -> None: ...
    def on_validation(self, step: int, loss: float) -> None: ...
    def on_sample(self, step: int, text: str) -> None: ...


def train_run(
    out: str | Path, corpus: str | Path | Sequence[str], steps: int, *, watcher: Watcher | None = None, **options: Any
) -> Run:
    """Trains the built-in model and records it: `workbench train`, from Python.

    Args:
        out: folder of the new run.
        corpus: a text file, or uint16 tokens as .bin or .npy; or several, each with its weight: ["a.txt=0.7", …].
        steps: optimizer updates.
        watcher: told of each step.
        options: those of the command line, with underscores (`preset`, `save_every`, `faults=["garbage@40"]`, …).

    Raises:
        WorkbenchError: as the command line.
    """
    if unknown := sorted(options.keys() - set(FRESH)):
        raise ExperimentError(f"{unknown[0]!r} is no option of training; expected {', '.join(FRESH)}")
    fresh(options | {"out": Path(out), "corpus": corpus, "steps": steps}).run(watcher or Quiet())
    return Run(Path(out))


@dataclass
class Job:
    """A training job, ready to run."""

    config: TrainConfig
    files: Sequence[Path]
    out: Path | None
    data: Sequence[DataFile] = ()
    resume: bool | int = False
    acts: Acts | None = None
    recording: dict[str, Any] = field(default_factory=dict)

    def run(self, watcher: Watcher) -> tuple[int, dict[str, str]]:
        """Trains; returns the last step and the fingerprints of its state."""
        planned: dict[str, Any] = {"data": self.data, "resume": self.resume, "acts": self.acts}
        return train(self.config, self.files, self.out, watcher, **planned, **self.recording)


def fresh(given: Mapping[str, Any]) -> Job:
    """A job from options; None means not given.

    Raises:
        ExperimentError, DataError: an option is missing or out of range.
        RunError: the folder already holds a run.
    """
    given = complete(given)
    for name, option in (("from_", "--from"), ("skip_batch", "--skip-batch"), ("set_", "--set")):
        if given[name]:
            raise ExperimentError(f"{option} goes with --fork, the run to start from")
    if given["no_record"] and given["log_jsonl"] is not None:
        raise ExperimentError("--log-jsonl is a copy of the record, and --no-record makes none; expected one of them")
    for name in ("corpus", "steps"):
        if given[name] in (None, ()):
            raise ExperimentError(f"--{name} is missing; expected it to start a run (or --resume to go on with one)")
    out: Path | None = given["out"]
    if given["no_record"]:
        out = None
    elif out is None:
        raise ExperimentError("--out is missing; expected the folder to record in (or --no-record)")
    else:
        refuse_used(out)
    corpora, shares = mixed(given["corpus"])
    config = recipe_of(given, max(corpora, key=lambda corpus: corpus.vocabulary), shares)
    files, data, acts = [one.path for one in corpora], [DataFile(**one.describe()) for one in corpora], None
    if given["faults"]:
        refuse_launched("a planted fault")
        if out is None:
            raise ExperimentError("--fault needs --out: the data that it adds is a file of the run")
        planted = plant([parse(text) for text in given["faults"]], config, corpora, out)
        config, acts = planted.config, planted.acts or None
        files += planted.files
        data += [_inside(path, out) for path in planted.files]
    return Job(config, files, out, data, False, acts, recording_of(given))


def _inside(path: Path, out: Path) -> DataFile:
    entry = Corpus.open(path).describe()
    return DataFile(f"{SOURCES}/{path.name}", entry["bytes"], entry["sha256"])


def resumed(given: Mapping[str, Any]) -> Job:
    """A job that goes on from a checkpoint of the run at `--out`; everything else comes from its manifest.

    Raises:
        ExperimentError: an option was given that the manifest decides; or the run is not one of the trainer's; or it
            was to have a fault that was not planted yet.
        RunError, DataError: the run or its data can't be read.
    """
    out: Path | None = given["out"]
    if out is None:
        raise ExperimentError("--resume needs --out, the folder of the run to go on with")
    refuse_decided(given, RESUMABLE, f"{out} on resume")
    if given["resume"] != "last" and not str(given["resume"]).isdecimal():
        raise ExperimentError(f"--resume is {given['resume']!r}; expected nothing or the step of a checkpoint")
    manifest = manifests.read(out)
    if manifest.rebuild.get("kind") != "trainer":
        raise ExperimentError(
            f"{out} was not recorded by `workbench train`; resume it from your own loop with Recorder"
        )
    _refuse_unplanted(out)
    config = config_from(manifest.rebuild.get("config"))
    if given["steps"] is not None:
        config = msgspec.structs.replace(config, steps=given["steps"])
    if given["prefetch"] is not None:
        config = msgspec.structs.replace(config, prefetch=given["prefetch"])
    files = [locate(entry, out) for entry in manifest.data]
    resume = True if given["resume"] == "last" else int(given["resume"])
    return Job(config, files, out, manifest.data, resume, recording=recording_as(manifest, given))


class _Label(msgspec.Struct):
    fault: str
    step: int


def _refuse_unplanted(out: Path) -> None:
    """A fault that no recipe holds is planted by the process that starts the run. Were that ended before its step, the
    labels would name what never happened."""
    path = out / LABELS
    if not path.exists():
        return
    try:
        labels = decode(read_file(path), list[_Label])
    except ValueError as error:
        raise RunError(f"{path} is damaged: {error}; expected the labels of the faults planted in this run") from error
    last = Run(out).last_step
    for label in labels:
        if label.step > last and label.fault in KINDS and KINDS[label.fault].applied in ("state", "transient"):
            raise ExperimentError(
                f"{out} ended after step {last}, before fault {label.fault}@{label.step} was planted, and a resume "
                "can't plant it; record the run anew, or remove planted.json to go on without the fault"
            )


def refuse_used(out: Path) -> None:
    """A new run gets a folder of its own.

    Raises:
        RunError: the folder holds a run, or something else.
    """
    refuse_existing(out)
    if out.is_dir() and any(out.iterdir()):
        raise RunError(f"{out} is not empty; expected a new folder for the run, so that it holds nothing else")
