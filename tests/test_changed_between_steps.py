"""State that is changed between two steps is noticed, and gone on with in a segment of its own."""

import mlx.core as mx
import numpy as np
import pytest
import runs
from recordings import exact, record, recorder, steps_of

from workbench import open_run
from workbench.errors import RunError

pytest_plugins = ["recording_fixtures"]


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
