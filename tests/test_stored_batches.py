"""Runs whose data can't be drawn again: their batches are kept in the run's folder, and replayed from there."""

import json
import shutil
import warnings

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, edit_json, flipped, mlp, mse, python, repair_commit

import workbench as wb
from workbench.errors import CheckpointError, DataError, ExperimentError, ReplayError
from workbench.experiment import batch_hash
from workbench.stored_batches import BatchStore


def stream(seed=0, epochs=2, batches=5):
    """A plain generator, of the kind that people write: no cursor, and each epoch has the same batches."""
    random = np.random.default_rng(seed)
    data = [random.standard_normal((6, 4)).astype(np.float32) for _ in range(batches)]
    for _ in range(epochs):
        for number in random.permutation(batches):
            yield data[number], np.sin(data[number].sum(axis=1, keepdims=True))


def build(sampler=None):
    """The factory: no data in it."""
    return wb.Experiment(mlp(0.1), optim.AdamW(1e-2), mse, sampler)


def record(path, steps=None, *, sampler, **options):
    job = build()
    options = {"save_every": 4, "spikes": None} | options
    with wb.Recorder(path, job.model, job.optimizer, mse, sampler, **options) as recorder:
        losses = [recorder.step(batch) for batch in recorder.batches(steps)]
    return wb.open_run(path), losses


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return record(tmp_path_factory.mktemp("stored") / "run", sampler=stream(), factory="test_stored_batches:build")[0]


def test_every_step_replays_without_the_iterator(recorded, tmp_path):
    traces = recorded.replay(range(1, 11), experiment=build(), with_probe=False, trace_dir=tmp_path)
    assert [trace.exact for trace in traces] == [True] * 10
    assert recorded.manifest.stored_batches


def test_and_in_a_fresh_process(recorded, tmp_path):
    options = ("--factory", "test_stored_batches:build", "--trace-dir", tmp_path)
    done = python("-m", "workbench", "replay", recorded.path, "--step", 9, *options)
    assert done.returncode == 0, done.stdout + done.stderr


def test_equal_batches_are_stored_once_under_the_hash_that_telemetry_logs(recorded):
    files = sorted(path.stem for path in (recorded.path / "batches").iterdir())
    logged = [recorded.line(step, 0).batch_hash for step in range(1, 11)]
    assert len(files) == 5 and files == sorted(set(logged))


def test_the_loop_may_hand_over_batches_of_its_own(tmp_path):
    job, batches = build(), [(mx.array(x), mx.array(y)) for x, y in stream()]
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse) as recorder:
        for x, y in batches:
            recorder.step((x, y))
        with pytest.raises(ExperimentError, match="no sampler was given"):
            next(recorder.batches(20))
    traces = wb.open_run(tmp_path / "run").replay(range(1, 11), experiment=build(), with_probe=False)
    assert [trace.exact for trace in traces] == [True] * 10


@pytest.mark.parametrize("kind", ["int", "bfloat16", "one", "scalar and empty"])
def test_batches_of_any_kind_come_back_with_their_bits(tmp_path, kind):
    batch = {
        "int": (mx.array([[1, 2], [3, 4]], mx.int64), mx.array([True, False])),
        "bfloat16": (mx.array([1.5, float("nan"), -0.0], mx.bfloat16),),
        "one": (mx.random.normal((3, 2)).T,),
        "scalar and empty": (mx.array(2.0), mx.zeros((0, 3))),
    }[kind]
    store = BatchStore(tmp_path)
    store.put(batch_hash(batch), batch)
    assert batch_hash(store.get(batch_hash(batch))) == batch_hash(batch)


def test_a_batch_in_bfloat16_is_replayed_and_shown(tmp_path):
    batches = [tuple(mx.array(one).astype(mx.bfloat16) for one in batch) for batch in stream(epochs=1)]
    run, _ = record(tmp_path / "run", sampler=iter(batches))
    trace = run.replay(3, experiment=build(), with_probe=False)
    assert trace.exact and np.array_equal(trace.batch[0], np.array(batches[2][0].astype(mx.float32)))


def test_a_resume_winds_the_iterator_on_and_checks_what_it_passes(tmp_path):
    straight, losses = record(tmp_path / "straight", sampler=stream())
    first = record(tmp_path / "run", 6, sampler=stream())[1]
    run, second = record(tmp_path / "run", sampler=stream(), resume=True)
    assert first + second == losses and run.line(10, 0).state == straight.line(10, 0).state
    shutil.copytree(run.path, tmp_path / "copy")
    with pytest.raises(ExperimentError, match="the iterator's batch 1 is not the one that step 1 of .* used"):
        record(tmp_path / "copy", 12, sampler=stream(seed=9), resume=8)
    with pytest.raises(ExperimentError, match="the iterator ended after 5 batches, before that of step 8"):
        record(tmp_path / "copy", 12, sampler=stream(epochs=1), resume=8)


def test_a_resume_says_which_batches_the_loop_had_left_out(tmp_path):
    job = build()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, stream(), save_every=4, spikes=None) as recorder:
        for number, batch in enumerate(recorder.batches(4), 1):
            if number not in (2, 3):
                recorder.step(batch)
    assert recorder.step_number == 4
    words = (
        "batch 2 is not the one that step 2 .* used; its batch 4 is. The loop drew batches 2 to 3 and did not train on"
    )
    with pytest.raises(ExperimentError, match=words):
        record(tmp_path / "run", sampler=stream(), resume=True)
    with pytest.raises(ExperimentError, match="batch 1 is not .*, nor is one of the next 100: it gives other batches"):
        record(tmp_path / "run", sampler=stream(seed=1), resume=True)
    batches, job = list(stream()), build()
    with wb.Recorder(
        tmp_path / "run", job.model, job.optimizer, mse, save_every=4, spikes=None, resume=True
    ) as recorder:
        for number, batch in enumerate(batches, 1):
            if number not in (2, 3):
                recorder.step(batch)
    _, whole = record(tmp_path / "whole", sampler=[batch for at, batch in enumerate(batches, 1) if at not in (2, 3)])
    run = wb.open_run(tmp_path / "run")
    assert [wb.open_run(tmp_path / "whole").line(step, 0).loss_bits for step in range(1, 9)] == [
        run.line(step, run.manifest.segments[-1].segment).loss_bits for step in range(1, 9)
    ]


def test_branches_of_a_run_each_have_their_own_batches(tmp_path):
    record(tmp_path / "run", 8, sampler=stream())
    job = build()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, mse, resume=4) as recorder:
        for x, y in list(stream(seed=5))[:4]:
            recorder.step((x, y))
    run = wb.open_run(tmp_path / "run")
    for segment in (0, 1):
        traces = run.replay(range(5, 9), segment=segment, experiment=build(), with_probe=False)
        assert [trace.exact for trace in traces] == [True] * 4
    assert run.line(6, 0).batch_hash != run.line(6, 1).batch_hash


def test_a_missing_or_changed_batch_is_named(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "run")
    run = wb.open_run(tmp_path / "run")
    path = tmp_path / "run" / "batches" / f"{run.line(6, 0).batch_hash}.safetensors"
    found = mx.load(str(path))
    mx.eval(found)
    mx.save_safetensors(str(path), {"0": flipped(found["0"]), "1": found["1"]})
    with pytest.raises(DataError, match=f"the stored batch .*{path.stem}.* was changed: its hash is"):
        run.replay(6, experiment=build())
    path.unlink()
    with pytest.raises(DataError, match=f"the stored batch .*{path.stem}.* can't be read"):
        run.replay(6, experiment=build())
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="can't be read"):
        run.replay(6, experiment=build())


def test_a_line_that_is_gone_is_not_taken_for_the_end_of_the_data(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "run")
    telemetry = tmp_path / "run" / "telemetry.jsonl"
    lines = telemetry.read_bytes().splitlines(keepends=True)
    telemetry.write_bytes(b"".join(line for line in lines if json.loads(line).get("step") != 6))
    with pytest.raises(ReplayError, match=r"has no line of step 6, though it has later ones.*workbench verify"):
        wb.open_run(tmp_path / "run").replay(7, experiment=build())


def test_a_file_longer_than_its_header_says_is_not_read(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "run")
    run = wb.open_run(tmp_path / "run")
    name = run.line(6, 0).batch_hash
    with (tmp_path / "run" / "batches" / f"{name}.safetensors").open("r+b") as file:
        file.truncate(1 << 40)  # takes nothing on the disk
    with pytest.raises(DataError, match=rf"{name}.* can't be read .*it has {1 << 40} bytes; expected at most"):
        run.replay(6, experiment=build())


@pytest.mark.parametrize("cursor", [{"step": "a"}, {}, {"step": -1}, {"step": True}, {"step": 1 << 63}])
def test_a_cursor_of_another_kind_is_refused(recorded, tmp_path, cursor):
    shutil.copytree(recorded.path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "00000000.cursor").write_text(json.dumps(cursor))
    repair_commit(tmp_path / "run", "00000000")
    with pytest.raises(CheckpointError, match=r"the cursor of a checkpoint of .*expected \{\"step\": N\}"):
        wb.open_run(tmp_path / "run").replay(1, experiment=build())


@pytest.mark.parametrize("part", ["rng", "cursor"])
def test_a_part_that_no_recorder_writes_so_large_is_not_read(recorded, tmp_path, part):
    shutil.copytree(recorded.path, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    with (folder / f"00000000.{part}").open("r+b") as file:
        file.truncate(1 << 40)
    edit_json(
        folder / "00000000.json",
        lambda record: record["files"][f"00000000.{part}"].update(bytes=1 << 40, sha256="0" * 64),
    )
    with pytest.raises(CheckpointError, match=rf"{part} has {1 << 40} bytes by its commit record; expected at most"):
        wb.open_run(tmp_path / "run").replay(1, experiment=build())


def test_a_hash_that_leads_out_of_the_folder_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected 64 hexadecimal digits"):
        BatchStore(tmp_path).get("../../etc/passwd")


def test_the_budget_is_kept_and_no_step_goes_unstored(tmp_path):
    size = 2000  # one batch is 120 bytes of numbers and a header
    path = tmp_path / "run"
    with (
        pytest.warns(UserWarning, match="when the budget is used up the recorder refuses further steps"),
        pytest.raises(ExperimentError, match="exceeds the budget of 2000: the step was not performed"),
    ):
        record(path, sampler=stream(epochs=1, batches=9), batch_budget=size)
    run = wb.open_run(path)
    last = run.telemetry.last_step()
    assert 2 < last < 9 and sum(file.stat().st_size for file in (path / "batches").iterdir()) <= size
    assert run.checkpoints[-1] == (last, 0)  # nothing is lost
    traces = run.replay(range(1, last + 1), experiment=build(), with_probe=False)
    assert all(trace.exact for trace in traces)
    run, losses = record(path, sampler=stream(epochs=1, batches=9), resume=True)
    assert len(losses) == 9 - last and run.replay(9, experiment=build()).exact


def test_a_repeated_batch_takes_nothing_from_the_budget(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run, losses = record(tmp_path / "run", sampler=stream(epochs=4, batches=2), batch_budget=800)
    assert len(losses) == 8


def test_one_kind_of_sampler_is_not_the_other(recorded, tmp_path):
    shutil.copytree(recorded.path, tmp_path / "stored")
    with pytest.raises(ExperimentError, match="the sampler is one with a cursor, recorded one without a cursor"):
        record(tmp_path / "stored", 12, sampler=Points(), resume=True)
    run, _ = record(tmp_path / "drawn", 3, sampler=Points())
    with pytest.raises(ExperimentError, match="recorded with a sampler that has a cursor, and the experiment has none"):
        run.replay(2, experiment=build())


def test_a_fork_goes_on_with_batches_of_its_own(recorded, tmp_path):
    job, point = build(), wb.fork_point(recorded.path, 8)
    with wb.Recorder(tmp_path / "fork", job.model, job.optimizer, mse, fork=point, save_every=4) as recorder:
        for x, y in list(stream(seed=5))[:3]:
            recorder.step((x, y))
    run = wb.open_run(tmp_path / "fork")
    assert [trace.exact for trace in run.replay(range(9, 12), experiment=build())] == [True] * 3
