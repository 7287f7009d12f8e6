"""The dashboard's widgets and where they stand; nothing of what they do."""

from __future__ import annotations

from collections.abc import Sequence

import ipywidgets as W

from .curve import LABELS
from .curves import rules_to_choose
from .curves_figure import SCALES


class DashboardControls(W.VBox):
    """What a person sees of the dashboard. Each widget has the CSS class `wb-` and its name.

    Attributes:
        chosen, shown, scale, smooth, marked: which runs and panels (by quantity), on which scale, the mean of how many
            values, and whose spikes.
        zoom, step: the steps that are shown, as "90-110"; and the one whose values stand in the table, 0 for the last.
        follow: whether the logs are read on.
        picture, numbers, status, error: what is seen.
    """

    def __init__(self, names: Sequence[str], quantities: Sequence[str], scale: str, smooth: int, spikes: str) -> None:
        label = {"description_width": "5em"}
        wide = W.Layout(width="auto", min_width="16em", flex="1 1 0", max_width="24em")
        self.chosen = W.SelectMultiple(
            description="Runs", options=list(names), value=list(names), rows=list_rows(names), style=label,
            layout=wide,
        )  # fmt: skip
        self.shown = {
            name: W.Checkbox(description=text, value=name in quantities, indent=False, layout=W.Layout(width="auto"))
            for name, text in LABELS.items()
        }
        self.scale = W.ToggleButtons(
            description="Scale",
            options=SCALES,
            value=scale,
            style=label | {"button_width": "5em"},
            layout=W.Layout(display="flex"),
        )
        self.smooth = W.BoundedIntText(
            description="Mean of", value=smooth, min=1, max=10**7, style=label, layout=W.Layout(width="12em")
        )
        self.marked = W.Dropdown(
            description="Spikes",
            options=rules_to_choose(),
            value=spikes,
            style=label,
            layout=W.Layout(width="22em"),
        )
        self.zoom = W.Text(
            description="Show steps", placeholder="all, or such as 90-110", continuous_update=False,
            style={"description_width": "6em"}, layout=W.Layout(width="18em"),
        )  # fmt: skip
        self.step = W.BoundedIntText(description="Step", min=0, max=2**53, style=label, layout=W.Layout(width="13em"))
        self.follow = W.Checkbox(description="Follow", indent=False, layout=W.Layout(width="auto"))
        self.picture, self.numbers, self.status, self.error = (W.HTML() for _ in range(4))
        for name, widget in vars(self).copy().items():
            if isinstance(widget, W.DOMWidget):
                widget.add_class(f"wb-{name}")
        super().__init__(self._arranged())
        self.add_class("wb-panel")  # in which the picture's mouse finds its fields
        self.add_class("wb-dashboard")

    def _arranged(self) -> list[W.Widget]:
        wrapping = W.Layout(flex_flow="row wrap", align_items="center")
        second = W.VBox([W.HBox([self.scale, self.smooth], layout=wrapping), self.marked])
        return [
            W.HBox([self.chosen, second], layout=W.Layout(flex_flow="row wrap", align_items="flex-start")),
            W.HBox([*self.shown.values()], layout=W.Layout(flex_flow="row wrap", grid_gap="0 1.5em")),
            self.error,
            self.picture,
            W.HBox([self.zoom, self.step, self.follow], layout=wrapping),
            self.status,
            self.numbers,
        ]


def list_rows(names: Sequence[str]) -> int:
    """Lines of the list of runs; of more it scrolls."""
    return min(max(len(names), 2), 6)
