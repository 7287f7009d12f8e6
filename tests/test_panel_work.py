"""Slow work in the panel: replays, verdicts, maps and experiments; their progress, their end, and their errors."""

import gc
import html
import os
import re
import signal
import tempfile
import threading
import time
import tracemalloc
import warnings

import ipywidgets as W
import matplotlib.figure
import pytest
import runs
from panels import SPIKE, STEPS, VIEWS, in_a_process, look, plain, press, seen

from workbench import worker
from workbench.batches.batch import batch_table
from workbench.errors import ReplayError
from workbench.panel import Panel
from workbench.record import Recorder
from workbench.screen import layer_view, performing
from workbench.screen.performing import Cancelled
from workbench.screen.views import MEANINGS
from workbench.work import child

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")


# ---- replaying


def test_a_replay_by_the_button(panel, drawn):
    panel.step.value = 17
    panel.spikes.value = (SPIKE, 0)
    press(panel)
    assert panel.last_error is None and panel.trace.exact
    assert repr(panel) == "Panel(run='spiked', step=18, replayed)"
    text = plain(panel.badges.value)
    assert "Step 18 is exact" in text and "probe pass: certified" in text and "<details>" in panel.badges.value
    for name, verdict, why in panel.trace.badges():
        assert f"✓ {name}: {verdict}" in text and html.unescape(panel.badges.value).count(why) == 2  # text and title
        assert html.unescape(panel.badges.value).count(MEANINGS[name]) == 2
    assert re.search(r"Step 18 replayed in [\d.]+ s", panel.status.value)
    assert panel.progress.value == panel.progress.max and panel.progress.bar_style == "success"
    assert not panel.replay_button.disabled and panel.cancel_button.disabled
    assert panel.view.value == "Step"  # where the replay is seen
    assert "replayed, and the range" in panel.layers.value and "✓" in panel.layers.value
    assert "≠" not in panel.layers.value.split("L2 norms of the replay")[0]
    assert "update ratio" in seen(panel) and "Nothing that was measured is NaN" in seen(panel)
    measured = panel.trace.parameters.set_index(["path", "kind"])["l2"]
    ratio = measured["embedding.weight", "update"] / measured["embedding.weight", "weight_before"]
    assert layer_view.update_ratios(panel.trace)["embedding"] == pytest.approx(ratio, rel=1e-12)
    rows = batch_table(panel.opened, SPIKE, panel.trace)
    shown = [f"{100 * share:.1f} %" for share in rows["share"]]
    table = look(panel, "Batch").partition("<details>")[0]
    assert re.findall(r"[\d.]+ %", plain(table)) == shown and rows["share"].is_monotonic_decreasing
    assert set(rows["source"][:2]) == {"1.bytes"}  # the garbage is on top


def test_coming_back_to_a_step_shows_its_replay(panel):
    press(panel)
    panel.step.value = 3
    assert panel.trace is None and panel.badges.value == "" and repr(panel) == "Panel(run='spiked', step=3)"
    panel.step.value = SPIKE
    assert panel.trace.step == SPIKE and "Step 18 is exact" in seen(panel)


def test_what_stands_out_in_a_step_is_told_with_the_badges(panel):
    panel.replay(SPIKE).record.targets = 0
    panel.step.value = 3
    panel.step.value = SPIKE
    assert "Zero target tokens" in plain(panel.badges.value)


def test_replay_from_python_waits_and_returns_the_trace(panel):
    trace = panel.replay(10)
    assert trace.exact and panel.trace is trace and panel.step.value == 10
    assert "Step 10 is exact" in seen(panel) and not panel.replay_button.disabled


def test_replay_from_python_raises(panel):
    with pytest.raises(ReplayError, match="step 999 is not in the telemetry"):
        panel.replay(999)
    assert "step 999 is not in the telemetry" in plain(panel.error.value)
    assert isinstance(panel.last_error, ReplayError)
    assert panel.step.value == SPIKE and "Step 18:" in seen(panel)  # not the nearest one
    panel.step.value = 5
    assert panel.error.value == "" and panel.last_error is None
    assert panel.replay(5).exact


def test_cancel(held):
    panel, may_go = held
    assert panel.replay_button.disabled and not panel.cancel_button.disabled
    panel.cancel_button.click()
    assert "Cancelling" in panel.status.value
    may_go.set()
    panel.wait(60)
    assert "cancelled; nothing was changed" in panel.status.value and panel.progress.bar_style == "warning"
    assert isinstance(panel.last_error, Cancelled) and panel.error.value == ""
    assert panel.trace is None and not panel.replay_button.disabled and panel.cancel_button.disabled
    assert not (panel.opened.path / "traces").exists()
    assert panel.replay(SPIKE).exact  # and the next one is not cancelled


SLOW = """
import runs, time
from workbench.experiment import Experiment

def squares(model, x, y):
    print("the step is being computed", flush=True)
    time.sleep(600)  # in one piece, as a matrix product on a slow BLAS
    return runs.squares(model, x, y)

def build():
    fast = runs.build()
    return Experiment(fast.model, fast.optimizer, squares, fast.sampler, fast.options)
"""


@pytest.fixture
def slow(tmp_path, monkeypatch):
    """A panel on a run whose step can be replayed, but takes ten minutes."""
    parts = runs.parts(runs.build())
    with Recorder(tmp_path / "mine", *parts, compile=False, save_every=2, factory="slowly:build") as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    (tmp_path / "slowly.py").write_text(SLOW)
    monkeypatch.syspath_prepend(tmp_path)
    child.end()  # one with another path may be there
    yield Panel(tmp_path, "mine", factory="slowly:build")
    child.end()


def begun(slow):
    """The process in which its step is being computed now."""
    slow.step.value = 4
    slow.replay_button.click()
    process, end = child.present(), time.monotonic() + 120
    while "is being computed" not in process.said():
        assert time.monotonic() < end and slow.last_error is None, slow.last_error
        time.sleep(0.01)
    return process


def test_cancel_ends_a_step_that_can_not_be_interrupted(slow, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # not everybody's
    os.mkdir(tempfile.gettempdir())
    process = begun(slow)
    slow.cancel_button.click()
    slow.wait(60)  # not ten minutes
    assert isinstance(slow.last_error, Cancelled) and "cancelled; nothing was changed" in slow.status.value
    with pytest.raises(ProcessLookupError):
        os.kill(process.process, 0)  # not even a zombie
    assert not (tmp_path / "mine" / "traces").exists()
    assert os.listdir(tempfile.gettempdir()) == []
    assert not slow.replay_button.disabled and slow.cancel_button.disabled
    assert capfd.readouterr() == ("", "")  # what the step printed lands in no cell
    (tmp_path / "slowly.py").write_text(SLOW.replace("600", "0"))
    press(slow)
    assert slow.error.value == "" and slow.trace.exact
    assert "the step is being computed" in slow.output.value and "the step is" not in seen(slow).split("What the")[0]


def test_an_experiment_that_exists_only_here_is_replayed_here(tmp_path, capfd):
    with Recorder(tmp_path / "mine", *runs.parts(runs.build()), compile=False, save_every=2) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    built, may_go = threading.Event(), threading.Event()

    def build():
        print("building")
        built.set()
        assert may_go.wait(60)
        return runs.build()

    panel = Panel(tmp_path, "mine", experiment=build)
    assert "Cancel waits for the end of a step" in plain(panel.estimate.value)
    panel.step.value = 4
    panel.replay_button.click()
    assert built.wait(60)
    panel.cancel_button.click()
    assert "once the present pass has ended" in plain(panel.status.value)
    may_go.set()
    panel.wait(60)
    assert isinstance(panel.last_error, Cancelled) and panel.trace is None
    press(panel)
    assert panel.trace.exact and panel.error.value == "" and "building" in panel.output.value
    assert "building" not in capfd.readouterr().out


def test_what_ends_by_itself_is_a_sentence(slow, tmp_path):
    os.kill(begun(slow).process, signal.SIGKILL)
    slow.wait(60)
    text = plain(slow.error.value)
    assert "the process that did the work ended with signal 9" in text and "want of memory" in text
    assert "Traceback" not in slow.error.value
    (tmp_path / "slowly.py").write_text(SLOW.replace("600", "0"))
    press(slow)
    assert slow.error.value == "" and slow.trace.exact


def test_progress_is_told_ten_times_a_second_at_most(panel):
    told = []
    panel.progress.observe(lambda change: told.append(change["new"]), "value")
    clock = [100.0]

    class Clock:
        monotonic = staticmethod(lambda: clock[0])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(performing, "time", Clock)
        for done in range(1000):
            clock[0] += 0.001
            panel._performer.progress(done, 1000, "step 5")
        panel._performer.progress(1000, 1000, "step 5")
    assert 8 <= len(told) <= 12 and told[-1] == 1000
    assert "Step 5 (1000 of 1000 done)" in panel.status.value


def test_many_moves_leak_neither_figures_nor_threads_nor_memory(panel):
    def count():
        gc.collect()
        things = gc.get_objects()
        figures = sum(isinstance(thing, matplotlib.figure.Figure) for thing in things)
        return figures, sum(isinstance(thing, W.Widget) for thing in things), threading.active_count()

    def move_about(moves):
        for view in VIEWS:
            look(panel, view)
            for move in range(moves):
                panel.slider.value = 1 + move % STEPS

    move_about(2)
    before = count()
    tracemalloc.start()
    try:
        move_about(40)
        assert count() == before and panel.last_error is None
        assert tracemalloc.get_traced_memory()[0] < 500_000  # what one view holds; 200 of them would be far more
    finally:
        tracemalloc.stop()


def in_a_thread(work):
    """What `work` returns or raises, called in another thread, where warnings are errors too."""
    answer = []

    def call():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                answer.append((work(), None))
        except BaseException as error:
            answer.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(90)
    result, error = answer[0]
    if error is not None:
        raise error
    return result


def test_handlers_are_right_in_any_thread(folder, drawn):
    """Which thread runs a widget's callback depends on the version of ipykernel."""
    panel = Panel(folder)

    def use():
        panel.run.value = "spiked"
        panel.slider.value = 11
        panel.replay_button.click()
        panel.wait(60)
        return panel.trace

    theirs = in_a_thread(use)
    assert panel.last_error is None and theirs.exact and "Step 11 is exact" in seen(panel)
    ours = panel.replay(11)
    assert ours.record.loss_bits == theirs.record.loss_bits and ours.record.state == theirs.record.state
    assert in_a_thread(lambda: panel.replay(12)).exact


# ---- the end of the process


def test_a_replay_stops_when_the_process_ends(panel, monkeypatch):
    monkeypatch.setattr(worker, "leaving", threading.Event())
    worker.leaving.set()
    with pytest.raises(Cancelled):
        panel.replay(SPIKE)


def test_a_process_may_end_during_a_replay(folder):
    """A thread that MLX is busy in when the process ends would bring it down."""
    code = """
import sys, time
import workbench as wb
panel = wb.Panel(sys.argv[1], "spiked")
panel.step.value = 24
panel.replay_button.click()
while panel.progress.bar_style not in ("info", "success") or "Step 24: starting" in panel.status.value:
    time.sleep(0.005)
"""
    in_a_process(code, folder)
