"""What the panel has of a step already, and while it works: kept results, and what may be done meanwhile."""

import re
import shutil
import tempfile

import pytest
import runs
from panels import SPIKE, STEPS, look, plain, press

from workbench import kernel_cache
from workbench.errors import EnvironmentMismatch, ReplayError
from workbench.panel import Panel
from workbench.work import child
from workbench.work.child import Child

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")


def test_a_kept_result_says_so(panel):
    press(panel)
    assert "From the cache" not in panel.badges.value
    panel.step.value = 3
    panel.step.value = SPIKE
    assert re.search(r"From the cache: replayed at \d\d:\d\d:\d\d in [\d.]+ s", plain(panel.badges.value))
    press(panel)
    assert "From the cache" not in panel.badges.value


def test_what_the_runs_files_hold_is_shown_and_said_to_be_of_them(folder):
    first = Panel(folder, "spiked")
    first.replay(SPIKE)
    first.whatif(SPIKE, ["lr=0.5x", "v=max"])
    verdict = first.autopsy(SPIKE)
    again = Panel(folder, "spiked")
    assert again.trace.record == first.trace.record and again.found.verdict == verdict
    assert re.search(r"From the run's own files \(00000018.json\): replayed on \d{4}-", plain(again.badges.value))
    assert again.found.experiments["change"].tolist() == ["untouched", "lr=0.5x", "v=max"]
    text = look(again, "Cause")
    assert "00000018.autopsy.json" in text and verdict.reason in plain(text) and "lr=0.5x" in text
    assert repr(again) == "Panel(run='spiked', step=18)"  # nothing was computed in this notebook


def test_files_of_another_environment_are_told_and_not_shown(folder):
    Panel(folder, "spiked").replay(SPIKE)
    file = folder / "spiked" / "traces" / "00000018.json"
    runs.edit_json(file, lambda trace: trace["environment"].update(mlx="0.0.1"))
    panel = Panel(folder, "spiked")
    assert panel.trace is not None  # which machine this is, is not known yet
    panel = Panel(folder, "spiked")
    panel.step.value = 3
    panel.replay(3)
    panel.step.value = SPIKE
    assert panel.trace is None
    assert "of another environment than this one: mlx: recorded 0.0.1, here" in plain(panel.badges.value)
    file.write_text("{}")
    panel = Panel(folder, "spiked")
    assert panel.trace is None and "00000018.json is not a trace" in plain(panel.badges.value)


def test_a_result_belongs_to_its_environment(panel, monkeypatch):
    panel.replay(SPIKE)
    shutil.rmtree(panel.opened.path / "traces")
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    panel.step.value = 3
    panel.step.value = SPIKE
    assert panel.trace is None
    press(panel)
    assert isinstance(panel.last_error, EnvironmentMismatch) and "OPENBLAS_NUM_THREADS" in panel.error.value
    monkeypatch.undo()
    panel.step.value = 3
    panel.step.value = SPIKE
    assert panel.trace.exact
    child.end()


def test_compiled_kernels_are_looked_for_where_mlx_keeps_them(monkeypatch, tmp_path):
    """Not in the folder for temporary files that the other process has: each would be said to compile them anew."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "of the other process"))
    place = kernel_cache.folder("cuda")
    assert place is not None and place.parents[2] == tmp_path


def test_a_second_replay_is_refused_while_one_runs(held, folder):
    panel, may_go = held
    running = panel._performer._work
    panel.replay_button.click()
    assert (
        "Work is being done already" in panel.status.value
        and panel.error.value == ""
        and panel._performer._work is running
    )
    with pytest.raises(ReplayError, match="other work is being done"):
        panel.replay(3)
    other = Panel(folder, "spiked")
    other.replay_button.click()
    assert "by another panel of this notebook" in other.status.value and other._performer._work is None
    may_go.set()
    panel.wait(60)
    press(other)
    assert other.trace.exact


def test_moving_about_starts_and_queues_nothing(held, monkeypatch):
    """However far the slider is dragged while a replay goes on: the last step is the one that is seen."""
    panel, may_go = held
    asked = []
    monkeypatch.setattr(Child, "ask", lambda child, request, tell: asked.append(request))
    for step in (*(1 + move % STEPS for move in range(300)), 3, 12, 7):
        panel.slider.value = step
        assert f"Step {step}:" in plain(panel.step_facts.value)
    assert not panel.cancel_button.disabled  # it still runs
    may_go.set()
    panel.wait(60)
    assert asked == [] and panel.step.value == 7 and panel.trace is None
    assert "Step 18 of spiked replayed" in panel.status.value and "Go to that step" in panel.status.value
    panel.step.value = SPIKE
    assert panel.trace.exact


def test_another_run_may_be_opened_while_one_is_replayed(held, folder, tmp_path):
    panel, may_go = held
    shutil.copytree(runs.recorded_read_only(), folder / "calm")
    panel.folder.value = str(tmp_path)
    panel.folder.value = str(folder)
    panel.run.value = "calm"
    may_go.set()
    panel.wait(60)
    assert panel.opened.name == "calm" and panel.trace is None and "Step 18 of spiked" in panel.status.value
    panel.run.value = "spiked"
    assert panel.trace.step == SPIKE
