"""What an optimizer's m and v are called where they are not Adam's: by its class, in every view of a step."""

from pathlib import Path

import mlx.core as mx
import mlx.optimizers as optim
import pytest
import runs
from helpers import experiment, parts, python

from workbench import Recorder, open_run, report_html
from workbench.hyperparameters import describe_optimizer
from workbench.kind_names import moment_names


@pytest.mark.parametrize(
    ("optimizer", "m", "v"),
    [
        (optim.SGD(0.1, momentum=0.9), "m", "v (SGD momentum)"),
        (optim.Muon(0.1), "m", "v (Muon momentum)"),
        (optim.Lion(0.1), "m (Lion momentum)", "v"),
        (optim.RMSprop(0.1), "m", "v (RMSprop)"),
        (optim.Adagrad(0.1), "m", "v (Adagrad)"),
        (optim.AdaDelta(0.1), "m", "v (AdaDelta)"),
        (optim.Adafactor(0.1), "m", "v"),
        (optim.Adamax(0.1), "m (Adamax)", "v (Adamax)"),
    ],
)
def test_moments_of_another_optimizer_have_its_name(optimizer, m, v):
    """It is named by the one it keeps: by those leaves of its state that are there."""
    assert moment_names(describe_optimizer(optimizer)) == {"adam_m": m, "adam_v": v}
    kept: dict = {}
    optimizer.init_single(mx.zeros((2, 2)), kept)
    assert ("(" in m, "(" in v) == ("m" in kept, "v" in kept)


@pytest.mark.parametrize("optimizer", [optim.Adam(0.1), optim.AdamW(0.1)])
def test_those_of_adam_keep_theirs(optimizer):
    assert moment_names(describe_optimizer(optimizer)) == {}
    both = optim.MultiOptimizer([optimizer, optim.Adam(0.1)], [lambda path, value: True])
    assert moment_names(describe_optimizer(both)) == {}


def test_members_of_several_kinds_are_all_named():
    both = optim.MultiOptimizer([optim.AdamW(0.1), optim.SGD(0.1)], [lambda path, value: True])
    assert moment_names(describe_optimizer(both)) == {"adam_m": "m (AdamW)", "adam_v": "v (AdamW, SGD momentum)"}


def test_the_momentum_of_sgd_is_called_that_wherever_it_is_shown(tmp_path):
    def build():
        return experiment(optimizer=optim.SGD(1e-2, momentum=0.9))

    made = build()
    with Recorder(tmp_path / "run", *parts(made), compile=False, spikes=None, factory="helpers:experiment") as recorder:
        for batch in recorder.batches(12):
            recorder.step(batch)
    run = open_run(tmp_path / "run")
    shown = report_html(run, 11)
    assert "v (SGD momentum)" in shown and "Adam" not in shown
    run.replay(11, experiment=build(), fresh_process=False)
    assert "v (SGD momentum)" in report_html(run, 11) and "Adam v" not in report_html(run, 11)


def test_the_command_prints_the_name_and_no_empty_column(tmp_path):
    (tmp_path / "loop.py").write_text(
        "import mlx.optimizers as optim\n"
        "from helpers import experiment, parts\n"
        "from workbench import Recorder\n"
        "made = experiment(optimizer=optim.SGD(1e-2, momentum=0.9))\n"
        f"with Recorder({str(tmp_path / 'run')!r}, *parts(made), compile=False, spikes=None) as recorder:\n"
        "    for batch in recorder.batches(4):\n"
        "        recorder.step(batch)\n"
    )
    assert python(tmp_path / "loop.py").returncode == 0
    asked = ("--step", 3, "--factory", tmp_path / "loop.py", "--no-fresh-process")
    said = runs.workbench("replay", tmp_path / "run", *asked, PYTHONPATH=str(Path(__file__).parent))
    assert said.code == 0, said.err
    assert (
        "v (SGD momentum)" in said.out and "adam_m" not in said.out and "adam_v" not in said.out.partition("trace")[0]
    )
