"""Fixtures of the panel's tests, a plugin: `pytest_plugins = ["panel_fixtures"]`."""

import shutil
import threading
from pathlib import Path

import ipywidgets as W
import matplotlib.figure
import panels
import pytest

from workbench import figures
from workbench.panel import VARIABLE, Panel


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one run, `spiked`: 24 steps, checkpoints 0, 8, 16, 24, two rows of garbage at step 18."""
    shutil.copytree(panels.spiked(), tmp_path / "runs" / "spiked")
    return tmp_path / "runs"


@pytest.fixture
def closed(monkeypatch):
    """ipywidgets keeps every widget alive until it is closed."""
    monkeypatch.delenv(VARIABLE, raising=False)
    yield
    W.Widget.close_all()


@pytest.fixture
def drawn():
    """Asked for by tests that need the real pictures."""


@pytest.fixture
def quick(request, monkeypatch):
    """A dot in place of each picture: drawing would be most of the time."""
    if "drawn" not in request.fixturenames:
        dot = figures.png(matplotlib.figure.Figure(figsize=(1, 1), dpi=10))
        monkeypatch.setattr(figures, "png", lambda figure: dot)


@pytest.fixture
def panel(folder) -> Panel:
    return Panel(folder, "spiked")


@pytest.fixture
def held(panel, monkeypatch):
    """A panel whose replay waits before its first pass until the event is set."""
    may_go, arrived = threading.Event(), threading.Event()
    tell = panel._performer.progress

    def wait_first(*what):
        arrived.set()
        assert may_go.wait(60)
        tell(*what)

    monkeypatch.setattr(panel._performer, "progress", wait_first)
    panel.replay_button.click()
    assert arrived.wait(60)
    yield panel, may_go
    may_go.set()
    panel.wait(60)
