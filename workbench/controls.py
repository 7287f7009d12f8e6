"""The panel's widgets and where they stand; nothing of what they do."""

from __future__ import annotations

import ipywidgets as W

UNCHOSEN = ""  # value of an option that asks for a choice: with None a drop-down would be blank


class Controls(W.VBox):
    """What a person sees of the panel. Each widget has the CSS class `wb-` and its name.

    Attributes:
        folder, run, refresh: choose a run.
        facts, timeline: of the run.
        spikes, step, slider, segment: choose a step; the last appears where one has to be chosen.
        step_facts, estimate: of the step, and what a replay of it would cost.
        replay_button, cancel_button, progress, anyway, status: replay it; `anyway` appears where this machine differs.
        error: the red box.
        badges, layers, batch: of the replay, as far as there is one.
    """

    def __init__(self) -> None:
        label = {"description_width": "4.5em"}
        self.folder = W.Text(description="Folder", continuous_update=False, style=label, layout=_flexible())
        self.run = W.Dropdown(description="Run", options=[("choose a run", UNCHOSEN)], style=label, layout=_flexible())
        self.refresh = W.Button(description="Refresh", icon="refresh", layout=W.Layout(width="7.5em"))
        self.spikes = W.Select(description="Spikes", rows=9, style=label, layout=_flexible(0.8))
        self.step = W.BoundedIntText(description="Step", style=label, layout=W.Layout(width="12em"))
        self.slider = W.IntSlider(
            description="Slide", readout=False, style={"description_width": "3em"}, layout=_flexible()
        )
        self.segment = W.Dropdown(description="Segment", style=label, layout=W.Layout(width="auto"))
        button = {"width": "7.5em"}
        self.replay_button = W.Button(description="Replay", icon="play", button_style="primary", layout=button)
        self.cancel_button = W.Button(description="Cancel", icon="stop", disabled=True, layout=button)
        self.progress = W.IntProgress(description="Progress", style=label, layout=_flexible())
        self.anyway = W.Checkbox(
            description="Replay here anyway (informational)", indent=False, layout=W.Layout(width="auto")
        )
        self.facts, self.timeline, self.step_facts, self.estimate = (W.HTML() for _ in range(4))
        self.status, self.error, self.badges, self.layers, self.batch = (W.HTML() for _ in range(5))
        for name, widget in vars(self).copy().items():
            if isinstance(widget, W.DOMWidget):
                widget.add_class(f"wb-{name.removesuffix('_button').replace('_', '-')}")
        show(self.segment, False)
        show(self.anyway, False)
        super().__init__(self._arranged())
        self.add_class("wb-panel")

    def _arranged(self) -> list[W.Widget]:
        choose = W.HBox([self.step, self.slider])
        buttons = W.HBox([self.replay_button, self.cancel_button, self.progress])
        right = [choose, self.segment, self.step_facts, self.estimate, buttons, self.anyway, self.status]
        both = [self.spikes, W.VBox(right, layout=_flexible())]
        return [
            W.HBox([self.folder, self.run, self.refresh]),
            self.facts,
            self.timeline,
            W.HBox(both, layout=W.Layout(align_items="flex-start")),
            self.error,
            self.badges,
            self.layers,
            self.batch,
        ]


def _flexible(share: float = 1) -> W.Layout:
    """Takes its share of a row; without `min_width` the row would rather grow out of the page."""
    return W.Layout(width="auto", min_width="0", flex=f"{share} 1 0")


def set_range(control: W.BoundedIntText | W.IntSlider, low: int, high: int) -> None:
    """Sets both bounds; one at a time, since the lower may never be above the upper."""
    if low > control.max:
        control.max, control.min = high, low
    else:
        control.min, control.max = low, high
    control.disabled = low == high


def show(widget: W.Widget, visible: bool) -> None:
    """Shows a widget, or takes it out of the page."""
    widget.layout.display = None if visible else "none"
