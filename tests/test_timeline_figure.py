"""The timeline: its artists are read back; no picture is compared with another program's."""

import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.text import Text
from pictures import artists, curves, inside, legend, run, texts

from workbench.detection.spike_table import find_spikes
from workbench.errors import WorkbenchError
from workbench.screen.timeline_figure import decimate, timeline
from workbench.screen.timeline_view import Timeline

NAN, INF = float("nan"), float("inf")


# ---- timeline


def test_timeline_has_three_axes_with_labels_and_the_data():
    steps = run()
    figure = timeline(steps, title="shakespeare-42")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm (L2)", "learning rate"]
    assert figure.axes[2].get_xlabel() == "step" and figure.texts[0].get_text() == "shakespeare-42"
    for axes, name in zip(figure.axes, ("loss", "grad_norm", "lr"), strict=True):
        (line,) = curves(axes)
        np.testing.assert_array_equal(line.get_xdata(), steps["step"])
        np.testing.assert_array_equal(line.get_ydata(), steps[name])
        assert axes.get_xlim() == figure.axes[0].get_xlim()
    assert figure.get_facecolor() == (1, 1, 1, 1) and tuple(figure.bbox.size) == (900, 640)
    assert legend(figure) == [] and inside(figure)


@pytest.mark.parametrize("last", [90, 10_000_000])
def test_nothing_stands_over_the_numbers_of_the_steps(last):
    """Not the number of the cursor, wherever it is; not the label of the axis; and none is cut off or over another."""
    steps = run()
    steps["step"] = np.linspace(1, last, len(steps)).astype(np.int64)
    figure = timeline(steps)
    assert inside(figure)
    axis = figure.axes[2].xaxis
    shown = axis.get_ticklabels()
    low, high = figure.axes[2].get_xlim()
    boxes = [text.get_window_extent() for text in shown if low <= text.get_position()[0] <= high]
    assert len(boxes) >= 4
    assert all(one.x1 + 8 < following.x0 for one, following in zip(boxes, boxes[1:], strict=False))
    assert not any(axis.label.get_window_extent().overlaps(box) for box in boxes)
    chip = re.search(r"top:([\d.]+)%;transform:translateX", Timeline(figure, "", 1, last).at(last // 2))
    assert (1 - float(chip[1]) / 100) * 640 < min(box.y0 for box in boxes)
    assert float(chip[1]) / 100 * 640 + 17 < 640


@pytest.mark.parametrize(("spike", "scale"), [(5.6, "linear"), (12.0, "log")])
def test_a_large_spike_makes_the_axis_logarithmic(spike, scale):
    figure = timeline(run(spike=spike))
    assert [axes.get_yscale() for axes in figure.axes] == [scale, "log", "linear"]
    low, high = figure.axes[0].get_ylim()
    assert low < 1.9 and high > spike


def test_a_loss_that_is_not_positive_stays_linear():
    steps = run(spike=100.0)
    steps.loc[3, "loss"] = 0.0
    assert timeline(steps).axes[0].get_yscale() == "linear"


def test_an_axis_of_less_than_a_decade_has_labels():
    for spike in (8.5, 20.0, 300.0, 1e6):
        figure = timeline(run(spike=spike))
        figure.draw_without_rendering()
        low, high = figure.axes[0].get_ylim()
        labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
        shown = [value for value in figure.axes[0].get_yticks() if low <= value <= high]
        assert len(shown) >= 3 and not any("$" in label for label in labels), (spike, labels)


def test_spikes_are_marked_and_named():
    steps = run()
    spikes = find_spikes(steps)
    assert spikes["rule"].tolist() == ["loss_z"]
    figure = timeline(steps, spikes, step=150)
    (marker,) = artists(figure.axes[0], "spike")
    assert marker.get_xydata().tolist() == [[150, 5.6]] and marker.get_marker() == "D"
    assert texts(figure.axes[0]) == ["150 loss_z"] and texts(figure.axes[1]) == []
    assert legend(figure) == ["step 150", "spike"] and inside(figure)


def test_a_gradient_norm_spike_is_marked_on_its_own_axis():
    steps = run()
    spikes = pd.DataFrame({"step": [150], "rule": ["grad_norm_z"], "value": [8.0]})
    figure = timeline(steps, spikes)
    assert artists(figure.axes[0], "spike") == [] and texts(figure.axes[1]) == ["150 grad_norm_z"]
    assert artists(figure.axes[1], "spike")[0].get_xydata().tolist() == [[150, 8.0]]


def test_names_of_neighbouring_spikes_do_not_overlap():
    at = [60, 61, 66, 70, 150, 152, 196, 199]
    steps = run()
    steps.loc[[step - 1 for step in at], "loss"] = 6.0
    spikes = pd.DataFrame({"step": at, "rule": "loss_factor", "value": 6.0})
    figure = timeline(steps, spikes)
    assert inside(figure)
    renderer = figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(text, renderer).padded(-1) for text in figure.axes[0].texts]
    assert len(boxes) == 8
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    marks = figure.axes[0].transData.transform([[step, 6.0] for step in at])
    assert not any(box.contains(*mark) for box in boxes for mark in marks), "nor hide a marker"


def test_many_spikes_are_marked_but_not_named():
    at = np.arange(10, 190, 20)
    steps = run()
    figure = timeline(steps, pd.DataFrame({"step": at, "rule": "loss_z", "value": steps["loss"].to_numpy()[at - 1]}))
    assert texts(figure.axes[0]) == []
    assert artists(figure.axes[0], "spike")[0].get_xdata().tolist() == at.tolist()


def test_the_selected_step_is_a_line_across_all_axes():
    figure = timeline(run(), step=42)
    for axes in figure.axes:
        (line,) = artists(axes, "step 42")
        assert set(line.get_xdata()) == {42}
    low, high = timeline(run(), step=900).axes[0].get_xlim()
    assert low < 1 and high > 900, "a step outside the frame is still shown"


def test_checkpoints_are_ticks_at_the_bottom():
    figure = timeline(run(), checkpoints=range(0, 201, 50))
    (marks,) = artists(figure.axes[2], "checkpoint")
    assert marks.get_xdata().tolist() == [0, 50, 100, 150, 200] and set(marks.get_ydata()) == {0.05}
    assert marks.get_transform() == figure.axes[2].get_xaxis_transform() and marks.get_marker() == "|"


def test_non_finite_values_are_at_the_top_edge():
    steps = run()
    steps.loc[[9, 19], "loss"] = [NAN, INF]
    steps.loc[29, "grad_norm"] = NAN
    figure = timeline(steps, find_spikes(steps))
    for axes, at in zip(figure.axes, ([10, 20], [30], []), strict=True):
        marks = artists(axes, "non-finite")
        assert [x for line in marks for x in line.get_xdata()] == at
        assert all(line.get_marker() == "x" and min(line.get_ydata()) > 0.9 for line in marks)
    assert np.isnan(curves(figure.axes[0])[0].get_ydata()[[9, 19]]).all(), "a gap in the curve"
    assert texts(figure.axes[0]) == ["10 non_finite", "20 non_finite", "150 loss_z"]
    assert texts(figure.axes[1]) == ["30 non_finite"]
    assert "non-finite" in legend(figure)


def test_a_run_that_stays_nan_is_named_once():
    steps = run(5000)
    steps.loc[3000:, "loss"] = NAN
    figure = timeline(steps, find_spikes(steps))
    assert texts(figure.axes[0]) == ["150 loss_z", "3,001 non_finite"]
    x = artists(figure.axes[0], "non-finite")[0].get_xdata()
    assert x[0] == 3001 and x[-1] > 4990 and len(x) < 1000


def test_a_value_that_was_not_recorded_is_not_non_finite():
    steps = run()
    steps.loc[::2, "grad_norm"] = NAN
    figure = timeline(steps.assign(grad_norm_recorded=steps["grad_norm"].notna()))
    assert artists(figure.axes[1], "non-finite") == []
    np.testing.assert_array_equal(curves(figure.axes[1])[0].get_xdata(), steps["step"][1::2])


def test_segments_are_separate_lines():
    steps = pd.concat([run(), run()[100:150].assign(segment=1), run()[120:].assign(segment=2)])
    figure = timeline(steps)
    for axes in figure.axes:
        lines = curves(axes)
        assert [len(line.get_xdata()) for line in lines] == [200, 50, 80]
        assert all((np.diff(line.get_xdata()) > 0).all() for line in lines), "no zigzag"
        assert len({(line.get_color(), str(line.get_linestyle())) for line in lines}) == 3
        assert len({str(line._dash_pattern) for line in lines}) == 3, "told apart without colour"
    assert legend(figure) == ["segment 0", "segment 1", "segment 2"]


def test_validation_loss_is_points():
    steps = run().assign(val_loss=NAN)
    steps.loc[[49, 99], "val_loss"] = [2.9, 2.3]
    figure = timeline(steps)
    (points,) = artists(figure.axes[0], "validation loss")
    assert points.get_xydata().tolist() == [[50, 2.9], [100, 2.3]] and points.get_linestyle() == "None"
    assert legend(timeline(run().assign(val_loss=NAN))) == []


def test_missing_columns_say_so():
    figure = timeline(run()[["step", "loss"]].assign(lr=NAN))
    assert [texts(axes) for axes in figure.axes] == [[], ["not recorded"], ["not recorded"]]
    for frame in (pd.DataFrame({"step": []}), pd.DataFrame({"step": [], "loss": [], "grad_norm": []})):
        assert [texts(axes) for axes in timeline(frame).axes] == [["not recorded"]] * 3
    with pytest.raises(WorkbenchError, match="The frame has no column 'step'"):
        timeline(pd.DataFrame({"loss": [1.0]}))


def test_one_step_is_visible():
    figure = timeline(run().head(1), step=1)
    assert curves(figure.axes[0])[0].get_marker() == "." and inside(figure)


def test_only_non_finite_losses():
    steps = pd.DataFrame({"step": [1, 2, 3], "loss": [NAN, INF, NAN]})
    figure = timeline(steps, find_spikes(steps))
    assert artists(figure.axes[0], "non-finite")[0].get_xdata().tolist() == [1, 2, 3]
    assert texts(figure.axes[0]) == ["1 non_finite"] and inside(figure)


def test_long_runs_are_decimated_and_keep_their_spikes():
    steps = run(100_000, spike_at=61_235, spike=11.0)
    steps.loc[777, "loss"] = 0.5
    (line,) = curves(timeline(steps).axes[0])
    assert len(line.get_xdata()) <= 4000
    drawn = dict(zip(line.get_xdata().tolist(), line.get_ydata().tolist(), strict=True))
    assert drawn[61_235] == 11.0 and drawn[778] == 0.5 and {1, 100_000} <= set(drawn)


# ---- decimate


@pytest.mark.parametrize("count", [1, 4, 100, 101, 102, 5000, 99_999])
def test_decimate_keeps_ends_and_extremes(count):
    values = np.random.default_rng(count).standard_t(2, count)
    kept = decimate(values, 100)
    assert len(kept) <= max(100, 1) and (np.diff(kept) > 0).all()
    assert {0, count - 1, values.argmin(), values.argmax()} <= set(kept.tolist())
    if count <= 100:
        assert len(kept) == count


def test_decimate_keeps_the_extremes_of_every_stretch():
    values = np.random.default_rng(1).standard_normal(1000)
    kept = set(decimate(values, 100).tolist())
    for start in range(0, 1000, 21):  # 1000 values in 49 stretches
        stretch = values[start : start + 21]
        assert {start + stretch.argmin(), start + stretch.argmax()} <= kept


def test_decimate_with_non_finite_values():
    values = np.sin(np.arange(1000.0))
    values[300:600], values[700], values[999] = NAN, INF, NAN
    values[[310, 800]] = 5.0, -5.0
    kept = decimate(values, 60)
    assert {0, 310, 800, 999} <= set(kept.tolist()) and len(kept) <= 60
    assert np.isnan(values[kept[(kept > 340) & (kept < 560)]]).all(), "the gap stays a gap"
    assert len(decimate(np.full(1000, NAN), 60)) <= 60


@pytest.mark.parametrize("rate", [1e-5, 1e-3])
def test_a_constant_learning_rate_stands_on_an_axis_from_0(rate):
    """Around it the numbers of the axis would have so many digits that they lie over its label."""
    figure = timeline(run().assign(lr=rate))
    axes = figure.axes[2]
    figure.canvas.draw()
    label, numbers = axes.yaxis.label.get_window_extent(), axes.yaxis.get_ticklabels()
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > rate
    assert all(not text.get_window_extent().overlaps(label) for text in numbers if text.get_text())
    assert timeline(run()).axes[2].get_ylim()[0] < 0, "one that varies is shown as it is"


def test_a_long_name_keeps_both_ends_and_stays_in_the_figure():
    name = "sweep-" + "lr3e-4-wd0.1-" * 8 + "attempt-3"
    figure = timeline(run(), title=f"{name}, steps 52 to 92 of 200")
    (title,) = [text.get_text() for text in figure.texts]
    assert title.startswith("sweep-lr3e-4") and title.endswith("attempt-3, steps 52 to 92 of 200") and inside(figure)
