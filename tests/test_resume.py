"""A resumed run is equal to one without a break, bit for bit; where it goes back, it opens a segment."""

import shutil

import pytest
import runs
from recordings import checkpoint_bytes, exact, record, recorder, steps_of

from workbench import open_run
from workbench.errors import CheckpointError, ExperimentError, RunError

pytest_plugins = ["recording_fixtures"]


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
