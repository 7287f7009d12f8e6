"""Slow work in the panel: replays, verdicts, maps and experiments; their progress, their end, and their errors."""

import gc
import html
import os
import re
import shutil
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
from panels import EVIL, SPIKE, STEPS, VIEWS, in_a_process, look, plain, press, seen

from workbench import kernel_cache, worker
from workbench.batches.batch import batch_table
from workbench.errors import EnvironmentMismatch, ReplayError, WorkbenchError
from workbench.panel import Panel
from workbench.record import Recorder
from workbench.screen import layer_view, performing
from workbench.screen.performing import Cancelled
from workbench.screen.views import MEANINGS
from workbench.work import child
from workbench.work.child import Child

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


def test_cancel_ends_a_step_that_can_not_be_interrupted(slow, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # not everybody's
    os.mkdir(tempfile.gettempdir())
    slow.step.value = 4
    slow.replay_button.click()
    process, end = child.present(), time.monotonic() + 120
    while "is being computed" not in process.said():
        assert time.monotonic() < end and slow.last_error is None, slow.last_error
        time.sleep(0.01)
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


def test_what_ends_by_itself_is_a_sentence(held):
    panel, may_go = held
    os.kill(child.present().process, signal.SIGKILL)
    may_go.set()
    panel.wait(60)
    text = plain(panel.error.value)
    assert "the process that did the work ended with signal 9" in text and "want of memory" in text
    assert "Traceback" not in panel.error.value
    press(panel)
    assert panel.error.value == "" and panel.trace.exact


# ---- what was computed before


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


# ---- the cause


def test_the_cause_by_the_button(panel):
    assert "replays step 18 and the steps before it" in plain(look(panel, "Cause"))
    panel.view.value = "Batch"
    press(panel, panel.cause_button)
    verdict, context = panel.found.verdict, panel.found.context
    assert panel.last_error is None and verdict.step == context.step == panel.trace.step == SPIKE
    assert repr(panel) == f"Panel(run='spiked', step=18, replayed, verdict={verdict.verdict!r})"
    assert panel.view.value == "Cause" and "steps before it in" in panel.status.value
    text = plain(panel.verdict.value)
    assert verdict.reason in text and all(one.sentence in text for one in (*verdict.evidence, *verdict.refuted))
    assert 'aria-label="Verdict on step 18"' in panel.verdict.value
    assert "Step 18 is exact" in seen(panel) and context.sentence() in plain(panel.onset.value)
    assert re.search(r'<img[^>]* alt="How far each layer', panel.onset.value)
    assert panel.measure_button.layout.display == "none"
    panel.step.value = 3
    assert panel.found.verdict is None and "wb-verdict" not in panel.verdict.value
    assert panel.measure_button.layout.display is None
    panel.step.value = SPIKE
    assert panel.found.verdict is verdict and verdict.reason in plain(panel.verdict.value)


def test_the_steps_before_are_measured_by_themselves_and_once(panel):
    look(panel, "Cause")
    press(panel, panel.measure_button)
    measured = panel.found.context
    assert panel.found.context.step == SPIKE and panel.found.verdict is None and panel.trace.exact
    assert "<img" in panel.onset.value and panel.last_error is None
    press(panel, panel.cause_button)
    assert panel.found.verdict.step == SPIKE and panel.found.context is measured


def test_too_few_steps_before_are_a_sentence(panel):
    look(panel, "Cause")
    panel.context(2)
    assert "fewer than 4 healthy neighbours" in panel.onset.value and "<img" not in panel.onset.value


def test_an_experiment_by_its_button(panel):
    look(panel, "Cause")
    names = [button.description for button in panel.try_buttons if button.layout.display is None]
    assert names[:4] == ["lr=0.5x", "batch=skip", "reset=m,v", "v=max"] and names[4].startswith("clip=")
    panel.replay(SPIKE)
    top = panel.trace.rows["row"].iloc[0]
    assert [button.description for button in panel.try_buttons][2] == f"drop-row={top}"
    press(panel, panel.try_buttons[0])
    assert panel.last_error is None and panel.found.experiments["change"].tolist() == ["untouched", "lr=0.5x"]
    text = plain(panel.experiments.value)
    assert "Interventions: each is a replay of step 18 with exactly one thing changed" in text
    assert "The untouched replay of step 18 has the run's bits" in text
    press(panel, panel.try_buttons[2])
    made = panel.found.experiments
    assert made["change"].tolist() == ["untouched", "lr=0.5x", f"drop-row={top}"]
    cells = re.findall(r"<tr><td[^>]*>(.*?)</td><td[^>]*>(.*?)</td>", panel.experiments.value)
    assert [plain(name) for name, _ in cells] == made["change"].tolist()
    assert [plain(loss).split()[0] for _, loss in cells] == [f"{loss:#.4g}" for loss in made["loss"]]
    assert "±0" in cells[1][1] and "\N{MINUS SIGN}" in cells[2][1]  # a rate moves no loss of its own step
    panel.step.value = 3
    assert "<table" not in panel.experiments.value
    panel.step.value = SPIKE
    assert "<table" in panel.experiments.value


def test_an_experiment_of_ones_own(panel):
    look(panel, "Cause")
    press(panel, panel.try_button)
    assert "no change is given" in plain(panel.error.value)
    for text, said in (
        ("faster", "is malformed"),
        ("speed=2", "is unknown"),
        ("lr=fast", "has the value"),
        (EVIL, "is"),
    ):
        panel.change.value = text
        press(panel, panel.try_button)
        assert said in plain(panel.error.value) and "<script" not in panel.error.value
        assert panel.found.experiments is None
    panel.change.value = "drop-row=99"  # well formed, and not of this batch
    press(panel, panel.try_button)
    assert "99" in plain(panel.error.value) and "failed" in panel.status.value
    panel.change.value = " lr=2x  clip=off "
    press(panel, panel.try_button)
    assert (
        panel.found.experiments["change"].tolist() == ["untouched", "lr=2.0x", "clip=off"] and panel.error.value == ""
    )


def test_work_from_python_is_shown_and_returned(panel):
    table = panel.whatif(10, "lr=0.5x", next_steps=2)
    assert panel.step.value == 10 and table.equals(panel.found.experiments) and table["steps"].tolist() == [3, 3]
    verdict = panel.autopsy(10)
    assert verdict is panel.found.verdict and verdict.verdict == "no-spike"
    assert verdict.reason in plain(panel.verdict.value) and panel.view.value == "Cause"
    with pytest.raises(WorkbenchError, match="is unknown"):
        panel.whatif(10, "speed=2")
    assert "is unknown" in plain(panel.error.value) and panel.found.verdict is verdict


def test_cancelling_ends_all_that_was_asked_for(panel, monkeypatch):
    arrived, may_go = threading.Event(), threading.Event()
    tell = panel._performer.progress

    def wait_first(*what):
        arrived.set()
        assert may_go.wait(60)
        tell(*what)

    monkeypatch.setattr(panel._performer, "progress", wait_first)
    panel.cause_button.click()
    assert arrived.wait(60)
    look(panel, "Cause")
    buttons = (panel.replay_button, panel.cause_button, panel.measure_button, *panel.try_buttons, panel.try_button)
    assert all(button.disabled for button in buttons) and not panel.cancel_button.disabled
    panel.cancel_button.click()
    may_go.set()
    panel.wait(60)
    assert "cancelled; nothing was changed" in panel.status.value and isinstance(panel.last_error, Cancelled)
    assert panel.found.verdict is None and panel.found.context is None
    assert not any(button.disabled for button in buttons) and panel.cancel_button.disabled
    assert not (panel.opened.path / "traces").exists()


# ---- what can't be done


def test_another_machine_is_named_and_one_can_go_on(folder):
    runs.edit_json(folder / "spiked" / "run.json", lambda m: m["segments"][0]["environment"].update(mlx="0.0.1"))
    panel = Panel(folder, "spiked")
    assert panel.anyway.layout.display == "none"
    press(panel)
    assert isinstance(panel.last_error, EnvironmentMismatch) and "mlx: recorded 0.0.1" in plain(panel.error.value)
    assert "Traceback" not in panel.error.value and panel.anyway.layout.display is None
    assert "failed" in panel.status.value and not panel.replay_button.disabled
    assert look(panel, "Timeline") and look(panel, "Step") and "Batch of step 18" in look(panel, "Batch")
    panel.anyway.value = True
    press(panel)
    assert panel.last_error is None and "informational" in plain(panel.badges.value)


def test_a_missing_corpus_hides_the_batch_and_nothing_else(folder):
    runs.edit_json(folder / "spiked" / "run.json", lambda m: m["data"][0].update(path="/nowhere/lost.txt"))
    panel = Panel(folder, "spiked")
    assert "lost.txt" in plain(look(panel, "Batch")) and "is missing" in plain(panel.batch.value)
    assert panel.error.value == "" and look(panel, "Step") and look(panel, "Timeline")
    press(panel)
    assert "lost.txt" in plain(panel.error.value) and "is missing" in plain(panel.error.value)
    assert "Traceback" not in panel.error.value and look(panel, "Step") and look(panel, "Timeline")


def test_a_run_of_another_loop(tmp_path):
    experiment = runs.build()
    parts = (experiment.model, experiment.optimizer, experiment.loss_fn, experiment.sampler)
    with Recorder(tmp_path / "mine", *parts, compile=False, save_every=2) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    panel = Panel(tmp_path, "mine")
    assert "only that loop knows its batches" in plain(look(panel, "Batch")) and panel.spikes.options[0][1] is None
    press(panel)
    assert "a loop of your own" in plain(panel.error.value)
    assert panel.replay(4, experiment=runs.build()).exact
    assert "float32[3]" in plain(panel.batch.value) and "Step 4 is exact" in seen(panel)


@pytest.mark.parametrize("damage", ["manifest", "telemetry", "no telemetry"])
def test_a_damaged_run_is_a_sentence(folder, damage):
    path = folder / "spiked" / ("run.json" if damage == "manifest" else "telemetry.jsonl")
    if damage == "no telemetry":
        path.unlink()
    else:
        path.write_text("[]\n" + path.read_text())
    panel = Panel(folder, "spiked")
    assert panel.opened is None and path.name in plain(panel.error.value) and 'role="alert"' in panel.error.value
    assert "Traceback" not in panel.error.value and "<details" not in panel.error.value
    assert isinstance(panel.last_error, WorkbenchError) and panel.timeline.value == panel.facts.value == ""


def test_an_unexpected_error_is_shown_with_its_details_folded(panel, monkeypatch):
    def fail(child, request, tell):
        raise ZeroDivisionError("<script>alert(1)</script>")

    monkeypatch.setattr(Child, "ask", fail)
    press(panel)
    assert isinstance(panel.last_error, ZeroDivisionError) and "<script" not in panel.error.value
    visible, _, folded = panel.error.value.partition("<details>")
    assert "ZeroDivisionError" in visible and "Traceback" not in visible and "Traceback" in folded
    assert panel.progress.bar_style == "warning" and not panel.replay_button.disabled
    monkeypatch.undo()
    press(panel)
    assert panel.error.value == "" and panel.trace.exact


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
