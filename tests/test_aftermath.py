"""A contradiction of one step, and of several: what may be called a transient fault, and what a loop may have done."""

import shutil
import warnings

import autopsies
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import edit_line

from workbench import open_run
from workbench.experiment import Experiment, StepOptions
from workbench.record import Recorder
from workbench.spikes import SpikeSettings

SCALE = 1.0  # what the loop of `scaled` sets


def scaled():
    """A loss that is multiplied by a number of this module."""

    def loss(model, x, y):
        return autopsies.squares(model, x, y) * SCALE

    draws = autopsies.Numbered(lambda number: autopsies._regression(number, 1.0))
    model = autopsies.Vector([0.5, 0.1])
    return Experiment(model, optim.SGD(0.01), loss, draws, StepOptions(compile=False))


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Records a run of `scaled` whose loop sets the number to 50 in some steps; a checkpoint every 10."""

    def record(steps, until=42):
        job = scaled()
        parts = (job.model, job.optimizer, job.loss_fn, job.sampler)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            with Recorder(
                tmp_path / "run", *parts, save_every=10, spikes=SpikeSettings(window=20), compile=False
            ) as recorder:
                for number, batch in enumerate(recorder.batches(until), 1):
                    monkeypatch.setattr(f"{__name__}.SCALE", 50.0 if number in steps else 1.0)
                    recorder.step(batch)
        return open_run(tmp_path / "run")

    return record


def test_a_number_that_the_loop_sets_for_some_steps_is_no_transient_fault(recorded):
    run = recorded(range(30, 34))
    for step in (30, 32):
        found = run.autopsy(step, experiment=scaled())
        assert found.verdict == "unknown" and not found.remedies and found.culprit == {}
        assert "step 31 is contradicted as well" in found.reason.lower()
        assert "loss_fn.SCALE" in found.reason


def test_a_step_that_reads_a_number_beside_its_state_may_have_had_another(recorded):
    path = recorded([]).path
    edit_line(path, 30, lambda line: line.update(loss=8.0, loss_bits="0x41000000"))
    found = open_run(path).autopsy(30, experiment=scaled())
    assert found.verdict == "unknown" and "Step 30 alone differs" in found.reason
    assert "loss_fn.SCALE" in found.reason
    assert any(one.name == "steps after" and "have the logged bits" in one.sentence for one in found.evidence)


def test_what_the_recorder_noted_is_quoted(recorded):
    found = recorded(range(30, 99)).autopsy(30, experiment=scaled())
    assert found.verdict == "unknown" and "loss_fn.SCALE is 50.0 now" in found.reason


def test_steps_that_can_not_be_performed_again_leave_it_open(tmp_path):
    """The gradient norm and the weights of step 32 are others in the log: the next state held is 40."""
    path = shutil.copytree(autopsies.own_read_only(autopsies.stale, 46).path, tmp_path / "run")

    def change(line):
        line.update(loss=8.0, loss_bits="0x41000000", state=line["state"] | {"weights": "0" * 32})

    edit_line(path, 32, change)
    found = open_run(path).autopsy(32, experiment=autopsies.stale())
    assert found.verdict == "unknown" and "steps 33 to 40 would differ too can't be checked" in found.reason


def test_a_fault_whose_later_steps_have_the_runs_bits_is_named(tmp_path):
    path = shutil.copytree(autopsies.own_read_only(autopsies.stale, 46).path, tmp_path / "run")
    edit_line(path, 40, lambda line: line.update(loss=8.0, loss_bits="0x41000000"))
    found = open_run(path).autopsy(40, experiment=autopsies.stale())
    after = next(one for one in found.evidence if one.name == "steps after")
    assert found.verdict == "transient-fault" and "41, 42, 43" in after.sentence
    assert np.isfinite(after.numbers["steps"])
