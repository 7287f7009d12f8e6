"""What is replayed, a plugin: `pytest_plugins = ["replay_fixtures"]`."""

import pytest
from helpers import experiment, parts, remembered
from replays import STEPS

from workbench import Recorder, open_run


@pytest.fixture(scope="module")
def memory():
    """States and evidence of 8 uninterrupted steps."""
    return remembered(experiment(), STEPS)


@pytest.fixture
def run(tmp_path):
    """A recorded run of 12 steps with checkpoints at 0, 5, 10 and 12."""
    with Recorder(tmp_path / "run", *parts(experiment()), compile=False, save_every=5) as recorder:
        for batch in recorder.batches(12):
            recorder.step(batch)
    return open_run(tmp_path / "run")
