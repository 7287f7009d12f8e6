"""Unstable steps: noted, taken back if asked for, and every step on either side of a rollback replays bit for bit."""

import logging
import math
import statistics

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from recordings import checkpoint_bytes, steps_of

from workbench import Recorder, open_run
from workbench.errors import ExperimentError, TrainingUnstable
from workbench.experiment import Experiment, StepOptions
from workbench.rate_scale import Scaled, scale_schedules
from workbench.recovery import Recovery, Row, Stability

QUICK = Recovery("on", window=4, back=3)


class Odd(runs.Numbers):
    """Batches whose targets are far too large, or not numbers, at some positions."""

    def __init__(self, at, factor=1e3):
        super().__init__(64)  # enough rows for steady gradient norms
        self.at, self.factor = at, factor

    def __next__(self):
        x, y = super().__next__()
        return x, y * np.float32(self.factor if self.position in self.at else 1)


def build(at=(12,), factor=1e3, schedule=False, compile=False, rate=1e-2):
    plain = runs.build()
    optimizer = optim.AdamW(optim.cosine_decay(rate, 60) if schedule else rate, bias_correction=True)
    return Experiment(plain.model, optimizer, plain.loss_fn, Odd(at, factor), StepOptions(compile=compile))


def record(path, steps, experiment, *, compile=False, **settings):
    settings = {"auto_rollback": QUICK, "save_every": 4, "spikes": None} | settings
    with Recorder(path, *runs.parts(experiment), compile=compile, **settings) as recording:
        for batch in recording.batches(steps):
            recording.step(batch)
    return open_run(path)


def replays(run, segment, steps, make):
    found = run.replay(steps, segment=segment, experiment=make(), with_probe=False)
    assert all(trace.exact for trace in found), [trace.sentence() for trace in found]


# ------------------------------------------------------------------------------------------------------------ the rule


def test_the_rule_is_that_of_a_slow_reference():
    draw = np.random.default_rng(0)
    norms = np.exp(draw.normal(size=400)) * np.where(draw.random(400) < 0.05, 20, 1)
    judged, fired = Stability(Recovery(window=50)), []
    for number, norm in enumerate(norms.tolist()):
        past = norms[max(0, number - 50) : number].tolist()
        expected = len(past) == 50 and norm > 3 * statistics.median(past)
        assert (judged.judge(1.0, norm) is not None) == expected
        fired.append(expected)
    assert 5 < sum(fired) < 100


@pytest.mark.parametrize(("loss", "norm"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)])
def test_what_is_not_finite_is_unstable_from_the_first_step(loss, norm):
    assert "is" in Stability(Recovery()).judge(loss, norm)
    assert Stability(Recovery("off")).judge(loss, norm) is None


def test_times_in_a_row():
    row = Row()
    assert [row.add(step, 10) for step in (100, 95, 105, 115, 126, 400)] == [1, 2, 3, 4, 1, 1]


@pytest.mark.parametrize(
    "given",
    [{"mode": "yes"}, {"factor": 1.0}, {"window": 0}, {"back": 0}, {"rate": 0.0}, {"rate": 1.5}, {"limit": 0}],
)
def test_settings_out_of_range(given):
    with pytest.raises(ExperimentError, match="expected"):
        Recovery(**given)


def test_a_stream_without_a_cursor_can_not_go_back(tmp_path):
    experiment = runs.build()
    with pytest.raises(ExperimentError, match="can draw them again"):
        Recorder(tmp_path, experiment.model, experiment.optimizer, experiment.loss_fn, iter([]), auto_rollback="on")


# ------------------------------------------------------------------------------------------------------- warn, and off


def test_by_default_it_is_noted_and_the_state_before_it_kept(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "workbench"):
        run = record(tmp_path / "run", 16, build(), auto_rollback=Recovery(window=4), save_every=0)
    assert "step 12 is unstable: gradient norm" in caplog.text
    assert [step for step, line in steps_of(run).items() if "unstable" in line] == [12]
    assert (11, 0) in run.checkpoints and len(run.manifest.segments) == 1 and run.rollbacks().empty
    other = record(tmp_path / "off", 16, build(), auto_rollback="off", save_every=0)
    assert [step for step, _ in other.checkpoints] == [0, 16]
    same = {step: {k: v for k, v in line.items() if k != "unstable"} for step, line in steps_of(run).items()}
    assert same == steps_of(other)  # judging moves no bit


def test_a_run_with_rough_gradients_is_not_told_of_each(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "workbench"):
        run = record(tmp_path / "run", 60, build(()), auto_rollback=Recovery(window=3, factor=1.01), save_every=0)
    said = [message for message in caplog.messages if "is unstable" in message]
    assert len(said) == 5 and said[-1].endswith("further ones are noted in the telemetry only")
    assert sum("unstable" in line for line in steps_of(run).values()) > 10


# ------------------------------------------------------------------------------------------------------------- rollback


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("compile", [False, True])
def test_a_spike_is_taken_back_at_half_the_rate_and_all_of_it_replays(tmp_path, schedule, compile):
    """The batch of step 12 blows up, and blows up again at half the rate: two rollbacks, then without it."""

    def make(at=(12,)):
        return build(at, schedule=schedule, compile=compile)

    path = tmp_path / "run"
    experiment = make()
    lines = {}
    with Recorder(path, *runs.parts(experiment), compile=compile, auto_rollback=QUICK, spikes=None) as recording:
        for batch in recording.batches(24):
            recording.step(batch)
            if recording.rolled_back is not None:
                lines[recording.segment] = (recording.rolled_back, recording.step_number, recording.rate_factor)
                if len(lines) == 2:
                    experiment.sampler.at = ()  # someone mends the data
    run = open_run(path)
    assert lines == {1: (12, 9, 0.5), 2: (12, 9, 0.25)}
    assert run.rollbacks()[["unstable_step", "left", "step", "segment", "rate_factor", "in_a_row"]].values.tolist() == [
        [12, 0, 9, 1, 0.5, 1],
        [12, 1, 9, 2, 0.25, 2],
    ]
    assert [(entry.start, entry.parent, entry.rate_factor) for entry in run.manifest.segments] == [
        (0, None, 1.0),
        (9, 0, 0.5),
        (9, 0, 0.25),
    ]
    assert sorted(steps_of(run, 2)) == list(range(10, 25)) and all(run.seam(segment) == [] for segment in (1, 2))
    # Rates: those of the undisturbed run, times the factor.
    whole = steps_of(record(tmp_path / "whole", 24, make(()), compile=compile, auto_rollback="off"))
    for segment, factor in ((1, 0.5), (2, 0.25)):
        for step, line in steps_of(run, segment).items():
            assert np.float32(line["lr"]) == np.float32(whole[step]["lr"]) * np.float32(factor)
    # The step that was taken back, from the very state before it; and across each seam.
    assert (11, 0) in run.checkpoints
    assert run.plan(12, 0).rolled == 0
    replays(run, 0, range(7, 13), make)
    replays(run, 1, range(8, 13), make)
    replays(run, 2, range(8, 25), lambda: make(()))
    again = make()
    for segment in (1, 0):  # an experiment that a replay has used can be used for another segment
        replays(run, segment, [10, 12], lambda: again)


def test_left_out_instead(tmp_path):
    settings = Recovery("on", window=4, back=3, skip_batch=True)
    run = record(tmp_path / "run", 20, build(), auto_rollback=settings)
    assert run.rollbacks()[["unstable_step", "rate_factor", "skip_batch"]].values.tolist() == [[12, 1.0, True]]
    plain = steps_of(record(tmp_path / "plain", 20, build(())))
    without = steps_of(run, 1)
    for step in (10, 11):  # as before it
        assert without[step]["loss_bits"] == plain[step]["loss_bits"] and without[step]["lr"] == plain[step]["lr"]
    assert without[12]["batch_hash"] == plain[13]["batch_hash"] and without[12]["before"] == {"skip": 1}
    replays(run, 0, range(10, 13), build)
    replays(run, 1, range(10, 21), build)


def test_the_third_in_a_row_ends_it_with_the_state_that_it_went_back_to(tmp_path):
    with pytest.raises(TrainingUnstable, match="training is unstable; investigate: step 12 .* rollback 3 in a row"):
        record(tmp_path / "run", 24, build())
    run = open_run(tmp_path / "run")
    assert run.rollbacks()["in_a_row"].tolist() == [1, 2, 3]
    assert run.manifest.segments[-1].rate_factor == 0.125 and runs.lines(run.path)[-1]["type"] != "done"
    assert (9, 0) in run.checkpoints
    run = record(run.path, 14, build(()), resume=True)  # once the data is mended
    assert len(run.manifest.segments) == 4 and sorted(steps_of(run, 3)) == list(range(10, 15))
    assert np.float32(steps_of(run, 3)[10]["lr"]) == np.float32(0.01) * np.float32(0.125)
    replays(run, 3, range(10, 15), lambda: build(()))


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_early_on_goes_back_to_the_beginning(tmp_path, factor):
    settings = Recovery("on", skip_batch=True)
    run = record(tmp_path / "run", 8, build((3,), factor), auto_rollback=settings, save_every=0)
    assert run.rollbacks()[["unstable_step", "step"]].values.tolist() == [[3, 0]]
    assert np.isfinite(run.replay(8, experiment=build((3,), factor), with_probe=False, segment=1).loss)
    replays(run, 0, [1, 2, 3], lambda: build((3,), factor))
    replays(run, 1, range(1, 9), lambda: build((3,), factor))


@pytest.mark.parametrize("schedule", [False, True])
@pytest.mark.parametrize("stop", [9, 10, 14])
def test_a_resume_after_a_rollback_goes_on_as_if_there_had_been_no_break(tmp_path, schedule, stop):
    """Ended right after it, before or after the batch to leave out."""
    settings = Recovery("on", window=4, back=3, rate=0.5, skip_batch=stop != 9)

    def make():
        return build((12,) if settings.skip_batch else (12,), schedule=schedule)

    def until(path, last, **more):
        experiment = make()
        with Recorder(path, *runs.parts(experiment), compile=False, auto_rollback=settings, spikes=None, **more) as it:
            for batch in it.batches(last):
                it.step(batch)
                if it.segment == 1 and it.step_number >= stop and last == 18:
                    return
                if it.rolled_back and not settings.skip_batch:
                    it.experiment.sampler.at = ()

    until(tmp_path / "whole", 20)
    until(tmp_path / "run", 18)
    experiment = build((12,) if settings.skip_batch else (), schedule=schedule)
    run = record(tmp_path / "run", 20, experiment, auto_rollback=settings, resume=True)
    whole = open_run(tmp_path / "whole")
    assert len(run.manifest.segments) == len(whole.manifest.segments) == 2
    assert steps_of(run, 1) == steps_of(whole, 1)
    assert checkpoint_bytes(run, 20, 1) == checkpoint_bytes(whole, 20, 1)


def test_a_state_on_the_disk_will_do_where_none_is_held(tmp_path):
    run = record(tmp_path / "run", 11, build(), save_every=4)
    settings = Recovery("on", window=4, back=3, skip_batch=True)
    run = record(run.path, 14, build(), resume=True, auto_rollback=settings)
    assert run.rollbacks()[["unstable_step", "step", "segment"]].values.tolist() == [[12, 8, 1]]
    replays(run, 1, range(9, 15), build)


def test_a_fork_of_a_run_that_was_taken_back_has_its_rate(tmp_path):
    import workbench as wb

    def make():
        return build((), schedule=True)

    experiment = build(schedule=True)
    with Recorder(tmp_path / "run", *runs.parts(experiment), compile=False, auto_rollback=QUICK, spikes=None) as it:
        for batch in it.batches(16):
            it.step(batch)
            if it.rolled_back is not None:
                experiment.sampler.at = ()
        lanes = it._standing.at.lanes
    point = wb.fork_point(tmp_path / "run", 12, segment=1, experiment=make())
    fork = make()
    with Recorder(tmp_path / "fork", *runs.parts(fork), compile=False, fork=point, spikes=None) as it:
        for batch in it.batches(16):
            it.step(batch)
        assert it._standing.at.lanes == lanes
    replays(open_run(tmp_path / "fork"), 0, range(13, 17), make)


def test_a_folder_that_can_not_be_written_keeps_training_where_it_is(tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(28, "No space left on device")

    experiment = build()
    with Recorder(tmp_path / "run", *runs.parts(experiment), compile=False, auto_rollback=QUICK, spikes=None) as it:
        for batch in it.batches(14):
            with monkeypatch.context() as patch:
                if it.step_number == 11:
                    patch.setattr("workbench.manifest.write_atomic", full)
                    with pytest.warns(UserWarning, match="step 12 is unstable, and was not taken back: .*No space"):
                        it.step(batch)
                else:
                    it.step(batch)
            assert it.rolled_back is None or it.step_number < 12
    run = open_run(tmp_path / "run")
    assert run.line(12, 0) is not None and run.line(13, 0) is not None


# ------------------------------------------------------------------------------------------------------- learning rates


def test_schedules_are_scaled_once_and_can_be_put_back():
    schedule = optim.cosine_decay(1e-2, 10)
    both = optim.MultiOptimizer([optim.AdamW(schedule), optim.SGD(0.1)], [lambda path, weight: "bias" in path])
    scale_schedules(both, 0.5)
    scale_schedules(both, 0.25)
    found = both.optimizers[0]._schedulers["learning_rate"]
    assert isinstance(found, Scaled) and found.schedule is schedule
    assert found(mx.array(3)).item() == (schedule(mx.array(3)) * 0.25).item()
    scale_schedules(both, 1.0)
    assert both.optimizers[0]._schedulers["learning_rate"] is schedule and not both.optimizers[1]._schedulers


# ------------------------------------------------------------------------------------------------- the command line


def test_training_says_it_and_goes_on_or_ends(tmp_path):
    def train(name, *more):
        return runs.here("train", "--corpus", runs.corpus(), "--steps", 70, "--out", tmp_path / name, *runs.FLAGS,
                         "--fault", "garbage@60:rows=4", "--no-spike-detect", "--save-every", 0, *more)  # fmt: skip

    done = train("off", "--auto-rollback", "off")
    assert done.code == 0
    norms = open_run(tmp_path / "off").steps["grad_norm"].to_numpy()
    fires = bool(norms[59] > 3 * np.median(norms[9:59]))
    done = train("on", "--rollback-skip-batch")
    assert done.code == 0
    run = open_run(tmp_path / "on")
    assert run.manifest.recovery["mode"] == "on" and run.manifest.recovery["skip_batch"]
    assert fires == (60 in run.rollbacks()["unstable_step"].tolist())
    refused = train("odd", "--rollback-skip-batch", "--auto-rollback", "warn")
    assert "goes with --auto-rollback on" in refused.sentence
