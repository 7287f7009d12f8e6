"""Figures of a step: artists are read back; no picture is compared with another program's."""

import numpy as np
import pandas as pd
import pytest
from pictures import artists, inside, legend, texts

from workbench.errors import WorkbenchError
from workbench.plots import layer_norms, row_losses, short_names

NAN, INF = float("nan"), float("inf")
KINDS = ("activation", "gradient", "adam_m", "adam_v")


# ---- layer norms


def layers(blocks=2, kinds=KINDS):
    parts = ("attention.query", "attention.out", "mlp.up", "mlp.down")
    names = ["embedding", *(f"blocks.{k}.{part}" for k in range(blocks) for part in parts), "head"]
    rows = [(name, kind, 0.5 + i, 0.5 + i) for kind in kinds for i, name in enumerate(names)]
    return pd.DataFrame(rows, columns=["layer", "kind", "l2", "recorded"])


def test_layer_norms_has_a_panel_a_kind_with_dots_in_rings():
    table = layers()
    table.loc[2, "recorded"] = NAN
    figure = layer_norms(table, step=4218)
    labels = [f"{name}\nL2 norm" for name in ("activation", "gradient", "Adam m", "Adam v")]
    assert [axes.get_ylabel() for axes in figure.axes] == labels
    assert figure.texts[0].get_text() == "Layers at step 4,218" and legend(figure) == ["replay", "telemetry"]
    for axes in figure.axes:
        assert axes.get_yscale() == "log"
        (dots,), (rings,) = artists(axes, "replay"), artists(axes, "telemetry")
        assert dots.get_xydata().tolist() == [[i, 0.5 + i] for i in range(10)]
        assert rings.get_markerfacecolor() == "none" and rings.get_markersize() > dots.get_markersize()
    assert artists(figure.axes[0], "telemetry")[0].get_xdata().tolist() == [0, 1, *range(3, 10)]
    names = [label.get_text() for label in figure.axes[-1].get_xticklabels()]
    assert names[:3] == ["embedding", "b0.attention.query", "b0.attention.out"] and names[-1] == "head"
    assert inside(figure)


def test_layer_order_is_that_of_the_frame():
    table = layers()
    figure = layer_norms(table[::-1], step=1)
    assert figure.axes[-1].get_xticklabels()[0].get_text() == "head"
    assert artists(figure.axes[0], "replay")[0].get_xydata()[0].tolist() == [0, 9.5]


def test_many_layers_are_all_drawn_but_not_all_named():
    figure = layer_norms(layers(blocks=12), step=1)
    assert len(artists(figure.axes[0], "replay")[0].get_xdata()) == 50
    assert len(figure.axes[-1].get_xticks()) == 25 and inside(figure)


def test_neighbours_are_a_band_and_a_median():
    table = layers(kinds=("gradient",))
    names = table["layer"].tolist()
    rows = [(s, name, "gradient", value) for name in names[:-1] for s, value in ((10, 1.0), (11, 4.0), (12, 2.0))]
    near = pd.DataFrame([*rows, (10, "elsewhere", "gradient", 1e9), (11, names[0], "gradient", NAN)])
    near.columns = ["step", "layer", "kind", "recorded"]
    figure = layer_norms(table, step=13, kinds=["gradient"], neighbours=near)
    (axes,) = figure.axes
    assert legend(figure) == ["replay", "telemetry", "range of steps 10–12", "median of steps 10–12"]
    (band,) = axes.collections
    corners = np.concatenate([path.vertices for path in band.get_paths()])
    assert (corners[:, 1].min(), corners[:, 1].max()) == (1.0, 4.0)
    assert (corners[:, 0].min(), corners[:, 0].max()) == (-0.5, len(names) - 1.5), "no telemetry of the last layer"
    (line,) = artists(axes, "median of steps 10–12")
    assert set(line.get_ydata()[~np.isnan(line.get_ydata())]) == {2.0}
    assert axes.get_ylim()[1] < 1e3, "a layer that is not drawn does not stretch the axis"


def test_values_without_a_place_on_the_scale():
    table = layers(kinds=("adam_v",))
    table.loc[[1, 2], "l2"] = [NAN, INF]
    table.loc[3, "recorded"] = INF
    table.loc[4, ["l2", "recorded"]] = 0.0
    figure = layer_norms(table, step=1, kinds=["adam_v"])
    (axes,) = figure.axes
    (broken,), (zero,) = artists(axes, "non-finite"), artists(axes, "zero")
    assert broken.get_xdata().tolist() == [1, 2, 3] and min(broken.get_ydata()) > 0.9 and broken.get_marker() == "x"
    assert zero.get_xdata().tolist() == [4] and max(zero.get_ydata()) < 0.1
    assert artists(axes, "replay")[0].get_xdata().tolist() == [0, 3, *range(5, 10)]
    nothing = layer_norms(table.assign(l2=0.0, recorded=NAN), step=1, kinds=["adam_v", "weight"])
    assert [texts(axes) for axes in nothing.axes] == [[], ["not measured"]] and inside(nothing)


def test_layer_norms_refuses_what_it_can_not_draw():
    with pytest.raises(WorkbenchError, match="no column 'l2'"):
        layer_norms(layers().drop(columns="l2"), step=1)
    with pytest.raises(WorkbenchError, match="no column 'step'"):
        layer_norms(layers(), step=1, neighbours=layers())
    for kinds in ([], "activation"):
        with pytest.raises(WorkbenchError, match="expected a list of one or more"):
            layer_norms(layers(), step=1, kinds=kinds)
    assert [texts(axes) for axes in layer_norms(layers()[:0], step=1).axes] == [["not measured"]] * 4


def test_short_names():
    assert short_names(["blocks.3.attention.query", "head"]) == ["b3.attention.query", "head"]
    assert short_names(["model.layers.0.self_attn.q_proj", "model.norm"]) == ["l0.self_attn.q_proj", "norm"]
    assert short_names(["blocks.0.mlp", "blocks.1.mlp"]) == ["b0.mlp", "b1.mlp"], "a number needs its name"
    assert short_names(["blocks.0.x", "branches.0.x"]) == ["blocks.0.x", "branches.0.x"], "never two alike"
    assert short_names(["head", "head#1"]) == ["head", "head#1"]
    assert short_names(["a.b"]) == ["a.b"] and short_names([]) == []
    (long, _) = short_names(["encoder.7.a_very_long_module_name.projection", "x"])
    assert len(long) == 26 and long.startswith("e7.a_ver…") and long.endswith(".projection")
    path = "language_model.transformer.decoder.hidden_layers.{}.self_attention.query_projection"
    deep = short_names([path.format(0), path.format(11), "language_model.norm", "vision.norm"])
    assert deep == ["…h0.self….query_projection", "…h11.sel….query_projection", "language_model.norm", "vision.norm"]


# ---- rows of a batch


def test_row_losses_are_bars_by_share():
    loss = np.array([2.3, 2.5, 2.4, 5.6])
    figure = row_losses(pd.DataFrame({"row": range(4), "loss": loss, "share": loss / loss.sum()}), step=4218)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["3", "1", "2", "0"]
    assert [bar.get_width() for bar in axes.patches] == pytest.approx(sorted(100 * loss / loss.sum(), reverse=True))
    assert texts(axes)[0] == "43.8 %   loss 5.6" and axes.yaxis_inverted()
    assert set(axes.lines[0].get_xdata()) == {25.0} and legend(figure) == ["equal share (1 of 4)"]
    assert axes.get_xlabel() == "share of the step's summed loss (%)" and axes.get_ylabel() == "row of the batch"
    assert inside(figure)


def test_rows_that_are_not_finite_come_first():
    table = pd.DataFrame({"row": [0, 1, 2], "loss": [2.0, NAN, 3.0], "share": [NAN, NAN, NAN]})
    (axes,) = row_losses(table, step=1).axes
    assert texts(axes) == ["loss 2", "loss NaN", "loss 3"]
    table["share"] = [0.4, 0.9, 0.6]
    (axes,) = row_losses(table, step=1).axes
    assert texts(axes) == ["loss NaN", "60.0 %   loss 3", "40.0 %   loss 2"]


def test_a_row_whose_mean_is_not_known_has_its_share():
    table = pd.DataFrame({"row": [0, 1, 2], "loss": [NAN, NAN, 3.0], "share": [0.5, 0.0, 0.5]})
    table["targets"] = pd.array([None, 0, 4], dtype="Int64")
    (axes,) = row_losses(table, step=1).axes
    assert texts(axes) == ["50.0 %   loss not known", "50.0 %   loss 3", "0.0 %   loss not known"]


def test_a_large_batch_shows_its_largest_rows():
    share = np.arange(64) / np.arange(64).sum()
    figure = row_losses(pd.DataFrame({"row": range(64), "loss": share, "share": share}), step=7)
    assert len(figure.axes[0].patches) == 32 and figure.texts[0].get_text() == "Rows of step 7: 32 of 64"
    assert figure.axes[0].get_yticklabels()[0].get_text() == "63" and inside(figure)
    assert len(row_losses(pd.DataFrame({"row": [], "loss": [], "share": []}), step=1).axes[0].patches) == 0
    with pytest.raises(WorkbenchError, match="no column 'share'"):
        row_losses(pd.DataFrame({"row": [1], "loss": [1.0]}), step=1)
