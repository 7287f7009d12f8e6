"""From the command line's options to a training job: a fresh run, or one that goes on."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import msgspec

from .. import manifest as manifests
from ..environment import no_gpu
from ..errors import ExperimentError, RunError
from ..faults import KINDS, parse
from ..manifest import DataFile, Manifest
from ..ranks.attendance import refuse_launched
from ..rebuild import locate
from ..recovery import Recovery
from ..run import Run, refuse_existing
from ..sabotage.planters import SOURCES
from ..sabotage.planting import LABELS, plant
from ..sabotage.saboteur import Acts
from ..spikes import Reading, SpikeSettings
from ..untrusted import decode, read_file
from .corpus import Corpus
from .model import PRESETS, ModelConfig, depth_config
from .recipe import AdamWConfig, Share, TrainConfig, config_from
from .schedule import ScheduleConfig
from .train import Watcher, train

# Every option, as `workbench train` names them; one that is not given is None (flags: False).
OPTIONS = (
    *("corpus", "steps", "out", "resume", "fork", "from_", "skip_batch", "set_"),
    *("preset", "depth", "batch", "ctx", "accum", "dropout", "tied", "dtype"),
    *("grad_clip", "beta1", "beta2", "eps", "weight_decay", "bias_correction"),
    *("lr_schedule", "warmup", "max_lr", "min_lr", "decay_steps", "decay_shape"),
    *("seed", "val_split", "val_every", "sample_every", "prefetch", "device", "compile_", "deterministic", "faults"),
    *(
        "save_every",
        "keep_last",
        "keep_every",
        "black_box",
        "auto_rollback",
        "rollback_skip_batch",
        "spike_factor",
        "spike_window",
        "no_spike_detect",
        "log_jsonl",
    ),
    *("no_record", "print_fingerprint"),
)
_FRESH = OPTIONS[8:]  # those that `train_run` takes beside its arguments
# What may be given with --resume; anything else is in the manifest.
_FLAGS = ("no_spike_detect", "rollback_skip_batch", "no_record", "print_fingerprint")  # False: not given
_SPELLED = {
    "faults": "fault",
    "from_": "from",
    "set_": "set",
    "compile_": "compile/--no-compile",
    "tied": "tied/--untied",
    "bias_correction": "bias-correction/--no-bias-correction",
    "deterministic": "deterministic/--no-deterministic",
}
_RESUMABLE = {
    "out",
    "resume",
    "steps",
    "print_fingerprint",
    "prefetch",
    "log_jsonl",
    "save_every",
    "keep_last",
    "keep_every",
    "black_box",
    "auto_rollback",
    "rollback_skip_batch",
}


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
    if unknown := sorted(options.keys() - set(_FRESH)):
        raise ExperimentError(f"{unknown[0]!r} is no option of training; expected {', '.join(_FRESH)}")
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
    given = _complete(given)
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
    config = _config(given, max(corpora, key=lambda corpus: corpus.vocabulary), shares)
    files, data, acts = [one.path for one in corpora], [DataFile(**one.describe()) for one in corpora], None
    if given["faults"]:
        refuse_launched("a planted fault")
        if out is None:
            raise ExperimentError("--fault needs --out: the data that it adds is a file of the run")
        planted = plant([parse(text) for text in given["faults"]], config, corpora, out)
        config, acts = planted.config, planted.acts or None
        files += planted.files
        data += [_inside(path, out) for path in planted.files]
    return Job(config, files, out, data, False, acts, _recording(given))


def mixed(given: Any) -> tuple[list[Corpus], tuple[Share, ...]]:
    """The corpora of a run, and the share of each where there are several.

    Args:
        given: a path; or several, each with its weight, as in `plays.txt=0.7`.

    Raises:
        ExperimentError: one of several has no weight.
        DataError: a file can't be read.
    """
    texts = [str(one) for one in (given if isinstance(given, (list, tuple)) else [given])]
    corpora, shares = [], []
    for text in texts:
        path, equals, weight = text.rpartition("=")
        if len(texts) == 1 and (not equals or Path(text).exists()):
            return [Corpus.open(Path(text).absolute())], ()
        try:
            share = Share(weight=float(weight)) if path else None
        except ValueError:
            share = None
        if share is None:
            raise ExperimentError(
                f"--corpus is {text!r} among {len(texts)}; expected each with its weight, as in plays.txt=0.7"
            )
        corpora.append(Corpus.open(Path(path).absolute()))
        shares.append(share)
    return corpora, tuple(shares)


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
    refuse_decided(given, _RESUMABLE, f"{out} on resume")
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


def refuse_decided(given: Mapping[str, Any], allowed: Collection[str], where: str) -> None:
    """An option that would be ignored is refused.

    Raises:
        ExperimentError: one was given that the manifest of `where` decides.
    """
    if refused := [name for name, value in given.items() if _is_given(name, value) and name not in allowed]:
        option = _SPELLED.get(refused[0], refused[0].replace("_", "-"))
        raise ExperimentError(f"--{option} is decided by the manifest of {where}; leave it out")


def recording_as(manifest: Manifest, given: Mapping[str, Any]) -> dict[str, Any]:
    """How to record, as a run does, unless it was given otherwise."""
    recording = _recording(_complete(given))
    for name in ("save_every", "keep_last", "keep_every"):
        recording[name] = getattr(manifest, name) if given.get(name) is None else given[name]
    recording["spikes"] = None if manifest.spikes is None else SpikeSettings(**manifest.spikes)
    if "auto_rollback" not in recording and manifest.recovery is not None:
        recording["auto_rollback"] = Recovery(**manifest.recovery)
    return recording


def _config(given: Mapping[str, Any], corpus: Corpus, shares: tuple[Share, ...]) -> TrainConfig:
    if given["preset"] is not None and given["depth"] is not None:
        raise ExperimentError("--preset and --depth both say how large the model is; expected one of them")
    if given["preset"] not in (None, *PRESETS):
        raise ExperimentError(f"--preset is {given['preset']!r}; expected one of {', '.join(PRESETS)}")
    own = {key: given[key] for key in ("ctx", "dropout", "tied", "dtype") if given[key] is not None}
    if given["depth"] is not None:
        model, batch = depth_config(given["depth"], vocabulary=corpus.vocabulary, **own), 8
    else:
        preset = PRESETS[given["preset"] or "tiny"]
        settings = preset["model"] | own
        settings["vocabulary"] = max(settings["vocabulary"], corpus.vocabulary)
        model, batch = ModelConfig(**settings), preset["batch"]
    steps = given["steps"]
    schedule = {
        "kind": given["lr_schedule"],
        "warmup": min(max(1, steps // 20), steps - 1) if given["warmup"] is None else given["warmup"],
        **{key: given[key] for key in ("max_lr", "min_lr", "decay_steps", "decay_shape")},
    }
    adamw = {key: given[key] for key in ("beta1", "beta2", "eps", "weight_decay", "bias_correction")}
    if adamw["eps"] is None and model.dtype == "float16":
        adamw["eps"] = 1e-4  # 1e-8 is below float16's smallest number, and 0/0 makes NaN where a gradient is 0
    clip = 1.0 if given["grad_clip"] is None else given["grad_clip"] or None
    settings = {
        "batch": batch if given["batch"] is None else given["batch"],
        "accumulate": given["accum"],
        "compile": given["compile_"],
        "deterministic": given["deterministic"],
        **{key: given[key] for key in ("seed", "val_split", "val_every", "sample_every", "prefetch")},
    }
    return TrainConfig(
        model=model,
        schedule=ScheduleConfig(steps=steps, **_given(schedule)),
        adamw=AdamWConfig(**_given(adamw)),
        clip=clip,
        mixture=shares,
        steps=steps,
        device=_device(given["device"] or os.environ.get("WORKBENCH_DEVICE")),
        **_given(settings),
    )


def _device(asked: str | None) -> Literal["cpu", "gpu"]:
    if asked not in (None, "", "cpu", "gpu"):
        raise ExperimentError(f"the device is {asked!r}; expected cpu or gpu")
    if asked == "gpu" and not mx.is_available(mx.Device(mx.DeviceType.gpu)):
        raise ExperimentError(f"--device is gpu, and {no_gpu()}; expected cpu")
    on_gpu = asked == "gpu" or (not asked and mx.default_device().type == mx.DeviceType.gpu)
    return "gpu" if on_gpu else "cpu"


def _recovery(given: Mapping[str, Any]) -> dict[str, Any]:
    """What to do about unstable steps; empty if nothing was given."""
    mode, skip = given["auto_rollback"], bool(given["rollback_skip_batch"])
    if skip and mode not in (None, "on"):
        raise ExperimentError(f"--rollback-skip-batch goes with --auto-rollback on; found --auto-rollback {mode}")
    return {"auto_rollback": Recovery("on" if skip else mode, skip_batch=skip)} if mode or skip else {}


def _is_given(name: str, value: Any) -> bool:
    return value is not None and value != () and not (value is False and name in _FLAGS)


def _complete(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: given.get(name) for name in OPTIONS}


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if value is not None}


def _recording(given: Mapping[str, Any]) -> dict[str, Any]:
    if given["no_record"]:
        return {}
    spikes: SpikeSettings | None = None
    if not given["no_spike_detect"]:
        spikes = SpikeSettings(**_given({"factor": given["spike_factor"], "window": given["spike_window"]}))
    return {
        "save_every": 100 if given["save_every"] is None else given["save_every"],
        "keep_last": given["keep_last"],
        "keep_every": given["keep_every"],
        **_given({"black_box": given["black_box"]}),
        **_recovery(given),
        "spikes": spikes,
        "copy_telemetry_to": given["log_jsonl"],
    }
