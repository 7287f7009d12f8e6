"""workbench.dashboard: what a person sets, what they then see, and a run that grows meanwhile."""

import json
import shutil
import subprocess
import sys
import time

import ipywidgets as W
import numpy as np
import pandas as pd
import pytest
import runs

import workbench as wb
from workbench.dashboard import Dashboard
from workbench.errors import WorkbenchError


@pytest.fixture(autouse=True)
def closed():
    yield
    W.Widget.close_all()


@pytest.fixture
def pair(tmp_path):
    """The shared run, and a log of another program."""
    run = runs.recorded(tmp_path)
    losses = 2.4 + 0.05 * np.random.default_rng(0).standard_normal(90)
    losses[79] = 7.0
    pd.DataFrame({"step": np.arange(1, 91), "loss": losses}).to_csv(tmp_path / "other.csv", index=False)
    return run, tmp_path / "other.csv"


def grow(run, count=1):
    """Appends steps to a run's telemetry."""
    path = run / "telemetry.jsonl"
    last = [json.loads(line) for line in path.read_text().splitlines() if '"step"' in line]
    last = [line for line in last if line["type"] == "step"][-1]
    with path.open("a") as file:
        for more in range(1, count + 1):
            file.write(json.dumps(last | {"step": last["step"] + more}) + "\n")


def test_runs_and_logs_are_shown_over_each_other(pair):
    dashboard = Dashboard(pair)
    assert repr(dashboard) == "Dashboard(runs=['run', 'other.csv'], steps=90)" and dashboard.last_error is None
    figure = dashboard.figure()
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm (L2)", "learning rate"]
    assert {"run", "other.csv"} <= {line.get_label() for line in figure.axes[0].lines}
    assert 'alt="Loss, validation loss' in dashboard.picture.value and "run and other" not in dashboard.picture.value
    table = dashboard.table.set_index("run")
    assert table["step"].to_dict() == {"run": 12, "other.csv": 90}
    steps = wb.open_run(pair[0]).steps
    assert table.loc["run", "loss"] == steps["loss"].iloc[-1] and np.isnan(table.loc["other.csv", "grad_norm"])
    assert table.loc["run", "val_loss"] == steps["val_loss"].dropna().iloc[-1]
    assert "Only a log, in which nothing can be replayed or verified: other.csv." in dashboard.status.value


def test_the_controls_change_the_picture(pair):
    dashboard = Dashboard(pair)
    before = dashboard.picture.value
    dashboard.shown["lr"].value = False
    assert len(dashboard.figure().axes) == 2 and dashboard.picture.value != before
    dashboard.shown["step_per_s"].value = True
    assert dashboard.figure().axes[-1].get_ylabel() == "steps per second"
    dashboard.scale.value = "log"
    assert dashboard.figure().axes[0].get_yscale() == "log"
    dashboard.smooth.value = 5
    labels = {line.get_label() for line in dashboard.figure().axes[0].lines}
    assert "other.csv, mean of 5 values" in labels and "the mean of 5 values" in dashboard.status.value
    dashboard.zoom.value = "70-80"
    low, high = dashboard.figure().axes[0].get_xlim()
    assert 69 < low < 70 and 80 < high < 81
    dashboard.chosen.value = ("other.csv",)
    assert dashboard.table["run"].tolist() == ["other.csv"]


def test_a_smoothed_value_is_the_mean_of_the_last_ones(pair):
    dashboard = Dashboard([pair[1]], smooth=7)
    losses = pd.read_csv(pair[1])["loss"]
    (line,) = [x for x in dashboard.figure().axes[0].lines if x.get_label() == "other.csv, mean of 7 values"]
    expected = losses.rolling(7).mean().dropna()
    np.testing.assert_allclose(line.get_ydata(), expected, rtol=1e-12)
    assert line.get_xdata().tolist() == (expected.index + 1).tolist()


def test_a_chosen_step_stands_in_the_table(pair):
    dashboard = Dashboard(pair)
    dashboard.step.value = 80
    table = dashboard.table.set_index("run")
    assert table.loc["other.csv", "loss"] == 7.0 and np.isnan(table.loc["run", "loss"])
    assert ">80</div>" in dashboard.picture.value and ">7<" in dashboard.numbers.value


def test_spikes_are_those_that_were_asked_for(pair):
    dashboard = Dashboard(pair)
    assert dashboard.marked.value == "all", "a log names none"
    assert dashboard.spikes()["rule"].tolist() == ["loss_z"] and dashboard.spikes()["step"].tolist() == [80]
    dashboard.marked.value = "recorded"
    assert "other.csv names no spikes; choose a rule" in dashboard.status.value
    assert set(dashboard.spikes()["run"]) <= {"run"}
    dashboard.marked.value = "none"
    assert dashboard.spikes().empty
    assert Dashboard([pair[0]]).marked.value == "recorded"


def test_recorded_spikes_are_the_logs_own(tmp_path):
    run = runs.recorded(tmp_path)
    lines = runs.lines(run)
    flagged = [line["step"] for line in lines if line["type"] == "step" and line["spike"]]
    runs.edit_line(run, 7, spike=True, spike_rule="grad_norm_z")
    marks = Dashboard([run]).spikes()
    assert marks["step"].tolist() == sorted({*flagged, 7})
    (row,) = marks[marks["step"] == 7].to_dict("records")
    norm = next(line["grad_norm"] for line in lines if line["type"] == "step" and line["step"] == 7)
    assert (row["quantity"], row["rule"]) == ("grad_norm", "grad_norm_z") and row["value"] == pytest.approx(norm)


def test_segments_have_a_line_each(tmp_path):
    dashboard = Dashboard([runs.segmented(tmp_path)])
    assert dashboard.table["segments"].tolist() == [2]
    labels = [line.get_label() for line in dashboard.figure().axes[0].lines]
    assert labels.count("run") == 2 and "run, segment 1" in labels


def test_new_steps_are_seen_on_a_look(tmp_path):
    run = runs.recorded(tmp_path)
    dashboard = Dashboard([run], smooth=3)
    assert dashboard.refresh() is False
    before = dashboard.picture.value
    grow(run, 5)
    assert dashboard.refresh() is True and dashboard.picture.value != before
    assert dashboard.table["step"].tolist() == [17] and "steps=17" in repr(dashboard)
    (line,) = [x for x in dashboard.figure().axes[0].lines if x.get_label() == "run, mean of 3 values"]
    np.testing.assert_allclose(line.get_ydata(), wb.open_run(run).steps["loss"].rolling(3).mean().dropna(), rtol=1e-12)


def wait_for(what, seconds=30.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_run_in_training_is_followed_until_the_tick_is_taken_away(tmp_path):
    run = runs.recorded(tmp_path)
    dashboard = Dashboard([run], follow=True, every=0.2)
    assert "Following" in dashboard.status.value
    grow(run)
    wait_for(lambda: dashboard.table["step"].tolist() == [13])
    (run / "telemetry.jsonl").rename(run / "aside")
    wait_for(lambda: dashboard.last_error is not None and dashboard.error.value)
    assert "role='alert'" in dashboard.error.value.replace('"', "'") and "telemetry" in dashboard.error.value
    (run / "aside").rename(run / "telemetry.jsonl")
    wait_for(lambda: dashboard.last_error is None and not dashboard.error.value)
    dashboard.follow.value = False
    grow(run)
    time.sleep(0.5)
    assert dashboard.table["step"].tolist() == [13] and "Following" not in dashboard.status.value
    dashboard.follow.value = True
    wait_for(lambda: dashboard.table["step"].tolist() == [14])
    dashboard.close()


def test_following_does_not_outlive_the_kernel(tmp_path):
    code = "import sys, workbench as wb; wb.Dashboard([sys.argv[1]], follow=True, every=0.2); print('done')"
    command = [sys.executable, "-c", code, str(runs.recorded_read_only())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


def test_a_folder_names_and_added_runs(tmp_path, pair):
    for name in ("b", "a"):
        shutil.copytree(runs.recorded_read_only(), tmp_path / "runs" / name)
    assert Dashboard(tmp_path / "runs").names == ["a", "b"]
    assert Dashboard({"first": pair[0], "second": pair[0]}).names == ["first", "second"]
    dashboard = Dashboard(pair[0])
    dashboard.add(pair[0])
    dashboard.add(wb.open_run(pair[1]), "log")
    assert dashboard.names == ["run", "run (2)", "log"] and dashboard.table["run"].tolist() == dashboard.names
    assert dashboard.compare(["loss_z"]).frame["step"].tolist() == [80]


def test_mistakes_are_shown_and_go_away(pair):
    dashboard = Dashboard(pair)
    before = dashboard.picture.value
    dashboard.zoom.value = "90-70"
    assert "expected such as 90-110" in dashboard.error.value and dashboard.picture.value == before
    dashboard.zoom.value = "5 - 12"
    assert dashboard.error.value == "" and dashboard.last_error is None and dashboard.picture.value != before
    dashboard.chosen.value = ()
    assert "No run is chosen" in dashboard.error.value


def test_bad_arguments_are_errors(tmp_path, pair):
    with pytest.raises(WorkbenchError, match="No run is given"):
        Dashboard([])
    for given, text in (
        ({"scale": "ln"}, "scale is 'ln'"),
        ({"smooth": 0}, "smooth is 0"),
        ({"spikes": "big"}, "spikes is 'big'"),
        ({"quantities": ["speed"]}, "'speed' is no quantity"),
        ({"every": 0.01}, "every is 0.01"),
    ):
        with pytest.raises(WorkbenchError, match=text):
            Dashboard(pair, **given)


def test_a_reader_without_a_kernel_sees_a_picture(pair):
    dashboard = Dashboard(pair)
    bundle = dashboard._repr_mimebundle_()
    assert bundle["image/png"] == dashboard.still() and bundle["image/png"].startswith(b"\x89PNG")
    assert bundle["text/plain"] == repr(dashboard)


def test_every_control_has_a_label(pair):
    def walk(widget):
        yield widget
        for child in getattr(widget, "children", ()):
            yield from walk(child)

    controls = [w for w in walk(Dashboard(pair)) if not isinstance(w, W.Box | W.HTML)]
    assert len(controls) == 12 and all(control.description for control in controls)


def test_names_are_escaped(tmp_path, pair):
    dashboard = Dashboard({"<script>alert(1)</script>": pair[1]})
    assert "<script>" not in dashboard.numbers.value + dashboard.picture.value + dashboard.status.value


def test_an_empty_run_says_so(tmp_path):
    run = runs.recorded(tmp_path)
    path = run / "telemetry.jsonl"
    path.write_text(path.read_text().splitlines()[0] + "\n")
    dashboard = Dashboard([run])
    assert dashboard.last_error is None and dashboard.table["step"].tolist() == [0]
    assert [text.get_text() for text in dashboard.figure().axes[0].texts] == ["not recorded"]


@pytest.mark.parametrize(("value", "spelled"), [("NaN", "NaN"), ("Infinity", "inf"), ("-Infinity", "-inf")])
def test_a_run_that_went_is_shown_as_it_ended(tmp_path, value, spelled):
    log = tmp_path / "gone.jsonl"
    losses = [*("2.5" for _ in range(8)), value, "2.4", *(value for _ in range(11))]
    log.write_text("".join(f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, 1)))
    dashboard = Dashboard(log)
    row = dashboard.table.iloc[0]
    assert row["step"] == 21 and row["not_finite_since"] == 11 and str(row["loss"]) == str(float(value))
    assert f">{spelled} since step 11</td>" in dashboard.numbers.value
    dashboard.step.value = 9
    assert f">{spelled}</td>" in dashboard.numbers.value
    dashboard.step.value = 10
    assert ">2.4</td>" in dashboard.numbers.value


def test_a_run_that_goes_on_finite_ends_so(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(
        "".join(f'{{"step": {step}, "loss": {"NaN" if step == 5 else 2.0 + step}}}\n' for step in range(1, 9))
    )
    row = Dashboard(log).table.iloc[0]
    assert row["loss"] == 10.0 and pd.isna(row["not_finite_since"])


def test_a_run_that_can_not_be_read_hides_no_other(tmp_path, pair):
    (tmp_path / "runs" / "bad").mkdir(parents=True)
    pair[0].rename(tmp_path / "runs" / "good")
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    dashboard = Dashboard(tmp_path / "runs")
    assert dashboard.names == ["good"] and list(dashboard.unread) == ["bad"]
    assert "bad can&#x27;t be read, so it is not shown: " in dashboard.status.value
    assert dashboard.unread["bad"] == wb.list_runs(tmp_path / "runs").set_index("run").loc["bad", "problem"]
    shutil.rmtree(tmp_path / "runs" / "good")
    with pytest.raises(WorkbenchError, match="run.json"):
        Dashboard(tmp_path / "runs")


def test_empty_columns_and_long_names_push_no_number_away(tmp_path):
    log = tmp_path / f"{'long' * 60}.csv"
    pd.DataFrame({"step": [1, 2, 3], "loss": [3.0, 2.0, 1.5]}).to_csv(log, index=False)
    numbers = Dashboard(log).numbers.value
    assert "gradient" not in numbers and "learning" not in numbers and ">1.5</td>" in numbers
    (name,) = [part for part in numbers.split("<td") if "longlong" in part]
    assert "overflow-wrap:anywhere" in name and "nowrap" not in name
