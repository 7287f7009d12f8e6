"""The panel on a run that several ranks trained together: it says so, shows what there is, and Replay starts them."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import ipywidgets
import pytest
from panels import look, plain, press, seen
from ranks_job import SPIKE
from test_ranks import SETUP, unable

from workbench.errors import ReplayError
from workbench.panel import Panel
from workbench.ranks.launching import launch_command
from workbench.run import Run
from workbench.step_report import report_html

RECORD = """
import sys
from pathlib import Path

from ranks_job import record

record(Path(sys.argv[1]), factory="slow_job:build")
"""
TESTS = Path(__file__).parent


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    if why := unable():
        pytest.skip(why)
    folder = tmp_path_factory.mktemp("of-ranks") / "own"
    folder.with_name("slow_job.py").write_text(SLOW)
    command = [*launch_command(SETUP), sys.executable, "-c", RECORD, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder.parent), str(TESTS)])}
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as launcher:
        launcher.wait(100)  # its input stays open: see `launching.watched`
    return folder


@pytest.fixture
def panel(recorded, tmp_path, monkeypatch):
    """With a factory that takes its time, where a file `slow` lies beside the run."""
    (tmp_path / "slow_job.py").write_text(SLOW)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(TESTS)]))
    panel = Panel(run=shutil.copytree(recorded, tmp_path / "own"), factory="slow_job:build")
    panel.step.value = SPIKE
    yield panel
    ipywidgets.Widget.close_all()


SLOW = """
import time
from pathlib import Path

import ranks_job


def build():
    if Path(__file__).with_name("slow").exists():
        time.sleep(60)
    return ranks_job.build()
"""


def at_work(run):
    """Processes of this host that are ranks of a replay of it, or start them."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True).stdout
    return [line for line in listed.splitlines() if "workbench.ranks.launching" in line and str(run.path) in line]


def await_end(run):
    """Killed processes of others take a moment to be gone; of themselves they would end after a minute."""
    end = time.monotonic() + 20
    while at_work(run):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_it_shows_what_can_be_read(panel):
    assert "by 2 ranks together" in plain(panel.facts.value)
    assert f"Rank 1's batch carried step {SPIKE}" in plain(panel.step_facts.value)
    for view in panel.view.options:
        assert look(panel, view) and panel.last_error is None, view
    assert f"Rank 1's batch carried step {SPIKE}" in plain(report_html(Run(panel.opened.path), SPIKE))


def test_replay_is_performed_by_all_ranks(panel):
    press(panel)
    assert panel.last_error is None, panel.last_error
    assert [one.rank for one in panel.trace.record.ranks] == [0, 1] and panel.trace.exact
    assert "Rank 1's batch carried" in seen(panel)


def test_what_one_process_would_have_to_do_is_refused_in_a_sentence(panel):
    for button in (panel.cause_button, panel.measure_button, panel.doctor_button, panel.try_button):
        assert button.disabled and not panel.replay_button.disabled
    for text in (plain(panel.estimate.value), plain(look(panel, "Cause"))):
        assert "Recorded by 2 ranks together: causes are not looked for" in text
    assert panel.trying.layout.display == panel.measure_button.layout.display == "none"
    with pytest.raises(ReplayError, match="was recorded by 2 ranks together"):
        panel.autopsy(SPIKE)
    assert "Traceback" not in panel.error.value and not panel.replay_button.disabled


def test_cancel_ends_the_ranks_too(panel, tmp_path):
    run = panel.opened
    (tmp_path / "slow").touch()
    panel.replay_button.click()
    end = time.monotonic() + 60
    while len(at_work(run)) < 3:  # the launcher and two ranks
        assert time.monotonic() < end and panel.last_error is None, panel.last_error
        time.sleep(0.1)
    panel.cancel_button.click()
    panel.wait(20)
    assert "cancelled; nothing was changed" in plain(panel.status.value)
    await_end(run)
    assert panel.trace is None and not (run.path / "traces").exists()


def test_ranks_end_when_who_asked_for_them_is_killed(panel, tmp_path):
    run = panel.opened
    (tmp_path / "slow").touch()
    command = [sys.executable, "-m", "workbench", "replay", str(run.path), "--step", str(SPIKE)]
    with subprocess.Popen([*command, "--factory", "slow_job:build"], stderr=subprocess.DEVNULL) as asked:
        while len(at_work(run)) < 3:
            assert asked.poll() is None
            time.sleep(0.1)
        asked.kill()
    await_end(run)
