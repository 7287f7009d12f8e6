"""Models of every make: recorded, replayed, exact; with the bits of a loop without a recorder."""

import os

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import zoo
from helpers import python
from mlx.utils import tree_flatten, tree_map

import workbench as wb

STEPS = 5

# Compiling kernels takes most of the time on a machine that has none yet; with ZOO=all in the environment every model
# is tried compiled, too.
COMPILED = ["batch norm", "lora, quantised", "shared modules called twice", "gradient checkpointing, dropout"]
COMPILED = list(zoo.ZOO) if os.environ.get("ZOO") == "all" else COMPILED


def record(path, name, compile, steps=STEPS, **options):
    job = zoo.build(name, compile)
    options = {key: getattr(job.options, key) for key in ("clip", "accumulate", "compile")} | options
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    factory = {"factory": "zoo:build", "arguments": {"name": name, "compile": compile}}
    with wb.Recorder(path, *parts, save_every=2, spikes=None, **factory, **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path), job


def plain_loop(name, steps=STEPS):
    """The eager loop that someone without a recorder would write; the weights that it ends with."""
    job = zoo.build(name)
    options = job.options
    passes = nn.value_and_grad(job.model, job.loss_fn)
    for _ in range(steps):
        batch = [mx.array(part) for part in next(job.sampler)]
        rows, found = len(batch[0]) // options.accumulate, None
        for start in range(0, rows * options.accumulate, rows):
            _, gradients = passes(job.model, *(part[start : start + rows] for part in batch))
            found = gradients if found is None else tree_map(mx.add, found, gradients)
        if options.accumulate > 1:
            found = tree_map(lambda gradient: gradient / options.accumulate, found)
        if options.clip is not None:
            found, _ = optim.clip_grad_norm(found, options.clip)
        job.optimizer.update(job.model, found)
        mx.eval(job.model.parameters(), job.optimizer.state)
    return weights(job.model)


def weights(model):
    return {path: np.array(array.astype(mx.float32)).tobytes() for path, array in tree_flatten(model.parameters())}


@pytest.mark.parametrize("name", zoo.ZOO)
def test_eager(tmp_path, name):
    """Every step replays; the training has the bits of a loop without a recorder (case D2), and a resumed one, too."""
    run, job = record(tmp_path / "run", name, compile=False)
    assert weights(job.model) == plain_loop(name)
    traces = run.replay(range(1, STEPS + 1), experiment=zoo.build(name, compile=False), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * STEPS
    assert traces[3].record.items["checkpoint"].verdict == "exact"
    record(tmp_path / "half", name, False, 3)
    resumed, again = record(tmp_path / "half", name, False, resume=True)
    assert resumed.line(STEPS, 0).state == run.line(STEPS, 0).state and weights(again.model) == weights(job.model)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(tmp_path, name):
    """Every step replays, and the probe pass is one of that very step."""
    run, _ = record(tmp_path / "run", name, compile=True)
    traces = run.replay(range(1, STEPS + 1), experiment=zoo.build(name), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * STEPS
    trace = run.replay(3, experiment=zoo.build(name))
    assert trace.exact and trace.record.certified_probe


def test_fresh_processes_replay_them(tmp_path):
    code = (
        "import sys, workbench as wb\n"
        "for path in sys.argv[1:]:\n"
        "    options = {'factory': 'zoo:build', 'with_probe': False, 'fresh_process': False}\n"
        "    print(path, *(trace.exact for trace in wb.open_run(path).replay(range(4, 6), **options)))\n"
    )
    paths = [record(tmp_path / name, name, compile=False)[0].path for name in zoo.ZOO]
    paths += [record(tmp_path / f"{name} compiled", name, compile=True)[0].path for name in COMPILED]
    done = python("-c", code, *paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"{path} True True" for path in paths]


def test_gradient_checkpointing_draws_new_masks_and_replays_with_them(tmp_path):
    """Case R4: the loss is that of the run without it, the gradients are not; both replay as they were recorded."""
    with_it, _ = record(tmp_path / "with", "gradient checkpointing, dropout", False)
    job = zoo.build("gradient checkpointing, dropout")
    job.model._again = job.model.blocks
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    with wb.Recorder(tmp_path / "without", *parts, compile=False) as recorder:
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    without = wb.open_run(tmp_path / "without")
    assert with_it.line(1, 0).loss_bits == without.line(1, 0).loss_bits
    assert with_it.line(1, 0).grad_norm_bits != without.line(1, 0).grad_norm_bits
    assert with_it.replay(4, experiment=zoo.build("gradient checkpointing, dropout", compile=False)).exact


def test_running_statistics_are_state(tmp_path):
    run, job = record(tmp_path / "run", "batch norm", False)
    saved = mx.load(str(run.path / "checkpoints" / "00000004.safetensors"))
    assert not mx.array_equal(saved["norm.running_mean"], mx.zeros(8)).item()
    assert not mx.array_equal(saved["norm.running_mean"], job.model.norm.running_mean).item()
