import numpy as np
import pandas as pd
import pytest

from workbench.screen.nearby import beside_neighbours


def frame(rows):
    return pd.DataFrame(rows, columns=["step", "layer", "kind", "recorded"])


def test_ratio_to_the_median_of_the_others():
    layers = pd.DataFrame({"layer": ["a", "b"], "kind": "gradient", "l2": [6.0, 1.0], "recorded": [6.0, 2.0]})
    logged = frame([(step, "a", "gradient", value) for step, value in enumerate([1, 2, 100, 4, np.nan])])
    table = beside_neighbours(layers, logged, step=2)
    assert table.columns.tolist() == ["layer", "kind", "l2", "recorded", "neighbours", "ratio"]
    assert table["neighbours"][0] == 2 and table["ratio"][0] == 3
    assert np.isnan(table["neighbours"][1]) and np.isnan(table["ratio"][1])


def test_without_a_replay_the_telemetry_counts():
    layers = pd.DataFrame({"layer": ["a"], "kind": ["gradient"], "l2": [pd.NA], "recorded": [6.0]})
    assert beside_neighbours(layers, frame([(1, "a", "gradient", 2.0)]), step=2)["ratio"][0] == 3


@pytest.mark.parametrize("value, median", [(np.nan, 1.0), (np.inf, 1.0), (0.0, 1.0), (1.0, 0.0)])
def test_no_ratio_where_there_is_none(value, median):
    layers = pd.DataFrame({"layer": ["a"], "kind": ["gradient"], "l2": [value], "recorded": [1.0]})
    assert np.isnan(beside_neighbours(layers, frame([(1, "a", "gradient", median)]), step=2)["ratio"][0])
