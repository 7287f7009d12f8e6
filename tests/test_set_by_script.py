"""What a script sets in its own process is compared when it has been run, and is no reason to refuse its replay."""

import os
import runpy

import mlx.core as mx
import pytest

from workbench.environment import compile_disabled
from workbench.errors import EnvironmentMismatch
from workbench.process_settings import as_before
from workbench.run import open_run
from workbench.surroundings import set_too_late, shell_line

SCRIPT = """
import os, warnings
from pathlib import Path
import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, workbench as wb
mx.set_default_device(mx.cpu)
{settings}
mx.random.seed(0)
model, optimizer = nn.Linear(3, 1), optim.Adam(1e-2)

def loss_fn(model, x, y):
    return mx.mean(mx.square(model(x) - y))

warnings.simplefilter("ignore")
with wb.Recorder(Path(__file__).parent / "run", model, optimizer, loss_fn, compile=False, spikes=None) as recorder:
    for number in range(3):
        x = mx.arange(6).reshape(2, 3) + number
        recorder.step((x.astype(mx.float32), x.sum(1, keepdims=True).astype(mx.float32)))
"""
SETTINGS = "mx.disable_compile()\nos.environ['OMP_NUM_THREADS'] = '7'"


@pytest.fixture
def script(tmp_path, monkeypatch):
    """A run, and its script, which switched compilation off and set a variable; neither is so any more."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that it is taken away in the end
    monkeypatch.delenv("OMP_NUM_THREADS")
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(settings=SETTINGS))
    try:
        runpy.run_path(str(path), run_name="__main__")
    finally:
        mx.enable_compile()
        os.environ.pop("OMP_NUM_THREADS", None)
    yield path
    mx.enable_compile()


def replayed(script):
    run = open_run(script.parent / "run")
    return run.replay(3, factory=str(script), with_probe=False, repeat=False, fresh_process=False)


def test_what_the_script_sets_again_is_no_difference_and_is_taken_back(script):
    recorded = open_run(script.parent / "run").manifest.segments[0].environment
    assert recorded["compile_disabled"] is True and recorded["variables"]["OMP_NUM_THREADS"] == "7"
    trace = replayed(script)
    assert trace.exact and trace.record.environment_differences == []
    assert not compile_disabled()


def test_what_it_does_not_set_again_is_refused_as_ever_with_the_line_to_type(script):
    script.write_text(SCRIPT.format(settings="pass"))
    with pytest.raises(EnvironmentMismatch) as caught:
        replayed(script)
    assert "compile_disabled: recorded True, here nothing" in str(caught.value)
    assert "variables.OMP_NUM_THREADS: recorded 7, here nothing" in str(caught.value)
    assert "in the shell that starts Python (export OMP_NUM_THREADS=7)" in str(caught.value)


def test_another_library_is_refused_before_the_script_is_run(script):
    import runs

    def older(document):
        document["segments"][0]["environment"]["mlx"] = "0.1"

    runs.edit_json(script.parent / "run" / "run.json", older)
    script.write_text("raise SystemExit('it was run')")
    with pytest.raises(EnvironmentMismatch, match="mlx: recorded 0.1, here "):
        replayed(script)


def test_compilation_that_was_off_before_stays_off():
    mx.disable_compile()
    try:
        with as_before():
            mx.disable_compile()
        assert compile_disabled()
    finally:
        mx.enable_compile()
    with as_before():
        mx.disable_compile()
    assert not compile_disabled()


def test_a_variable_that_comes_too_late_is_told_from_one_that_is_seen_elsewhere():
    before = {"backend": "cpu", "variables": {}}
    here = {"backend": "cpu", "variables": {"OMP_NUM_THREADS": "1", "MLX_ENABLE_TF32": "0", "MKL_CBWR": "AVX2"}}
    (only,) = set_too_late(before, here)
    assert only.startswith("variables.MKL_CBWR: set to AVX2 by the script")
    on_gpu = [one.partition(":")[0] for one in set_too_late(before, here | {"backend": "cuda"})]
    assert on_gpu == ["variables.MKL_CBWR", "variables.MLX_ENABLE_TF32", "variables.OMP_NUM_THREADS"]
    assert set_too_late(here, here) == []


def test_the_line_to_type_is_safe_to_type():
    recorded = {"variables": {"OMP_NUM_THREADS": "1; rm -rf x", "$(x)": "1", "SAME": "1"}}
    started = {"variables": {"MLX_B": "2", "SAME": "1"}}
    assert shell_line(recorded, started) == "unset MLX_B; export OMP_NUM_THREADS='1; rm -rf x'"
    assert shell_line(started, started) is None and shell_line({}, {}) is None
