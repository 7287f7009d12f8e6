"""What a step reads beside its state when a run begins: kept as short texts, and named where a replay has another."""

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

import workbench as wb
from workbench.experiment import Experiment, StepOptions
from workbench.manifest import Segment
from workbench.recording import start_values as module
from workbench.recording.start_values import other_values, start_values

rate, table, api_key = 0.5, None, "abc"
unread = 1.0


class Job:
    def __init__(self):
        self.model, self.optimizer = helpers.mlp(0.1), optim.AdamW(1e-2)
        self.sampler, self.seen = helpers.Points(), (3,)

    def step(self, x, y):
        loss, gradients = nn.value_and_grad(self.model, helpers.mse)(self.model, x * self.seen[0], y)
        self.optimizer.update(self.model, nn.utils.tree_map(lambda one: one * rate + 0 * table[0], gradients))
        return loss if api_key else None

    @property
    def experiment(self):
        return Experiment(
            self.model, self.optimizer, helpers.mse, self.sampler, StepOptions(compile=False), step_fn=self.step
        )


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    monkeypatch.setitem(globals(), "rate", 0.5)
    monkeypatch.setitem(globals(), "unread", 1.0)
    monkeypatch.setitem(globals(), "table", mx.arange(4.0))
    monkeypatch.setitem(globals(), "api_key", "abc")


@pytest.fixture
def run(tmp_path):
    job = Job()
    options = {"step_fn": job.step, "spikes": None, "save_every": 4}
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, helpers.mse, job.sampler, **options) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    return wb.open_run(tmp_path / "run")


def replayed(run):
    return run.replay(2, experiment=Job().experiment, with_probe=False, repeat=False)


def test_a_replay_that_is_not_exact_names_what_is_otherwise(run):
    globals()["rate"], globals()["unread"], globals()["table"] = 0.7, 2.0, mx.arange(4.0) + 1
    trace = replayed(run)
    assert not trace.exact
    (said,) = [one for one in trace.notices if "otherwise here" in one]
    assert said == (
        "The step reads what is otherwise here than when it was recorded: step_fn.rate (it was 0.5, and is 0.7 here), "
        "step_fn.table (an array of shape (4,) and dtype float32, which has another content here)."
    )


def test_a_replay_that_is_exact_says_nothing_of_it(run):
    globals()["table"] = mx.arange(4.0) + 1  # multiplied by 0
    trace = replayed(run)
    assert trace.exact and not any("otherwise here" in one for one in trace.notices)


def test_what_is_kept_is_what_the_step_reads(run):
    kept = run.manifest.segments[0].values
    assert kept["step_fn.rate"] == "0.5" and kept["step_fn.self.seen[0]"] == "3"
    assert not any("unread" in path for path in kept)


def test_what_may_be_a_key_of_a_service_is_not_kept_itself(run):
    kept = run.manifest.segments[0].values
    assert kept["step_fn.api_key"].startswith("a text of 3 characters, sha256 ")
    globals()["rate"] = "x" * 21
    assert start_values(Job().experiment)["step_fn.rate"].startswith("a text of 21 characters, sha256 ")
    globals()["rate"] = "gelu"
    assert start_values(Job().experiment)["step_fn.rate"] == "'gelu'"


def test_they_are_few_and_the_users_come_first(monkeypatch):
    monkeypatch.setattr(module, "MOST", 2)
    assert (
        all(path.startswith("step_fn.") for path in start_values(Job().experiment))
        and len(start_values(Job().experiment)) == 2
    )


def test_large_arrays_are_left_out_and_those_of_numpy_are_not(monkeypatch):
    globals()["table"] = np.arange(4, dtype=np.float32)
    assert "a numpy array of shape (4,) and dtype float32, sha256 " in start_values(Job().experiment)["step_fn.table"]
    monkeypatch.setattr(module, "BUFFER", 8)
    assert "step_fn.table" not in start_values(Job().experiment)


def test_the_order_of_a_set_makes_no_other_value():
    globals()["table"] = {"a", "b", "c"}
    one = start_values(Job().experiment)["step_fn.table"]
    globals()["table"] = {"c", "b", "a"}
    assert start_values(Job().experiment)["step_fn.table"] == one
    globals()["table"] = {"c", "b", "d"}
    assert start_values(Job().experiment)["step_fn.table"] != one


def test_what_is_gone_or_ignored_is_not_spoken_of():
    assert other_values({"step_fn.rate": "1"}, {}) is None
    assert "step_fn.rate" not in start_values(Job().experiment, ("rate",))


def test_a_run_of_the_trainer_and_an_older_one_have_none(tmp_path):
    import runs

    run = wb.open_run(runs.recorded_read_only())
    assert not run.manifest.segments[0].values
    assert not Segment(segment=0, start=0, parent=None, t=0.0, environment={}).values


def test_a_segment_that_another_process_begins_has_those_of_its_own(run):
    globals()["rate"] = 0.7
    job = Job()
    options = {"step_fn": job.step, "spikes": None, "save_every": 4, "resume": 0, "self_check": False}
    with wb.Recorder(run.path, job.model, job.optimizer, helpers.mse, job.sampler, **options) as recorder:
        recorder.step(next(recorder.batches(1)))
    first, second = wb.open_run(run.path).manifest.segments
    assert (first.values["step_fn.rate"], second.values["step_fn.rate"]) == ("0.5", "0.7")
