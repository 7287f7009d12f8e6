"""Python values that a step reads and that change while it is recorded: what is said of each, once, by its name."""

import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse

import workbench as wb

factor = 1.0
unread = 0


class Job:
    """A step that multiplies its loss by a global variable, which only a function written inside it names."""

    def __init__(self):
        self.model, self.optimizer = mlp(0.1), optim.AdamW(1e-2)
        self.unread = None

    def step(self, x, y):
        passes = nn.value_and_grad(self.model, lambda model, x, y: mse(model, x, y) * factor)
        loss, gradients = passes(self.model, x, y)
        self.optimizer.update(self.model, gradients)
        return loss if self.unread is None else None  # an attribute with the name of a variable


class Sloped(nn.Module):
    """Its activation has a slope that is a Python number."""

    def __init__(self):
        super().__init__()
        self.first, self.slope, self.last = nn.Linear(4, 8), 0.1, nn.Linear(8, 1)

    def __call__(self, x):
        return self.last(nn.leaky_relu(self.first(x), self.slope))


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setitem(globals(), "factor", 1.0)
    monkeypatch.setitem(globals(), "unread", 0)


def said(path, change, job=None, steps=9, **options):
    """What is warned of while `change(job, step)` is called before each step; and the losses."""
    job = job or Job()
    sampler, losses = Points(), []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        options = {"step_fn": job.step, "save_every": 4, "spikes": None} | options
        with wb.Recorder(path, job.model, job.optimizer, mse, sampler, **options) as recorder:
            for batch in recorder.batches(steps):
                change(job, recorder.step_number + 1)
                losses.append(recorder.step(batch))
    return [str(one.message) for one in found], losses


def doubled(job, step):
    globals()["factor"] = 1.0 if step < 6 else 2.0
    globals()["unread"] = step


def plain(change, steps=9):
    job, sampler, losses = Job(), Points(), []
    for step in range(1, steps + 1):
        change(job, step)
        losses.append(job.step(*(mx.array(part) for part in next(sampler))).item())
    return losses


def test_a_plain_loop_is_recorded_as_it_trains_and_told_what_will_not_replay(tmp_path):
    found, losses = said(tmp_path / "run", doubled)
    assert losses == plain(doubled)
    (only,) = found
    assert only.startswith(
        "step_fn.factor is 2.0 now, but no checkpoint holds it, and a replay starts with 1.0, its first value: steps "
        "after 4 that depend on it will not replay exactly. Hand it over in `extra`"
    )
    globals()["factor"] = 1.0
    job = Job()
    run, own = wb.open_run(tmp_path / "run"), wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step)
    assert [run.replay(step, experiment=own, with_probe=False).exact for step in (5, 6)] == [True, False]


def test_a_compiled_step_goes_on_with_what_it_read_and_says_so(tmp_path):
    found, losses = said(tmp_path / "run", doubled, compile=True)
    assert losses == said(tmp_path / "other", lambda job, step: globals().update(factor=1.0), compile=True)[1]
    (only,) = found
    assert only.startswith(
        "step_fn.factor is 2.0 now, but the compiled step read it when it was traced, as 1.0, and goes on with that"
    )


def test_a_value_that_is_set_between_the_recorder_and_the_first_step(tmp_path):
    found, _ = said(tmp_path / "run", lambda job, step: globals().update(factor=3.0))
    (only,) = found
    assert only.startswith("step_fn.factor is 3.0 at the first step, and was 1.0 when the recorder was made.")


def test_layers_that_are_frozen_between_the_recorder_and_the_first_step(tmp_path):
    found, _ = said(tmp_path / "run", lambda job, step: job.model.layers[0].freeze(keys="bias"))
    (only,) = found
    words = "other parameters are trainable at the first step than when the recorder was made (layers.0.bias)"
    assert only.startswith(words)


@pytest.mark.parametrize("compiled", [True, False])
def test_layers_that_are_frozen_on_the_way_are_named(tmp_path, compiled):
    def freeze(job, step):
        if step == 6:
            job.model.layers[0].freeze()

    found, _ = said(tmp_path / "run", freeze, compile=compiled)
    (only,) = found
    assert "other parameters are trainable now than at the start (layers.0.bias, layers.0.weight)" in only
    assert ("the compiled step was traced with those of the start" in only) is compiled
    assert ("steps after 5 will not replay exactly" in only) is not compiled


def test_numbers_in_the_model_and_the_optimizer_are_seen(tmp_path):
    job = Job()
    job.model = Sloped()

    def change(job, step):
        if step == 3:
            job.model.slope, job.optimizer.eps = 0.2, 1e-6

    found, _ = said(tmp_path / "run", change, job)
    assert [one.partition(",")[0] for one in found] == [
        "model.slope is 0.2 now",
        "optimizer.eps is 1e-06 now",
    ]


def test_what_does_not_change_or_is_not_read_is_not_spoken_of(tmp_path):
    assert said(tmp_path / "run", lambda job, step: globals().update(unread=step))[0] == []


class Validating(Job):
    """Keeps its best loss, which only the loop reads, and a decay, which the step reads through a method."""

    def __init__(self):
        super().__init__()
        self.best, self.decay, self.settings = float("inf"), 1.0, {"scale": 1.0}

    def decayed(self, loss):
        return loss * self.decay * self.settings["scale"]

    def step(self, x, y):
        return self.decayed(super().step(x, y))

    def validate(self, step):
        self.best = min(self.best, 1.0 / step)


def test_what_only_the_loop_reads_is_not_spoken_of(tmp_path):
    job = Validating()
    assert said(tmp_path / "run", lambda job, step: job.validate(step), job)[0] == []
    assert job.best == 1 / 9

    def change(job, step):
        job.validate(step)
        if step == 6:
            job.decay, job.settings["scale"] = 0.5, 2.0

    found, _ = said(tmp_path / "other", change, Validating())
    assert [one.partition(" is ")[0] for one in found] == ["step_fn.self.decay", "step_fn.self.settings.scale"]


def test_code_that_may_read_anything_makes_it_a_guess(tmp_path):
    class Dynamic(Validating):
        def decayed(self, loss):
            return loss * (1.0 if vars(self)["decay"] else 2.0)

    found, _ = said(tmp_path / "run", lambda job, step: step == 1 or job.validate(step), Dynamic())
    (only,) = found
    assert only.startswith("step_fn.self.best is ") and "may not, if they depend on it, replay exactly" in only


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_left_in_evaluation_mode_is_one_sentence(tmp_path, compiled):
    def validate(job, step):
        job.model.eval()
        if step != 6:
            job.model.train()

    (only,) = said(tmp_path / "run", validate, compile=compiled)[0]
    assert only.startswith("the model is in evaluation mode since step 5")
    assert "Call model.train() before the next step" in only
    assert said(tmp_path / "other", lambda job, step: (job.model.eval(), job.model.train()))[0] == []


def test_what_is_noticed_late_is_kept_and_a_replay_that_differs_recalls_it(tmp_path):
    def freeze(job, step):
        if step == 6:
            job.model.layers[0].freeze()

    said(tmp_path / "run", freeze)
    run = wb.open_run(tmp_path / "run")
    (line,) = [line for line in run.telemetry.lines if isinstance(line.since, int)]
    assert (line.step, line.since) == (6, 5) and line.remarks[0].startswith("other parameters are trainable now")
    job = Job()
    own = wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step)
    notices = {step: run.replay(step, experiment=own, with_probe=False).notices for step in (5, 7)}
    assert not any("trainable" in one for one in notices[5])
    (recalled,) = [one for one in notices[7] if "trainable" in one]
    assert "steps after 5 will not replay exactly" in recalled and recalled.endswith("That is the likely reason.")


def test_after_a_resume_a_value_is_spoken_of_once(tmp_path):
    said(tmp_path / "run", lambda job, step: None, steps=4)
    found, _ = said(tmp_path / "run", lambda job, step: globals().update(factor=3.0), resume=True)
    (only,) = found
    assert only.startswith("step_fn.factor is 3.0 at the first step, and was 1.0 when the recorder was made.")
