"""A recording that is interrupted: no half step is saved, and no line or checkpoint is lost."""

import os
import signal

import pytest
import runs
from recordings import checkpoint_bytes, exact, record, recorder, steps_of

from workbench import open_run

pytest_plugins = ["recording_fixtures"]


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

    monkeypatch.setattr("workbench.lines.writer.os.write", filling)
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


@pytest.mark.parametrize("presses", [1, 2])
def test_the_first_ctrl_c_in_a_with_waits_for_the_step_and_the_second_does_not(tmp_path, capfd, presses):
    experiment = runs.build()
    loss, began, ended = experiment.loss_fn, [], []

    def pressed(model, x, y):
        began.append(None)
        for _ in range(presses if len(began) > 5 else 0):
            signal.raise_signal(signal.SIGINT)
        found = loss(model, x, y)
        ended.append(None)
        return found

    experiment.loss_fn = pressed
    before = signal.getsignal(signal.SIGINT)
    with (
        pytest.raises(KeyboardInterrupt),
        recorder(tmp_path / "run", experiment, save_every=0, self_check=False) as recording,
    ):
        for batch in recording.batches(12):
            recording.step(batch)
    assert signal.getsignal(signal.SIGINT) is before
    assert open_run(tmp_path / "run").checkpoints == [(0, 0), (6, 0)][: 3 - presses]  # half a step is not saved
    assert len(ended) == len(began) - (presses - 1)
    assert capfd.readouterr().err.count("finishing this step and saving it; once more stops at once") == 1


def test_a_handler_of_the_users_own_is_called_at_once_and_so_is_pythons_outside_of_a_with(tmp_path):
    experiment, other, called, loss = runs.build(), runs.build(), [], runs.build().loss_fn

    def pressed(model, x, y):
        signal.raise_signal(signal.SIGINT)
        called.append("loss")
        return loss(model, x, y)

    before = signal.signal(signal.SIGINT, lambda number, frame: called.append("handler"))
    try:
        experiment.loss_fn = other.loss_fn = pressed
        with recorder(tmp_path / "run", experiment, self_check=False) as recording:
            recording.step(next(recording.batches()))
        assert called == ["handler", "loss"]
    finally:
        signal.signal(signal.SIGINT, before)
    recording = recorder(tmp_path / "other", other, self_check=False)
    with pytest.raises(KeyboardInterrupt):
        recording.step(next(recording.batches()))
    assert len(called) == 2
