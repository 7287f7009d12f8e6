"""Memory and open files stay level while a run is recorded. The long version is `python tests/long_run.py`."""

import sys

import long_run
import pytest

from workbench.run import open_run

STEPS = 1500


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux for the memory of this process")
def test_memory_and_open_files_stay_level_and_checkpoints_are_thinned(tmp_path):
    found = long_run.recorded(tmp_path / "run", STEPS, samples=15)
    memory, files = long_run.grown(found)
    assert files == 0 and memory < long_run.GROWTH, found
    run = open_run(tmp_path / "run")
    assert run.last_step == STEPS and len(run.steps) == STEPS
    steps = [step for step, _ in run.checkpoints]
    assert {0, 150, 300, STEPS} - set(steps) == {150} and 1400 in steps and 100 not in steps


def test_growth_would_be_seen():
    level = [(step, 100 << 20, 10 + step % 200 // 100) for step in range(100, 1100, 100)]
    assert long_run.grown(level) == (0, 0)
    leaking = [(step, (100 << 20) + step * 20_000, 10 + step // 100) for step in range(100, 1100, 100)]
    assert long_run.grown(leaking)[0] > long_run.GROWTH and long_run.grown(leaking)[1] > 0
