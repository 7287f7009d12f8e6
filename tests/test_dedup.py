"""Tensors that did not change are stored once, come back with every checkpoint bit for bit, and go with the last."""

import json
import os
import random
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from helpers import Numbered, assert_same_state, tree

import workbench as wb
from workbench import deduplication, snapshot
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.checkpoints.commit import files_of, read_commit, stem
from workbench.errors import CheckpointError
from workbench.snapshot import State
from workbench.tensor_file import HostArray

WIDTH = 64  # of a branch that trains in steps 7 to 10 only; its tensors have 16 KiB


class Batches(Numbered):
    def batch(self, number):
        draw = np.random.Generator(np.random.Philox(key=3, counter=number))
        on = np.full((8, 1), 7 <= number <= 10, np.float32)
        return draw.standard_normal((8, WIDTH), dtype=np.float32), on, draw.standard_normal((8, 1), dtype=np.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.branch, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def __call__(self, x, on):
        hidden = mx.tanh(self.main(x))
        return self.head(hidden + on * self.branch(hidden))


def loss_fn(model, x, on, y):
    return nn.losses.mse_loss(model(x, on), y)


def parts():
    mx.random.seed(1)
    return Net(), optim.Adam(1e-3), loss_fn, Batches()


def record(path, steps=16, save_every=2, seen=None, **options):
    job = parts()
    with wb.Recorder(path, *job, compile=False, save_every=save_every, spikes=None, **options) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
            if seen is not None:
                seen[recorder.step_number] = snapshot.capture(
                    recorder.experiment, recorder.step_number, recorder.experiment.sampler.state_dict()
                )  # fmt: skip
    return wb.open_run(path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    seen = {}
    return record(tmp_path_factory.mktemp("dedup") / "run", seen=seen), seen


def commit(run, step, segment=0):
    return json.loads((run.path / "checkpoints" / f"{stem(step, segment)}.json").read_text())


def shared_in(folder):
    return {path.name for path in folder.glob("shared-*")}


def test_every_checkpoint_is_the_state_that_was_there(whole):
    run, seen = whole
    for step in range(2, 17, 2):
        assert_same_state(checkpoint_reader.read(run.path / "checkpoints", step, 0), seen[step])
    traces = wb.open_run(run.path).replay(
        range(1, 17), experiment=wb.Experiment(*parts(), wb.StepOptions(compile=False)), with_probe=False, repeat=False
    )
    assert all(trace.exact for trace in traces)
    assert sum(trace.record.items["checkpoint"].verdict == "exact" for trace in traces) == 8
    found = run.verify()
    assert found.exact and found.notices == [] and "sharing what did not change saves" in found.storage()


def test_what_is_written_is_what_changed(whole):
    """Beside the slow way: all states in memory, compared tensor by tensor."""
    run, seen = whole
    sizes = run.checkpoint_sizes().set_index("step")
    for step in range(4, 17, 2):
        ours = seen[step].weights | {f"o.{path}": one for path, one in seen[step].optimizer.items()}
        theirs = seen[step - 2].weights | {f"o.{path}": one for path, one in seen[step - 2].optimizer.items()}
        equal = {path for path, one in ours.items() if mx.array_equal(one, theirs[path]) and one.nbytes >= 1 << 14}
        assert equal == ({"branch.weight", "o.branch.weight.m", "o.branch.weight.v"} if step <= 6 else set())
        assert sizes.loc[step, "shared_bytes"] == sum(ours[path].nbytes for path in equal)
        assert sizes.loc[step, "limit_bytes"] == sum(one.nbytes for one in ours.values())
        taken = commit(run, step).get("taken", {})
        assert {*taken.get("weights", {}), *(f"o.{path}" for path in taken.get("optimizer", {}))} == equal
    folder = run.path / "checkpoints"
    inodes = {(status.st_ino, status.st_size) for status in (path.stat() for path in folder.iterdir())}
    assert sizes["new_bytes"].sum() == sum(size for _, size in inodes)
    for step in (2, 4, 6):  # of what they share, nothing is new
        assert sizes.loc[step, "new_bytes"] == sizes.loc[step, "bytes"] - 3 * 16384
    assert (sizes["bytes"] >= sizes["limit_bytes"]).all() and (sizes["ratio"] < 1.2).all()


def test_a_tensor_that_stays_is_on_the_disk_once(whole):
    run, _ = whole
    places = [commit(run, step)["taken"]["weights"]["branch.weight"] for step in (2, 4, 6)]
    assert len({(one["file"], one["start"]) for one in places}) == 1
    folder = run.path / "checkpoints"
    assert os.path.samefile(folder / places[0]["file"], folder / "00000000.safetensors")


def test_small_tensors_and_old_records_are_as_they_were(tmp_path):
    run = wb.open_run(runs.recorded_read_only())
    for step, segment in run.checkpoints:
        assert "taken" not in commit(run, step, segment)
    assert not shared_in(run.path / "checkpoints")


def test_thinning_never_removes_what_a_kept_checkpoint_needs(tmp_path):
    seen = {}
    run = record(tmp_path / "run", 6, save_every=1, keep_last=2, seen=seen)
    folder = run.path / "checkpoints"
    assert run.checkpoints == [(0, 0), (5, 0), (6, 0)] and shared_in(folder)
    for step in (5, 6):
        assert_same_state(checkpoint_reader.read(folder, step, 0), seen[step])
    run = record(tmp_path / "run", 14, save_every=1, keep_last=2, resume=True)
    assert run.checkpoints == [(0, 0), (13, 0), (14, 0)]
    assert shared_in(folder) == {place["file"] for places in commit(run, 14).get("taken", {}).values()
                                 for place in places.values()}  # fmt: skip
    assert run.verify().exact


def state(step, values):
    """Tensors of 20,000 bytes, each full of its value."""
    arrays = {name: mx.full((5000,), value) for name, value in values.items()}
    mx.eval(arrays)
    return State(step, {"w": arrays.pop("w"), "x": arrays.pop("x")}, arrays, (0, step), {"step": step})


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_writing_and_removing(tmp_path, seed):
    draw, kept = random.Random(seed), {}
    values = {name: 0 for name in "wxmv"}
    for step in range(24):
        values |= {name: draw.randrange(3) for name in values if draw.random() < 0.3}
        held = state(step, values)
        lasting = draw.random() < 0.5
        checkpoint_writer.write(
            held, tmp_path, run="r", segment=0, t=0.0, lasts=lambda step, segment, lasting=lasting: lasting
        )
        kept[step] = held
        for gone in [one for one in kept if draw.random() < 0.15]:
            checkpoint_writer.delete(tmp_path, gone, 0)
            del kept[gone]
        for one, expected in kept.items():
            assert_same_state(checkpoint_reader.read(tmp_path, one, 0), expected)
    named = {name for step in kept for name in files_of(read_commit(tmp_path, step, 0))}
    assert {path.name for path in tmp_path.iterdir() if path.suffix == ".safetensors"} == {
        name for name in named if name.endswith(".safetensors")
    }
    for step in list(kept):
        checkpoint_writer.delete(tmp_path, step, 0)
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_replaced_leaves_later_ones_whole(tmp_path):
    values = {name: 1 for name in "wxmv"}
    for step in (1, 2, 3):
        checkpoint_writer.write(state(step, values), tmp_path, run="r", segment=0, t=0.0)
    assert shared_in(tmp_path)
    other = state(1, values | {"w": 2, "m": 5})
    checkpoint_writer.write(other, tmp_path, run="r", segment=0, t=1.0)
    assert_same_state(checkpoint_reader.read(tmp_path, 1, 0), other)
    for step in (2, 3):
        assert_same_state(checkpoint_reader.read(tmp_path, step, 0), state(step, values))


def test_bits_decide_not_values(tmp_path):
    zeros, minus = mx.zeros((5000,)), -mx.zeros((5000,))
    nans = mx.full((5000,), float("nan"))
    mx.eval(zeros, minus, nans)
    for step, one in enumerate((zeros, minus, minus)):
        found = checkpoint_writer.write(
            State(step, {"w": one, "n": nans}, {}, (0, 0), {}), tmp_path, run="r", segment=0, t=0.0
        )
        taken = set() if not step else set(found.taken["weights"])
        assert taken == [set(), {"n"}, {"n", "w"}][step]


def test_another_type_or_shape_is_another_tensor(tmp_path):
    for step, one in enumerate((mx.zeros((5000,)), mx.zeros((50, 100)), mx.zeros((50, 100), mx.int32))):
        found = checkpoint_writer.write(State(step, {"w": one}, {}, (0, 0), {}), tmp_path, run="r", segment=0, t=0.0)
        assert not found.taken
        assert_same_state(checkpoint_reader.read(tmp_path, step, 0), State(step, {"w": one}, {}, (0, 0), {}))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.bool_, mx.uint64, mx.complex64, mx.int8])
def test_every_type_comes_back(tmp_path, dtype):
    one = mx.ones((40_000,), dtype).reshape(200, 200)
    for step in range(2):
        found = checkpoint_writer.write(State(step, {"w": one}, {}, (0, 0), {}), tmp_path, run="r", segment=0, t=0.0)
    assert found.taken["weights"].keys() == {"w"}
    assert_same_state(checkpoint_reader.read(tmp_path, 1, 0), State(1, {"w": one}, {}, (0, 0), {}))


def test_arrays_on_the_host_as_a_cuda_device_gives_them(tmp_path):
    values = {name: 1 for name in "wxmv"}
    for step in (0, 1):
        held = state(step, values)
        weights = {path: HostArray.of(one) for path, one in held.weights.items()}
        found = checkpoint_writer.write(
            State(step, weights, held.optimizer, held.rng, held.cursor), tmp_path, run="r", segment=0, t=0.0,
            lanes=held.lanes(),
        )  # fmt: skip
    assert found.taken["weights"].keys() == {"w", "x"}
    assert_same_state(checkpoint_reader.read(tmp_path, 1, 0), held)


def test_without_hard_links_everything_is_written(tmp_path, monkeypatch):
    def refused(*arguments, **named):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    values = {name: 1 for name in "wxmv"}
    for step in (0, 1):
        found = checkpoint_writer.write(state(step, values), tmp_path, run="r", segment=0, t=0.0)
    assert not found.taken and not shared_in(tmp_path)
    assert_same_state(checkpoint_reader.read(tmp_path, 1, 0), state(1, values))


def test_a_copy_of_a_run_is_whole_and_goes_on(whole, tmp_path):
    """Copying by name makes two files of two names of one."""
    record(tmp_path / "run", 6)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    shutil.rmtree(tmp_path / "run")
    run = record(tmp_path / "copy", 16, resume=True)
    assert run.verify().exact and "taken" in commit(run, 6)
    straight, _ = whole
    assert_same_state(
        checkpoint_reader.read(run.path / "checkpoints", 16, 0),
        checkpoint_reader.read(straight.path / "checkpoints", 16, 0),
    )


def test_a_fork_stands_on_its_own(whole, tmp_path):
    run, seen = whole
    with wb.Recorder(tmp_path / "fork", *parts(), compile=False, spikes=None, save_every=2,
                     fork=wb.fork_point(run, 4)) as recorder:  # fmt: skip
        for batch in recorder.batches(6):
            recorder.step(batch)
    fork = wb.open_run(tmp_path / "fork")
    assert "taken" not in commit(fork, 4) and fork.verify().exact
    assert_same_state(checkpoint_reader.read(fork.path / "checkpoints", 6, 0), seen[6])


def test_a_damaged_shared_file_is_named(whole, tmp_path):
    run, _ = whole
    shutil.copytree(run.path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    place = commit(run, 4)["taken"]["weights"]["branch.weight"]
    content = bytearray((folder / place["file"]).read_bytes())
    content[place["start"] + place["bytes"] - 1] ^= 1
    (folder / place["file"]).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"shared-\w+.safetensors was changed: the SHA-256 of branch.weight in"):
        checkpoint_reader.read(folder, 4, 0)
    found = wb.open_run(tmp_path / "run").verify()
    wrong = {"00000002", "00000004", "00000006", place["file"]}
    assert {one.what for one in found.checks if one.verdict == "mismatch"} == wrong
    (folder / place["file"]).write_bytes(content[: place["start"] + 5])
    with pytest.raises(CheckpointError, match="branch.weight should end at byte .* it was cut off or replaced"):
        checkpoint_reader.read(folder, 4, 0)
    (folder / place["file"]).unlink()
    with pytest.raises(CheckpointError, match=f"{place['file']} can't be read .* the commit record of 00000004 takes"):
        checkpoint_reader.read(folder, 4, 0)
    with pytest.raises(CheckpointError, match="the size of checkpoint .* can't be told"):
        wb.open_run(tmp_path / "run").checkpoint_sizes()


def test_a_damaged_file_is_not_relied_on(tmp_path):
    values = {name: 1 for name in "wxmv"}
    checkpoint_writer.write(state(0, values), tmp_path, run="r", segment=0, t=0.0)
    content = bytearray((tmp_path / "00000000.safetensors").read_bytes())
    content[-1] ^= 1  # of x
    (tmp_path / "00000000.safetensors").write_bytes(content)
    found = checkpoint_writer.write(state(1, values), tmp_path, run="r", segment=0, t=0.0)
    assert found.taken["weights"].keys() == {"w"}
    assert_same_state(checkpoint_reader.read(tmp_path, 1, 0), state(1, values))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"file": "../../secret"}, "it stands in '../../secret'; expected the name of a shared file"),
        ({"file": "00000000.safetensors"}, "expected the name of a shared file"),
        ({"bytes": 12}, "it has 12 bytes, which I32 of shape"),
        ({"dtype": "F128"}, "F128"),
        ({"start": -1}, "damaged"),
    ],
)
def test_a_record_that_leads_elsewhere_is_refused(tmp_path, change, said):
    values = {name: 1 for name in "wxmv"}
    for step in (0, 1):
        checkpoint_writer.write(state(step, values), tmp_path, run="r", segment=0, t=0.0)
    path = tmp_path / "00000001.json"
    record = json.loads(path.read_text())
    record["taken"]["weights"]["w"] |= change
    del record["seal"]
    path.write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match=said):
        checkpoint_reader.read(tmp_path, 1, 0)


def test_nothing_is_removed_while_a_record_can_not_be_read(tmp_path):
    values = {name: 1 for name in "wxmv"}
    for step in (0, 1):
        checkpoint_writer.write(state(step, values), tmp_path, run="r", segment=0, t=0.0)
    before = shared_in(tmp_path)
    (tmp_path / "00000009.json").write_text('{"taken": ')
    checkpoint_writer.delete(tmp_path, 1, 0)
    assert before and shared_in(tmp_path) == before
    (tmp_path / "00000009.json").unlink()
    checkpoint_writer.sweep(tmp_path)
    assert not shared_in(tmp_path)


def test_what_a_killed_process_left_is_swept(tmp_path):
    run = record(tmp_path / "run", 4)
    stray = run.path / "checkpoints" / f"shared-{'0' * 64}.safetensors"
    stray.write_bytes(b"half")
    (notice,) = run.verify().notices
    assert stray.name in notice and "as a crash leaves them" in notice
    run = record(run.path, 6, resume=True)
    assert not stray.exists() and run.verify().notices == []


def test_the_training_thread_compares_nothing(tmp_path, monkeypatch):
    import threading

    threads, split = set(), deduplication.split

    def noted(*arguments):
        threads.add(threading.current_thread().name)
        return split(*arguments)

    monkeypatch.setattr(deduplication, "split", noted)
    record(tmp_path / "run", 4)
    assert threads == {"workbench-saver"}


def test_on_the_command_line(whole):
    run, _ = whole
    said = runs.here("checkpoint", run.path, "--json")
    rows = json.loads(said.out)
    assert [row["step"] for row in rows] == list(range(0, 17, 2))
    assert set(rows[0]) == {*("step segment bytes new_bytes limit_bytes shared_bytes ratio".split())}
    assert "9 checkpoints take" in runs.here("verify", run.path).out
    assert len(json.loads(runs.here("verify", run.path, "--json").out)["sizes"]) == 9
    before = tree(run.path)
    runs.here("checkpoint", run.path)
    assert tree(run.path) == before
