"""The suite's table: who reached what, who is better, and why a row is lost, out of the numbers alone."""

import math

import numpy as np
import pandas as pd
import pytest

from workbench.bench.growth import SIZE, STEPS, fitted, slopes
from workbench.bench.scaling_figure import scaling_figure
from workbench.bench.suite_table import COLUMNS, OURS, Measured, printed, table
from workbench.errors import WorkbenchError


def row(value=1.02, **more):
    return Measured("recording", "a step", "× step", value, **more)


@pytest.mark.parametrize(
    ("value", "goal", "noise", "verdict"),
    [
        (1.01, 1.01, 0.0, "reached"),
        (0.99, 1.01, 0.0, "reached"),
        (1.0101, 1.01, 0.0, "missed"),
        (1.02, 1.01, 0.01, "within noise"),
        (1.03, 1.01, 0.01, "missed"),
        (5.0, None, 0.0, ""),
    ],
)
def test_the_verdict(value, goal, noise, verdict):
    assert row(value, goal=goal, noise=noise).verdict == verdict


def test_a_peer_is_better_only_beyond_the_noise():
    peers = {"slower": 1.5, "equal": 1.02, "a little": 1.015, "better": 1.0, "best": 0.5}
    assert row(peers=peers).lost_to == ["best", "better", "a little"]
    assert row(peers=peers, noise=0.01).lost_to == ["best", "better"]
    assert row(peers=peers, noise=1.1).lost_to == []


def test_a_lost_row_says_why_out_of_what_was_measured():
    lost = row(peers={"torch": 1.002}, parts={"hash": 0.25, "step": 1234.5}, remark="it hashes nothing")
    assert lost.why == "torch has 1.002 × step; measured by itself: hash 0.25 ms, step 1,234 ms; it hashes nothing"
    assert row(goal=1.01, parts={"hash": 2.0}).why == "measured by itself: hash 2.000 ms"
    assert row(goal=1.05, peers={"torch": 1.2}, parts={"hash": 2.0}, remark="said").why == ""
    assert row(remark="said").why == ""


def test_the_table_has_a_line_a_contender():
    found = table([row(goal=1.01, limit=1.005, peers={"b": 2.04, "a": 1.0}, failed={"c": "it ended"}), row(0.5)])
    assert list(found.columns) == list(COLUMNS)
    assert found["contender"].tolist() == [OURS, "a", "b", "c", OURS]
    assert found["ours_to_it"].tolist()[:3] == [1.0, 1.02, 0.5] and found["ours_to_it"].isna().tolist()[3]
    assert found["verdict"].tolist() == ["missed", "", "", "failed", ""]
    assert found["goal"].tolist()[0] == 1.01 and found["limit"].tolist()[0] == 1.005
    assert found["why"].tolist()[0].startswith("a has 1.000 × step") and found["why"].tolist()[3] == "it ended"
    assert table([]).empty


def test_a_peer_that_takes_nothing_has_no_ratio():
    found = table([row(peers={"nothing": 0.0})])
    assert math.isnan(found["ours_to_it"].tolist()[1])
    assert printed([row(peers={"nothing": 0.0})])[0][-1] == "nothing 0"


def test_the_printed_lines():
    (line,) = printed([row(1.0123, goal=1.01, limit=1.005, peers={"torch": 2.0246}, failed={"flor": "no git"})])
    assert line[2:] == ("1.012 × step", "≤ 1.010", "1.005", "missed", "torch 2.025 (0.5)\nflor: no git")
    assert printed([row(remark="not judged")])[0][1] == "a step; not judged"  # an explanation has it otherwise
    assert printed([row(goal=1.0, remark="slow")])[0][1] == "a step"


# -------------------------------------------------------------------------------------------------------------- growth


def frame(power=0.5, first=2e-3):
    x = [1e2, 1e3, 1e4, 1e5]
    rows = [(STEPS, "opening", one, first * one**power) for one in x]
    rows += [(SIZE, "recording", one, -1e-3 if one < 1e5 else 1e-3) for one in x]
    return pd.DataFrame(rows, columns=["against", "what", "x", "seconds"])


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_the_slope_of_a_power_is_its_exponent(power):
    x = np.array([1e2, 1e3, 1e5])
    slope, off = fitted(x, 3 * x**power)
    assert slope == pytest.approx(power, abs=1e-9) and off < 1e-9


def test_a_point_off_the_line_is_told():
    x, y = np.array([1.0, 10.0, 100.0]), np.array([1.0, 20.0, 100.0])
    slope, off = fitted(x, y)
    assert slope == pytest.approx(1.0) and off == pytest.approx(2 ** (2 / 3) - 1)


def test_costs_that_are_not_above_nothing_are_left_out_and_told():
    said = slopes(frame())
    assert said[0] == "opening grows as steps to the power 0.50 (the line is off by at most 0%)"
    assert said[1] == "recording against parameters: no slope, as fewer than two of its costs are above the noise"


def test_the_figure_draws_points_and_their_line():
    figure = scaling_figure(frame())
    left, right = figure.axes
    assert [axes.get_xscale() for axes in (left, right)] == ["log", "log"]
    assert len(left.lines) == 1 and left.lines[0].get_xdata().tolist() == [1e5]  # one point has no line
    line, points = right.lines
    np.testing.assert_allclose(line.get_ydata(), points.get_ydata())
    assert right.get_legend().get_texts()[0].get_text() == "opening (slope 0.50)"
    with pytest.raises(WorkbenchError, match="no column 'seconds'"):
        scaling_figure(frame().drop(columns="seconds"))
