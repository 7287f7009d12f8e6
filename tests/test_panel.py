"""The panel without a browser: set what a person would set, press what they would press, read what they would see."""

import functools
import gc
import html
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import ipywidgets as W
import matplotlib.figure
import pytest
import runs

from workbench import figures, plots, views, worker
from workbench import panel as panels
from workbench.batch import batch_table
from workbench.corpus import Corpus
from workbench.errors import EnvironmentMismatch, ReplayError, RunError, WorkbenchError
from workbench.panel import Panel
from workbench.record import Recorder
from workbench.run import Run

SPIKE, STEPS = 18, 24
VIEWS = ("facts", "timeline", "step_facts", "estimate", "status", "error", "badges", "layers", "batch")


@functools.cache
def _spiked() -> Path:
    out = runs.scratch() / "spiked"
    said = runs.workbench(
        *("train", "--corpus", runs.corpus(), "--steps", STEPS, "--out", out, "--save-every", 8, *runs.FLAGS),
        *("--spike-window", 8, "--fault", f"garbage@{SPIKE}:rows=2", "--max-lr", "3e-3"),
    )
    assert said.code == 0, said.err
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one run, `spiked`: 24 steps, checkpoints 0, 8, 16, 24, two rows of garbage at step 18."""
    shutil.copytree(_spiked(), tmp_path / "runs" / "spiked")
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def closed(monkeypatch):
    """ipywidgets keeps every widget alive until it is closed."""
    monkeypatch.delenv(panels.VARIABLE, raising=False)
    yield
    W.Widget.close_all()


@pytest.fixture
def drawn():
    """Asked for by tests that need the real pictures."""


@pytest.fixture(autouse=True)
def quick(request, monkeypatch):
    """A dot in place of each picture: drawing would be most of the time."""
    if "drawn" not in request.fixturenames:
        dot = figures.png(matplotlib.figure.Figure(figsize=(1, 1), dpi=10))
        monkeypatch.setattr(figures, "png", lambda figure: dot)


@pytest.fixture
def panel(folder) -> Panel:
    return Panel(folder, "spiked")


def seen(panel: Panel) -> str:
    """Everything that the panel shows, as text."""
    return "\n".join(plain(getattr(panel, name).value) for name in VIEWS)


def plain(markup: str) -> str:
    text = html.unescape(re.sub(r"<[^>]+>", " ", re.sub(r'src="data:[^"]*"', "", markup)))
    return text.replace("\N{NO-BREAK SPACE}", " ")


def loss(step: int) -> str:
    """As the panel shows it."""
    return f"{Run(_spiked()).steps.set_index('step')['loss'][step]:.4g}"


def press_replay(panel: Panel) -> None:
    panel.replay_button.click()
    panel.wait(60)


@pytest.fixture
def held(panel, monkeypatch):
    """A panel whose replay waits before its first pass until the event is set."""
    may_go, arrived = threading.Event(), threading.Event()
    tell = panel._on_progress

    def wait_first(*what):
        arrived.set()
        assert may_go.wait(60)
        tell(*what)

    monkeypatch.setattr(panel, "_on_progress", wait_first)
    panel.replay_button.click()
    assert arrived.wait(60)
    yield panel, may_go
    may_go.set()
    panel.wait(60)


# ---- choosing a run


def test_no_run_is_chosen_before_a_person_chooses_one(folder):
    panel = Panel(folder)
    assert panel.run.options == (("choose a run", ""), ("spiked", "spiked"))
    assert panel.opened is None and panel.run.value == "" and panel.run.label == "choose a run"
    assert panel.replay_button.disabled
    assert "choose one" in seen(panel) and panel.error.value == ""
    assert repr(panel) == "Panel(folder='runs', no run chosen)" and panel.still() is None
    with pytest.raises(RunError, match="no run is chosen"):
        panel.replay(SPIKE)
    assert "no run is chosen" in plain(panel.error.value)


def test_choosing_a_run_shows_its_last_spike(folder, drawn):
    panel = Panel(folder)
    panel.run.value = "spiked"
    assert panel.opened.name == "spiked" and panel.last_error is None
    assert (panel.step.value, panel.slider.value) == (SPIKE, SPIKE)
    assert (panel.step.min, panel.step.max, panel.slider.min, panel.slider.max) == (1, STEPS, 1, STEPS)
    assert [label for label, _ in panel.spikes.options] == [f"{SPIKE} · loss_z · loss {loss(SPIKE)}"]
    assert panel.spikes.value == (SPIKE, 0)
    assert "24 steps · 1 spike · checkpoints 0, 8, 16, 24" in plain(panel.facts.value)
    assert f"Step 18: loss {loss(SPIKE)}" in seen(panel) and "robust standard deviations" in seen(panel)
    assert "1 step to roll forward from checkpoint 16" in plain(panel.estimate.value)
    assert repr(panel) == "Panel(run='spiked', step=18)"


@pytest.mark.parametrize("given", ["path", "text", "folder field"])
def test_a_run_is_also_given_by_its_path(folder, given):
    path = folder / "spiked"
    if given == "folder field":
        panel = Panel(folder.parent)
        panel.folder.value = str(path)
    else:
        panel = Panel(run=path if given == "path" else str(path))
    assert panel.opened.path == path and panel.folder.value == str(folder) and panel.run.value == "spiked"


def test_the_run_of_workbench_lab_is_opened(folder, monkeypatch):
    monkeypatch.setenv(panels.VARIABLE, str(folder / "spiked"))
    assert Panel().opened.name == Panel(example=True).opened.name == "spiked"
    assert Panel(folder).opened is None  # what is asked for comes first


def test_the_example_comes_with_the_package():
    panel = Panel(example=True)
    assert panel.opened.name == "demo-run" and panel.last_error is None
    assert "shakespeare.txt" in panel.batch.value and "1.bytes" in panel.batch.value
    assert panel.step.value == 97


def test_another_folder_is_typed(folder, tmp_path):
    panel = Panel(folder, "spiked")
    (tmp_path / "empty").mkdir()
    panel.folder.value = str(tmp_path / "empty")
    assert panel.opened is None and "0 runs" in seen(panel) and panel.timeline.value == ""
    assert panel.run.label == "no runs in this folder"
    panel.folder.value = str(tmp_path / "missing")
    assert "No such file or directory" in plain(panel.error.value) and 'role="alert"' in panel.error.value
    panel.folder.value = str(folder)
    assert panel.error.value == "" and panel.last_error is None and panel.run.options[1][0] == "spiked"


def test_a_run_that_is_not_there_is_not_replaced_by_another(folder):
    panel = Panel(folder, "spike")
    assert panel.opened is None and panel.run.value == ""
    assert "spike is not a run in" in plain(panel.error.value) and "it has spiked" in plain(panel.error.value)


def test_refresh_shows_what_was_recorded_since(folder):
    panel = Panel(folder, "spiked")
    panel.step.value = 20
    lines = (folder / "spiked" / "telemetry.jsonl").read_text().splitlines()
    more = json.loads(next(line for line in lines if '"step":24' in line and '"type":"step"' in line)) | {"step": 25}
    with open(folder / "spiked" / "telemetry.jsonl", "a") as file:
        file.write(json.dumps(more) + "\n")
    shutil.copytree(folder / "spiked", folder / "second")
    panel.step.value = 21
    assert panel.opened.last_step == panel.step.max == STEPS  # one view of the run until a person asks for another
    panel.refresh.click()
    assert panel.step.max == STEPS + 1 and panel.step.value == 21
    assert [name for name, _ in panel.run.options] == ["choose a run", "second", "spiked"]


# ---- looking at a step


def cursor(panel: Panel) -> float:
    return float(re.search(r"position:absolute;left:([\d.]+)%", panel.timeline.value)[1])


def test_each_step_is_shown(panel):
    before = {name: getattr(panel, name).value for name in VIEWS}
    panel.step.value = 10
    changed = [name for name in VIEWS if getattr(panel, name).value != before[name]]
    assert changed == ["timeline", "step_facts", "estimate", "layers", "batch"]
    assert f"Step 10: loss {loss(10)}" in plain(panel.step_facts.value) and "Spike" not in panel.step_facts.value
    assert "from checkpoint 8" in panel.estimate.value and "Batch of step 10" in seen(panel)
    assert 'alt="Norms of each layer at step 10, from the telemetry' in panel.layers.value


def test_the_cursor_stands_where_the_figure_has_the_step(panel):
    figure = plots.timeline(panel.opened.steps, panel.opened.spikes(), checkpoints=[0, 8, 16, 24], title="spiked")
    for step in (1, 10, 24):
        panel.step.value = step
        pixel = figure.axes[0].transData.transform((step, 1.0))[0]
        assert cursor(panel) == pytest.approx(100 * pixel / figure.bbox.width, abs=0.002)
        assert f">{step}</div>" in panel.timeline.value


def test_number_and_slider_are_one(panel):
    panel.slider.value = 5
    assert panel.step.value == 5 and "Step 5:" in seen(panel)
    panel.step.value = 7
    assert panel.slider.value == 7


def test_the_spike_list_leads_there_again_and_again(panel):
    for _ in range(2):
        panel.step.value = 3
        assert panel.spikes.value is None
        panel.spikes.value = (SPIKE, 0)
        assert panel.step.value == SPIKE and "Step 18:" in seen(panel)


def test_the_batch_is_decoded_without_a_replay(panel):
    text = plain(panel.batch.value)
    assert "Batch of step 18" in text and text.count("corpus.txt") == 2 and text.count("1.bytes") == 2
    assert "share" not in text and "loss" not in text
    panel.step.value = 10
    first = batch_table(panel.opened, 10)["text"][0]
    cells = re.findall(r"<bdi>(.*?)</bdi>", panel.batch.value)
    assert html.unescape(re.sub(r"<[^>]+>", "", cells[0])) == first.replace("␊", r"\n")


# ---- replaying


def test_a_replay_by_the_button(panel, drawn):
    panel.step.value = 17
    panel.spikes.value = (SPIKE, 0)
    press_replay(panel)
    assert panel.last_error is None and panel.trace.exact
    assert repr(panel) == "Panel(run='spiked', step=18, replayed)"
    text = plain(panel.badges.value)
    assert "Step 18 is exact" in text and "Probe pass certified" in text
    for name, verdict, why in panel.trace.badges():
        assert f"✓ {name}: {verdict}" in text and html.unescape(panel.badges.value).count(why) == 2  # text and title
    assert re.search(r"Step 18 replayed in [\d.]+ s", panel.status.value)
    assert panel.progress.value == panel.progress.max and panel.progress.bar_style == "success"
    assert not panel.replay_button.disabled and panel.cancel_button.disabled
    assert "replayed, and the range" in panel.layers.value and "✓" in panel.layers.value
    assert "≠" not in panel.layers.value.split("L2 norms of the replay")[0]
    assert "update ratio" in seen(panel) and "Nothing that was measured is NaN" in seen(panel)
    measured = panel.trace.parameters.set_index(["path", "kind"])["l2"]
    ratio = measured["embedding.weight", "update"] / measured["embedding.weight", "weight_before"]
    assert views.update_ratios(panel.trace)["embedding"] == pytest.approx(ratio, rel=1e-12)
    rows = batch_table(panel.opened, SPIKE, panel.trace)
    shown = [f"{100 * share:.1f} %" for share in rows["share"]]
    assert re.findall(r"[\d.]+ %", plain(panel.batch.value)) == shown and rows["share"].is_monotonic_decreasing
    assert set(rows["source"][:2]) == {"1.bytes"}  # the garbage is on top


def test_coming_back_to_a_step_shows_its_replay(panel):
    press_replay(panel)
    panel.step.value = 3
    assert panel.trace is None and panel.badges.value == "" and repr(panel) == "Panel(run='spiked', step=3)"
    panel.step.value = SPIKE
    assert panel.trace.step == SPIKE and "Step 18 is exact" in seen(panel)


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
    assert isinstance(panel.last_error, panels.Cancelled) and panel.error.value == ""
    assert panel.trace is None and not panel.replay_button.disabled and panel.cancel_button.disabled
    assert not (panel.opened.path / "traces").exists()
    assert panel.replay(SPIKE).exact  # and the next one is not cancelled


def test_a_second_replay_is_refused_while_one_runs(held, folder):
    panel, may_go = held
    running = panel._work
    panel.on_replay()
    assert "A replay is running" in panel.status.value and panel.error.value == "" and panel._work is running
    with pytest.raises(ReplayError, match="another replay is running"):
        panel.replay(3)
    other = Panel(folder, "spiked")
    other.replay_button.click()
    assert "A replay is running" in other.status.value and other._work is None
    may_go.set()
    panel.wait(60)
    press_replay(other)
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
        patch.setattr(panels, "time", Clock)
        for done in range(1000):
            clock[0] += 0.001
            panel._on_progress(done, 1000, "step 5")
        panel._on_progress(1000, 1000, "step 5")
    assert 8 <= len(told) <= 12 and told[-1] == 1000
    assert "Step 5 (1000 of 1000 passes done)" in panel.status.value


def test_many_moves_leak_neither_figures_nor_threads(panel, monkeypatch):
    monkeypatch.setattr(plots, "layer_norms", lambda *rows, **options: matplotlib.figure.Figure())
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


# ---- what can't be done


def test_another_machine_is_named_and_one_can_go_on(folder):
    runs.edit_json(folder / "spiked" / "run.json", lambda m: m["segments"][0]["environment"].update(mlx="0.0.1"))
    panel = Panel(folder, "spiked")
    assert panel.anyway.layout.display == "none"
    press_replay(panel)
    assert isinstance(panel.last_error, EnvironmentMismatch) and "mlx: recorded 0.0.1" in plain(panel.error.value)
    assert "Traceback" not in panel.error.value and panel.anyway.layout.display is None
    assert "not replayed" in panel.status.value and not panel.replay_button.disabled
    assert panel.timeline.value and panel.layers.value and "Batch of step 18" in seen(panel)
    panel.anyway.value = True
    press_replay(panel)
    assert panel.last_error is None and "informational" in plain(panel.badges.value)


def test_a_missing_corpus_hides_the_batch_and_nothing_else(folder):
    runs.edit_json(folder / "spiked" / "run.json", lambda m: m["data"][0].update(path="/nowhere/lost.txt"))
    panel = Panel(folder, "spiked")
    assert "lost.txt" in plain(panel.batch.value) and "is missing" in plain(panel.batch.value)
    assert panel.error.value == "" and panel.timeline.value and "Layers" not in panel.error.value
    press_replay(panel)
    assert "lost.txt" in plain(panel.error.value) and "is missing" in plain(panel.error.value)
    assert "Traceback" not in panel.error.value and panel.layers.value and panel.timeline.value


def test_a_run_of_another_loop(tmp_path):
    experiment = runs.build()
    parts = (experiment.model, experiment.optimizer, experiment.loss_fn, experiment.sampler)
    with Recorder(tmp_path / "mine", *parts, compile=False, save_every=2) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    panel = Panel(tmp_path, "mine")
    assert "only that loop knows its batches" in plain(panel.batch.value) and panel.spikes.options[0][1] is None
    press_replay(panel)
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
    press_replay(panel)
    assert isinstance(panel.last_error, ZeroDivisionError) and "<script" not in panel.error.value
    visible, _, folded = panel.error.value.partition("<details>")
    assert "ZeroDivisionError" in visible and "Traceback" not in visible and "Traceback" in folded
    assert panel.progress.bar_style == "warning" and not panel.replay_button.disabled
    monkeypatch.undo()
    press_replay(panel)
    assert panel.error.value == "" and panel.trace.exact


# ---- unusual runs


def test_a_run_without_spikes(tmp_path):
    shutil.copytree(runs.recorded_read_only(), tmp_path / "calm")
    runs.edit_json(tmp_path / "calm" / "run.json", lambda m: m["spikes"].update(window=50))
    panel = Panel(tmp_path, "calm")
    assert panel.spikes.options == (("none found", None),) and panel.spikes.value is None
    assert panel.step.value == runs.STEPS and "0 spikes" in seen(panel) and panel.last_error is None
    assert "validation loss" in _facts(panel, 10)


def _facts(panel: Panel, step: int) -> str:
    panel.step.value = step
    return plain(panel.step_facts.value)


def test_a_run_that_has_no_steps_yet(folder):
    path = folder / "spiked" / "telemetry.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    panel = Panel(folder, "spiked")
    assert panel.opened is not None and panel.last_error is None and "0 steps" in seen(panel)
    assert panel.replay_button.disabled and panel.still() is None and panel.timeline.value == ""
    with pytest.raises(ReplayError, match="no steps yet"):
        panel.replay(1)


def test_a_run_that_became_nan(folder, drawn):
    nan, count = "0x7fc00000", 9
    layers = len(Run(folder / "spiked").manifest.layers)
    for step in range(20, STEPS + 1):
        fields = {"loss": None, "loss_bits": nan, "grad_norm": None, "grad_norm_bits": nan}
        fields |= {"per_layer_grad_norms": [None] * layers, "per_layer_grad_norms_bits": [nan] * layers}
        runs.edit_line(folder / "spiked", step, **fields)
    panel = Panel(folder, "spiked")
    assert panel.last_error is None and len(panel.spikes.options) == 2
    assert panel.spikes.options[-1][0].startswith("20 to 24 · non_finite") and panel.step.value == 20
    assert "Step 20: loss NaN, gradient norm NaN" in seen(panel) and plain(panel.layers.value).count("NaN") >= count
    press_replay(panel)
    assert "Step 20 is not exact" in seen(panel) and "mismatch" in seen(panel)
    table = panel.layers.value.split("L2 norms of the replay")[0]
    assert table.count("≠") == layers and table.count("✓") == 3 * layers  # only the gradients were changed


def test_a_replay_full_of_nan(panel, monkeypatch):
    trace = panel.replay(SPIKE)
    record = trace.record
    record.row_loss[1] = None
    record.loss, record.loss_bits = None, "0x7fc00000"
    record.rows[3].nonfinite = 5
    panel.step.value = 3
    panel.step.value = SPIKE
    assert panel.last_error is None
    assert "non-finite" in panel.layers.value and "Nothing that was measured" not in panel.layers.value
    first = re.search(r"<tbody><tr><td[^>]*>(\d)</td>", panel.batch.value)
    assert first[1] == "1" and "NaN" in plain(panel.batch.value)  # the row without a finite loss comes first


@pytest.fixture
def two_segments(folder) -> Path:
    """The run went back to step 16 and took the steps from there again, with other numbers from step 18 on."""
    run = folder / "spiked"
    lines = runs.lines(run)
    meta = {"type": "meta", "segment": 1, "step": 16, "run": lines[0]["run"], "process": "another"}
    again = [line | {"segment": 1} for line in lines if line["type"] == "step" and line["step"] > 16]
    again = [line | ({"loss": 3.0, "loss_bits": "0x40400000"} if line["step"] >= SPIKE else {}) for line in again]
    with open(run / "telemetry.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in [meta, *again])

    def resumed(manifest):
        manifest["segments"].append(manifest["segments"][0] | {"segment": 1, "start": 16, "parent": 0})

    runs.edit_json(run / "run.json", resumed)
    return folder


def test_a_segment_is_chosen_only_where_segments_differ(two_segments):
    panel = Panel(two_segments, "spiked")
    assert "2 segments" in seen(panel) and panel.last_error is None
    panel.step.value = 10
    assert panel.segment.layout.display == "none" and "Step 10: loss" in seen(panel)
    panel.step.value = 17  # stands in both, with the same bits
    assert panel.segment.layout.display == "none" and "Step 17: loss" in seen(panel)
    panel.step.value = SPIKE
    assert panel.segment.layout.display is None and panel.segment.label == "choose a segment"
    assert [name for name, _ in panel.segment.options] == ["choose a segment", "segment 0", "segment 1"]
    assert "stands in segments 0, 1, and they differ: choose one" in seen(panel) and panel.layers.value == ""
    press_replay(panel)
    assert "choose one in the field Segment" in plain(panel.error.value) and panel.trace is None
    panel.segment.value = 1
    assert "Step 18: loss 3," in seen(panel) and panel.error.value == ""
    panel.segment.value = ""
    assert "choose one" in seen(panel) and panel.layers.value == ""
    panel.segment.value = 0
    assert f"Step 18: loss {loss(SPIKE)}" in seen(panel)
    press_replay(panel)
    assert panel.trace.exact and panel.segment.value == 0
    panel.segment.value = 1
    assert panel.trace is None and panel.badges.value == ""
    assert panel.replay(SPIKE, segment=1).exact is False and "Step 18 is not exact" in seen(panel)


def test_a_spike_is_shown_in_its_own_segment(two_segments):
    panel = Panel(two_segments, "spiked")
    labels = [label for label, _ in panel.spikes.options]
    assert labels == [f"{SPIKE} · loss_z · loss {loss(SPIKE)} · segment 0"]
    panel.step.value = 10
    panel.spikes.value = (SPIKE, 0)
    assert (
        panel.segment.value == 0 and f"Step 18: loss {loss(SPIKE)}" in seen(panel) and panel.spikes.value == (SPIKE, 0)
    )


# ---- hostile text

EVIL = "<script>alert(1)</script>"


def test_text_from_outside_is_escaped(folder):
    name = '<img src=x onerror="alert(1)">'
    run = folder / name
    (folder / "spiked").rename(run)
    corpus = run / "<b>.txt"
    corpus.write_text("<script>" * 4000)
    entry = Corpus.open(corpus).describe() | {"path": corpus.name}

    def spoil(manifest):
        manifest["data"][0] = entry
        manifest["layers"] = [f"{EVIL}{layer}" for layer in manifest["layers"]]
        manifest["owned"] = {f"{EVIL}{layer}": paths for layer, paths in manifest["owned"].items()}
        manifest["optimizer"]["class"] = EVIL

    runs.edit_json(run / "run.json", spoil)
    content = (run / "telemetry.jsonl").read_text()
    (run / "telemetry.jsonl").write_text(re.sub(r'"batch_hash":"\w+",', "", content))
    panel = Panel(folder, name)
    panel.step.value = 4
    assert panel.last_error is None
    assert "&lt;script&gt;" in panel.batch.value and "&lt;b&gt;.txt" in panel.batch.value
    press_replay(panel)
    assert panel.last_error is not None  # no layer of the model has such a name
    panel.fail(RunError(EVIL))
    assert "&lt;script&gt;" in panel.error.value
    for view in VIEWS:
        markup = getattr(panel, view).value
        assert "<script" not in markup and "<b>.txt" not in markup and 'onerror="' not in markup, view
    panel.folder.value = str(folder / EVIL)
    assert "<script" not in panel.error.value and "alert(1)" in panel.error.value


# ---- what others rely on


def test_a_still_picture_goes_with_the_widget(panel):
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == "Panel(run='spiked', step=18)"
    assert bundle["image/png"].startswith(b"\x89PNG") and "application/vnd.jupyter.widget-view+json" in bundle
    before = len(bundle["image/png"])
    panel.replay(SPIKE)
    bundle = panel._repr_mimebundle_()
    assert bundle["text/plain"] == "Panel(run='spiked', step=18, replayed)" and len(bundle["text/plain"]) < 110
    assert len(bundle["image/png"]) > 1.3 * before  # the layers are in it
    assert bundle["image/png"] == panel.still()


def test_every_control_has_a_label(panel):
    def walk(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    controls = [w for w in walk(panel) if not isinstance(w, W.Box | W.HTML)]
    assert len(controls) == 11 and all(control.description for control in controls)
    assert all(re.search(r'<img[^>]* alt="[^"]+"', view.value) for view in (panel.timeline, panel.layers))


def in_a_process(code: str, *arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_mlx_is_not_imported_before_a_replay(folder):
    code = """
import sys
import workbench as wb
panel = wb.Panel(sys.argv[1], "spiked")
panel.step.value = 5
panel.still()
assert panel.last_error is None, panel.last_error
print([name for name in sys.modules if name.partition(".")[0] == "mlx" or name == "matplotlib.pyplot"])
panel.replay(5)
assert "mlx.core" in sys.modules
"""
    assert in_a_process(code, folder) == "[]"


def test_a_replay_stops_when_the_process_ends(panel, monkeypatch):
    monkeypatch.setattr(worker, "leaving", threading.Event())
    worker.leaving.set()
    with pytest.raises(panels.Cancelled):
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
