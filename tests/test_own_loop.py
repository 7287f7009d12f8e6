"""A training loop that knows nothing of the built-in trainer: recorded and replayed by the same calls."""

import os
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import python, tree

import workbench as wb
from workbench.errors import CheckpointError, ExperimentError
from workbench.trace import read

# ---------------------------------------------------------------------------------------------- what a user would write


SCALE = float(os.environ.get("SCALE", "1"))  # what no manifest knows: a test sets it for another process


class Waves:
    """Pairs (x, sin of a sum), drawn anew for each batch from its number."""

    def __init__(self):
        self.drawn = 0

    def __iter__(self):
        return self

    def __next__(self):
        random = np.random.Generator(np.random.Philox(key=11, counter=self.drawn))
        self.drawn += 1
        x = random.standard_normal((16, 6), dtype=np.float32)
        return x, np.sin(x.sum(axis=1, keepdims=True))

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, cursor):
        self.drawn = cursor["drawn"]


def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), y) * SCALE


def build(width=12, lr=1e-2):
    """The factory: everything at its initial state."""
    mx.random.seed(21)
    model = nn.Sequential(nn.Linear(6, width), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width, 1))
    return wb.Experiment(model, optim.AdamW(lr), loss_fn, Waves(), wb.StepOptions(clip=1.0))


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The folder of a run of 20 steps, and the losses that the loop saw."""
    path, job = tmp_path_factory.mktemp("own") / "run", build(width=10)
    recorder = wb.Recorder(
        path,
        *(job.model, job.optimizer, job.loss_fn, job.sampler),
        clip=1.0,
        save_every=6,
        factory="test_own_loop:build",
        arguments={"width": 10},
    )
    with recorder:
        losses = [recorder.step(batch) for batch in recorder.batches(20)]
    return path, losses


def test_the_loop_sees_the_losses_of_the_loop_without_a_recorder(recorded):
    job = build(width=10)
    state = [job.model.state, job.optimizer.state, mx.random.state]

    def step(x, y):
        loss, gradients = nn.value_and_grad(job.model, loss_fn)(job.model, x, y)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        job.optimizer.update(job.model, gradients)
        return loss

    job.optimizer.init(job.model.trainable_parameters())
    compiled = mx.compile(step, inputs=state, outputs=state)
    losses = []
    for _ in range(20):
        losses.append(compiled(*map(mx.array, next(job.sampler))).item())
        mx.eval(state)
    assert losses == recorded[1]


def test_every_step_replays_exactly_with_the_experiment_passed(recorded):
    path, losses = recorded
    traces = wb.open_run(path).replay(range(1, 21), experiment=build(width=10), trace_dir=path.parent / "here")
    assert all(trace.exact and trace.record.certified_probe for trace in traces)
    assert [trace.loss for trace in traces] == losses
    # Recorded by this very process, which is no independent witness, and the experiment exists only here.
    assert "another process was not tried" in traces[0].badges()[0][2]


def test_a_fresh_process_replays_by_the_factory_that_the_user_names(recorded):
    path, _ = recorded
    before = tree(path)
    trace = wb.open_run(path).replay(13, experiment=build(width=10), trace_dir=path.parent / "here")
    options = ("--factory", "test_own_loop:build", "--trace-dir", path.parent / "there")
    done = python("-m", "workbench", "replay", path, "--step", "13", *options)
    assert done.returncode == 0, done.stderr
    assert "Step 13 is exact: all 14 recorded items" in done.stdout
    theirs = read(path.parent / "there" / "00000013.json")
    assert "the recording process, another one, had them too" in theirs.badges()[0][2]
    assert theirs.record.items == trace.record.items and theirs.record.rows == trace.record.rows
    assert tree(path) == before


def test_in_this_process_the_factory_is_checked_against_a_fresh_one(recorded, monkeypatch):
    path, _ = recorded
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    calls = []
    trace = wb.open_run(path).replay(
        7,
        factory="test_own_loop:build",
        trace_dir=path.parent / "here",
        progress=lambda done, total, what: calls.append((done, total, what)),
    )
    assert trace.exact and "and in a fresh process" in trace.badges()[0][2]
    done = [call[0] for call in calls]
    assert done == sorted(done) and {call[1] for call in calls} == {done[-1]}
    assert "fresh process" in calls[-1][2]


def test_a_fresh_process_that_computes_otherwise_turns_repeatable_red(recorded, monkeypatch):
    path, _ = recorded
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("SCALE", "1.0000002")  # read when the module is imported: here it was 1
    trace = wb.open_run(path).replay(7, factory="test_own_loop:build", trace_dir=path.parent / "here")
    assert trace.exact  # this process agrees with the record
    name, verdict, why = trace.badges()[0]
    assert (name, verdict) == ("repeatable", "mismatch") and "a fresh process gave other bits: loss" in why


def test_nothing_is_imported_without_consent(recorded):
    run = wb.open_run(recorded[0])
    with pytest.raises(ExperimentError, match="rebuilt by the factory 'test_own_loop:build'.*pass factory="):
        run.replay(13)
    with pytest.raises(ExperimentError, match="names the factory 'test_own_loop:build', not 'os:system'"):
        run.replay(13, factory="os:system")
    code = "import sys, workbench as wb; r = wb.open_run(sys.argv[1]); r.steps, r.spikes(), r.plan(13); "
    done = python("-c", code + "sys.exit('test_own_loop' in sys.modules or 'mlx' in sys.modules)", recorded[0])
    assert done.returncode == 0, done.stderr
    done = python("-m", "workbench", "replay", recorded[0], "--step", "13")
    assert done.returncode == 2 and "--factory test_own_loop:build" in done.stderr and "Traceback" not in done.stderr


def test_an_experiment_that_is_another_one_is_named(recorded):
    run = wb.open_run(recorded[0])
    with pytest.raises(wb.WorkbenchError, match=r"layers.0.weight is mlx.core.float32\(10, 6\), expected .*\(12, 6\)"):
        run.replay(13, experiment=build())
    other = build(width=10)
    other.model.layers.append(nn.Linear(1, 1))
    with pytest.raises(CheckpointError, match=r"missing layers\.4\.bias, layers\.4\.weight"):
        run.replay(13, experiment=other)
    other = build(width=10)
    other.model.layers[0].freeze()  # the checkpoint's weights fit
    with pytest.raises(wb.WorkbenchError, match=r"layers\.0"):
        run.replay(13, experiment=other)


def test_a_run_without_a_factory_says_what_to_pass(tmp_path):
    job = build()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, job.loss_fn, job.sampler) as recorder:
        for batch in recorder.batches(2):
            recorder.step(batch)
    with pytest.raises(ExperimentError, match="named no factory; pass the experiment"):
        wb.open_run(tmp_path / "run").replay(1)
    assert wb.open_run(tmp_path / "run").replay(1, experiment=recorder_options(build())).exact


def recorder_options(job):
    """The run above was recorded without clipping."""
    return wb.Experiment(job.model, job.optimizer, job.loss_fn, job.sampler)


def test_resuming_goes_on_as_if_there_had_been_no_break(recorded, tmp_path):
    path, losses = recorded
    job = build(width=10)
    with wb.Recorder(
        tmp_path / "run", *(job.model, job.optimizer, job.loss_fn, job.sampler), clip=1.0, save_every=6
    ) as recorder:
        first = [recorder.step(batch) for batch in recorder.batches(9)]
    mx.random.seed(999)
    job = build(width=10)
    with wb.Recorder(
        tmp_path / "run", *(job.model, job.optimizer, job.loss_fn, job.sampler), clip=1.0, save_every=6, resume=True
    ) as recorder:
        second = [recorder.step(batch) for batch in recorder.batches(20)]
    assert first + second == losses
    ours, theirs = (wb.open_run(folder).evidence(20, 0) for folder in (tmp_path / "run", path))
    assert ours == theirs
    traces = wb.open_run(tmp_path / "run").replay(range(8, 12), experiment=build(width=10))
    assert [trace.exact for trace in traces] == [True] * 4


def test_sampler_buffers_may_be_reused(tmp_path):
    """The telemetry of a step is measured during the next one: it must not see the next batch."""

    class Reusing(Waves):
        buffers = np.empty((16, 6), np.float32), np.empty((16, 1), np.float32)

        def __next__(self):
            for buffer, fresh in zip(self.buffers, super().__next__(), strict=True):
                buffer[:] = fresh
            return self.buffers

    job = build()
    job.sampler = Reusing()
    with wb.Recorder(tmp_path / "run", job.model, job.optimizer, job.loss_fn, job.sampler, clip=1.0) as recorder:
        for batch in recorder.batches(6):
            recorder.step(batch)
    assert all(trace.exact for trace in wb.open_run(tmp_path / "run").replay(range(1, 7), experiment=build()))
