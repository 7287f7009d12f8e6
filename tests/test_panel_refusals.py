"""What the panel can't do is a sentence, and the rest of it goes on."""

import pytest
import runs
from panels import look, plain, press, seen

from workbench.errors import EnvironmentMismatch, WorkbenchError
from workbench.panel import Panel
from workbench.record import Recorder
from workbench.screen.markup import for_python
from workbench.work.child import Child

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")


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
    assert panel.last_error is None and plain(panel.badges.value).count("exact, informational") == 3


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


def test_without_a_run_there_is_nothing_to_act_on(folder, monkeypatch):
    panel = Panel(folder)
    assert panel.zooming.layout.display == "none" and panel.badges.layout.min_height is None
    look(panel, "Cause")
    assert panel.trying.layout.display == "none" == panel.measure_button.layout.display
    look(panel, "Timeline")
    panel.run.value = "spiked"
    assert panel.zooming.layout.display is None and panel.badges.layout.min_height is not None
    monkeypatch.chdir(folder.parent)
    (folder.parent / "runs").rename("others")
    lost = Panel(run="spiked")
    assert "A run elsewhere is given by its path: Panel(run='path/to/spiked')." in plain(lost.error.value)


def test_an_error_names_what_a_panel_has(panel):
    for path in (panel.opened.path / "checkpoints").glob("*[0-9].safetensors"):
        path.write_bytes(b"")
    press(panel)
    said = plain(panel.error.value)
    assert "checkpoint=STEP" in said and "--" not in said and "panel.replay(18, checkpoint=STEP)" in said
    assert 'role="status"' in panel.status.value


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Start from another: --checkpoint STEP (checkpoint=STEP)", "Start from another: checkpoint=STEP"),
        ("as in --set lr=0.5x (changes=['lr=0.5x'])", "as in changes=['lr=0.5x']"),
        ("or go on with --other-environment (other_environment=True): so", "or go on with other_environment=True: so"),
        ("pass factory='m' (--factory m) if you trust it", "pass factory='m' if you trust it"),
        ("`workbench replay RUN --step 3` (it says why)", "`workbench replay RUN --step 3` (it says why)"),
    ],
)
def test_of_options_and_arguments_the_arguments_are_left(text, shown):
    assert for_python(text) == shown
