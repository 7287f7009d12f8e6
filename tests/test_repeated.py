"""A loop that hands over its batches itself, killed and started again: the bits of one without a break."""

import logging
import signal

import pytest
from helpers import python

import workbench as wb
from workbench.errors import ExperimentError

LOOP = """
import os, signal, sys
import mlx.core as mx
import mlx.nn as nn, mlx.optimizers as optim, numpy as np
import workbench as wb

out, resume, kill, epochs, seed = sys.argv[1], sys.argv[2] == "resume", *map(int, sys.argv[3:6])
mx.random.seed(0)
np.random.seed(seed)
data = np.random.default_rng(0).standard_normal((96, 4)).astype(np.float32)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.AdamW(1e-2)

def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), y)

def step(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    return loss

recorder = wb.Recorder(out, model, optimizer, loss_fn, step_fn=step, resume=resume, save_every=10)
number = 0
for epoch in range(epochs):
    for rows in np.random.permutation(96).reshape(-1, 16):
        number += 1
        optimizer.learning_rate = 1e-2 / number
        if number == 8:
            model.layers[0].weight = model.layers[0].weight * 2
            recorder.open_segment()
        x = mx.array(data[rows])
        loss = recorder.step((x, mx.sin(x.sum(1, keepdims=True))))
        print(number, loss.item(), loss.tolist(), loss.shape)
        if number == kill:
            recorder._out.saves.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)
    mx.random.uniform()
    recorder.log_validation(epoch)
    recorder.checkpoint()
recorder.close()
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    path = tmp_path_factory.mktemp("loop") / "my_loop.py"
    path.write_text(LOOP)

    def start(out, *, resume=False, kill=0, epochs=5, seed=0):
        return python(path, out, "resume" if resume else "new", kill, epochs, seed)

    return start


@pytest.fixture(scope="module")
def straight(loop, tmp_path_factory):
    path = tmp_path_factory.mktemp("straight") / "run"
    done = loop(path)
    assert done.returncode == 0, done.stderr
    return wb.open_run(path), done.stdout


def last(run):
    step = run.telemetry.last_step()
    line = run.line(step, run.manifest.segments[-1].segment)
    return step, line.loss_bits, line.grad_norm_bits, line.batch_hash, line.state


@pytest.mark.parametrize("kill", [13, 20, 24])
def test_killed_and_started_again_it_ends_in_the_bits_of_a_run_without_a_break(loop, straight, tmp_path, kill):
    killed = loop(tmp_path / "run", kill=kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = loop(tmp_path / "run", resume=True)
    assert done.returncode == 0, done.stderr
    assert "steps 1 to" in done.stderr and "not trained on again" in done.stderr
    run = wb.open_run(tmp_path / "run")
    assert last(run) == last(straight[0]) and last(run)[0] == 30
    assert done.stdout == straight[1]  # the losses of steps that were passed, too


def test_a_run_that_had_ended_is_only_compared(loop, straight, tmp_path):
    assert loop(tmp_path / "run").returncode == 0
    before = (tmp_path / "run" / "telemetry.jsonl").read_bytes()
    done = loop(tmp_path / "run", resume=True)
    assert done.returncode == 0 and done.stdout == straight[1], done.stderr
    assert (tmp_path / "run" / "telemetry.jsonl").read_bytes() == before
    longer = loop(tmp_path / "run", resume=True, epochs=6)
    assert longer.returncode == 0 and longer.stdout.startswith(straight[1]), longer.stderr
    assert last(wb.open_run(tmp_path / "run"))[0] == 36


def stopped(path, steps, **options):
    from test_stored_batches import build, stream

    job = build()
    options = {"save_every": 4, "spikes": None} | options
    with wb.Recorder(path, job.model, job.optimizer, job.loss_fn, **options) as recorder:
        losses = [recorder.step(batch) for batch in list(stream(epochs=3, batches=9))[steps]]
    return wb.open_run(path), losses


def test_a_loop_that_begins_with_the_next_batch_goes_on_as_before(tmp_path):
    whole = stopped(tmp_path / "whole", slice(0, 9))[1]
    first = stopped(tmp_path / "run", slice(0, 6))[1]
    assert first + stopped(tmp_path / "run", slice(6, 9), resume=True)[1] == whole


def test_a_first_batch_that_the_run_used_in_the_middle_is_warned_of(tmp_path):
    stopped(tmp_path / "run", slice(0, 6))
    with pytest.warns(UserWarning, match=r"is taken as that of step 7, and .* used the same one at step 3"):
        run, _ = stopped(tmp_path / "run", slice(2, 4), resume=True)
    assert run.telemetry.last_step() == 8


def test_a_first_batch_that_came_again_is_warned_of(tmp_path):
    stopped(tmp_path / "run", slice(0, 18))
    with pytest.warns(UserWarning, match=r"the run used its first batch again at step \d+, so a loop that goes on"):
        run, _ = stopped(tmp_path / "run", slice(0, 20), resume=True)
    assert run.telemetry.last_step() == 20


def test_another_batch_on_the_way_is_an_error_with_both_hashes(tmp_path):
    run, _ = stopped(tmp_path / "run", slice(0, 6))
    hashes = [run.line(step, 0).batch_hash for step in (3, 2)]
    with pytest.raises(
        ExperimentError, match=f"its batch for step 2 has the hash {hashes[0]}, and the run's had {hashes[1]}"
    ):
        stopped(tmp_path / "run", slice(0, 5, 2), resume=True)


def test_a_loop_that_ends_among_the_passed_batches_is_told(tmp_path, caplog):
    stopped(tmp_path / "run", slice(0, 6))
    with (
        caplog.at_level(logging.WARNING),
        pytest.warns(UserWarning, match="ended after 4 batches.* nothing was trained"),
    ):
        stopped(tmp_path / "run", slice(0, 4), resume=True)
    assert wb.open_run(tmp_path / "run").telemetry.last_step() == 6
