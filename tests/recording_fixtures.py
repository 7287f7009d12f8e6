"""Fixtures of the recorder's tests, a plugin: `pytest_plugins = ["recording_fixtures"]`."""

import shutil

import pytest
from recordings import record

from workbench import open_run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """Twelve steps without a break; nothing is written into it."""
    return record(tmp_path_factory.mktemp("whole") / "run", 12)


@pytest.fixture
def twelve(whole, tmp_path):
    """A copy of it, to go on with."""
    return open_run(shutil.copytree(whole.path, tmp_path / "run"))
