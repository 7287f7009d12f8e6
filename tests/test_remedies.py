"""The lines that an autopsy prints to go on with: they work for the way in which this very run was recorded."""

import html
import io
import os
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import small_llm
from helpers import Numbered, edit_json, mlp, mse, python
from rich.console import Console

import workbench as wb
from workbench.cause import inquiry as inquiries
from workbench.cause.remedies import command
from workbench.cause.verdict_tables import verdict_parts
from workbench.errors import ExperimentError
from workbench.step_report import report_html

BAD, STEPS = 40, 46
RECORDING = {"save_every": 20, "spikes": wb.SpikeSettings(window=20)}


def batch(number):
    """Rows of a linear map; at step `BAD` with targets a thousand times too large."""
    x = np.random.default_rng(number).normal(size=(12, 4)).astype(np.float32)
    return x, x.sum(axis=1, keepdims=True) * np.float32(1000.0 if number == BAD else 1.0)


class Stream(Numbered):
    def batch(self, number):
        return batch(number)


class Loop:
    """What the printed lines name, in a loop of its own."""

    def __init__(self):
        self.model, self.loss_fn = mlp(0.1), mse
        self.optimizer = optim.AdamW(optim.cosine_decay(1e-2, 400), bias_correction=True)
        self.passes = nn.value_and_grad(self.model, mse)
        self.sampler = Stream()

    def step(self, x, y):
        loss, gradients = self.passes(self.model, x, y)
        gradients, _ = optim.clip_grad_norm(gradients, 1.0)
        self.optimizer.update(self.model, gradients)
        return loss

    def names(self, *which):
        return {"wb": wb} | {name: getattr(self, name) for name in which}


OWN = ("model", "optimizer", "loss_fn", "step")  # of a loop that hands over its batches
BUILT_IN = ("model", "optimizer", "loss_fn", "sampler")


def handed(path, *, steps=range(1, STEPS + 1), fork=None, **settings):
    """A loop with a step of its own that hands over its batches."""
    loop = Loop()
    parts = (loop.model, loop.optimizer, loop.loss_fn)
    with wb.Recorder(path, *parts, step_fn=loop.step, fork=fork, **(RECORDING | settings)) as recorder:
        for number in steps:
            recorder.step(batch(number))
    return wb.open_run(path)


def experiment():
    """Of such a loop: no sampler."""
    loop = Loop()
    return wb.Experiment(loop.model, loop.optimizer, loop.loss_fn, step_fn=loop.step)


def without_script(run):
    """As from a notebook."""
    edit_json(run.path / "run.json", lambda manifest: manifest.update(rebuild={"kind": "none"}))
    return wb.open_run(run.path)


def printed(verdict):
    """What stands in a terminal."""
    console = Console(file=io.StringIO(), width=400)
    for part in verdict_parts(verdict):
        console.print(part, markup=False, soft_wrap=True)
    return console.file.getvalue()


def skipping(verdict):
    return next(one for one in verdict.remedies if one.change == "batch=skip")


@pytest.fixture(scope="module", params=["held", "rolled forward to"])
def own(request, tmp_path_factory):
    """A hand-fed run with a bad batch, whose state before it has a checkpoint or has none; and its autopsy."""
    folder = tmp_path_factory.mktemp("own")
    run = without_script(handed(folder / "run", black_box=5 if request.param == "held" else 0))
    assert ((BAD - 1, 0) in run.checkpoints) == (request.param == "held")
    return run, run.autopsy(BAD, experiment=experiment())


def test_an_experiment_needs_no_sampler_where_batches_were_handed_over(own):
    run, found = own
    assert run.replay(BAD, experiment=experiment(), with_probe=False).exact
    assert found.verdict == "data" and skipping(found).helps


def test_a_hand_fed_loop_follows_the_printed_lines_and_the_fork_replays_exactly(own):
    run, found = own
    lines = skipping(found).command
    assert ("experiment=wb.Experiment(model, optimizer, loss_fn, step_fn=step)" in lines) == (
        (BAD - 1, 0) not in run.checkpoints
    )
    assert f"leave out the batch of step {BAD}, and hand over those of steps {BAD + 1}, {BAD + 2}" in lines
    loop = Loop()
    names = loop.names(*OWN)
    exec(lines, names)
    with names["recorder"] as recorder:
        for number in range(BAD + 1, STEPS + 1):
            recorder.step(batch(number))
    fork = wb.open_run(recorder.path)
    assert fork.path.name == f"run-from-{BAD - 1}" and fork.manifest.own_step and fork.manifest.stored_batches
    assert fork.manifest.parent.step == BAD - 1
    for name in ("save_every", "keep_last", "keep_every", "spikes", "recovery"):  # it is recorded as the run was
        assert getattr(fork.manifest, name) == getattr(run.manifest, name)
    losses = fork.steps["loss"]
    assert len(losses) == STEPS - BAD and losses.max() < 100 < run.steps["loss"].max()
    for step in fork.steps["step"]:
        assert fork.replay(step, experiment=experiment(), with_probe=False).exact


def test_the_lines_stand_below_each_other_wherever_they_are_shown(own):
    run, found = own
    remedy = found.remedy
    block = printed(found).partition(f"To go on with {remedy.change}:\n")[2]
    shown = block.splitlines()[: len(remedy.command.splitlines())]
    assert all(line.startswith("  ") for line in shown)
    assert textwrap.dedent("\n".join(shown)) == remedy.command
    assert f"mean of next {len(remedy.steps)}" in printed(found) and len(remedy.steps) == 5


def test_the_report_has_the_same_lines(own):
    run, found = own
    remedy = found.remedy
    document = report_html(run, BAD)
    assert html.escape(remedy.command, quote=True) in document or html.escape(remedy.command, quote=False) in document


@pytest.mark.parametrize("own_step", [True, False])
def test_a_loop_with_a_cursor_follows_the_printed_lines(tmp_path, own_step):
    """With a step of its own, or the built-in one with options: the recorder leaves the batch out."""

    def build():
        loop = Loop()
        options = {"step_fn": loop.step} if own_step else {"clip": 1.0, "accumulate": 2}
        return loop, options

    loop, options = build()
    parts = (loop.model, loop.optimizer, loop.loss_fn, loop.sampler)
    with wb.Recorder(tmp_path / "run", *parts, **options, **RECORDING, black_box=0) as recorder:
        for rows in recorder.batches(STEPS):
            recorder.step(rows)
    run = without_script(wb.open_run(tmp_path / "run"))

    def again():
        names = build()[0].names("model", "optimizer", "loss_fn", "sampler", "step")
        with pytest.raises(ExperimentError) as refused:
            run.replay(BAD)
        call = re.search(r"experiment=(wb\.Experiment\(.*\))\); or", str(refused.value))[1]
        return eval(call, names), names

    made, _ = again()
    lines = skipping(run.autopsy(BAD, experiment=made)).command
    assert "changes=['batch=skip']" in lines and ("step_fn=step" in lines) == own_step
    _, names = again()
    exec(lines, names)
    with names["recorder"] as recorder:
        for rows in recorder.batches(STEPS - 1):
            recorder.step(rows)
    fork = wb.open_run(recorder.path)
    assert fork.manifest.options == run.manifest.options and fork.manifest.own_step == own_step
    assert fork.steps["loss"].max() < 100 and fork.steps["step"].iloc[0] == BAD
    assert fork.replay(STEPS - 1, experiment=again()[0], with_probe=False).exact


SCRIPT = """
import os
import sys
os.chdir(FOLDER)
sys.path.insert(0, TESTS)
import test_remedies as remedies
import workbench as wb

loop = remedies.Loop()
model, optimizer, loss_fn, step = loop.model, loop.optimizer, loop.loss_fn, loop.step
"""
RECORD = """
recorder = wb.Recorder("run", model, optimizer, loss_fn, step_fn=step, black_box=0, **remedies.RECORDING)
for number in range(1, remedies.STEPS + 1):
    recorder.step(remedies.batch(number))
recorder.close()
"""
GO_ON = """
for number in range(remedies.BAD + 1, remedies.STEPS + 1):
    recorder.step(remedies.batch(number))
recorder.close()
"""


def test_a_script_is_forked_by_another_and_not_by_itself(tmp_path):
    """The state is rolled forward to by running the script that recorded; a script that forks can't be that one."""
    head = SCRIPT.replace("TESTS", repr(str(Path(__file__).parent))).replace("FOLDER", repr(str(tmp_path)))
    (tmp_path / "loop.py").write_text(head + RECORD)
    assert python(tmp_path / "loop.py").returncode == 0
    run, script, here = wb.open_run(tmp_path / "run"), str(tmp_path / "loop.py"), os.getcwd()
    lines = skipping(run.autopsy(BAD, factory=script)).command
    assert os.getcwd() == here  # which the script has changed
    assert f"39, factory={script!r})" in lines
    (tmp_path / "fork.py").write_text(head + lines + GO_ON)
    said = python(tmp_path / "fork.py")
    assert said.returncode == 0, said.stderr
    fork = wb.open_run(tmp_path / "run-from-39")
    assert fork.steps["loss"].max() < 100
    assert fork.replay(STEPS - 1, experiment=experiment(), with_probe=False).exact
    (tmp_path / "loop.py").write_text(head + lines.replace("-from-39", "-again") + RECORD)
    said = python(tmp_path / "loop.py")
    assert said.returncode != 0 and "asks for a fork point itself" in said.stderr


def test_state_of_the_loops_own_is_handed_over_by_its_names_and_settings_are_kept(tmp_path):
    loop, ema = Loop(), {"weights": mx.zeros((3,))}
    parts = (loop.model, loop.optimizer, loop.loss_fn, loop.sampler)
    settings = {"save_every": 7, "keep_last": 2, "spikes": None, "auto_rollback": wb.Recovery(factor=4.0)}
    with wb.Recorder(tmp_path / "run", *parts, extra={"ema": ema}, **settings) as recorder:
        for rows in recorder.batches(7):
            recorder.step(rows)
    run = wb.open_run(tmp_path / "run")
    inquiry = SimpleNamespace(run=run, scene=SimpleNamespace(segment=0), opening={})
    lines = command(inquiry, inquiries.skipping(8))
    assert "extra={'ema': ema}" in lines
    names = Loop().names("model", "optimizer", "loss_fn", "sampler") | {"ema": {"weights": mx.zeros((3,))}}
    exec(lines, names)
    with names["recorder"] as recorder:
        recorder.step(next(iter(recorder.batches(8))))
    fork = wb.open_run(recorder.path)
    for name in ("save_every", "keep_last", "keep_every", "spikes", "recovery", "extra"):
        assert getattr(fork.manifest, name) == getattr(run.manifest, name)


def test_the_loop_is_told_what_it_has_to_change_itself(own):
    run, found = own
    lines = next(one for one in found.remedies if one.change == "lr=0.1x").command
    assert "# lr=0.1x is for your loop to make" in lines and f"hand over the batches of steps {BAD}, {BAD + 1}" in lines


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A run of `workbench mlx-lm`: adapters, on examples of many lengths."""
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'spike-workbench[mlx-lm]'")
    folder = tmp_path_factory.mktemp("tuned")
    model, data = small_llm.save_model(folder / "model"), small_llm.save_data(folder / "data")
    return wb.fine_tune(small_llm.settings(model, data, iters=14), folder / "run", compile=False)


def test_a_run_of_mlx_lm_goes_on_by_lines_of_its_own(tuned):
    """No loop of the user's has its model, optimizer or data: they are rebuilt."""
    inquiry = SimpleNamespace(run=tuned, scene=SimpleNamespace(segment=0), opening={})
    exec(command(inquiry, inquiries.skipping(11)), {"wb": wb})
    fork = wb.open_run(f"{tuned.path}-from-10")
    hashes = [
        {step: run.line(step, 0).batch_hash for step in steps}
        for run, steps in ((fork, range(11, 15)), (tuned, range(11, 15)))
    ]
    assert [hashes[0][step] for step in (11, 12, 13)] == [hashes[1][step] for step in (12, 13, 14)]
    assert fork.replay(14, with_probe=False).exact


def test_adapters_and_padding_are_nothing_out_of_the_ordinary(tuned):
    found = tuned.autopsy(12)
    assert found.verdict == "unknown" and "no rule could judge it" in found.reason
    assert not [one.sentence for one in found.outliers if one.name == "not trained" or "repeated" in one.sentence]
