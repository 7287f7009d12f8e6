"""A run's numeric environment against another."""

import pytest
import runs

from workbench.errors import RunError
from workbench.run import Run
from workbench.surroundings import compared, differences, environment_table

RECORDED = {"mlx": "1", "blas": {"library": "a", "threads": 2}, "tf32": None, "variables": {"MLX_A": "1"}}
HERE = {"mlx": "1", "blas": {"library": "b", "threads": 2}, "tf32": None, "variables": {"MLX_B": "<b>"}}


def test_the_differences_come_first():
    rows = compared(RECORDED, HERE).to_dict("split")["data"]
    assert rows == [
        ["blas.library", "a", "b", False],
        ["variables.MLX_A", "1", "nothing", False],
        ["variables.MLX_B", "nothing", "<b>", False],
        ["blas.threads", "2", "2", True],
        ["mlx", "1", "1", True],
    ]
    assert differences(RECORDED, HERE) == [
        "blas.library: recorded a, here b",
        "variables.MLX_A: recorded 1, here nothing",
        "variables.MLX_B: recorded nothing, here <b>",
    ]
    assert differences(HERE, HERE) == [] and compared(HERE, HERE)["same"].all()


def test_a_run_against_this_machine(tmp_path):
    run = Run(runs.recorded(tmp_path))
    assert environment_table(run)["same"].all()
    other = environment_table(run, run.manifest.segments[0].environment | {"mlx": "0.0.1"}, segment=0)
    assert other.iloc[0].tolist() == ["mlx", run.manifest.segments[0].environment["mlx"], "0.0.1", False]
    with pytest.raises(RunError, match="has no segment 7; it has \\[0\\]"):
        environment_table(run, segment=7)
