"""What the panel shows of a step: the chart of norms, which layer left first, the environment, and the code for it."""

import html
import re

import numpy as np
import pandas as pd
import pytest
import runs
from panels import SPIKE, look, plain, press

from workbench.panel import Panel
from workbench.run import Run
from workbench.screen import departure
from workbench.screen.layer_view import layer_table
from workbench.screen.norm_chart import norm_chart

pytest_plugins = ["panel_fixtures"]
pytestmark = pytest.mark.usefixtures("closed", "quick")

NAN, INF = float("nan"), float("inf")


# ---- the chart


def chart(l2, recorded, nearby=()):
    names = [f"layer.{number}" for number in range(len(l2))]
    layers = pd.DataFrame({"layer": names, "kind": "gradient", "l2": l2, "recorded": recorded})
    rows = [
        (step, name, "gradient", value) for step, values in nearby for name, value in zip(names, values, strict=True)
    ]
    near = pd.DataFrame(rows, columns=["step", "layer", "kind", "recorded"])
    return norm_chart(layers, near, step=10, alt="a chart")


def heights(markup, kind):
    return [float(y) for y in re.findall(rf'<circle class="{kind}" r="[\d.]+" cx="[\d.]+" cy="([\d.]+)"/>', markup)]


def test_norms_stand_on_a_logarithmic_axis():
    dots = heights(chart([1.0, 10.0, 100.0], [1.0, 10.0, 1000.0]), "dot")
    rings = heights(chart([1.0, 10.0, 100.0], [1.0, 10.0, 1000.0]), "ring")
    assert dots[0] - dots[1] == pytest.approx(dots[1] - dots[2], abs=0.11) and dots[0] > dots[2]
    assert rings[:2] == dots[:2] and dots[2] - rings[2] == pytest.approx(dots[0] - dots[1], abs=0.11)


def test_each_layer_tells_its_numbers():
    markup = chart([2.0], [4.0], [(9, [1.0]), (10, [999.0]), (11, [3.0])])
    titles = [html.unescape(text) for text in re.findall(r"<title>(.*?)</title>", markup)]
    assert titles == ["layer.0, gradient: replay 2, telemetry 4, nearby 1 to 3"]  # the step itself is no neighbour
    assert "range and median of steps 9 to 11 around it" in markup
    assert plain(markup).count("not recorded") == 3  # the other kinds


def test_what_has_no_place_on_the_axis_is_marked_at_its_edge():
    """And the legend says what the marks mean. NaN is one also where it is all there is: in a run that went to NaN."""
    assert chart([1.0, 2.0], [1.0, 2.0]).count('class="bad"') == 0
    for l2, recorded, marks, meanings in (
        ([NAN, 2.0], [1.0, 2.0], 1, ["not finite"]),
        ([INF, 0.0], [INF, 0.0], 2, ["not finite", "zero"]),
        ([NAN, NAN], [NAN, NAN], 2, ["not finite"]),
        ([pd.NA, 0.0], [0.0, 0.0], 2, ["zero"]),
        ([pd.NA, pd.NA], [NAN, INF], 1, ["not finite"]),
        ([pd.NA, pd.NA], [NAN, NAN], 0, []),
    ):
        legend, picture = chart(l2, recorded).split('role="img"')
        assert picture.count('class="bad"') == marks, (l2, recorded)
        assert [word for word in ("not finite", "zero") if f"</svg> {word}<" in legend] == meanings, (l2, recorded)


def test_a_long_name_of_a_layer_does_not_push_its_numbers_out_of_sight():
    rows = [(name, "gradient", pd.NA, 1.0) for name in ("blocks.0.mlp", f"language_model.{'deep.' * 12}0.mlp")]
    layers = pd.DataFrame(rows, columns=["layer", "kind", "l2", "recorded"])
    near = pd.DataFrame([(2, "blocks.0.mlp", "gradient", 1.0)], columns=["step", "layer", "kind", "recorded"])
    short, long = re.findall(r"<th style=\"([^\"]*)\">(?:blocks|language)", layer_table(layers, near, 1, None))
    assert "nowrap" in short and "nowrap" not in long and "overflow-wrap:anywhere" in long


def test_names_are_escaped():
    layers = pd.DataFrame({"layer": ["<b>", "a&b"], "kind": "activation", "l2": 1.0, "recorded": 1.0})
    near = pd.DataFrame(columns=["step", "layer", "kind", "recorded"])
    markup = norm_chart(layers, near, step=1, alt='"<script>')
    assert "<b>" not in markup and "&lt;b&gt;" in markup and "<script>" not in markup and "a&amp;b" in markup


# ---- which layer left first


def norms(values):
    """values: {(layer, kind): [of steps 1, 2, …]}"""
    rows = [
        (step, layer, layer, kind, "l2", value)
        for (layer, kind), series in values.items()
        for step, value in enumerate(series, 1)
    ]
    return pd.DataFrame(rows, columns=["step", "layer", "path", "kind", "statistic", "value"])


CALM = [1.0, 1.1, 0.9, 1.05, 0.95, 1.0]


def test_the_first_is_the_first_that_was_computed():
    series = {(layer, kind): [*CALM, 1.0] for layer in "abc" for kind in ("activation", "gradient")}
    for layer, kind in (("a", "gradient"), ("b", "gradient"), ("c", "activation")):
        series[layer, kind] = [*CALM, 50.0]
    found = departure.departures(departure.scored(norms(series)), list("abc"), 7)
    # forwards from the first layer to the last, then gradients from the last to the first
    assert list(zip(found["layer"], found["kind"], strict=True)) == [
        ("c", "activation"),
        ("b", "gradient"),
        ("a", "gradient"),
    ]
    series["a", "gradient"] = [*CALM[:-2], 50.0, 50.0, 50.0]
    found = departure.departures(departure.scored(norms(series)), list("abc"), 7)
    assert (found["layer"][0], found["step"][0]) == ("a", 5)
    said = departure.sentence(departure.scored(norms(series)), list("abc"), 7, "telemetry")
    assert "the gradient of a at step 5 (" in said and "At step 7 itself, 2 of 6 norms left theirs" in said


def test_where_none_left_and_where_it_can_not_be_told():
    calm = departure.scored(norms({("a", "activation"): [*CALM, 1.0]}))
    assert departure.sentence(calm, ["a"], 7, "replay") == (
        "No layer's norm left its usual range, by the replay of steps 1 to 7."
    )
    few = departure.scored(norms({("a", "activation"): [1.0, 50.0]}))
    assert "can't be told: 4 healthy steps before are needed" in departure.sentence(few, ["a"], 2, "telemetry")
    assert departure.sentence(few[:0], ["a"], 2, "telemetry") == ""


def test_a_norm_that_was_logged_as_nan_is_far_off_and_one_that_was_not_logged_is_not(tmp_path):
    path = runs.recorded(tmp_path)
    line = next(line for line in runs.lines(path) if line.get("step") == 10 and line["type"] == "step")
    names = ("per_layer_grad_norms", "adam_m_norms")
    bits = {f"{name}_bits": ["0x7fc00000"] * len(line[name]) for name in names}
    runs.edit_line(path, 10, **{name: [None] * len(line[name]) for name in names}, **bits, adam_v_norms=...)
    run = Run(path)
    scores = departure.logged_scores(run, 10, 0, [])
    here = scores[scores["step"] == 10].set_index("kind")["z"]
    assert np.isinf(here["gradient"]).all() and np.isinf(here["adam_m"]).all() and "adam_v" not in here.index
    assert np.isfinite(here["activation"]).all()
    said = departure.sentence(scores, run.manifest.layers, 10, "telemetry")
    assert f"the gradient of {run.manifest.layers[-1]} at step 10 (not finite)" in said


def test_telemetry_alone_tells_which_layer_left(panel):
    run = panel.opened
    text = plain(look(panel, "Step"))
    assert "No layer's norm left its usual range, by the telemetry of steps 10 to 18. 4 of 360 norms stood" in text
    # by hand: robust z of the logarithm of one norm against the eight steps before it
    scores = departure.logged_scores(run, SPIKE, 0, [])
    for layer, kind in ((run.manifest.layers[0], "gradient"), (run.manifest.layers[-1], "activation")):
        logged = run.norms(SPIKE, 0, SPIKE)
        own = logged[(logged["layer"] == layer) & (logged["kind"] == kind) & (logged["step"] <= SPIKE)]
        x = np.log(own["recorded"].to_numpy())
        found = []
        for past, few in ((x[-9:-1], 1.129), (x[:-1], 17 / 16.2)):  # the eight before, and all before
            spread = few * 1.482602218505602 * np.median(np.abs(past - np.median(past)))
            found.append((x[-1] - np.median(past)) / max(spread, 0.05 if kind == "activation" else 0.1))
        here = (scores["layer"] == layer) & (scores["kind"] == kind) & (scores["step"] == SPIKE)
        assert scores.loc[here, "z"].item() == pytest.approx(max(found, key=abs), rel=1e-3)


# ---- the environment


def test_differences_come_first(folder):
    runs.edit_json(folder / "spiked" / "run.json", lambda m: m["segments"][0]["environment"].update(mlx="0.0.1"))
    panel = Panel(folder, "spiked")
    markup = look(panel, "Environment")
    rows = [plain(row).split() for row in re.findall(r"<tr>(<td.*?)</tr>", markup)]
    assert rows[0][:2] == ["mlx", "0.0.1"] and rows[0][-1] == "differs" and all(row[-1] == "same" for row in rows[1:])
    assert "1 difference: mlx. A replay here is refused" in plain(markup)
    assert panel.status.value.count("This machine") == 0 and panel.last_error is None
    for view in ("Timeline", "Step", "Batch", "Cause"):
        assert look(panel, view)


def test_this_machine_is_asked_about_once(panel):
    asked = []
    panel.status.observe(lambda change: asked.append(change["new"]), "value")
    text = plain(look(panel, "Environment"))
    assert "everything known to move a bit is the same" in text and asked
    assert panel.progress.layout.visibility == "hidden", "nothing is left of it"
    asked.clear()
    look(panel, "Timeline"), look(panel, "Environment")
    assert asked == []
    panel.replay(SPIKE)
    assert panel.progress.layout.visibility == "visible"
    assert panel.view.value == "Step"  # where a replay is seen


def test_the_doctor_by_its_button(panel):
    look(panel, "Environment")
    press(panel, panel.doctor_button)
    report = panel._here.report[0]
    assert panel.last_error is None and report.run == "spiked" and report.sentence in plain(panel.examination.value)
    assert f"{report.self_test.found} of {report.self_test.planted} planted" in plain(panel.examination.value)
    assert re.search(r"A step of spiked examined in [\d.]+ s", panel.status.value)
    panel.step.value = 3
    assert report.sentence in plain(panel.examination.value)


def test_a_run_that_no_checkpoint_leads_to_shows_all_that_can_be_read(folder):
    for path in (folder / "spiked" / "checkpoints").glob("*"):
        path.unlink()
    panel = Panel(folder, "spiked")
    assert "No replay: no checkpoint of" in plain(panel.estimate.value) and panel.last_error is None
    for view in ("Timeline", "Step", "Batch", "Cause", "Environment"):
        assert look(panel, view)
    press(panel)
    assert "no checkpoint of" in plain(panel.error.value)


# ---- zoom


def test_steps_are_shown_larger(panel):
    panel.zoom.value = "10-20"
    assert "steps 10 to 20" in panel.timeline.value and ">18</div>" in panel.timeline.value
    panel.step.value = 3
    assert "Step 3 is not among the steps 10 to 20" in plain(panel.timeline.value)
    panel.zoom_near.click()
    assert panel.zoom.value == "1-23" and ">3</div>" in panel.timeline.value
    panel.zoom_all.click()
    assert panel.zoom.value == "" and "steps 1 to 24" in panel.timeline.value
    for text in ("1 to 99", "1..24", "all", "1–1,000"):
        panel.zoom.value = text
        assert panel.zoom.value == "" and panel.last_error is None  # all there are
    for text in ("20-10", "ten", "5", "<b>-3"):
        panel.zoom.value = text
        assert "is no range of steps" in plain(panel.error.value) and "<b>-" not in panel.error.value
    panel.zoom.value = "24-24"
    assert panel.zoom.value == "23-24" and panel.error.value == ""


def test_the_picture_hands_the_mouse_what_it_needs(panel):
    def numbers():
        return {name: float(value) for name, value in re.findall(r' data-(\w+)="([-\d.e]+)"', panel.timeline.value)}

    def at(step):
        panel.step.value = step
        return float(re.search(r"position:absolute;left:([\d.]+)%", panel.timeline.value)[1]) / 100

    for shown in ("", "5-15"):
        panel.zoom.value = shown
        found = numbers()
        assert (found["first"], found["last"]) == ((5, 15) if shown else (1, 24))
        for step in (5, 9, 15):
            assert round((at(step) - found["left"]) / found["each"]) == step


# ---- show the code


def code(panel) -> str:
    return html.unescape(re.search(r"<code[^>]*>(.*?)</code>", panel.code.value)[1])


def run_line(line):
    """The value of a line's last expression."""
    *before, last = line.split("; ")
    names: dict = {}
    exec("\n".join(before), names)
    return eval(last, names)


def test_the_code_gives_what_the_view_shows(panel):
    look(panel, "Timeline")
    pd.testing.assert_frame_equal(run_line(code(panel)), Run(panel.opened.path).steps)
    look(panel, "Step")
    pd.testing.assert_frame_equal(run_line(code(panel)), panel.opened.norms(SPIKE, 0))
    look(panel, "Batch")
    text = run_line(code(panel))
    assert len(text) == 4 and "loss" not in text
    look(panel, "Environment")
    assert run_line(code(panel))["same"].all()
    panel.autopsy(SPIKE)
    assert run_line(code(panel)) == panel.found.verdict
    panel.replay(SPIKE)
    look(panel, "Step")
    pd.testing.assert_frame_equal(run_line(code(panel)), panel.trace.layers)
    look(panel, "Batch")
    assert run_line(code(panel))["loss"].tolist()[:2] == panel.trace.rows["loss"].tolist()[:2]


def test_the_code_of_experiments(panel):
    panel.whatif(SPIKE, ["lr=0.5x", "v=max"])
    look(panel, "Cause")
    assert "run.whatif(18, ['lr=0.5x', 'v=max'])" in code(panel)
    pd.testing.assert_frame_equal(run_line(code(panel)), panel.found.experiments)


def test_the_code_names_segment_and_factory():
    from pathlib import Path

    from workbench.screen.code_view import Code

    lines = Code(Path("a 'b'"), 7, 1, "m:f", replayed=False, examined=False)
    assert lines.step(True).endswith("run = wb.open_run(\"a 'b'\"); run.replay(7, segment=1, factory='m:f').layers")
    assert lines.cause(["lr=2x"]).endswith("run.whatif(7, ['lr=2x'], segment=1, factory='m:f')")
    assert lines.cause([]).endswith("run.autopsy(7, segment=1, factory='m:f')")
    assert lines.batch(False).endswith("wb.batch_table(run, 7, segment=1)")
