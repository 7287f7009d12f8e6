"""Where it began: a heat map of how far each layer's norms stand from their healthy neighbours, step by step.

Knows columns; nothing of files, runs, widgets or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from ..errors import WorkbenchError
from ..figures import BLUE, INK, VERMILION, add_title, blank, plain, require
from ..plots import KIND_NAMES, short_names
from ..probes.onsets import onsets

# Blue to vermilion by way of white: Okabe and Ito's pair that all common kinds of colour vision keep apart.
# In steps that `figures.png`, which keeps four bits a channel, leaves as they are: of a smooth ramp it would make cells
# near 0 yellow, cyan and violet.
_BELOW = (BLUE, "#1177BB", "#4499CC", "#66AADD", "#88BBDD", "#AACCEE", "#CCDDEE", "#DDEEFF")
_ABOVE = ("#FFEEDD", "#FFDDCC", "#FFCCAA", "#FFAA77", "#EE9955", "#EE7733", "#DD6611", VERMILION)
COLOURS = ListedColormap((*_BELOW, "#FFFFFF", *_ABOVE), "onset")
UNSCORED = "#DDDDDD"
LIMIT = 12.0  # robust deviations at which a colour is full: twice what counts as far off
LABELLED_LAYERS = 40
KINDS = ("activation", "activation_gradient", "gradient", "update", "adam_m", "adam_v", "weight")


def onset_map(
    scores: pd.DataFrame,
    *,
    step: int,
    threshold: float = 6.0,
    layers: Sequence[str] | None = None,
    kinds: Sequence[str] = KINDS,
    statistic: str = "l2",
    names: Mapping[str, str] | None = None,
) -> Figure:
    """How far each layer's norm stood from its healthy neighbours at each step before a spike, and where it began.

    Colour is the robust z: vermilion above, blue below, full at 12. A cell beyond the threshold has a dot, and the one
    from which on its row was off a ring around it: the onset, see `onsets.onsets`. An x is a norm that is not finite;
    grey was not scored, for lack of enough healthy steps before it.

    Args:
        scores: rows `step`, `layer`, `kind`, `statistic`, `z` (NaN: not scored; inf: not finite), as `Context.frame`.
        step: N, in the title; the last column.
        threshold: of |z|.
        layers: from top to bottom; None: as they first appear.
        kinds: the panels, from left to right; those without rows are left out.
        statistic: whose z is drawn.
        names: of kinds that are not what they are called (see `kind_names`).

    Returns:
        A figure 900 pixels wide with one axis a kind, which share the layers.

    Raises:
        WorkbenchError: a column is missing, or none of the kinds has rows.
    """
    require(scores, "step", "layer", "kind", "statistic", "z")
    rows = scores[(scores["statistic"] == statistic) & scores["kind"].isin(kinds)]
    shown = [kind for kind in kinds if (rows["kind"] == kind).any()]
    if not shown:
        raise WorkbenchError(
            f"The frame has no {statistic} of {', '.join(kinds)}; it has {sorted(set(scores['kind']))}."
        )
    called = KIND_NAMES | dict(names or {})
    paths = list(dict.fromkeys(rows["layer"])) if layers is None else list(layers)
    steps = list(range(int(rows["step"].min()), int(rows["step"].max()) + 1))
    labels = [plain(label or "(model)") for label in short_names(paths)]
    every = math.ceil(len(paths) / LABELLED_LAYERS)
    left = 0.3 + 0.068 * max(len(label) for label in labels[::every])  # inches, as are the margins below
    top, bottom, body = 0.78, 1.02, max(1.0, 0.19 * min(len(paths), LABELLED_LAYERS))
    height = top + body + bottom
    figure = blank(height)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    width = figure.get_figwidth()
    edges = {"left": left / width, "right": 0.98, "bottom": bottom / height, "top": 1 - top / height}
    figure.subplots_adjust(wspace=0.06, **edges)
    began = onsets(rows, step, threshold)
    for axes, kind in zip(panels, shown, strict=True):
        own = rows[rows["kind"] == kind].pivot(index="layer", columns="step", values="z")
        z = own.reindex(index=paths, columns=steps).to_numpy(float)
        image = _panel(axes, z, _rings(began[began["kind"] == kind], paths, steps), threshold, 72 * body / len(paths))
        axes.set_title(called.get(kind, kind).replace("activation ", "activation\n"), fontsize=9, color=INK, pad=4)
        _label_steps(axes, [number - step for number in steps], len(shown))
    panels[0].set_yticks(range(0, len(paths), every), labels[::every], fontsize=9)
    figure.text(
        (edges["left"] + edges["right"]) / 2,
        0.66 / height,
        f"steps from step {step:,}",
        ha="center",
        color=INK,
        fontsize=10,
    )
    _legend(figure, image, height, edges["left"], threshold)
    add_title(figure, f"Layers before step {step:,}, against their own healthy steps")
    return figure


def _rings(began: pd.DataFrame, paths: Sequence[str], steps: Sequence[int]) -> np.ndarray:
    """(layers, steps): where a row was off from."""
    where = set(zip(began["layer"], began["step"], strict=True))
    return np.array([[(path, step) in where for step in steps] for path in paths])


def _panel(axes: Axes, z: np.ndarray, first: np.ndarray, threshold: float, points: float) -> Any:
    """z and first: (layers, steps); `points`: height of a cell, in which a mark must fit."""
    axes.set_facecolor(UNSCORED)
    shown = np.ma.masked_invalid(np.where(np.isinf(z), np.sign(z) * LIMIT, z))
    image = axes.imshow(shown, cmap=COLOURS, vmin=-LIMIT, vmax=LIMIT, aspect="auto", interpolation="nearest")
    axes.set_xticks(np.arange(z.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(z.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", lw=0.8)
    axes.tick_params(which="both", length=0, colors=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)
    far = np.abs(z) > threshold
    dots, broken = far & np.isfinite(z), np.isinf(z)
    marks: tuple[tuple[np.ndarray, dict[str, Any]], ...] = (
        (dots, {"marker": ".", "ms": min(4, 0.45 * points), "color": INK}),
        (broken, {"marker": "x", "ms": min(5, 0.5 * points), "mew": 1.2, "color": INK}),
        (first, {"marker": "o", "ms": min(9, 0.75 * points), "mfc": "none", "mec": INK, "mew": 1.1}),
    )
    for where, style in marks:
        layer, place = np.nonzero(where)
        axes.plot(place, layer, ls="none", zorder=3, **style)
    return image


def _label_steps(axes: Axes, offsets: Sequence[int], panels: int) -> None:
    """Every so many steps back from the last, so that labels touch neither each other nor those of the next panel."""
    room = max(2, 56 // panels // (len(str(offsets[0])) + 1))  # labels in a panel's width
    each = math.ceil(len(offsets) / room)
    places = list(range(len(offsets) - 1, -1, -each))
    axes.set_xticks(places, [str(offsets[place]) for place in places], fontsize=8)


def _legend(figure: Figure, image: Any, height: float, left: float, threshold: float) -> None:
    bar = figure.add_axes((left, 0.37 / height, 0.26, 0.11 / height))
    colours = figure.colorbar(image, cax=bar, orientation="horizontal", extend="both")
    colours.set_ticks(
        [-LIMIT, -threshold, 0, threshold, LIMIT], labels=[f"{v:g}" for v in (-LIMIT, -threshold, 0, threshold, LIMIT)]
    )
    colours.outline.set_visible(False)
    bar.tick_params(colors=INK, labelsize=8, length=2, pad=1)
    marks = f"•  beyond {threshold:g}     ○  left here     ×  not finite     grey: not scored"
    for line, text in ((0.44, "robust z of the logarithm of the L2 norm"), (0.22, marks)):
        figure.text(left + 0.29, line / height, plain(text), va="center", color=INK, fontsize=8.5)
