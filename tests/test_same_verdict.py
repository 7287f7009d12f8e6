"""A step has the same verdict however it is asked for: alone, in a range, beside its neighbours, among many, or in a
sample; also one that depends on what no checkpoint holds."""

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import runs

import workbench as wb
from workbench.proving import sample
from workbench.replaying.legs import ONE_EXPERIMENT, legs_of

STEPS, EVERY = 14, 4

SCRIPT = """
import warnings
from pathlib import Path
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np, workbench as wb
mx.set_default_device(mx.cpu)
mx.random.seed(0)
draw = np.random.default_rng(0)
model, optimizer = nn.Linear(3, 1), optim.Adam(1e-2)

def loss_fn(model, x, y):
    return mx.mean(mx.square(model(x) - y))

gradients_of = nn.value_and_grad(model, loss_fn)

class Hidden:
    mean = mx.zeros((1, 3))

hidden = Hidden()

def step(x, y):
    loss, gradients = gradients_of(model, x, y)
    if optimizer.step.item() >= 6:
        gradients["weight"] = gradients["weight"] + 0.01 * hidden.mean
    optimizer.update(model, gradients)
    hidden.mean = 0.9 * hidden.mean + 0.1 * model.weight
    mx.eval(hidden.mean)
    return loss

warnings.simplefilter("ignore")  # of what it is about
with wb.Recorder(Path(__file__).parent / "run", model, optimizer, loss_fn, step_fn=step, save_every=4) as recorder:
    for _ in range(14):
        x = mx.array(draw.standard_normal((4, 3)).astype(np.float32))
        recorder.step((x, x.sum(1, keepdims=True)))
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory):
    """A run whose step depends, from the seventh on, on a mean that only Python holds; and its script."""
    folder = tmp_path_factory.mktemp("hidden")
    (folder / "script.py").write_text(SCRIPT)
    done = helpers.python(folder / "script.py")
    assert done.returncode == 0, done.stderr
    return wb.open_run(folder / "run"), str(folder / "script.py")


@pytest.fixture(scope="module")
def alone(hidden):
    """The verdict of each step, replayed by itself, and where it first differs."""
    run, script = hidden
    found = {}
    for step in range(1, STEPS + 1):
        trace = run.replay(step, factory=script, with_probe=False, repeat=False, fresh_process=False)
        found[step] = trace.exact, trace.record.first_difference and trace.record.first_difference.step
    return found


def test_what_no_checkpoint_holds_shows_after_each_of_them(alone):
    first = {step: number for step, (exact, number) in alone.items() if not exact}
    assert first == {7: 7, 8: 7, 9: 9, 10: 9, 11: 9, 12: 9, 13: 13, 14: 13}


@pytest.mark.parametrize("steps", [range(1, STEPS + 1), range(7, 12), range(2, STEPS + 1, 3)])
def test_a_range_says_the_same(hidden, alone, steps):
    run, script = hidden
    traces = run.replay(steps, factory=script, with_probe=False, repeat=False, fresh_process=False)
    said = {one.step: (one.exact, one.record.first_difference and one.record.first_difference.step) for one in traces}
    assert said == {step: alone[step] for step in steps}
    assert {one.step: one.record.checkpoint for one in traces} == {step: (step - 1) // EVERY * EVERY for step in steps}


def test_a_fresh_process_repeats_a_range_over_a_checkpoint(hidden):
    run, script = hidden
    traces = run.replay(range(4, 7), factory=script, with_probe=False, fresh_process=True)
    assert [one.exact for one in traces] == [True, True, True]
    assert all("and in a fresh process" in one.record.gates.repeatable.explanation for one in traces)


def test_many_and_a_sample_say_the_same(hidden, alone):
    run, script = hidden
    frame = run.replay_many(range(1, STEPS + 1), factory=script, workers=0)
    assert {row.step: row.verdict == "exact" for row in frame.itertuples()} == {
        step: exact for step, (exact, _) in alone.items()
    }
    for count in (3, 6, STEPS):
        checks = [one for one in run.verify(replay=count, factory=script).checks if one.kind == "step"]
        said = {int(one.what.partition(",")[0]): one.verdict == "exact" for one in checks}
        assert len(said) == count and said == {step: alone[step][0] for step in said}


def test_neighbours_say_the_same(hidden, alone):
    run, script = hidden
    context = run.context(10, 4, factory=script, fresh_process=False)
    assert {one.step: one.exact for one in context.traces} == {step: alone[step][0] for step in range(6, 11)}


def test_from_a_checkpoint_that_was_asked_for_all_is_one_way(hidden):
    run, script = hidden
    options = {"factory": script, "with_probe": False, "repeat": False, "fresh_process": False}
    traces = run.replay(range(3, STEPS + 1), checkpoint=0, **options)
    assert all(one.exact and one.record.checkpoint == 0 for one in traces)


def test_one_experiment_for_all_is_told(hidden):
    run, _ = hidden
    scope = {}
    mx.random.seed(0)
    model, optimizer = nn.Linear(3, 1), optim.Adam(1e-2)
    scope |= {"mx": mx, "model": model, "optimizer": optimizer, "nn": nn}
    body = SCRIPT.partition("def loss_fn")
    exec(compile("def loss_fn" + body[2].partition("warnings.simple")[0], "script", "exec"), scope)
    given = wb.Experiment(model, optimizer, scope["loss_fn"], step_fn=scope["step"])
    assert ONE_EXPERIMENT in run.verify(replay=STEPS, experiment=given).notices
    traces = run.replay(range(3, 7), experiment=given, with_probe=False, repeat=False)
    assert [ONE_EXPERIMENT in one.notices for one in traces] == [False, False, True, True]


def test_the_sample_tries_checkpoints(hidden):
    run, _ = hidden
    after = {step for step in range(1, STEPS + 1) if (step - 1) % EVERY == 0}
    for seed in range(10):
        steps = [step for _, step in sample(run, 4, seed)]
        assert len(steps) == 4 and len(after & set(steps)) >= 2
    assert {step for seed in range(40) for _, step in sample(run, 4, seed)} > after


def test_legs(tmp_path):
    run = wb.open_run(runs.recorded(tmp_path))  # 12 steps, a checkpoint every 4
    plan = run.plan(range(3, 12))
    legs = legs_of(run, plan)
    assert [(list(leg.steps), leg.checkpoint[0], leg.rolled) for leg in legs] == [
        ([3, 4], 0, 2),
        ([5, 6, 7, 8], 4, 0),
        ([9, 10, 11], 8, 0),
    ]
    assert legs_of(run, plan, checkpoint=0) == [plan]
    assert {leg.segment for leg in legs} == {plan.segment}
