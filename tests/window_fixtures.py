"""Two corpora, a plugin: `pytest_plugins = ["window_fixtures"]`."""

import numpy as np
import pytest
from windows import LENGTH

from workbench.trainer.corpus import Corpus


@pytest.fixture
def corpus(tmp_path):
    """Tokens 0, 1, 2, ... so that a token says where it was taken from."""
    path = tmp_path / "count.bin"
    np.arange(LENGTH, dtype="<u2").tofile(path)
    return Corpus.open(path)


@pytest.fixture
def other(tmp_path):
    path = tmp_path / "other.bin"
    np.arange(1000, 1050, dtype="<u2").tofile(path)
    return Corpus.open(path)
