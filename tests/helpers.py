"""What several test modules need: a tiny loop of one's own, a tiny trained run, and ways to damage it by one bit."""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map

from workbench import manifest as manifests
from workbench import snapshot
from workbench.experiment import Experiment, StepOptions, as_batch, read_cursor
from workbench.files import canonical_json
from workbench.host import raw_views
from workbench.lines.seal import Chain
from workbench.manifest import DataFile
from workbench.observe import observe
from workbench.record import Recorder
from workbench.step import Stepper
from workbench.trainer.corpus import Corpus
from workbench.trainer.model import ModelConfig
from workbench.trainer.recipe import TrainConfig
from workbench.trainer.schedule import ScheduleConfig
from workbench.trainer.train import train
from workbench.trainer.training import Quiet

# -------------------------------------------------------------------------------------------------- a loop of one's own


class Numbered:
    """A sampler whose batches are each a function of their number, from 1: `batch`. The cursor is that number."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        return self.batch(self.number)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, cursor):
        self.number = cursor["number"]


class Points(Numbered):
    """Batches of a regression problem."""

    def __init__(self, rows=12):
        super().__init__()
        self.rows = rows

    def batch(self, number):
        x = np.random.Generator(np.random.Philox(key=7, counter=number - 1)).standard_normal((self.rows, 4))
        return x.astype(np.float32), np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)


def mse(model, x, y):
    """In the dtype of the model's parameters."""
    dtype = tree_flatten(model.parameters())[0][1].dtype
    return nn.losses.mse_loss(model(x.astype(dtype)), y.astype(dtype))


def mlp(dropout=0.0, dtype=mx.float32, seed=3):
    mx.random.seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 1))
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def experiment(*, dropout=0.0, dtype="float32", optimizer=None, loss_fn=mse, rows=12, model=None, **options):
    """A small experiment at its initial state; `options` are those of `StepOptions`."""
    model = mlp(dropout, getattr(mx, dtype)) if model is None else model
    return Experiment(
        model,
        optim.AdamW(1e-2, bias_correction=True) if optimizer is None else optimizer,
        loss_fn,
        Points(rows),
        StepOptions(**({"compile": False} | options)),
    )


def advance(job, steps, stepper=None):
    """Performs `steps` steps; returns the stepper and the results."""
    stepper = stepper or Stepper(job)
    return stepper, [stepper(as_batch(next(job.sampler))) for _ in range(steps)]


def remembered(job, steps):
    """Performs `steps` steps; returns the states 0 … `steps` and what a run would have logged of each."""
    stepper = Stepper(job)
    states = [state_of(job)]
    evidence = {0: {f"state.{lane}": value for lane, value in states[0].lanes().items()}}
    for step in range(1, steps + 1):
        batch = as_batch(next(job.sampler))
        result = stepper(batch)
        evidence[step] = observe(stepper, batch, result, read_cursor(job.sampler)).evidence()
        states.append(state_of(job, step))
    return states, evidence, stepper.layers


def state_of(job, step=0):
    return snapshot.capture(job, step, read_cursor(job.sampler))


def parts(job):
    """The arguments of `Recorder` that make the experiment."""
    return job.model, job.optimizer, job.loss_fn, job.sampler


class ScaledJob:
    """A step of one's own, whose gradients are scaled by what `habit(norm)` returns, unless that is None."""

    def __init__(self, habit):
        self.model, self.optimizer = mlp(), optim.SGD(1e-1)
        passes = nn.value_and_grad(self.model, mse)

        def step(x, y):
            loss, gradients = passes(self.model, x, y)
            norm = mx.sqrt(sum(mx.sum(one * one) for _, one in tree_flatten(gradients))).item()
            scale = habit(norm)
            if scale is not None:
                gradients = tree_map(lambda one: one * scale, gradients)
            self.optimizer.update(self.model, gradients)
            return loss

        self.step = step


def record_scaled(path, make, steps, **options):
    """Records a `ScaledJob` with the habit that `make()` gives; returns the losses, and the warnings as texts."""
    job = ScaledJob(make())
    options = {"step_fn": job.step, "spikes": None} | options
    with (
        warnings.catch_warnings(record=True) as said,
        Recorder(path, job.model, job.optimizer, mse, Points(), **options) as recorder,
    ):
        warnings.simplefilter("always")
        losses = [recorder.step(batch) for batch in recorder.batches(steps)]
    return losses, [str(one.message) for one in said]


# -------------------------------------------------------------------------------------------------------- a trained run


def write_corpus(folder, suffix=".txt", tokens=6000):
    """A corpus of pseudo-random letters (or uint16 tokens below 300)."""
    words = np.random.Philox(key=5).random_raw(tokens)
    path = folder / f"corpus{suffix}"
    path.write_bytes((words % 300).astype("<u2").tobytes() if suffix == ".bin" else (words % 26 + 97).astype("u1"))
    return path


_MODEL = {"dropout", "dtype", "vocabulary", "tied"}


def config(steps, **changed):
    """A trainer's config: 1 block of width 16, 16 tokens, 4 rows; `changed` are fields of it or of its model."""
    model = {"vocabulary": 256, "ctx": 16, "depth": 1, "width": 16, "heads": 2}
    model |= {name: changed.pop(name) for name in _MODEL & changed.keys()}
    settings = {"schedule": ScheduleConfig(steps=60, max_lr=1e-2, warmup=3), "batch": 4, "device": "cpu"}
    return TrainConfig(model=ModelConfig(**model), steps=steps, **(settings | changed))


def record(out, corpus, settings, **recording):
    """Records a run of the built-in trainer; returns the fingerprint of each lane of its last state."""
    data = [DataFile(**Corpus.open(corpus).describe())]
    return train(settings, [corpus], out, Quiet(), data=data, **({"save_every": 7, "spikes": None} | recording))[1]


def python(*arguments, **environment):
    """A fresh Python process that can import the tests' helpers; its output is captured."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "error", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": paths} | environment, timeout=300
    )


# ------------------------------------------------------------------------------------------------- equality, to the bit


def tensor_bytes(tensors):
    return {path: raw_views([array])[0].tobytes() for path, array in tensors.items()}


def assert_same_state(left, right):
    """Weights, optimizer, random state and cursor, byte for byte."""
    assert tensor_bytes(left.weights) == tensor_bytes(right.weights)
    assert tensor_bytes(left.optimizer) == tensor_bytes(right.optimizer)
    assert (left.rng, left.cursor) == (right.rng, right.cursor)


def flipped(array, bit=0, element=0):
    """A copy of an MLX array with one bit of one element changed."""
    (view,) = raw_views([array])
    raw = view.copy()
    words = raw.reshape(-1).view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[raw.itemsize])
    words[element] ^= words.dtype.type(1 << bit)
    changed = mx.array(raw)
    return changed.view(array.dtype) if changed.dtype != array.dtype else changed


def tree(folder):
    """SHA-256 of every file below a folder, by relative path."""
    files = (path for path in sorted(Path(folder).rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# ---------------------------------------------------------------------------------------- damage of one bit, undetected


def edit_json(path, change):
    """Rewrites a JSON file after `change(value)`, and its digests, as someone would who edits it on purpose."""
    value = json.loads(path.read_text())
    change(value)
    if isinstance(value, dict) and value.get("seal"):
        value["seal"] = hashlib.sha256(canonical_json(value | {"seal": None})).hexdigest()
    path.write_text(json.dumps(value))
    if path.name == "run.json":
        reseal(path.parent)


def edit_line(run, step, change, kind="step"):
    """Rewrites one line of a run's telemetry after `change(line)`, and the digests of the lines."""
    path = run / "telemetry.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["type"] == kind and line["step"] == step:
            change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    reseal(run)


def reseal(run):
    """Makes the digests of a run's lines and manifest agree again; nothing where it has none, or can't be read."""
    try:
        manifest = json.loads((run / "run.json").read_text())
        lines = [json.loads(line) for line in (run / "telemetry.jsonl").read_text().splitlines()]
        sealed = isinstance(manifest["segments"], list) and manifest["sealed"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return
    if not sealed:
        return
    chain, found = Chain(), []
    for line in lines:
        line.pop("seal", None)
        if "manifest" in line:
            line["manifest"] = manifests.digest((run / "run.json").read_bytes())
        found.append(chain.sealed(json.dumps(line).encode()))
    (run / "telemetry.jsonl").write_bytes(b"".join(line + b"\n" for line in found))
    manifest.pop("end", None)
    if lines[-1]["type"] == "done":
        there = [path.stem.split(".s") for path in (run / "checkpoints").glob("????????*.json")]
        there = [(int(step), int(*segment or [0])) for step, *segment in there]
        manifest["end"] = {"step": lines[-1]["step"], "seal": chain.last.decode(), "checkpoints": sorted(there)}
    (run / "run.json").write_text(json.dumps(manifest))


def flip_in_safetensors(path, choose, bit=0):
    """Flips a bit of the middle element of the first tensor (by name) that `choose(name)` accepts; returns the name."""
    content = bytearray(path.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    name = min(name for name in header if name != "__metadata__" and choose(name))
    start, end = header[name]["data_offsets"]
    width = {"F32": 4, "BF16": 2, "F16": 2, "U64": 8}[header[name]["dtype"]]
    middle = (end - start) // width // 2 * width
    content[8 + size + start + middle + bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return name


def repair_commit(run, stem):
    """Makes the commit record agree with the files again, as someone would who edits a checkpoint on purpose."""

    def repair(record):
        for name in record["files"]:
            content = (run / "checkpoints" / name).read_bytes()
            record["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}

    edit_json(run / "checkpoints" / f"{stem}.json", repair)


def next_up(value, steps=1):
    """The float32 with the bit pattern `steps` higher."""
    return float((np.float32(value).view(np.uint32) + np.uint32(steps)).view(np.float32))
