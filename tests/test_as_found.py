"""A replay in the middle of a training, with the very objects that are being trained, leaves no trace in it."""

import warnings

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from recordings import SPIKES, checkpoint_bytes, steps_of

import workbench as wb
from workbench import doctor
from workbench.examination import repeats
from workbench.interventions.scene import Scene

STEPS, AT = 12, 6


def trained(path, between=lambda run, job: None, compile=False, again=False):
    """A run of 12 steps, with something done with its live experiment after the eighth."""
    job = helpers.experiment(dropout=0.2, compile=compile)
    with wb.Recorder(path, *helpers.parts(job), compile=compile, save_every=4, spikes=SPIKES) as recorder:
        for batch in recorder.batches(8):
            recorder.step(batch)
        live = wb.Experiment(*helpers.parts(job), wb.StepOptions(compile=compile))
        between(wb.open_run(path), live)
        for batch in recorder.batches(STEPS):
            recorder.step(batch)
    return wb.open_run(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = trained(tmp_path_factory.mktemp("undisturbed") / "run")
    return steps_of(run), checkpoint_bytes(run, STEPS)


class Stop(Exception):
    pass


def stopped(run, job):
    """Cancelled while the experiment is in a state of the run."""

    def progress(done, total, what):
        if done:
            raise Stop

    with pytest.raises(Stop):
        run.replay(AT, experiment=job, progress=progress)


def interrupted(run, job):
    def progress(done, total, what):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.whatif(AT, "lr=0.5x", experiment=job, progress=progress)


def looked_at(run, job):
    """A scene lives on, and is asked for more now and then."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scene = Scene.open(run, AT, experiment=job, memory_budget=0)
        scene.state(AT - 3)
        assert len(scene.after(2)) == 2


DONE = {
    "replay": lambda run, job: run.replay(AT, experiment=job),
    "replay of a range": lambda run, job: run.replay(range(3, 8), experiment=job, with_probe=False),
    "in a context": lambda run, job: run.context(AT, 2, experiment=job),
    "autopsy": lambda run, job: run.autopsy(AT, experiment=job),
    "whatif": lambda run, job: run.whatif(AT, ["lr=0.5x", "reset=m,v"], experiment=job),
    "diverge": lambda run, job: run.diverge(AT, experiment=job, rungs=("same process", "another thread", "compile")),
    "resumption": lambda run, job: run.resumption(0, experiment=job),
    "verify": lambda run, job: run.verify(replay=2, experiment=job),
    "batch facts": lambda run, job: run.batch_facts(AT, experiment=job),
    "a fork": lambda run, job: wb.fork_point(run, AT, experiment=job),
    "a scene": looked_at,
    "cancelled": stopped,
    "interrupted": interrupted,
}


@pytest.mark.parametrize("what", DONE)
def test_a_training_goes_on_as_if_nothing_had_been(tmp_path, undisturbed, what):
    run = trained(tmp_path / "run", DONE[what])
    assert (steps_of(run), checkpoint_bytes(run, STEPS)) == undisturbed


def test_a_compiled_one_too(tmp_path):
    plain = trained(tmp_path / "plain", compile=True)
    run = trained(tmp_path / "run", DONE["replay"], compile=True)
    assert steps_of(run) == steps_of(plain)


def test_of_a_step_of_ones_own_with_more_state(tmp_path):
    def recorded(path, between):
        model = helpers.mlp()
        optimizer, extra = optim.Adam(1e-2), {"mean": {"loss": mx.zeros(())}}
        points = helpers.Points()

        def step(x, y):
            loss, gradients = nn.value_and_grad(model, helpers.mse)(model, x, y)
            optimizer.update(model, gradients)
            extra["mean"]["loss"] = 0.9 * extra["mean"]["loss"] + 0.1 * loss
            return loss

        with wb.Recorder(path, model, optimizer, helpers.mse, step_fn=step, extra=extra, save_every=4) as recorder:
            for number in range(1, STEPS + 1):
                if number == 9:
                    live = wb.Experiment(model, optimizer, helpers.mse, step_fn=step, extra=extra)
                    between(wb.open_run(path), live)
                recorder.step(tuple(map(mx.array, points.batch(number))))
        return steps_of(wb.open_run(path))

    plain = recorded(tmp_path / "plain", lambda run, live: None)
    assert recorded(tmp_path / "run", DONE["replay"]) == plain
    assert recorded(tmp_path / "whatif", DONE["whatif"]) == plain


def test_what_the_owner_holds_is_the_very_array_that_it_was(tmp_path):
    run = trained(tmp_path / "run")
    job = helpers.experiment(dropout=0.2)
    mx.random.seed(5)
    weight, key = job.model.layers[0].weight, np.array(mx.random.state[0])
    value = np.array(weight)
    assert run.replay(AT, experiment=job).exact
    assert job.model.layers[0].weight is weight and np.array_equal(weight, value)
    assert job.optimizer.step.item() == 0 and job.sampler.number == 0
    assert np.array_equal(mx.random.state[0], key)


def test_the_doctor_gives_it_back(tmp_path, monkeypatch):
    run, job = trained(tmp_path / "run"), helpers.experiment(dropout=0.2)
    weight, performed = job.model.layers[0].weight, []

    def examine(subject, settings, *rest):
        performed.append(repeats.perform(*subject(settings[0]), 1))
        raise Stop

    monkeypatch.setattr(doctor, "_examine_steps", examine)
    with pytest.raises(Stop):
        doctor.examine_run(run, experiment=job)
    assert performed and job.model.layers[0].weight is weight and job.sampler.number == 0
