"""Situations that users met with replay and resumption, an experiment each: group R of the cases. Others:
`test_known_cases`, and the files that it names."""

import os
from pathlib import Path

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points

import workbench as wb

OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3")
FACTORY = "test_cases_of_replay:build"


def build():
    """A loop of one's own with dropout, clipping, a schedule and moments: all that a resume can lose."""
    model = helpers.mlp(dropout=0.3)
    optimizer = optim.AdamW(optim.cosine_decay(1e-2, 40))

    def step(x, y):
        loss, gradients = nn.value_and_grad(model, helpers.mse)(model, x, y)
        gradients, _ = optim.clip_grad_norm(gradients, 0.5)
        optimizer.update(model, gradients)
        return loss

    return wb.Experiment(model, optimizer, helpers.mse, Points(), step_fn=step)


def record(path, steps, *, change=None, **options):
    """Up to a step; `change` is made to the experiment before its first one."""
    one = build()
    settings = {"save_every": 4, "spikes": None, "factory": FACTORY, "step_fn": one.step_fn}
    with wb.Recorder(path, *helpers.parts(one), **settings, **options) as recorder:
        if change is not None:
            change(one)
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return wb.open_run(path)


@pytest.fixture(autouse=True)
def found_by_other_processes(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))


# R12: compare with the same run continued past the checkpoint; the restored state and the way, each by itself.


def test_r12_a_resumed_run_beside_itself_without_the_break(tmp_path):
    record(tmp_path / "run", 10)
    run = record(tmp_path / "run", 12, resume=4)
    for segment, last in ((0, 10), (1, 12)):
        found = run.resumption(4, segment=segment, factory=FACTORY)
        assert (found.restored_state, found.trajectory, max(found.steps)) == ("exact", "exact", last)
    assert len(found.sentences()) == 2
    assert "identical" in wb.compare_runs(record(tmp_path / "whole", 12).path, run.path).sentence


def test_r12_moments_that_the_loop_lost_are_no_fault_of_the_checkpoint(tmp_path):
    """The checkpoint leads back onto both ways, and the seam between them is named with what differs."""

    def lose(one):
        state = one.optimizer.state
        for layer in state["layers"]:
            for leaves in layer.values():
                leaves.update({name: mx.zeros_like(array) for name, array in leaves.items()})

    record(tmp_path / "run", 10)
    run = record(tmp_path / "run", 12, resume=4, change=lose)
    found = run.resumption(4, segment=0, factory=FACTORY)
    assert (found.restored_state, found.trajectory, found.notices) == ("exact", "exact", [])
    found = run.resumption(4, segment=1, factory=FACTORY)
    assert (found.restored_state, found.trajectory) == ("exact", "exact")
    assert found.notices == ["segment 1 went on from another state than step 4 had left: adam_m, adam_v differ"]


# R13: the same state and seed, but another process, thread, compile setting or BLAS.


def test_r13_each_rung_is_equal_or_its_first_difference_is_named(tmp_path):
    run = record(tmp_path / "run", 10)
    other = OPENBLAS.exists() and "openblas" not in os.environ.get("LD_PRELOAD", "")
    rungs = ["same process", "another thread", "fresh process", "compile"]
    ladder = run.diverge(
        10, factory=FACTORY, rungs=rungs, variables={"LD_PRELOAD": str(OPENBLAS)} if other else {"MLX_QUIET": "1"}
    )
    assert ladder.record.verdict == "equal" and ladder.record.compared > 10
    *equal, last = ladder.rungs
    assert [(rung.name, rung.verdict) for rung in equal] == [
        *((name, "equal") for name in rungs[:3]),
        ("compile=on", "equal"),
    ]
    assert last.intervention and last.verdict == ("differs" if other else "equal")
    if other:
        assert last.first.name == "activation of layers.0" and last.first.max_ulp > 0
