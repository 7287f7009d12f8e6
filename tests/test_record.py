"""Recording: nothing written over, no half step saved, and a resumed run equal to one without a break, bit for bit."""

import math
import os
import shutil

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import runs

from workbench import Recorder, open_run
from workbench.errors import CheckpointError, ExperimentError, RunError
from workbench.spikes import SpikeSettings

SPIKES = SpikeSettings(window=4)
WINDOWED = {"spikes": SPIKES, "save_every": 4}


def recorder(path, experiment=None, **settings):
    experiment = experiment or runs.build()
    return Recorder(path, *runs.parts(experiment), compile=False, **(WINDOWED | settings))


def record(path, steps, experiment=None, **settings):
    with recorder(path, experiment, **settings) as recording:
        for batch in recording.batches(steps):
            recording.step(batch)
    return open_run(path)


def steps_of(run, segment=0):
    """Per step what the run logged, without the times."""
    moving = ("t", "elapsed_s", "step_per_s", "peak_rss_mb", "segment", "seal")
    return {
        line["step"]: {key: value for key, value in line.items() if key not in moving}
        for line in runs.lines(run.path)
        if line["type"] == "step" and line["segment"] == segment
    }


def checkpoint_bytes(run, step, segment=0):
    stem = f"{step:08d}" + (f".s{segment}" if segment else "")
    suffixes = (".safetensors", ".optimizer.safetensors", ".rng", ".cursor")
    return [(run.path / "checkpoints" / (stem + suffix)).read_bytes() for suffix in suffixes]


def exact(run, step, **options):
    trace = run.replay(step, experiment=runs.build(), with_probe=False, **options)
    assert trace.exact, trace.sentence()
    return trace


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Twelve steps without a break."""
    return record(tmp_path_factory.mktemp("whole") / "run", 12)


@pytest.fixture
def twelve(whole, tmp_path):
    """A copy of it, to go on with."""
    return open_run(shutil.copytree(whole.path, tmp_path / "run"))


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
    assert [step for step, segment in run.checkpoints if segment == 1] == [13]


def test_a_checkpoint_can_be_asked_for(tmp_path):
    with recorder(tmp_path / "run", save_every=0) as recording:
        for batch in recording.batches(3):
            recording.step(batch)
            if recording.step_number == 2:
                recording.checkpoint()
    assert open_run(tmp_path / "run").checkpoints == [(0, 0), (2, 0), (3, 0)]


# ---------------------------------------------------------------------------------------------------------- interrupted


class Cut(Exception):
    pass


def test_an_exception_within_a_step_saves_no_half_step(tmp_path):
    experiment = runs.build()
    loss = experiment.loss_fn
    fail = False

    def failing(model, x, y):
        if fail:
            raise Cut
        return loss(model, x, y)

    experiment.loss_fn = failing
    with pytest.raises(Cut), recorder(tmp_path / "run", experiment) as recording:
        for batch in recording.batches(12):
            fail = recording.step_number == 6
            recording.step(batch)
    run = open_run(tmp_path / "run")
    assert run.checkpoints == [(0, 0), (4, 0)] and run.last_step == 6
    assert runs.lines(run.path)[-1]["type"] == "step"  # not done
    for step in (5, 6):
        exact(run, step)
    resumed = record(run.path, 12, resume=True)  # from 4: 5 and 6 come again
    assert [entry.start for entry in resumed.manifest.segments] == [0, 4]


def test_an_exception_after_a_step_saves_its_whole_state(tmp_path, whole):
    with pytest.raises(Cut), recorder(tmp_path / "run") as recording:
        for batch in recording.batches(12):
            recording.step(batch)
            if recording.step_number == 6:
                raise Cut
    run = open_run(tmp_path / "run")
    assert run.checkpoints == [(0, 0), (4, 0), (6, 0)]
    assert runs.lines(run.path)[-1]["type"] == "step"
    resumed = record(run.path, 12, resume=True)
    assert len(resumed.manifest.segments) == 1
    assert checkpoint_bytes(resumed, 12) == checkpoint_bytes(whole, 12)
    assert steps_of(resumed) == steps_of(whole)


def test_a_failed_save_damages_no_earlier_checkpoint(tmp_path, monkeypatch):
    """The disk is full when the checkpoint of step 8 is written, and has room again for that of step 12."""
    path = tmp_path / "run"

    def full(*arguments):
        raise OSError(28, "No space left on device")

    with recorder(path) as recording:
        for batch in recording.batches(12):
            if recording.step_number == 7:
                recording._out.saves.checkpointer.wait()
                before = runs.digest(path / "checkpoints")
                monkeypatch.setattr("workbench.checkpoints.checkpoint_writer.write_together", full)
            if recording.step_number == 8:
                with pytest.warns(UserWarning, match="checkpoint 8 was not saved to .*No space left.* goes on"):
                    recording._out.saves.checkpointer.wait()
                    recording.step(batch)
                assert runs.digest(path / "checkpoints") == before
                monkeypatch.undo()
            else:
                recording.step(batch)
    run = open_run(path)
    assert run.checkpoints == [(0, 0), (4, 0), (12, 0)] and run.last_step == 12
    exact(run, 8)


@pytest.mark.parametrize("room_at", [7, 10, 99])
def test_lines_that_can_not_be_written_wait_and_no_checkpoint_outlives_them(tmp_path, monkeypatch, whole, room_at):
    """The disk is full in the middle of the line of step 6, until step 7, 10 or for good."""
    path = tmp_path / "run"
    real, written = os.write, []

    def filling(descriptor, content):
        if isinstance(content, bytes) and b'"step":6,' in content and recording.step_number < room_at:
            written.append(real(descriptor, content[:50]) if not written else 0)
            if written == [50]:
                return 50
        if written and recording.step_number < room_at:
            raise OSError(28, "No space left on device")
        return real(descriptor, content)

    monkeypatch.setattr("workbench.telemetry.os.write", filling)
    with pytest.warns(UserWarning) as told:
        with recorder(path) as recording:
            for batch in recording.batches(12):
                recording.step(batch)
                recording._out.saves.checkpointer.wait()
        monkeypatch.undo()
    said = [str(warning.message) for warning in told]
    assert sum("telemetry of step 6 can't be written" in text and "wait in memory" in text for text in said) == 1
    run = open_run(path)
    assert written and run.checkpoints == [(0, 0), (4, 0)] + [(8, 0)] * (room_at < 8) + [(12, 0)] * (room_at < 12)
    if room_at < 12:
        assert steps_of(run) == steps_of(whole) and not run.telemetry.notices
        return
    assert run.last_step == 5 and "unfinished" in run.telemetry.notices[0]
    assert any("the last lines of telemetry" in text for text in said)
    exact(run, 5)
    resumed = record(path, 12, resume=True)
    assert checkpoint_bytes(resumed, 12, 1) == checkpoint_bytes(whole, 12)


def test_the_telemetry_of_a_step_is_in_its_file_when_the_step_returns(tmp_path):
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(3):
            recording.step(batch)
            assert open_run(tmp_path / "run").last_step == recording.step_number


# -------------------------------------------------------------------------------------------------------------- resume


def test_a_resume_at_the_end_goes_on_with_the_segment(tmp_path, whole):
    path = tmp_path / "run"
    record(path, 7)
    record(path, 9, resume=True)
    run = record(path, 12, resume=True)
    assert len(run.manifest.segments) == 1
    assert run.checkpoints == [(0, 0), (4, 0), (7, 0), (8, 0), (9, 0), (12, 0)]
    assert checkpoint_bytes(run, 12) == checkpoint_bytes(whole, 12)
    assert steps_of(run) == steps_of(whole)  # every field: ma, spike and spike_rule too
    assert [line["type"] for line in runs.lines(path)].count("meta") == 3
    for step in (7, 8, 10):
        exact(run, step)


def test_a_resume_in_another_environment_opens_a_segment(twelve):
    """A segment has one environment, so that a replay can tell where each step was computed."""
    runs.edit_json(twelve.path / "run.json", lambda d: d["segments"][0]["environment"].update(mlx="0.1.2"))
    run = record(twelve.path, 13, resume=True)
    first, second = run.manifest.segments
    assert (second.start, second.parent) == (12, 0)
    assert first.environment["mlx"] == "0.1.2" != second.environment["mlx"]
    assert list(steps_of(run, 1)) == [13] and run.checkpoints[-1] == (13, 1)


def test_a_resume_that_goes_back_opens_a_segment(twelve, whole):
    before = runs.digest(twelve.path)
    telemetry = (twelve.path / "telemetry.jsonl").read_bytes()
    run = record(twelve.path, 14, resume=8)
    assert (run.path / "telemetry.jsonl").read_bytes().startswith(telemetry)
    after = runs.digest(twelve.path)
    changed = {name for name in before if after[name] != before[name]}
    assert changed == {"run.json", "telemetry.jsonl"}  # every file of segment 0 is untouched
    assert {name.split(".")[1] for name in after.keys() - before.keys()} == {"s1"}
    assert run.checkpoints == [(0, 0), (4, 0), (8, 0), (12, 0), (12, 1), (14, 1)]
    assert checkpoint_bytes(run, 12, 1) == checkpoint_bytes(whole, 12)
    assert {step: steps_of(run, 1)[step] for step in (9, 10, 11, 12)} == {
        step: steps_of(whole)[step] for step in (9, 10, 11, 12)
    }
    meta = [line for line in runs.lines(run.path) if line["type"] == "meta"]
    assert [(line["segment"], line["step"]) for line in meta] == [(0, 0), (1, 8)]
    assert meta[1]["state"] == steps_of(whole)[8]["state"]


def test_replay_across_segments(twelve):
    run = record(twelve.path, 14, resume=8)
    for step, segment in ((6, 0), (9, 1), (13, 1)):
        assert exact(run, step).record.segment == segment
    assert exact(run, 10, segment=0).record.segment == 0
    traces = run.replay(range(7, 12), experiment=runs.build(), with_probe=False)
    assert [(trace.step, trace.record.segment, trace.exact) for trace in traces] == [
        (7, 0, True),
        (8, 0, True),
        (9, 1, True),
        (10, 1, True),
        (11, 1, True),
    ]
    assert [trace.path.name for trace in traces[1:3]] == ["00000008.json", "00000009.s1.json"]


def test_a_second_resume_that_goes_back(twelve, whole):
    record(twelve.path, 14, resume=8)
    run = record(twelve.path, 13, resume=12)  # the checkpoint of segment 1: segment 0 was left at 8
    assert [(s.segment, s.start, s.parent) for s in run.manifest.segments] == [(0, 0, None), (1, 8, 0), (2, 12, 1)]
    run = record(twelve.path, 9, resume=4)  # on the way: checkpoint 4 of segment 0
    assert [(s.start, s.parent) for s in run.manifest.segments][3:] == [(4, 0)]
    for step, segment in ((13, 2), (9, 3), (14, 1), (3, 0)):
        exact(run, step, segment=segment)
    assert steps_of(run, 3)[9] == steps_of(whole)[9]


def test_resume_from_a_step_without_a_checkpoint(twelve):
    before = runs.digest(twelve.path)
    with pytest.raises(CheckpointError, match=r"has no checkpoint of step 5; it has \[0, 4, 8, 12\]"):
        recorder(twelve.path, resume=5)
    shutil.rmtree(twelve.path / "checkpoints")
    with pytest.raises(CheckpointError, match="has no checkpoint at all"):
        recorder(twelve.path, resume=True)
    assert {k: v for k, v in before.items() if "checkpoints" not in k} == runs.digest(twelve.path)


def test_resume_from_step_0_starts_over_in_a_segment(twelve, whole):
    run = record(twelve.path, 5, resume=0)
    assert run.manifest.segments[1].start == 0 and run.manifest.segments[1].parent == 0
    assert steps_of(run, 1)[5] == steps_of(whole)[5]
    exact(run, 5, segment=1)


def test_resume_of_nothing(tmp_path):
    with pytest.raises(RunError, match="does not exist"):
        recorder(tmp_path / "run", resume=True)


@pytest.mark.parametrize("resume", [True, 8])
def test_a_resume_that_performs_no_step_leaves_no_trace(twelve, resume):
    before = runs.digest(twelve.path)
    record(twelve.path, 8, resume=resume)
    assert runs.digest(twelve.path) == before


def test_another_experiment_is_refused_and_nothing_is_changed(twelve):
    before = runs.digest(twelve.path)
    for changed, word in (
        ({"eps": 1e-6}, "1e-06"),
        ({"betas": (0.9, 0.99)}, "0.99"),
        ({"bias_correction": False}, "F"),
    ):
        with pytest.raises(ExperimentError, match="this is not the experiment that .* recorded") as caught:
            recorder(twelve.path, runs.build(**changed), resume=True)
        assert word in str(caught.value)
    with pytest.raises(ExperimentError, match="clip"):
        recorder(twelve.path, resume=True, clip=1.0)
    assert runs.digest(twelve.path) == before


def test_a_checkpoint_of_another_run_is_not_gone_on_with(twelve, tmp_path):
    other = record(tmp_path / "other", 12, runs.build(lr=2e-2))
    for path in (other.path / "checkpoints").glob("00000012*"):
        shutil.copy(path, twelve.path / "checkpoints" / path.name)
    with pytest.raises(CheckpointError, match=f"belongs to run {other.manifest.run}, expected {twelve.manifest.run}"):
        recorder(twelve.path, resume=True)


def test_a_damaged_checkpoint_is_not_gone_on_with(twelve):
    path = twelve.path / "checkpoints" / "00000012.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    before = runs.digest(twelve.path)
    with pytest.raises(CheckpointError, match="00000012.safetensors .*cut off"):
        recorder(twelve.path, resume=True)
    assert runs.digest(twelve.path) == before
    assert record(twelve.path, 10, resume=8).last_step == 12  # the older one is offered by its number


def test_a_run_that_is_being_recorded_is_not_gone_on_with(twelve):
    """Two recorders would each log step 13 in the same segment, and the telemetry would be unreadable."""
    with recorder(twelve.path, resume=True) as first:
        first.step(next(first.experiment.sampler))
        before = runs.digest(twelve.path)
        with pytest.raises(RunError, match="is being recorded just now"):
            recorder(twelve.path, resume=True)
        assert runs.digest(twelve.path) == before
    assert record(twelve.path, 14, resume=True).last_step == 14


def test_a_new_run_is_taken_too_and_let_go_at_the_end(tmp_path):
    with recorder(tmp_path / "run") as first:
        first.step(next(first.experiment.sampler))
        first.checkpoint()
        with pytest.raises(RunError, match="is being recorded just now"):
            recorder(tmp_path / "run", resume=True)
    assert record(tmp_path / "run", 2, resume=True).last_step == 2


def test_a_refused_resume_does_not_keep_the_run(twelve):
    with pytest.raises(ExperimentError) as kept:  # as a notebook keeps the last traceback
        recorder(twelve.path, runs.build(eps=1.0), resume=True)
    assert record(twelve.path, 13, resume=True).last_step == 13 and kept.value


def test_a_torn_line_is_declared_and_kept(twelve, whole):
    """Killed while writing step 10: the checkpoint is older, the line unfinished."""
    path = twelve.path / "telemetry.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    kept = b"".join(lines[:10]) + lines[10][:77]
    path.write_bytes(kept)
    for file in (twelve.path / "checkpoints").glob("00000012*"):
        file.unlink()
    run = record(twelve.path, 12, resume=True)
    assert path.read_bytes().startswith(kept + b"\n")
    meta = [line for line in open_run(run.path).telemetry.lines if line.type == "meta"]
    assert [(line.segment, line.step) for line in meta] == [(0, 0), (1, 8)] and meta[1].torn_bytes == 77
    assert "unfinished" in run.telemetry.notices[0]
    assert checkpoint_bytes(run, 12, 1) == checkpoint_bytes(whole, 12)
    exact(run, 11)


# ------------------------------------------------------------------------------------------- changes between two steps


def changing(path, at, change, steps=12, **settings):
    """Records, and changes the experiment after step `at`, in a segment of its own."""
    with recorder(path, **settings) as recording:
        while recording.step_number < steps:
            recording.step(next(recording.experiment.sampler))
            if recording.step_number == at:
                change(recording.experiment)
                recording.open_segment()
    return open_run(path)


def halve(experiment):
    experiment.model.layers[1].weight = experiment.model.layers[1].weight * 0.5


def reset(experiment):
    experiment.optimizer.state["layers"][0]["weight"]["v"] = mx.zeros((4, 3))


def rewind(experiment):
    experiment.sampler.position = 1


@pytest.mark.parametrize(
    ("change", "lane"), [(halve, "weights"), (reset, "adam_v"), (rewind, "cursor"), (lambda experiment: None, None)]
)
def test_a_changed_state_is_gone_on_with_in_a_segment_of_its_own(tmp_path, change, lane):
    run = changing(tmp_path / "run", 6, change)
    assert [(entry.start, entry.parent) for entry in run.manifest.segments] == [(0, None), (6, 0)]
    assert run.checkpoints == [(0, 0), (4, 0), (6, 1), (8, 1), (12, 1)]
    assert run.seam(1) == ([lane] if lane else [])
    for step in (6, 7, 12):
        exact(run, step)
    traces = run.replay(range(5, 9), experiment=runs.build(), with_probe=False)  # over the seam
    assert [(trace.record.segment, trace.exact) for trace in traces] == [(0, True), (0, True), (1, True), (1, True)]
    assert any("segment 1 went on" in notice for notice in run.plan(7).notices) is bool(lane)


def test_a_resume_after_a_change_goes_on_from_the_changed_state(tmp_path):
    straight = changing(tmp_path / "straight", 6, halve)
    changing(tmp_path / "run", 6, halve, steps=6)  # nothing was performed after it
    run = record(tmp_path / "run", 12, resume=True)
    assert steps_of(run, 1) == steps_of(straight, 1) and len(run.manifest.segments) == 2
    changing(tmp_path / "other", 6, halve, steps=10)
    other = record(tmp_path / "other", 12, resume=6)
    assert {step: line["state"] for step, line in steps_of(other, 2).items()} == {
        step: line["state"] for step, line in steps_of(straight, 1).items()
    }
    exact(other, 8, segment=2)


def test_two_changes_at_one_step(tmp_path):
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(6):
            recording.step(batch)
            if recording.step_number == 3:
                for change in (halve, reset):
                    change(recording.experiment)
                    recording.open_segment()
    run = open_run(tmp_path / "run")
    assert [run.seam(segment) for segment in range(3)] == [[], ["weights"], ["adam_v"]]
    assert run.plan(4).checkpoint == (3, 2)
    assert all(trace.exact for trace in run.replay(range(2, 7), experiment=runs.build(), with_probe=False))


def test_thinning_spares_a_changed_state(tmp_path):
    run = changing(tmp_path / "run", 6, halve, save_every=2, keep_last=1)
    assert run.checkpoints == [(0, 0), (6, 0), (6, 1), (12, 1)]
    exact(run, 7)


def test_an_unrecorded_change_is_gone_on_with_but_not_quietly(tmp_path):
    """The recorder opens the segment itself; see `test_by_hand`."""
    with recorder(tmp_path / "run") as recording, pytest.warns(UserWarning, match="was changed between steps 3 and 4"):
        for batch in recording.batches(6):
            recording.step(batch)
            if recording.step_number == 3:
                halve(recording.experiment)
    run, other = open_run(tmp_path / "run"), changing(tmp_path / "other", 3, halve, steps=6)
    assert run.seam(1) == ["weights"] and steps_of(run, 1) == steps_of(other, 1)
    exact(run, 4)


def test_a_segment_may_be_opened_with_the_next_batch_drawn_already(tmp_path):
    """As in the body of `for batch in recorder.batches()`, before the step."""
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(12):
            if recording.step_number == 6:
                halve(recording.experiment)
                recording.open_segment()
            recording.step(batch)
    run, other = open_run(tmp_path / "run"), changing(tmp_path / "other", 6, halve)
    assert run.seam(1) == ["weights"] and steps_of(run, 1) == steps_of(other, 1)
    for step in (6, 7, 12):
        exact(run, step)


def test_a_segment_that_could_not_be_opened_takes_no_steps(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(8):
            recording.step(batch)
            if recording.step_number == 6:
                with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
                    patch.setattr("workbench.manifest.write_atomic", full)
                    recording.open_segment()
    run = open_run(tmp_path / "run")
    assert len(run.manifest.segments) == 1 and sorted(steps_of(run)) == list(range(1, 9))
    exact(run, 8)


def test_a_segment_whose_state_was_lost_before_its_first_step_has_no_seam(tmp_path, monkeypatch):
    """A process that dies while it saves the changed state: the next one goes on from the state that was left."""
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(6):
            recording.step(batch)
        recording.checkpoint()
        halve(recording.experiment)
        monkeypatch.setattr(recording._keeper, "save", lambda state, lanes: None)
        recording.open_segment()
    run = record(tmp_path / "run", 9, resume=True)
    assert [(entry.start, run.seam(entry.segment)) for entry in run.manifest.segments] == [(0, []), (6, [])]
    exact(run, 8)


@pytest.mark.parametrize(("change", "lane"), [(halve, "weights"), (reset, "adam_v")])
@pytest.mark.parametrize("resume", [True, 4])
def test_what_was_changed_after_a_resume_is_the_start_of_a_segment(twelve, resume, change, lane):
    with recorder(twelve.path, resume=resume) as recording:
        change(recording.experiment)
        for batch in recording.batches(14):
            recording.step(batch)
    run, start = open_run(twelve.path), 12 if resume is True else 4
    assert [(entry.start, run.seam(entry.segment)) for entry in run.manifest.segments] == [(0, []), (start, [lane])]
    assert (start, 0) in run.checkpoints and (start, 1) in run.checkpoints
    exact(run, start, segment=0)
    exact(run, start + 1, segment=1)
    exact(run, 14)


def test_a_rate_set_after_a_resume_is_replayed_and_opens_no_segment(twelve):
    with recorder(twelve.path, resume=True) as recording:
        recording.experiment.optimizer.learning_rate = 1e-4
        for batch in recording.batches(15):
            recording.step(batch)
    run = open_run(twelve.path)
    assert len(run.manifest.segments) == 1 and [run.line(step, 0).lr for step in (12, 13, 14)] == [0.01, 1e-4, 1e-4]
    for step in (13, 15):
        exact(run, step)


def test_a_rate_set_for_the_next_step_does_not_spoil_the_last_checkpoint(tmp_path):
    """As loops do that end each round with their scheduler."""

    def rounds(steps, **settings):
        with recorder(tmp_path / "run", save_every=0, **settings) as recording:
            for batch in recording.batches(steps):
                recording.step(batch)
                recording.experiment.optimizer.learning_rate = 0.01 / recording.step_number
        return open_run(tmp_path / "run")

    assert rounds(5).checkpoints == [(0, 0), (5, 0)]
    run = rounds(8, resume=True)
    assert run.checkpoints == [(0, 0), (5, 0), (8, 0)]
    assert all(trace.exact for trace in run.replay(range(1, 9), experiment=runs.build(), with_probe=False))


def test_a_checkpoint_asked_for_before_the_first_step(tmp_path):
    with recorder(tmp_path / "run") as recording, pytest.raises(RunError, match="before its first step"):
        recording.checkpoint()


class Dice(runs.Numbers):
    """A sampler that draws from MLX's random state, as many do."""

    def __next__(self):
        x, y = super().__next__()
        return x + np.array(mx.random.normal(x.shape)), y


def dice():
    experiment = runs.build()
    experiment.sampler = Dice()
    return experiment


def test_a_sampler_that_draws_random_numbers_is_replayed_and_gone_on_with(tmp_path):
    straight = record(tmp_path / "straight", 12, dice())
    record(tmp_path / "run", 6, dice())
    mx.random.seed(99)
    run = record(tmp_path / "run", 12, dice(), resume=True)
    assert steps_of(run) == steps_of(straight)
    traces = run.replay(range(1, 13), experiment=dice(), with_probe=False)
    assert all(trace.exact for trace in traces), [trace.sentence() for trace in traces]


def test_a_segment_opens_only_between_steps(tmp_path):
    recording = recorder(tmp_path / "run")
    with pytest.raises(RunError, match="before its first step or after its end"), recording:
        recording.open_segment()
    with recorder(tmp_path / "run") as recording:
        recording.step(next(recording.experiment.sampler))
    before = runs.digest(tmp_path / "run")
    with pytest.raises(RunError, match="before its first step or after its end"):
        recording.open_segment()
    assert runs.digest(tmp_path / "run") == before


# ----------------------------------------------------------------------------------------------------- spikes and lines


def test_detection_goes_on_over_a_resume_as_if_there_were_no_break(tmp_path):
    """Batches blown up at 6 and 10: the window (4) is full before each only if it outlives the resume at 7."""

    class Blown(runs.Numbers):
        def __next__(self):
            x, y = super().__next__()
            return x, y + np.float32(1e3 if self.position in (6, 10) else 0)

    def build():
        experiment = runs.build()
        experiment.sampler = Blown()
        return experiment

    straight = record(tmp_path / "straight", 12, build())
    broken = tmp_path / "broken"
    record(broken, 7, build())
    broken = record(broken, 12, build(), resume=True)
    assert [line["spike_rule"] for line in steps_of(straight).values()].count("loss_factor") == 2
    assert steps_of(broken) == steps_of(straight)
    assert [line["ma"] for line in steps_of(straight).values()][0] is None
    logged = [step for step, line in steps_of(broken).items() if line["spike"]]
    assert broken.spikes()["step"].tolist() == logged  # the reader and the trainer agree
    back = record(tmp_path / "broken", 12, build(), resume=8)
    assert {step: line["ma"] for step, line in steps_of(back, 1).items()} == {
        step: steps_of(straight)[step]["ma"] for step in (9, 10, 11, 12)
    }


def test_detection_can_be_switched_off(tmp_path):
    run = record(tmp_path / "run", 2, spikes=None)
    assert run.manifest.spikes is None
    assert all("spike" not in line and "ma" not in line for line in steps_of(run).values())


def test_validation_lines_stand_beside_their_step(tmp_path):
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(3):
            recording.step(batch)
            if recording.step_number == 2:
                recording.log_validation(0.5)
        recording.log_validation(math.nan)
    run = open_run(tmp_path / "run")
    found = [(line["step"], line["val_loss"]) for line in runs.lines(run.path) if line["type"] == "val"]
    assert found == [(2, 0.5), (3, None)]
    assert run.steps["val_loss"].tolist()[1] == 0.5
    last = runs.lines(run.path)[-1]
    assert (last["type"], last["step"], last["segment"]) == ("done", 3, 0)


def test_a_nan_loss_is_recorded_with_its_bits_and_replays(tmp_path):
    class Holey(runs.Numbers):
        def __next__(self):
            x, y = super().__next__()
            return x, y * np.float32(np.nan if self.position == 4 else 1)

    def build():
        experiment = runs.build()
        experiment.sampler = Holey()
        return experiment

    run = record(tmp_path / "run", 5, build())
    line = steps_of(run)[4]
    assert line["loss"] is None and np.isnan(np.array(int(line["loss_bits"], 16), np.uint32).view(np.float32))
    assert line["spike_rule"] == "non_finite" and None in line["per_layer_grad_norms"]
    assert math.isnan(run.steps["loss"][3]) and run.steps["loss_recorded"][3]
    assert run.spikes()["step"].tolist()[0] == 4
    trace = run.replay(4, experiment=build())
    assert trace.exact and math.isnan(trace.loss)
    runs.strict(trace.path.read_bytes())


def test_a_copy_of_the_telemetry(tmp_path, whole):
    copy = tmp_path / "logs" / "copy.jsonl"
    run = record(tmp_path / "run", 3, copy_telemetry_to=copy)
    assert copy.read_bytes() == (run.path / "telemetry.jsonl").read_bytes()
    run = record(tmp_path / "run", 4, copy_telemetry_to=copy, resume=True)
    assert copy.read_bytes() == (run.path / "telemetry.jsonl").read_bytes()


def test_the_copy_can_not_be_the_original_or_a_folder(tmp_path):
    """Every line would stand twice; and a run whose recording could not begin is none."""
    path = tmp_path / "run"
    for copy, error in ((path / "telemetry.jsonl", RunError), (tmp_path, ExperimentError)):
        with pytest.raises(error), recorder(path, copy_telemetry_to=copy) as recording:
            recording.step(next(recording.experiment.sampler))
        assert not (path / "run.json").exists()
    assert record(path, 1).last_step == 1


def test_a_checkpoint_that_contradicts_the_telemetry_is_not_resumed_from(tmp_path):
    """Its digests are right: only what the run logged at that step says that it is another state."""
    path = tmp_path / "run"
    record(path, 6)
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 6)
    runs.edit_line(path, 6, state=line["state"] | {"adam_m": "0" * 32})
    with pytest.raises(CheckpointError, match=r"checkpoint 6 of .* state.adam_m differ"):
        recorder(path, resume=True)
    assert record(path, 8, resume=4).last_step == 8


def test_thinning_goes_on_after_a_resume(tmp_path):
    """The policy stands in the manifest, so that nothing has to be said again."""
    done = runs.here("train", "--corpus", runs.corpus(), "--steps", 6, "--out", tmp_path / "run", *runs.FLAGS,
                     "--save-every", 2, "--keep-last", 1)  # fmt: skip
    assert done.code == 0, done.err
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 6]
    done = runs.here("train", "--out", tmp_path / "run", "--resume", "--steps", 12)
    assert done.code == 0, done.err
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 12]


def test_norms_made_in_another_way_are_not_compared(tmp_path):
    run = record(tmp_path / "run", 3)
    runs.edit_json(run.path / "run.json", lambda manifest: manifest.update(norms="some older order"))
    trace = open_run(run.path).replay(2, experiment=runs.build(), with_probe=False)
    assert trace.exact and any("some older order" in notice for notice in trace.notices)
    assert trace.record.items["adam_v_norms"].verdict == "unverified"
    assert trace.record.items["state.adam_v"].verdict == "exact"
