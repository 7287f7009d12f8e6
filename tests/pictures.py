"""What tests of figures share: a run to draw, and what can be read off the artists."""

import numpy as np
import pandas as pd


def run(steps=200, spike_at=150, spike=5.6):
    """A healthy run of a byte-level model with one spike."""
    step, rng = np.arange(1, steps + 1), np.random.default_rng(0)
    loss = 1.9 + 3.6 * np.exp(-step / 30) + 0.06 * rng.standard_normal(steps)
    norm = np.exp(0.2 * rng.standard_normal(steps) - 0.5)
    loss[spike_at - 1], norm[spike_at - 1] = spike, 8.0
    return pd.DataFrame({"step": step, "segment": 0, "loss": loss, "grad_norm": norm, "lr": 3e-3 * (1 - step / steps)})


def curves(axes):
    """The data lines: neither marks nor the selected step."""
    return [line for line in axes.lines if line.get_linestyle() != "None" and line.get_transform() == axes.transData]


def artists(axes, label):
    return [line for line in axes.lines if line.get_label() == label]


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
