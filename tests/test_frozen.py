"""Weights that no step trains are stored once a run, and come back with every checkpoint, or its loss is named."""

import shutil

import mlx.core as mx
import pytest
import zoo
from helpers import assert_same_state, flip_in_safetensors, state_of

import workbench as wb
from workbench.checkpoints import checkpoint_reader
from workbench.errors import CheckpointError
from workbench.tensor_file import HostArray


@pytest.fixture(autouse=True)
def any_size(monkeypatch):
    monkeypatch.setattr("workbench.frozen.LEAST", 1)


def record(path, name, steps=6, **options):
    job = zoo.build(name, compile=False)
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    with wb.Recorder(path, *parts, compile=False, save_every=2, spikes=None, **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path), job


def bases(run):
    return sorted(path.name for path in (run.path / "checkpoints").glob("frozen-*"))


@pytest.mark.parametrize("name", ["lora, quantised", "partly frozen", "batch norm"])
def test_one_file_holds_them_for_all_checkpoints(tmp_path, name):
    run, job = record(tmp_path / "run", name)
    (base,) = bases(run)
    held = mx.load(str(run.path / "checkpoints" / base))
    own = mx.load(str(run.path / "checkpoints" / "00000004.safetensors"))
    if name == "batch norm":  # its statistics are not trained, and change
        assert held.keys() <= own.keys()
    else:
        assert held and not held.keys() & own.keys()
    read = checkpoint_reader.read(run.path / "checkpoints", 6, 0)
    assert_same_state(read, state_of(job, 6))
    traces = run.replay(range(1, 7), experiment=zoo.build(name, compile=False), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * 6
    assert [step for step in (2, 4, 6) if traces[step - 1].record.items["checkpoint"].verdict == "exact"] == [2, 4, 6]


def test_a_resume_writes_no_second_one(tmp_path):
    straight, _ = record(tmp_path / "straight", "lora, quantised")
    record(tmp_path / "run", "lora, quantised", 3)
    run, _ = record(tmp_path / "run", "lora, quantised", resume=True)
    assert bases(run) == bases(straight) and run.line(6, 0).state == straight.line(6, 0).state


def test_a_layer_that_is_unfrozen_on_the_way_goes_on_in_the_checkpoints(tmp_path):
    job = zoo.build("partly frozen", compile=False)
    parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
    with wb.Recorder(tmp_path / "run", *parts, compile=False, save_every=2, spikes=None) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
        weight = job.model.blocks[0].norm1.weight
        job.model.blocks[0].norm1.weight = weight * 2
        recorder.open_segment()
        for batch in recorder.batches(6):
            recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    own = mx.load(str(run.path / "checkpoints" / "00000006.s1.safetensors"))
    assert mx.array_equal(own["blocks.0.norm1.weight"], weight * 2) and "blocks.0.norm2.weight" not in own
    assert_same_state(checkpoint_reader.read(run.path / "checkpoints", 6, 1), state_of(job, 6))
    assert run.replay(6, experiment=zoo.build("partly frozen", compile=False)).exact


def test_without_it_no_checkpoint_is_whole(tmp_path):
    run, _ = record(tmp_path / "run", "lora, quantised")
    (base,) = bases(run)
    shutil.copytree(run.path, tmp_path / "damaged")
    flip_in_safetensors(tmp_path / "damaged" / "checkpoints" / base, lambda name: name.endswith("bias"))
    with pytest.raises(CheckpointError, match=f"{base} was changed: its SHA-256 is"):
        wb.open_run(tmp_path / "damaged").replay(3, experiment=zoo.build("lora, quantised", compile=False))
    (run.path / "checkpoints" / base).unlink()
    with pytest.raises(CheckpointError, match=f"{base} can't be read .*; its commit record lists it"):
        run.replay(3, experiment=zoo.build("lora, quantised", compile=False))


def test_few_bytes_are_not_worth_a_file(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.frozen.LEAST", 1 << 20)
    assert bases(record(tmp_path / "run", "lora, quantised", 2)[0]) == []


def test_thinning_spares_it(tmp_path):
    run, job = record(tmp_path / "run", "lora, quantised", keep_last=1)
    assert run.checkpoints == [(0, 0), (6, 0)] and len(bases(run)) == 1
    assert_same_state(checkpoint_reader.read(run.path / "checkpoints", 6, 0), state_of(job, 6))


def test_arrays_on_the_host_as_a_cuda_device_gives_them_are_stored_once_too(tmp_path):
    job = zoo.build("partly frozen", compile=False)
    for _ in range(2):
        weights = {path: HostArray.of(array) for path, array in state_of(job).weights.items()}
        own, base = job.frozen.split(tmp_path, weights)
        assert base is not None and own.keys() == weights.keys() - base.arrays.keys()
