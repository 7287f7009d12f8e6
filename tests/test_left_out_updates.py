"""A step of the user's own that leaves its update out, as a dynamic loss scale does: recorded, and replayed."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse
from mlx.utils import tree_flatten, tree_map

import workbench as wb
from workbench.errors import ExperimentError


class Scale:
    """Numbers of Python, as people write it: halved by an overflow."""

    def __init__(self, value=2.0**10):
        self.value = value

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"]


class Job:
    """The scale grows until the gradients overflow, soon and often."""

    def __init__(self, value=2.0**10, clip=False):
        self.model, self.optimizer, self.scale, self.clip = mlp(0.1), optim.AdamW(1e-2), Scale(value), clip

    def step(self, x, y):
        def scaled(model, x, y):
            return mse(model, x, y) * self.scale.value

        loss, gradients = nn.value_and_grad(self.model, scaled)(self.model, x, y)
        gradients = tree_map(lambda gradient: gradient / self.scale.value, gradients)
        if self.clip:
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        if all(mx.isfinite(gradient).all().item() for _, gradient in tree_flatten(gradients)):
            self.optimizer.update(self.model, gradients)
            self.scale.value *= 2.0**30
        else:
            self.scale.value /= 2.0**40
        return mse(self.model, x, y)

    def parts(self):
        return self.model, self.optimizer, mse, Points()

    def experiment(self):
        return wb.Experiment(
            *self.parts(), wb.StepOptions(compile=False), step_fn=self.step, extra={"scale": self.scale}
        )


def record(path, job, steps=16):
    with wb.Recorder(path, *job.parts(), step_fn=job.step, extra={"scale": job.scale}, save_every=5) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


def test_every_step_replays_and_one_without_an_update_says_so(tmp_path):
    run = record(tmp_path / "run", Job())
    lines = {line.step: line for line in run.telemetry.lines if line.type == "step"}
    weights = {step: line.state["weights"] for step, line in lines.items()}
    skipped = [step for step in lines if step > 1 and weights[step] == weights[step - 1]]
    assert skipped and len(skipped) < 10
    for step, line in lines.items():
        assert (line.grad_norm is None) == (step in skipped)
        assert (line.per_layer_grad_norms == [None] * len(run.manifest.layers)) == (step in skipped)
        assert None not in line.adam_m_norms
    assert "grad_norm" not in lines[skipped[0]].evidence()
    traces = run.replay(range(1, 17), experiment=Job().experiment())
    assert [trace.exact for trace in traces] == [True] * 16
    one = traces[skipped[0] - 1]
    assert one.record.first_nonfinite is None and one.record.grad_norm is None
    assert set(one.layers.query("kind == 'gradient'")["l2"].isna()) <= {True}


def test_gradients_that_were_clipped_before_are_logged(tmp_path):
    run = record(tmp_path / "run", Job(clip=True))
    lines = [line for line in run.telemetry.lines if line.type == "step"]
    assert all("grad_norm" in line.evidence() for line in lines)
    assert any(line.grad_norm is None for line in lines)  # not finite
    assert all(trace.exact for trace in run.replay(range(1, 17), experiment=Job(clip=True).experiment()))


def test_the_first_step_may_leave_it_out_if_the_scale_says_so(tmp_path):
    run = record(tmp_path / "run", Job(value=2.0**140))
    assert run.line(1, 0).grad_norm is None and run.line(2, 0).grad_norm is not None
    assert all(trace.exact for trace in run.replay(range(1, 17), experiment=Job(value=2.0**140).experiment()))


def test_a_loop_that_goes_on_after_a_break_may_leave_it_out_at_once(tmp_path):
    """What it changes is nothing but the loss that it returns."""

    def recorder(**more):
        model, optimizer = mlp(0.1), optim.AdamW(1e-2)

        def step(x, y):
            loss, gradients = nn.value_and_grad(model, mse)(model, x, y)
            if optimizer.step.item() < 4:
                optimizer.update(model, gradients)
            return loss

        return wb.Recorder(tmp_path / "run", model, optimizer, mse, Points(), step_fn=step, **more), step

    for steps in (6, 8):
        one, _ = recorder(resume="auto")
        with one:
            for batch in one.batches(steps):
                one.step(batch)
    assert wb.open_run(tmp_path / "run").steps["grad_norm_recorded"].tolist() == [True] * 4 + [False] * 4


def test_a_first_step_that_changes_nothing_is_refused(tmp_path):
    job = Job()
    job.step = lambda x, y: mse(job.model, x, y)
    with pytest.raises(ExperimentError, match="updated the experiment's optimizer 0 times.*leaves its update out"):
        record(tmp_path / "run", job)


def test_an_autopsy_of_such_a_step_needs_no_loss_function(tmp_path):
    """Whose loss is not finite, as that of an overflow."""

    class Overflowing(Job):
        def step(self, x, y):
            scale = self.scale.value
            super().step(x, y)
            return mse(self.model, x, y) * (mx.nan if self.scale.value < scale else 1.0)

        def parts(self):
            return self.model, self.optimizer, None, Points()

    record(tmp_path / "run", Overflowing(), 24)
    run = wb.open_run(tmp_path / "run")
    skipped = [line.step for line in run.telemetry.lines if line.type == "step" and line.loss is None]
    verdict = run.autopsy(skipped[-1], experiment=Overflowing().experiment())
    assert verdict.exact and any("no loss function" in one.why for one in verdict.unchecked)
