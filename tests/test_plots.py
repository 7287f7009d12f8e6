"""workbench.plots: the artists are read back; no picture is compared with another program's."""

import base64
import re
import subprocess
import sys
import threading

import matplotlib as mpl
import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from workbench.errors import WorkbenchError
from workbench.figures import img, number, png
from workbench.plots import decimate, layer_norms, row_losses, short_names, timeline
from workbench.spikes import find_spikes

NAN, INF = float("nan"), float("inf")
KINDS = ("activation", "gradient", "adam_m", "adam_v")


def run(steps=200, spike_at=150, spike=5.6):
    """A healthy run of a byte-level model with one spike."""
    step, rng = np.arange(1, steps + 1), np.random.default_rng(0)
    loss = 1.9 + 3.6 * np.exp(-step / 30) + 0.06 * rng.standard_normal(steps)
    norm = np.exp(0.2 * rng.standard_normal(steps) - 0.5)
    loss[spike_at - 1], norm[spike_at - 1] = spike, 8.0
    return pd.DataFrame({"step": step, "segment": 0, "loss": loss, "grad_norm": norm, "lr": 3e-3 * (1 - step / steps)})


def artists(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


def curves(axes):
    """The data lines: neither marks nor the selected step."""
    return [line for line in axes.lines if line.get_linestyle() != "None" and line.get_transform() == axes.transData]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


def inside(figure):
    """Whether every text lies within the figure, as drawn."""
    renderer = figure.canvas.get_renderer()
    figure.draw(renderer)
    found = [*figure.texts, *(text for box in figure.legends for text in box.get_texts())]
    for axes in figure.axes:
        found += [axes.xaxis, axes.yaxis, *axes.texts]
    boxes = [box for artist in found if (box := artist.get_tightbbox(renderer)) is not None]
    return all(b.x0 >= 0 and b.y0 >= 0 and b.x1 <= figure.bbox.width and b.y1 <= figure.bbox.height for b in boxes)


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
    assert texts(axes) == ["loss 2", "loss nan", "loss 3"]
    table["share"] = [0.4, 0.9, 0.6]
    (axes,) = row_losses(table, step=1).axes
    assert texts(axes) == ["loss nan", "60.0 %   loss 3", "40.0 %   loss 2"]


def test_a_large_batch_shows_its_largest_rows():
    share = np.arange(64) / np.arange(64).sum()
    figure = row_losses(pd.DataFrame({"row": range(64), "loss": share, "share": share}), step=7)
    assert len(figure.axes[0].patches) == 32 and figure.texts[0].get_text() == "Rows of step 7: 32 of 64"
    assert figure.axes[0].get_yticklabels()[0].get_text() == "63" and inside(figure)
    assert len(row_losses(pd.DataFrame({"row": [], "loss": [], "share": []}), step=1).axes[0].patches) == 0
    with pytest.raises(WorkbenchError, match="no column 'share'"):
        row_losses(pd.DataFrame({"row": [1], "loss": [1.0]}), step=1)


# ---- pictures


def every_figure():
    steps = run(80, spike_at=70, spike=12.0)
    small = layers(blocks=1, kinds=("activation",))
    share = pd.DataFrame({"row": [0, 1], "loss": [2.0, 3.0], "share": [0.4, 0.6]})
    return [
        timeline(steps, find_spikes(steps), step=70, checkpoints=[0, 40], title="a $x$ run"),
        layer_norms(small, step=10, kinds=["activation"], neighbours=small.assign(step=9)),
        row_losses(share, step=10),
    ]


def test_png_is_the_same_bytes_again_and_in_four_threads():
    expected = [png(figure) for figure in every_figure()]
    assert len(set(expected)) == 3
    assert all(picture.startswith(b"\x89PNG") and b"matplotlib" not in picture.lower() for picture in expected)
    found = {}

    def work(name):
        found[name] = [png(figure) for figure in every_figure()]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == dict.fromkeys(range(4), expected)


def test_img_is_one_tag_with_escaped_alt_and_size():
    figure = timeline(run())
    tag = img(figure, 'loss of "a" & <b>')
    match = re.fullmatch(
        r'<img alt="(.*)" width="900" height="640" decoding="sync" src="data:image/png;base64,([A-Za-z0-9+/=]+)">', tag
    )
    assert match and match[1] == "loss of &quot;a&quot; &amp; &lt;b&gt;"
    assert base64.b64decode(match[2]) == png(figure)
    assert 'width="450" height="320"' in img(figure, "", 450)
    figure.set_dpi(200)
    assert 'width="900" height="640"' in img(figure, "", 900)


def test_a_dark_theme_of_the_user_changes_nothing():
    def look():
        figure = timeline(run(), step=5)
        picture, axes = png(figure), figure.axes[2]
        written = [axes.yaxis.label, axes.get_xticklabels()[0], *figure.legends[0].get_texts(), *figure.texts]
        return (
            axes.get_facecolor(),
            [mpl.colors.to_hex(text.get_color()) for text in written],
            picture[:24],
        )  # the header has the size

    theme = {"text.color": "white", "axes.facecolor": "black", "axes.labelcolor": "white", "savefig.bbox": "tight"}
    plain = look()
    with mpl.rc_context(theme | {"figure.dpi": 50, "xtick.color": "white", "axes.formatter.use_mathtext": True}):
        assert look() == plain


def test_dollar_signs_are_not_mathematics():
    figure = timeline(run(), title="$HOME and $x")
    assert figure.texts[0]._preprocess_math(figure.texts[0].get_text()) == ("$HOME and $x", False)


def test_number():
    cases = {0: "0", 0.25: "0.25", 1500: "1500", 3e-4: "3e-4", 2.5e-5: "2.5e-5", 1e6: "1e6", -2e-7: "-2e-7"}
    assert {value: number(value) for value in cases} == cases
    assert number(0.1 + 0.2) == "0.3" and number(3e-4 + 1e-19) == "3e-4"


def test_figures_are_built_without_pyplot_and_mlx():
    code = (
        "import sys, workbench.figures as f, workbench.plots as p, pandas as pd;"
        "f.png(p.timeline(pd.DataFrame({'step': [1], 'loss': [2.0]})));"
        "assert not {'matplotlib.pyplot', 'mlx', 'mlx.core', 'ipywidgets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert isinstance(timeline(run()), Figure)
