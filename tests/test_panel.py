"""The panel without a browser: set what a person would set, press what they would press, read what they would see."""

import html
import json
import re
import shutil
from pathlib import Path

import ipywidgets as W
import pytest
import runs
from panels import EVERY, EVIL, SPIKE, STEPS, VIEWS, in_a_process, look, loss, plain, press, seen

from workbench import panel as panels
from workbench.batches.batch import batch_table
from workbench.errors import ReplayError, RunError
from workbench.panel import Panel
from workbench.run import Run
from workbench.screen import timeline_figure
from workbench.trainer.corpus import Corpus

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")


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
    assert "24 steps · 1 spike · checkpoints 0, 8, 16, 17, 24" in plain(panel.facts.value)
    assert f"Step 18: loss {loss(SPIKE)}" in seen(panel) and "robust standard deviations" in seen(panel)
    assert "0 steps to roll forward from checkpoint 17" in plain(panel.estimate.value)
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
    text = look(panel, "Batch")
    assert "shakespeare.txt" in text and "1.bytes" in text and panel.step.value == 97


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


@pytest.mark.parametrize("view", VIEWS)
def test_each_step_is_shown_in_the_chosen_view(panel, view):
    look(panel, view)
    before = {name: getattr(panel, name).value for name in EVERY}
    panel.step.value = 10
    changed = {name for name in EVERY if getattr(panel, name).value != before[name]}
    said_elsewhere = {"Timeline": set(), "Environment": set(VIEWS[view])}.get(view, {"code"})
    assert changed == {"step_facts", "estimate", *VIEWS[view]} ^ said_elsewhere
    assert f"Step 10: loss {loss(10)}" in plain(panel.step_facts.value) and "Spike" not in panel.step_facts.value
    assert "from checkpoint 8" in panel.estimate.value
    own = "\n".join(getattr(panel, name).value for name in VIEWS[view])
    said = {"Timeline": ">10</div>", "Step": 'aria-label="Norms of each layer at step 10, from the telemetry'}
    said |= {"Batch": "Batch of step 10", "Cause": "replays step 10 and the steps before it"}
    said |= {"Environment": "everything known to move a bit is the same"}
    assert said[view] in own


def test_one_view_is_seen_at_a_time(panel):
    assert panel.view.value == "Timeline"
    for view in (*VIEWS, "Timeline"):
        assert look(panel, view)
        others = [name for other, names in VIEWS.items() if other != view for name in names]
        assert all(getattr(panel, name).value == "" for name in others)
        shown = [name for name, widget in panel._views.items() if widget.layout.display != "none"]
        assert shown == [view]


def test_the_cursor_stands_where_the_figure_has_the_step(panel):
    figure = timeline_figure.timeline(
        panel.opened.steps, panel.opened.spikes(), checkpoints=[0, 8, 16, 24], title="spiked"
    )
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
    text = plain(look(panel, "Batch").partition("<details>")[0])
    assert "Batch of step 18" in text and text.count("corpus.txt") == 2 and text.count("1.bytes") == 2
    assert "share" not in text and "loss" not in text
    panel.step.value = 10
    first = batch_table(panel.opened, 10)["text"][0].replace("␊", r"\n")
    cells = re.findall(r"<bdi>(.*?)</bdi>", panel.batch.value)
    assert html.unescape(re.sub(r"<[^>]+>", "", cells[0])).replace("·", " ") == first
    assert first in html.unescape(re.search(r"<pre[^>]*>(.*?)</pre>", panel.batch.value, re.DOTALL)[1])


# ---- unusual runs


def test_steps_before_a_full_window_are_said_to_be_unjudged(panel):
    said = "Not judged whether it is a spike. Steps 1 to 8 were not judged: a rule needs the 8 losses before a step."
    assert said in _facts(panel, 8)
    assert "udged" not in _facts(panel, 9) + _facts(panel, SPIKE)


def test_a_run_without_spikes(tmp_path):
    shutil.copytree(runs.recorded_read_only(), tmp_path / "calm")
    runs.edit_json(tmp_path / "calm" / "run.json", lambda m: m["spikes"].update(window=50))
    panel = Panel(tmp_path, "calm")
    assert panel.spikes.options == (("no step was judged", None),) and panel.spikes.value is None
    assert panel.step.value == runs.STEPS and "0 spikes" in seen(panel) and panel.last_error is None
    assert "validation loss" in _facts(panel, 10)
    assert f"None of these {runs.STEPS} steps was judged" in _facts(panel, 10)


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
    assert "Step 20: loss NaN, gradient norm NaN" in seen(panel)
    assert plain(look(panel, "Step")).count("NaN") >= count
    press(panel)
    assert "Step 20 is not exact" in seen(panel) and "mismatch" in seen(panel)
    assert "<details open>" in panel.badges.value
    table = panel.layers.value.split("L2 norms of the replay")[0]
    assert table.count("≠") == layers and table.count("✓") == 3 * layers  # only the gradients were changed


def test_a_replay_full_of_nan(panel, monkeypatch):
    trace = panel.replay(SPIKE)
    record = trace.record
    record.row_loss[1] = None
    record.loss, record.loss_bits = None, "0x7fc00000"
    record.rows[3].nonfinite = 5
    record.token_loss[1][2] = None
    panel.step.value = 3
    panel.step.value = SPIKE
    layers = look(panel, "Step")
    assert "non-finite" in layers and "Nothing that was measured" not in layers
    rows = look(panel, "Batch")
    first = re.search(r"<tbody><tr><td[^>]*>(\d)</td>", rows)
    assert first[1] == "1" and "NaN" in plain(rows)  # the row without a finite loss comes first
    assert rows.count('<i class="nan" title="loss not finite">') == 1 and panel.last_error is None
    saved = json.dumps(W.Widget.get_manager_state(), allow_nan=False)  # with the notebook: JSON proper
    assert "NaN" in saved and panel.still().startswith(b"\x89PNG")


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
    press(panel)
    assert "choose one in the field Segment" in plain(panel.error.value) and panel.trace is None
    panel.segment.value = 1
    assert "Step 18: loss 3," in seen(panel) and panel.error.value == ""
    panel.segment.value = ""
    assert "choose one" in seen(panel) and panel.layers.value == ""
    panel.segment.value = 0
    assert f"Step 18: loss {loss(SPIKE)}" in seen(panel)
    press(panel)
    assert panel.trace.exact and panel.segment.value == 0
    panel.segment.value = 1
    assert panel.trace is None and panel.badges.value == ""
    assert panel.replay(SPIKE, segment=1).exact is False and "Step 18 is not exact" in seen(panel)


def test_a_spike_is_shown_in_its_own_segment(two_segments):
    panel = Panel(two_segments, "spiked")
    labels = [label for label, _ in panel.spikes.options]
    assert labels == [f"{SPIKE} · segment 0 · loss_z · loss {loss(SPIKE)}"]
    panel.step.value = 10
    panel.spikes.value = (SPIKE, 0)
    assert (
        panel.segment.value == 0 and f"Step 18: loss {loss(SPIKE)}" in seen(panel) and panel.spikes.value == (SPIKE, 0)
    )


# ---- hostile text


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
    (run / "telemetry.jsonl").write_text(re.sub(r'"batch_hash": ?"\w+",', "", content))
    panel = Panel(folder, name)
    panel.step.value = 4
    assert panel.last_error is None
    text = look(panel, "Batch")
    assert "&lt;script&gt;" in text and "&lt;b&gt;.txt" in text and "<script" not in text and "<b>.txt" not in text
    for view in VIEWS:
        text = look(panel, view)
        assert "<script" not in text and 'onerror="' not in text, view
    press(panel)
    assert panel.last_error is not None  # no layer of the model has such a name
    panel._boundary.fail(RunError(EVIL))
    assert "&lt;script&gt;" in panel.error.value
    for view in EVERY:
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
    look(panel, "Cause")
    visible = [control for control in controls if control.layout.display != "none"]
    assert len(controls) == 28 and len(visible) == 25 and all(control.description for control in visible)
    assert re.search(r'<img[^>]* alt="[^"]+"', look(panel, "Timeline"))
    assert re.search(r'<svg[^>]* role="img" aria-label="[^"]+"', look(panel, "Step"))


def test_mlx_is_not_imported_in_the_notebook(folder):
    """Another process does the work, so that it can be ended, and so that the notebook's memory is its own."""
    code = """
import sys
import workbench as wb
panel = wb.Panel(sys.argv[1], "spiked")
panel.step.value = 5
panel.still()
assert panel.last_error is None, panel.last_error
assert panel.replay(5).exact
print([name for name in sys.modules if name.partition(".")[0] == "mlx" or name == "matplotlib.pyplot"])
"""
    assert in_a_process(code, folder) == "[]"
