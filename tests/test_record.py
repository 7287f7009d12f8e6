"""Recording: nothing written over, and no checkpoint that was not asked for."""

import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import runs
from recordings import checkpoint_bytes, exact, record, recorder

from workbench import Recorder, open_run
from workbench.errors import ExperimentError, RunError

pytest_plugins = ["recording_fixtures"]


# ----------------------------------------------------------------------------------------------------------- beginning


def test_a_recorded_loop_replays_exactly(whole):
    assert whole.last_step == 12 and whole.checkpoints == [(0, 0), (4, 0), (8, 0), (12, 0)]
    for step in (1, 6, 12):
        trace = exact(open_run(whole.path), step, trace_dir=whole.path.parent / "traces")
        assert trace.record.items["checkpoint"].verdict == ("exact" if step == 12 else "unverified")


def test_recording_moves_no_bit(whole):
    """The same loop by hand, with nothing of the workbench in it."""
    experiment = runs.build()
    model, optimizer, loss_fn, sampler = runs.parts(experiment)
    losses = []
    for _ in range(12):
        value, gradients = nn.value_and_grad(model, loss_fn)(model, *(mx.array(a) for a in next(sampler)))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(float(value.item()))
    assert np.float32(whole.steps["loss"]).tolist() == losses


def test_a_folder_that_holds_a_run_is_refused_before_anything_is_done(twelve):
    before = runs.digest(twelve.path)
    experiment = runs.build()
    with pytest.raises(RunError, match=r"already holds a run \(run.json\); choose another folder, or go on"):
        recorder(twelve.path, experiment)
    assert runs.digest(twelve.path) == before
    assert experiment.sampler.position == 0


@pytest.mark.parametrize("left", ["telemetry.jsonl", "checkpoints"])
def test_what_is_left_of_a_run_is_not_mixed_with_a_new_one(twelve, left):
    for path in twelve.path.iterdir():
        if path.name != left:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    before = runs.digest(twelve.path)
    with pytest.raises(RunError, match=f"already holds a run .{left}"):
        recorder(twelve.path)
    assert runs.digest(twelve.path) == before


def test_a_run_that_another_process_began_meanwhile_is_not_written_over(tmp_path, twelve):
    path = tmp_path / "contested"
    late = recorder(path)
    shutil.copytree(twelve.path, path)
    before = runs.digest(path)
    with pytest.raises(RunError, match="already holds a run"), late:
        late.step(next(late.experiment.sampler))
    assert runs.digest(path) == before


def test_a_folder_of_other_things_is_fine(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert record(tmp_path / "run", 1).last_step == 1
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_recorder_that_performs_no_step_writes_nothing(tmp_path):
    with recorder(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()
    ended = recorder(tmp_path / "run")
    ended.close()
    with pytest.raises(RunError, match="nothing can be logged .* after its end"):
        ended.log_validation(1.0)
    assert not (tmp_path / "run").exists()


def test_a_step_after_the_end_does_not_write_over_the_run(twelve):
    """It would begin a second run in the same folder."""
    recording = recorder(twelve.path, resume=True)
    with recording:
        recording.step(next(recording.experiment.sampler))
    before = runs.digest(twelve.path)
    with pytest.raises(RunError, match="has ended; go on with a new Recorder and resume=True"):
        recording.step(next(recording.experiment.sampler))
    with pytest.raises(RunError, match="nothing can be logged"):
        recording.log_validation(1.0)
    assert runs.digest(twelve.path) == before


@pytest.mark.parametrize(
    "settings", [{"save_every": -1}, {"keep_last": 0}, {"keep_every": 0}, {"keep_every": -3}, {"accumulate": 0}]
)
def test_settings_out_of_range(tmp_path, settings):
    (name,) = settings
    with pytest.raises(ExperimentError, match=f"{name} is {settings[name]}; expected"):
        recorder(tmp_path / "run", **settings)
    assert not (tmp_path / "run").exists()


def test_what_gives_no_batches_is_no_sampler(tmp_path):
    experiment = runs.build()
    with pytest.raises(ExperimentError, match="the sampler is a int; expected an iterator with state_dict"):
        Recorder(tmp_path / "run", experiment.model, experiment.optimizer, experiment.loss_fn, 3)


def test_batches_end_with_the_sampler_and_with_the_count(tmp_path):
    experiment = runs.build()
    real = type(experiment.sampler)

    class Three(real):
        def __next__(self):
            if self.position == 3:
                raise StopIteration
            return super().__next__()

    experiment.sampler = Three()
    assert record(tmp_path / "run", None, experiment).last_step == 3
    assert runs.lines(tmp_path / "run")[-1]["type"] == "done"


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_a_batch_that_is_used_twice_is_told_once(tmp_path):
    """A replay would draw the one after it."""
    with pytest.warns(UserWarning, match="step 4 was given a batch that an earlier step used") as said:
        with recorder(tmp_path / "run") as recording:
            for batch in recording.batches(7):
                recording.step(batch)
                if recording.step_number > 2:
                    recording.step(batch)
    assert len(said) == 1
    run = open_run(tmp_path / "run")
    exact(run, 3)
    trace = run.replay(4, experiment=runs.build(), with_probe=False)
    assert "the first difference is batch_hash at step 4" in trace.sentence()
    assert any("an earlier step used" in one for one in trace.notices)


def test_save_every_0_keeps_the_first_and_the_last_state(tmp_path, whole):
    run = record(tmp_path / "run", 12, save_every=0)
    assert run.checkpoints == [(0, 0), (12, 0)]
    assert checkpoint_bytes(run, 12) == checkpoint_bytes(whole, 12)
    exact(run, 12)


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ({}, [0, 2, 4, 6, 8, 10, 11]),
        ({"keep_last": 2}, [0, 10, 11]),
        ({"keep_last": 1}, [0, 11]),
        ({"keep_every": 4}, [0, 4, 8, 11]),
        ({"keep_last": 2, "keep_every": 6}, [0, 6, 10, 11]),
    ],
)
def test_thinning(tmp_path, policy, kept):
    run = record(tmp_path / "run", 11, save_every=2, **policy)
    assert [step for step, _ in run.checkpoints] == kept
    names = {path.name.split(".")[0] for path in (run.path / "checkpoints").iterdir()}
    assert names == {f"{step:08d}" for step in kept}  # no file is left of the others
    exact(run, 11)


def test_thinning_spares_the_start_of_a_segment_and_other_branches(tmp_path):
    """Going back with `keep_last` must not throw away what was just saved because the old branch had come further."""
    path = tmp_path / "run"
    record(path, 12, save_every=2)
    run = record(path, 9, save_every=2, keep_last=1, resume=4)
    assert run.manifest.segments[1].start == 4
    own = [step for step, segment in run.checkpoints if segment == 1]
    assert own == [9]
    assert [step for step, segment in run.checkpoints if segment == 0] == [0, 4, 6, 8, 10, 12]  # 2 was on the way
    exact(run, 9, segment=1)
    run = record(path, 13, save_every=2, keep_last=1, resume=True)
    assert run.manifest.segments[-1].segment == 1  # it went on at the very end
    assert run.spikes()["step"].tolist() == [13]  # the state before it is kept, too
    assert [step for step, segment in run.checkpoints if segment == 1] == [12, 13]


def test_a_checkpoint_can_be_asked_for(tmp_path):
    with recorder(tmp_path / "run", save_every=0) as recording:
        for batch in recording.batches(3):
            recording.step(batch)
            if recording.step_number == 2:
                recording.checkpoint()
    assert open_run(tmp_path / "run").checkpoints == [(0, 0), (2, 0), (3, 0)]
