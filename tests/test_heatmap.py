"""The onset map: what its cells, dots, rings and labels say; the picture is read off the artists."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from workbench.errors import WorkbenchError
from workbench.figures import png
from workbench.screen.heatmap import LIMIT, onset_map

LAYERS = ["embedding", "blocks.0.attention.query", "blocks.0.mlp.up", ""]
STEPS = range(4, 13)


def scores(kinds=("activation", "gradient"), layers=LAYERS, steps=STEPS, **cells):
    """z of 1 everywhere, NaN in the first four steps; `cells` are {kind: {(layer, step): z}}."""
    rows = [
        (step, layer, kind, "l2", cells.get(kind, {}).get((layer, step), np.nan if step < steps[0] + 4 else 1.0))
        for kind in kinds
        for layer in layers
        for step in steps
    ]
    return pd.DataFrame(rows, columns=["step", "layer", "kind", "statistic", "z"])


def panels(figure):
    return [axes for axes in figure.axes if axes.images]


def marks(axes):
    """(step index, layer index) of each mark, by marker."""
    found = {}
    for line in axes.lines:
        pairs = zip(line.get_xdata(), line.get_ydata(), strict=True)
        found[line.get_marker()] = [(int(x), int(y)) for x, y in pairs]
    return found


def test_cells_are_layers_by_steps_and_a_panel_is_a_kind():
    figure = onset_map(scores(gradient={("blocks.0.mlp.up", 11): 7.0}), step=12)
    assert isinstance(figure, Figure) and figure.get_figwidth() * figure.dpi == 900
    activation, gradient = panels(figure)
    assert [axes.get_title() for axes in (activation, gradient)] == ["activation", "gradient"]
    cells = gradient.images[0].get_array()
    assert cells.shape == (4, 9) and cells[2, 7] == 7 and cells[0, 8] == 1
    assert cells.mask[:, :4].all() and not cells.mask[:, 4:].any()
    assert gradient.images[0].get_clim() == (-LIMIT, LIMIT)


def test_beyond_the_threshold_is_a_dot_and_where_a_row_is_off_from_then_on_a_ring():
    off = {("embedding", step): z for step, z in ((8, 7.0), (10, 8.0), (11, -9.0), (12, 7.0))}
    off |= {("blocks.0.mlp.up", 12): 6.5, ("", 12): 5.9, ("blocks.0.attention.query", 9): 9.0}
    figure = onset_map(scores(gradient=off), step=12)
    found = marks(panels(figure)[1])
    assert sorted(found["."]) == [(4, 0), (5, 1), (6, 0), (7, 0), (8, 0), (8, 2)]
    assert sorted(found["o"]) == [(6, 0), (8, 2)]  # what came back has none
    assert found["x"] == [] == marks(panels(figure)[0])["."]
    assert len(marks(panels(onset_map(scores(gradient=off), step=12, threshold=5))[1])["o"]) == 3


def test_what_is_not_finite_is_an_x_in_full_colour():
    figure = onset_map(scores(gradient={("embedding", 12): np.inf}), step=12)
    gradient = panels(figure)[1]
    assert marks(gradient)["x"] == [(8, 0)] == marks(gradient)["o"] and marks(gradient)["."] == []
    assert gradient.images[0].get_array()[0, 8] == LIMIT


def test_colours_are_symmetric_and_told_apart_without_hue():
    image = panels(onset_map(scores(), step=12))[0].images[0]
    low, middle, high = (np.array(image.cmap(image.norm(value))[:3]) for value in (-LIMIT, 0, LIMIT))
    assert middle == pytest.approx(np.ones(3), abs=0.01)  # white
    assert high[0] > 0.8 and high[2] < 0.1 and low[0] < 0.1 and low[2] > 0.6  # vermilion and blue


def test_labels_name_layers_steps_and_units():
    figure = onset_map(scores(), step=12)
    first, second = panels(figure)
    assert [text.get_text() for text in first.get_yticklabels()] == [
        *("embedding", "b0.attention.query", "b0.mlp.up", "(model)")
    ]
    assert not any(text.get_visible() and text.get_text() for text in second.get_yticklabels())
    assert first.get_xticklabels()[0].get_text() == "0"  # the last step always has its label
    texts = " ".join(text.get_text() for text in figure.texts)
    assert "Layers before step 12" in texts and "robust z of the logarithm of the L2 norm" in texts
    assert "beyond 6" in texts and "left here" in texts and "steps from step 12" in texts
    bar = next(axes for axes in figure.axes if not axes.images and axes.collections)
    assert [text.get_text() for text in bar.get_xticklabels()] == ["-12", "-6", "0", "6", "12"]


def test_the_order_of_layers_and_kinds_can_be_given():
    figure = onset_map(scores(), step=12, layers=LAYERS[::-1], kinds=("gradient", "weight", "activation"))
    assert [axes.get_title() for axes in panels(figure)] == ["gradient", "activation"]
    assert [text.get_text() for text in panels(figure)[0].get_yticklabels()][0] == "(model)"


def test_no_text_leaves_the_figure_and_none_overlaps():
    many = [f"transformer.layers.{n}.attention.query_projection" for n in range(60)]
    kinds = ("activation", "activation_gradient", "gradient", "update", "adam_m", "adam_v", "weight")
    for frame in (
        scores(),
        scores(kinds, many, range(100_001, 100_010)),
        scores(("weight",), LAYERS[:1], range(1, 60)),
    ):
        figure = onset_map(frame, step=int(frame["step"].max()))
        figure.canvas.draw()
        width, height = figure.canvas.get_width_height()
        texts = [
            text for text in figure.findobj(lambda one: hasattr(one, "get_window_extent") and hasattr(one, "get_text"))
        ]
        texts = [text for text in texts if text.get_visible() and text.get_text().strip()]
        boxes = [text.get_window_extent() for text in texts]
        out = [
            (text.get_text(), box)
            for text, box in zip(texts, boxes, strict=True)
            if not (-1 <= box.x0 and box.x1 <= width + 1 and -1 <= box.y0 and box.y1 <= height + 1)
        ]
        assert out == []
        titles = [axes.title.get_window_extent() for axes in panels(figure)]
        assert all(left.x1 < right.x0 for left, right in zip(titles, titles[1:], strict=False))
        for one, other in zip(panels(figure), panels(figure)[1:], strict=False):
            left, right = one.get_xticklabels()[0], other.get_xticklabels()[-1]  # labelled from the last step back
            assert left.get_window_extent().x1 < right.get_window_extent().x0
        assert png(figure)[:4] == b"\x89PNG"


def test_what_is_missing_is_named():
    with pytest.raises(WorkbenchError, match="no column 'z'"):
        onset_map(scores().drop(columns="z"), step=12)
    with pytest.raises(WorkbenchError, match="has no l2 of weight; it has"):
        onset_map(scores(), step=12, kinds=("weight",))


def test_it_leaves_pyplot_alone():
    import matplotlib.pyplot as plt

    onset_map(scores(), step=12)
    assert plt.get_fignums() == []
