"""The state before a spike is there, whatever `save_every` is; holding it moves no bit and never stops a training."""

import mlx.core as mx
import pytest
import runs
from recordings import record, recorder, steps_of

from workbench import blackbox, open_run
from workbench.blackbox import BlackBox
from workbench.checkpoints import checkpoint_writer
from workbench.errors import ExperimentError
from workbench.memory import state_size


def spiking(path, at=(8,), steps=14, rate=30.0, **settings):
    """A recorded run whose update number `at` has a learning rate far too high, so that the loss of the next spikes."""
    with recorder(path, save_every=0, **settings) as recording:
        usual = recording.experiment.optimizer.learning_rate
        for number, batch in enumerate(recording.batches(steps), start=1):
            recording.experiment.optimizer.learning_rate = mx.array(rate) if number in at else usual
            recording.step(batch)
    return open_run(path)


def test_a_spike_replays_without_rolling_forward(tmp_path):
    run = spiking(tmp_path / "run")
    step = int(run.spikes()["step"].iloc[0])
    assert step == 9
    assert [step for step, _ in run.checkpoints] == [0, 8, 14]
    trace = run.replay(9, experiment=runs.build(), with_probe=False)
    assert trace.exact and trace.record.rolled == 0
    # It is the state that rolling forward reaches, too.
    rolled = run.replay(9, experiment=runs.build(), with_probe=False, checkpoint=0)
    assert rolled.exact and rolled.record.rolled == 8


def test_of_a_run_that_stays_nan_only_the_first_state_is_kept(tmp_path):
    run = spiking(tmp_path / "run", rate=float("inf"))
    assert (run.steps["loss"].isna()).sum() >= 4
    assert [step for step, _ in run.checkpoints] == [0, 8, 14]


def test_not_more_than_asked_for(tmp_path):
    at = (8, 20)
    both = spiking(tmp_path / "both", at, 24)
    flagged = [int(step) for step in both.spikes()["step"]]
    assert [step for step, _ in both.checkpoints] == [0, *(step - 1 for step in flagged), 24] and len(flagged) >= 2
    one = spiking(tmp_path / "one", at, 24, black_box=1)
    assert [step for step, _ in one.checkpoints] == [0, flagged[0] - 1, 24]
    none = spiking(tmp_path / "none", at, 24, black_box=0)
    assert [step for step, _ in none.checkpoints] == [0, 24]
    with pytest.raises(ExperimentError, match="black_box is -1; expected a whole number, 0 or more"):
        recorder(tmp_path / "less", black_box=-1)


def test_holding_the_state_moves_no_bit(tmp_path):
    held, free = (record(tmp_path / name, 9, black_box=limit) for name, limit in (("held", 8), ("free", 0)))
    assert steps_of(held) == steps_of(free)


def test_thinning_keeps_it_and_a_resumed_run_knows_it(tmp_path):
    path = tmp_path / "run"
    spiking(path, keep_last=1)
    with recorder(path, resume=True, save_every=2, keep_last=1) as recording:
        for batch in recording.batches(20):
            recording.step(batch)
    assert [step for step, _ in open_run(path).checkpoints] == [0, 8, 20]


@pytest.mark.parametrize("save_every", [3, 4])  # of which 8, the state before the spike, is no multiple, and one
def test_thinning_keeps_it_where_it_was_due_anyway(tmp_path, save_every):
    with recorder(tmp_path / "run", save_every=save_every, keep_last=1) as recording:
        usual = recording.experiment.optimizer.learning_rate
        for number, batch in enumerate(recording.batches(20), start=1):
            recording.experiment.optimizer.learning_rate = mx.array(30.0) if number == 8 else usual
            recording.step(batch)
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 8, 20]


def test_a_resume_does_not_keep_the_same_state_again(tmp_path):
    def gone_on(path, resume):
        with recorder(path, resume=resume, save_every=0) as recording:
            for batch in recording.batches(16):
                recording.step(batch)
        return open_run(path).checkpoints

    spiking(tmp_path / "nan", rate=float("inf"))  # NaN from step 9 on: state 8 is there
    assert gone_on(tmp_path / "nan", True) == [(0, 0), (8, 0), (14, 0), (16, 0)]
    spiking(tmp_path / "run")
    found = gone_on(tmp_path / "run", 8)  # step 9 is a spike again, now of segment 1, from the very same state
    assert open_run(tmp_path / "run").line(9, 1).loss is not None and (8, 1) not in found


def test_a_disk_that_is_full_stops_no_training(tmp_path, monkeypatch):
    real = checkpoint_writer.write

    def full(state, *args, **options):
        if state.step == 8:
            raise OSError(28, "No space left on device")
        return real(state, *args, **options)

    monkeypatch.setattr(checkpoint_writer, "write", full)
    with pytest.warns(UserWarning, match="state 8, before a spike, was not saved to .*No space left"):
        run = spiking(tmp_path / "run")
    assert run.last_step == 14 and [step for step, _ in run.checkpoints] == [0, 14]


def test_a_state_larger_than_a_quarter_of_memory_is_not_held(monkeypatch):
    experiment = runs.build()
    experiment.prepare()
    size = state_size(experiment)
    monkeypatch.setattr(blackbox, "memory", lambda: 4 * size)
    assert BlackBox.for_experiment(experiment, 8) == BlackBox(8, size)
    monkeypatch.setattr(blackbox, "memory", lambda: 4 * size - 1)
    assert not BlackBox.for_experiment(experiment, 8).on
