"""The figure of two loss curves: its artists are read back."""

import numpy as np
import pandas as pd
import pytest
from pictures import artists, inside, legend, texts

from workbench.errors import WorkbenchError
from workbench.pairs.pair_figure import MARKS, loss_pair


def pair(steps=40, parting=11, apart=0.01):
    step = np.arange(1, steps + 1)
    loss_a = 2 + np.exp(-step / 10)
    loss_b = loss_a + np.where(step >= parting, apart, 0.0)
    return pd.DataFrame({"step": step, "loss_a": loss_a, "loss_b": loss_b, "difference": loss_b - loss_a})


def draw(table, **options):
    return loss_pair(table, **({"a": "low", "b": "high"} | options))


def test_both_curves_their_difference_and_where_they_part():
    table = pair()
    figure = draw(table, parting=11, unit="nats per token", title="A/B")
    upper, lower = figure.axes
    assert upper.get_ylabel() == "loss (nats per token)" and lower.get_ylabel() == "|difference|\n(nats per token)"
    assert lower.get_xlabel() == "step" and figure.texts[0].get_text() == "A/B"
    for name, column in (("low", "loss_a"), ("high", "loss_b")):
        (line,) = artists(upper, name)
        np.testing.assert_array_equal(line.get_xdata(), table["step"])
        np.testing.assert_array_equal(line.get_ydata(), table[column])
    (line,) = artists(lower, "difference")
    drawn = np.isfinite(line.get_ydata())
    np.testing.assert_array_equal(np.asarray(line.get_xdata())[drawn], np.arange(11, 41))
    np.testing.assert_array_equal(line.get_ydata()[drawn], np.abs(table["difference"][10:]))
    (marks,) = artists(lower, "exactly 0")
    np.testing.assert_array_equal(marks.get_xdata(), np.arange(1, 11))
    assert lower.get_yscale() == "log"
    for axes in figure.axes:
        (vertical,) = artists(axes, "they part: step 11")
        assert list(vertical.get_xdata()) == [11, 11]
    assert legend(figure) == ["low", "high", "they part: step 11", "difference", "exactly 0"]
    assert tuple(figure.bbox.size) == (900, 520) and inside(figure)


def test_curves_differ_in_more_than_colour():
    low, high = (artists(draw(pair()).axes[0], name)[0] for name in ("low", "high"))
    assert low.get_linestyle() != high.get_linestyle() and low.get_linewidth() > high.get_linewidth()


def test_twins_have_nothing_but_zeros():
    figure = draw(pair(apart=0.0))
    assert legend(figure) == ["low", "high", "exactly 0"] and inside(figure)
    assert artists(figure.axes[1], "exactly 0")[0].get_xdata().size == 40


def test_values_that_are_not_finite_are_marked():
    table = pair()
    table.loc[3, ["loss_a", "difference"]] = np.nan
    table.loc[5, ["loss_b", "difference"]] = np.inf
    figure = draw(table)
    marked = [line.get_xdata().tolist() for line in artists(figure.axes[0], "not finite, or not logged")]
    assert marked == [[4], [6]] and inside(figure)


def test_nothing_recorded_says_so():
    table = pair(3)
    table[["loss_a", "loss_b", "difference"]] = np.nan
    figure = draw(table)
    assert [texts(axes) for axes in figure.axes] == [["not recorded"], ["not recorded"]]


def test_a_long_pair_is_drawn_with_few_points_and_its_extremes():
    table = pair(20_000, parting=15_000)
    table.loc[16_123, ["loss_b", "difference"]] += 9.0
    figure = draw(table, parting=15_000)
    (line,) = artists(figure.axes[0], "high")
    assert len(line.get_xdata()) <= 4000 and max(line.get_ydata()) == table["loss_b"].max()
    (marks,) = artists(figure.axes[1], "exactly 0")
    assert len(marks.get_xdata()) == MARKS and marks.get_xdata()[[0, -1]].tolist() == [1, 14_999]
    assert figure.axes[0].get_yscale() == "log"  # the spike would press the rest flat


@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_is_drawn_too(steps):
    assert inside(draw(pair(steps, parting=1), parting=1))


def test_a_missing_column_is_named():
    with pytest.raises(WorkbenchError, match="no column 'loss_b'"):
        draw(pair().drop(columns="loss_b"))
