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
    assert ("steps after 4 will not replay exactly" in only) is not compiled


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
