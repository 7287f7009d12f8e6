"""The demonstration: a planted spike from training to exact replay, here on a smaller model."""

import tempfile

import pytest
import runs

from workbench import demo, open_run
from workbench.errors import RunError
from workbench.trainer.training import Quiet, train_run


@pytest.fixture
def small(monkeypatch):
    """The same demonstration in a second: fewer steps of a smaller model, learning faster."""
    for name, value in {"STEPS": 36, "SPIKE": 30, "WINDOW": 10}.items():
        monkeypatch.setattr(demo, name, value)

    def train(out, corpus, steps, **options):
        return train_run(out, runs.corpus(), steps, **(options | runs.SMALL | {"max_lr": 1e-2, "device": "cpu"}))

    monkeypatch.setattr(demo, "train_run", train)


def test_demo_finds_the_planted_spike_and_replays_it_exactly(small, tmp_path):
    said = runs.here("demo", "--keep", tmp_path / "demo")
    assert said.code == 0, said.err
    assert "Spike detected at step 30 (loss_" in said.out and "Step 30 is exact" in said.out
    for name in ("repeatable", "faithful", "sensitive"):
        assert f"{name} " in said.out
    assert "Step 30: data. The batch of step 30 carries it: rows " in said.out
    assert f"workbench autopsy {tmp_path / 'demo'} --step 30" in said.out
    assert f"workbench replay {tmp_path / 'demo'} --step 30 --context 8" in said.out
    assert f"workbench lab {tmp_path / 'demo'}" in said.out
    assert "step 30: spike (loss_" in said.err  # told while it trains
    run = open_run(tmp_path / "demo")
    assert run.spikes()["step"].tolist()[0] == 30 and (run.path / "planted.json").exists()
    assert "already holds a run" in runs.here("demo", "--keep", tmp_path / "demo").sentence


def test_demo_without_a_folder_keeps_its_run_in_a_temporary_one(small, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    trace, _, spike, out = demo.run_demo(None, Quiet())
    assert trace.exact and spike.step == 30 and (out / "run.json").exists()
    assert out.name == "run" and out.parent.parent == tmp_path and out.parent.name.startswith("workbench-demo-")


def test_a_spike_that_is_not_detected_is_a_sentence(small, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "WINDOW", 35)  # never full before the spike
    with pytest.raises(RunError, match="the spike planted at step 30 .* was not detected; look: workbench replay"):
        demo.run_demo(tmp_path / "demo", Quiet())


def test_the_real_one_is_small_and_fills_its_window_first():
    assert demo.WINDOW < demo.SPIKE < demo.STEPS <= 120
    assert (demo.shared("data") / "shakespeare.txt").stat().st_size > 10_000
