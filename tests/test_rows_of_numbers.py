"""Rows that hold no tokens: which one carries the loss, where a step of the user's own returns no loss of each."""

import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from helpers import mlp

import workbench as wb
from workbench.commands.printed_trace import _worst_row
from workbench.probes.trace_tables import row_shares

BAD, STEPS, ROW = 30, 34, 3


def batch(number, bad):
    x = np.random.default_rng(number).normal(size=(12, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    if number == BAD:
        y[ROW] = bad
    return x, y


def parts(factor=1.0):
    """Model, optimizer, a loss function that gives the loss of each row, and a step of its own that returns none.

    Args:
        factor: of the loss function beside the step's loss.
    """
    model, optimizer = mlp(0.0), optim.Adam(1e-3, bias_correction=True)

    def squares(model, x, y):
        return (model(x) - y).square().mean()

    def loss_fn(model, x, y):
        losses = (model(x) - y).square() * factor
        return losses.mean(), {"token_loss": losses}

    passes = nn.value_and_grad(model, squares)

    def step(x, y):
        loss, gradients = passes(model, x, y)
        optimizer.update(model, gradients)
        return loss

    return (model, optimizer, loss_fn), step


@pytest.fixture
def autopsy(tmp_path):
    """Records a run with a bad target, and asks about it."""

    def ask(bad, factor=1.0):
        own, step = parts(factor)
        settings = {"spikes": wb.SpikeSettings(window=20), "save_every": 10}
        with wb.Recorder(tmp_path / "run", *own, step_fn=step, **settings) as recorder:
            for number in range(1, STEPS + 1):
                recorder.step(batch(number, bad))
        own, step = parts(factor)
        run = wb.open_run(tmp_path / "run")
        return run, run.autopsy(BAD, experiment=wb.Experiment(*own, step_fn=step))

    return ask


@pytest.mark.parametrize("bad", [1000.0, np.inf])
def test_the_row_is_named_by_its_loss(autopsy, bad):
    _, found = autopsy(bad)
    assert found.verdict == "data" and [one["row"] for one in found.culprit["rows"]] == [ROW], found.sentence()
    assert any("With row 3 exchanged" in one.sentence for one in found.evidence)


def test_a_loss_function_that_is_not_the_steps_names_no_row(autopsy):
    _, found = autopsy(1000.0, factor=2.0)
    assert found.verdict == "data" and "rows" not in found.culprit
    assert "with the very loss of the step" in found.reason


def test_a_loss_that_is_infinite_is_shown_as_such(autopsy):
    run, _ = autopsy(np.inf)
    own, step = parts()
    trace = run.replay(BAD, experiment=wb.Experiment(*own, step_fn=step))
    assert trace.rows["row"].iloc[0] == ROW and trace.rows["loss"].iloc[0] == np.inf
    said = runs.here("batch", run.path, "--step", BAD).out
    assert next(line for line in said.splitlines() if " inf " in line).split()[1] == str(ROW)
    assert np.isfinite(trace.rows["loss"].iloc[1:]).all()
    assert _worst_row(row_shares(trace.record)) == f"Row {ROW}'s loss is inf."
