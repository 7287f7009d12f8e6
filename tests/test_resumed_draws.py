"""A loop that draws its batches from MLX's random numbers between steps, killed and gone on with: the same bits."""

import signal

import pytest
from helpers import python

import workbench as wb

LOOP = """
import os, signal, sys
import mlx.core as mx
import mlx.nn as nn, mlx.optimizers as optim, numpy as np
import workbench as wb

kind, out, resume, kill, steps, seed = sys.argv[1], sys.argv[2], sys.argv[3] == "resume", *map(int, sys.argv[4:7])
again = {"again": True, "on": False}.get(sys.argv[7] if len(sys.argv) > 7 else "")
mx.random.seed(seed)
data = mx.random.normal((96, 4))
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
optimizer = optim.AdamW(1e-2)

def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), y)

every = 5 if kind == "on, every 5" else 7
recorder = wb.Recorder(out, model, optimizer, loss_fn, resume=resume, save_every=every, begins_again=again)
first = recorder.step_number if kind.startswith("on") else 0
order = None
for number in range(first, steps):
    if kind == "epochs":
        if number % 6 == 0:
            order = mx.random.permutation(96)
        rows = order[number % 6 * 16 : number % 6 * 16 + 16]
    else:
        rows = mx.random.randint(0, 96, (16,))
    x = data[rows]
    if kind == "noisy":
        x = x + 0.1 * mx.random.normal(x.shape)
    loss = recorder.step((x, mx.sin(x.sum(1, keepdims=True))))
    if number % 5 == 4:
        mx.eval(mx.random.uniform(shape=(3,)))
    if number + 1 == kill:
        recorder._out.saves.checkpointer.wait()
        os.kill(os.getpid(), signal.SIGKILL)
recorder.close()
print(recorder.step_number)
"""


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    path = tmp_path_factory.mktemp("loop") / "my_loop.py"
    path.write_text(LOOP)

    def start(kind, out, *, resume=False, kill=0, steps=24, seed=3, how=""):
        return python(path, kind, out, "resume" if resume else "new", kill, steps, seed, how)

    return start


@pytest.fixture(scope="module")
def straight(loop, tmp_path_factory):
    """By kind, the telemetry of a run without a break."""
    runs = {}

    def of(kind):
        if kind not in runs:
            path = tmp_path_factory.mktemp("straight") / "run"
            done = loop(kind, path)
            assert done.returncode == 0, done.stderr
            runs[kind] = bits(wb.open_run(path))
        return runs[kind]

    return of


def bits(run):
    """Of the steps on the way to the run's end."""
    segment = run.manifest.segments[-1].segment
    lines = [run.line(step, segment) for step in range(1, run.telemetry.last_step(segment) + 1)]
    return [(line.step, line.batch_hash, line.loss_bits, line.state) for line in lines]


def killed(loop, kind, path, at):
    done = loop(kind, path, kill=at)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(("kind", "at"), [("steps", 17), ("epochs", 17), ("noisy", 3)])
def test_run_again_it_draws_the_same_and_ends_where_it_would_have(loop, straight, tmp_path, kind, at):
    killed(loop, kind, tmp_path / "run", at)
    done = loop(kind, tmp_path / "run", resume=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "24" and bits(wb.open_run(tmp_path / "run")) == straight(kind)


def test_run_again_after_two_breaks(loop, straight, tmp_path):
    killed(loop, "steps", tmp_path / "run", 9)
    done = loop("steps", tmp_path / "run", resume=True, kill=16)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert loop("steps", tmp_path / "run", resume=True).returncode == 0
    assert bits(wb.open_run(tmp_path / "run")) == straight("steps")


def test_a_loop_that_says_that_it_goes_on_draws_what_would_have_come(loop, straight, tmp_path):
    killed(loop, "on", tmp_path / "run", 17)
    done = loop("on", tmp_path / "run", resume=True, how="on")
    assert done.returncode == 0, done.stderr
    assert bits(wb.open_run(tmp_path / "run")) == straight("on")


def test_a_loop_that_goes_on_with_another_batch_is_told(loop, tmp_path):
    """The run drew a number between steps 5 and 6, and the loop that goes on with step 6 does not."""
    killed(loop, "on, every 5", tmp_path / "run", 8)
    done = loop("on, every 5", tmp_path / "run", resume=True, how="on")
    assert done.returncode == 1 and "the batch of step 6 is another than the one that" in done.stderr


def test_whether_it_begins_again_or_goes_on_is_asked_where_it_can_not_be_told(loop, tmp_path):
    killed(loop, "on", tmp_path / "run", 17)
    before = (tmp_path / "run" / "telemetry.jsonl").read_bytes()
    done = loop("on", tmp_path / "run", resume=True)
    assert done.returncode == 1 and "which of the two it is can't be told. Pass begins_again=True" in done.stderr
    done = loop("steps", tmp_path / "run", resume=True, seed=4)
    assert done.returncode == 1 and "drew random numbers of MLX, and its first batch is none that" in done.stderr
    done = loop("steps", tmp_path / "run", resume=True, seed=4, how="again")
    assert done.returncode == 1 and "begins_again=True, but the first batch handed over is not the first" in done.stderr
    assert (tmp_path / "run" / "telemetry.jsonl").read_bytes() == before
    done = loop("steps", tmp_path / "run", resume=True, how="again")
    assert done.returncode == 0 and done.stdout.strip() == "24", done.stderr
