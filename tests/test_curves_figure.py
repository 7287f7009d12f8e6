"""workbench.screen.curves_figure: curves of several runs, read back from the artists."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex
from pictures import inside, legend

from workbench.errors import WorkbenchError
from workbench.screen.curve import MARKS, Curve
from workbench.screen.curves_figure import COLOURS, SHAPES, Drawn, overlay

ALL = ["loss", "val_loss", "grad_norm", "lr"]


def curve(values, segment=0, start=1, broken=()):
    steps = np.arange(start, start + len(values))
    return Curve(segment, steps, np.asarray(values, float), np.array(broken, np.int64))


def marks(*rows):
    return pd.DataFrame(rows, columns=list(MARKS))


def drawn(name="one", place=0, spike=3.0, **more):
    loss = np.linspace(3, 2, 100)
    loss[49] = spike
    curves = {"loss": [curve(loss)], "grad_norm": [curve(np.full(100, 1.0))], "lr": [curve(np.full(100, 1e-3))]}
    return Drawn(name, place, curves | {"val_loss": [curve([2.5, 2.2], start=40)]}, **more)


def line(axes, label):
    (found,) = [line for line in axes.lines if line.get_label() == label]
    return found


def test_each_run_has_a_curve_in_each_panel_and_its_own_colour():
    figure = overlay([drawn(), drawn("two", 1)], ALL, 1, 100, title="both")
    assert [axes.get_ylabel() for axes in figure.axes] == ["loss", "gradient norm (L2)", "learning rate"]
    for axes in figure.axes:
        assert to_hex(line(axes, "one").get_color()).upper() == COLOURS[0]
        assert to_hex(line(axes, "two").get_color()).upper() == COLOURS[1]
        assert axes.get_xlim() == figure.axes[0].get_xlim()
    assert line(figure.axes[0], "one, validation").get_ydata().tolist() == [2.5, 2.2]
    assert line(figure.axes[0], "one").get_linewidth() > line(figure.axes[0], "two").get_linewidth()
    assert {"one", "two", "one, validation"} <= set(legend(figure)) and inside(figure)
    assert not any(
        "validation" in (found.get_label() or "") for found in overlay([drawn()], ["loss"], 1, 9).axes[0].lines
    )


@pytest.mark.parametrize(
    ("scale", "spike", "expected"),
    [
        ("auto", 3.0, "linear"),
        ("auto", 50.0, "log"),
        ("linear", 50.0, "linear"),
        ("log", 3.0, "log"),
        ("log", -1.0, "linear"),
    ],
)
def test_the_scale_is_the_asked_one(scale, spike, expected):
    figure = overlay([drawn(spike=spike)], ALL, 1, 100, scale=scale)
    assert figure.axes[0].get_yscale() == expected and figure.axes[2].get_yscale() == "linear"


def test_spikes_stand_on_their_curve_and_a_departure_where_it_begins():
    found = marks((0, 45, 50, "loss_z", "loss", 9.0), (0, 60, 60, "grad_norm_median", "grad_norm", 4.0))
    figure = overlay([drawn(place=1, marks=found)], ALL, 1, 100)
    upper, middle = (line(axes, "one, spike") for axes in figure.axes[:2])
    assert (upper.get_xdata().tolist(), upper.get_ydata().tolist()) == ([50], [9.0])
    assert (middle.get_xdata().tolist(), middle.get_ydata().tolist()) == ([60], [4.0])
    assert upper.get_marker() == SHAPES[1] and line(figure.axes[0], "one, departure begins").get_xdata().tolist() == [
        45
    ]


def test_a_drift_whose_value_is_a_sum_is_marked_at_the_edge():
    figure = overlay([drawn(marks=marks((0, 20, 70, "drift", "loss", 21.0)))], ALL, 1, 100)
    assert line(figure.axes[0], "one, drift noticed").get_ydata()[0] < 0.1
    assert figure.axes[0].get_ylim()[1] < 10


def test_smoothed_curves_are_named_and_the_values_stay_behind():
    smooth = {"loss": [curve(np.linspace(3, 2, 91), start=10)]}
    figure = overlay([drawn(smoothed=smooth)], ALL, 1, 100, smooth=10)
    over, raw = line(figure.axes[0], "one, mean of 10 values"), line(figure.axes[0], "_one")
    assert raw.get_alpha() < 0.5 and over.get_alpha() is None and 3.0 in raw.get_ydata()


def test_segments_and_non_finite_values_are_marked():
    both = Drawn("one", 0, {"loss": [curve([2.0] * 50), curve([1.9] * 30, 1, 40, broken=[55])]}, begins=[(1, 40)])
    axes = overlay([both], ["loss"], 1, 80).axes[0]
    assert line(axes, "one, segment 1").get_xdata() == [40, 40]
    assert line(axes, "non-finite").get_xdata().tolist() == [55]
    styles = {found.get_linestyle() for found in axes.lines if found.get_label() == "one"}
    assert len(styles) == 2


def test_what_was_not_logged_says_so():
    figure = overlay([Drawn("one", 0, {"loss": [curve([2.0, 1.0])]})], ["loss", "lr"], 1, 2)
    assert [text.get_text() for text in figure.axes[1].texts] == ["not recorded"]
    broken = Drawn("one", 0, {"loss": [curve([], broken=[1, 2])]})
    assert [text.get_text() for text in overlay([broken], ["loss"], 1, 2).axes[0].texts] == ["not finite"]


def test_a_million_steps_are_few_points():
    values = np.full(1_000_000, 2.0)
    values[654_321] = 7.0
    one = Drawn("one", 0, {"loss": [curve(values)]})
    figure = overlay([one], ["loss"], 1, 1_000_000)
    (area,) = figure.axes[0].patches
    assert len(area.get_xy()) < 5000 and area.get_xy()[:, 1].max() == 7.0
    low, high = figure.axes[0].get_ylim()
    assert low < 2.0 < 7.0 < high and legend(figure) == ["one"] and inside(figure)
    assert {to_hex(area.get_facecolor()).upper(), to_hex(area.get_edgecolor()).upper()} == {COLOURS[0]}


def test_a_dense_curve_that_one_sees_through_or_that_has_gaps_stays_a_line():
    values = np.full(10_000, 2.0)
    values[654] = 7.0
    behind = Drawn("one", 0, {"loss": [curve(values)]}, smoothed={"loss": [curve(values[1:])]})
    dashed = Drawn("one", 0, {"loss": [curve(values, segment=1)]})
    for run, label in ((behind, "_one"), (dashed, "one")):
        axes = overlay([run], ["loss"], 1, 10_000, smooth=2).axes[0]
        assert not axes.patches and line(axes, label).get_ydata().max() == 7.0


def test_bad_arguments_are_named():
    for arguments, text in (
        ((["loss", "speed"],), "'speed' is no quantity"),
        ((["val_loss"],), "No quantity is chosen"),
    ):
        with pytest.raises(WorkbenchError, match=text):
            overlay([drawn()], *arguments, 1, 100)
    with pytest.raises(WorkbenchError, match="scale is 'logarithmic'"):
        overlay([drawn()], ["loss"], 1, 100, scale="logarithmic")
