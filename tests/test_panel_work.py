"""Slow work in the panel: replays, verdicts, maps and experiments; their progress, their end, and their errors."""

import gc
import html
import re
import shutil
import threading
import warnings

import matplotlib.figure
import pytest
import runs
from panels import EVIL, SPIKE, STEPS, in_a_process, look, plain, press, seen

from workbench import plots, worker
from workbench.batches.batch import batch_table
from workbench.errors import EnvironmentMismatch, ReplayError, WorkbenchError
from workbench.panel import Panel
from workbench.record import Recorder
from workbench.run import Run
from workbench.screen import layer_view, performing
from workbench.screen.performing import Cancelled

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
    assert "Work is being done already" in other.status.value and other._performer._work is None
    may_go.set()
    panel.wait(60)
    press(other)
    assert other.trace.exact


def test_moving_about_starts_and_queues_nothing(held, monkeypatch):
    panel, may_go = held
    asked = []
    monkeypatch.setattr(Run, "replay", lambda run, step, **options: asked.append(step))
    for step in (3, 12, 7):
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


@pytest.mark.parametrize("view", ["Timeline", "Step", "Batch", "Cause"])
def test_many_moves_leak_neither_figures_nor_threads(panel, monkeypatch, view):
    monkeypatch.setattr(plots, "layer_norms", lambda *rows, **options: matplotlib.figure.Figure())
    look(panel, view)
    panel.step.value = 1

    def count():
        gc.collect()
        return sum(isinstance(thing, matplotlib.figure.Figure) for thing in gc.get_objects()), threading.active_count()

    before = count()
    for move in range(200):
        panel.slider.value = 1 + move % STEPS
    assert count() == before and panel.last_error is None


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
    def fail(run, step, **options):
        raise ZeroDivisionError("<script>alert(1)</script>")

    monkeypatch.setattr(Run, "replay", fail)
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
while panel.progress.bar_style != "info" or "Step 24: starting" in panel.status.value:
    time.sleep(0.005)
"""
    in_a_process(code, folder)
