"""Every optimizer of MLX restores bit for bit, with a schedule and in a fresh process (compiled: test_exactness)."""

import mlx.core as mx
import numpy as np
import optimizers
import pytest
from helpers import python

import workbench as wb
from workbench.errors import CheckpointError
from workbench.snapshot import capture, restore

STEPS = 6


def record(path, name, steps=STEPS, **arguments):
    job = optimizers.build(name, **arguments)
    recorder = wb.Recorder(
        path,
        *(job.model, job.optimizer, job.loss_fn, job.sampler),
        **{"clip": 1.0, "compile": job.options.compile, "save_every": 4, "spikes": None, "resume": path.exists()},
        factory="optimizers:build",
        arguments={"name": name} | arguments,
    )
    with recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


def test_none_is_forgotten():
    """A new one of MLX's needs a line in `optimizers.ARGUMENTS`."""
    assert sorted(optimizers.FOUND) == sorted(optimizers.ARGUMENTS) and len(optimizers.FOUND) >= 11


@pytest.mark.parametrize(("name", "number"), optimizers.CASES)
def test_a_resume_in_half_precision_has_the_same_bits(tmp_path, name, number):
    arguments = {"number": number, "compile": False, "scheduled": True, "dtype": "bfloat16"}
    run = record(tmp_path / "run", name, **arguments)
    record(tmp_path / "half", name, 4, **arguments)
    resumed = record(tmp_path / "half", name, **arguments)
    assert resumed.line(STEPS, 0).state == run.line(STEPS, 0).state


def test_a_fresh_process_replays_them_all(tmp_path):
    paths = []
    for name, number in optimizers.CASES:
        paths.append(tmp_path / f"{name}{number}")
        record(paths[-1], name, number=number, compile=False, scheduled=True)
    code = (
        "import sys, workbench as wb\n"
        "for path in sys.argv[1:]:\n"
        "    options = {'factory': 'optimizers:build', 'with_probe': False, 'fresh_process': False}\n"
        "    found = wb.open_run(path).replay(range(5, 7), **options)\n"
        "    print(path, *(trace.exact for trace in found), *(trace.badges()[0][2] for trace in found[:1]))\n"
    )
    done = python("-c", code, *paths)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(paths) and all(
        f"{path} True True" in line for path, line in zip(paths, lines, strict=True)
    )
    assert all("the recording process, another one, had them too" in line for line in lines)


@pytest.mark.parametrize(("name", "number"), optimizers.CASES)
def test_a_state_that_lacks_an_array_is_refused(name, number):
    """Case R3: MLX would make it again, as zeros."""
    job = optimizers.build(name, number)
    job.prepare()
    state = capture(job, 0, {"number": 0})
    for path in state.optimizer:
        less = {other: array for other, array in state.optimizer.items() if other != path}
        with pytest.raises(CheckpointError, match=f"missing {path}"):
            restore(job, type(state)(0, state.weights, less, state.rng, state.cursor))


def test_the_logged_rate_is_the_one_that_the_update_used(tmp_path):
    """Case R10: MLX asks the schedule before it counts the update, so update N has the rate of N - 1."""
    run = record(tmp_path / "run", "AdamW", compile=False, scheduled=True)
    rates = [run.line(step, 0).lr for step in range(1, STEPS + 1)]
    schedule = optimizers.schedule()
    assert rates == [np.float32(schedule(mx.array(step)).item()) for step in range(STEPS)]
    trace = run.replay(3, experiment=optimizers.build("AdamW", compile=False, scheduled=True), with_probe=False)
    assert trace.record.lr == rates[2] != rates[3]
