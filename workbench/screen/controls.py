"""The panel's widgets and where they stand; nothing of what they do."""

from __future__ import annotations

import ipywidgets as W

from .views import BATCH as BATCH
from .views import CAUSE as CAUSE
from .views import ENVIRONMENT as ENVIRONMENT
from .views import STEP as STEP
from .views import TIMELINE as TIMELINE
from .views import VIEWS as VIEWS

UNCHOSEN = ""  # value of an option that asks for a choice: with None a drop-down would be blank
TRIED = 6  # experiments that have a button
LINE, BADGES = "19px", "95px"  # heights of what appears once a step is replayed


class Controls(W.VBox):
    """What a person sees of the panel. Each widget has the CSS class `wb-` and its name.

    Attributes:
        folder, run, refresh: choose a run.
        facts: of the run.
        spikes, step, slider, segment: choose a step; the last appears where one has to be chosen.
        step_facts, estimate: of the step, and what a replay of it would cost.
        replay_button, cause_button, cancel_button, progress, anyway, status: slow work; `anyway` appears where this
            machine differs.
        output: what the work printed.
        error: the red box.
        badges: how far the replay can be believed.
        view: which of the views is seen: the parts of Timeline; `layers`; `batch`; the parts of Cause, or Environment.
        timeline, zooming: the parts of Timeline; in the latter, which is seen with a run, zoom, zoom_near, zoom_all;
            `zoom` holds the steps that are shown, as "90-110".
        verdict, onset, measure_button, experiments, trying: the parts of Cause; in the last, which is seen where a step
            can be performed, try_buttons, try_all, change, try_button.
        environment, doctor_button, machine_button, examination: the parts of Environment.
        code: a line of Python that gives what the view shows.
        parts: the HTML widgets of each view.
    """

    def __init__(self) -> None:
        label = {"description_width": "4.5em"}
        self.folder = W.Text(description="Folder", continuous_update=False, style=label, layout=_flexible())
        self.run = W.Dropdown(description="Run", options=[("choose a run", UNCHOSEN)], style=label, layout=_flexible())
        self.refresh = _button("Refresh", "7.5em", icon="refresh")
        self.spikes = W.Select(description="Spikes", rows=6, style=label, layout=_flexible(0.7))
        self.step = W.BoundedIntText(description="Step", style=label, layout=W.Layout(width="12em"))
        self.slider = W.IntSlider(
            description="Slide", readout=False, style={"description_width": "3em"}, layout=_flexible()
        )
        self.segment = W.Dropdown(description="Segment", style=label, layout=W.Layout(width="auto"))
        self.replay_button = _button("Replay", "7em", icon="play", button_style="primary")
        self.cause_button = _button("Find the cause", "12em", icon="search", button_style="primary")
        self.cancel_button = _button("Cancel", "7em", icon="stop", disabled=True)
        self.progress = W.IntProgress(
            description="Progress",
            style=label,
            layout=W.Layout(width="auto", min_width="8em", flex="1 1 8em", visibility="hidden"),  # until work begins
        )
        self.anyway = W.Checkbox(
            description="Replay here anyway (informational)", indent=False, layout=W.Layout(width="auto")
        )
        self.facts, self.step_facts, self.estimate, self.status, self.error, self.badges = (W.HTML() for _ in range(6))
        self.output, self.code = W.HTML(), W.HTML()
        self.status.layout.min_height = LINE  # that nothing moves when work begins
        self.view = W.ToggleButtons(
            description="View",
            options=VIEWS,
            style={"description_width": "3em", "button_width": "8.4em"},
            layout=W.Layout(display="flex"),
        )
        self.timeline, self.layers, self.batch = (W.HTML() for _ in range(3))
        self.zoom = W.Text(
            description="Show steps",
            placeholder="all, or such as 90-110",
            continuous_update=False,
            style={"description_width": "6em"},
            layout=W.Layout(width="18em"),
        )
        self.zoom_near = _button("Near the step", "9em")
        self.zoom_all = _button("All", "5em")
        self.verdict, self.onset, self.experiments = (W.HTML() for _ in range(3))
        self.environment, self.examination = W.HTML(), W.HTML()
        self.doctor_button = _button("Examine the step", "14.5em", icon="stethoscope")
        self.machine_button = _button("Examine the machine", "16.5em", icon="microchip")
        self.measure_button = _button("Measure the steps before", "16em", icon="th")
        self.try_buttons = [_button("", "auto") for _ in range(TRIED)]
        self.try_all = _button("Try all", "6em")
        self.change = W.Text(
            description="Change",
            placeholder="one change, such as lr=0.1x, batch=4100, drop-row=3, beta2=0.95",
            style=label,
            layout=_flexible(),
        )
        self.try_button = _button("Try", "6em")
        self.parts = {TIMELINE: [self.timeline], STEP: [self.layers], BATCH: [self.batch]}
        self.parts[CAUSE] = [self.verdict, self.onset, self.experiments]
        self.parts[ENVIRONMENT] = [self.environment, self.examination]
        self._views = {TIMELINE: self._timeline(), STEP: self.layers, BATCH: self.batch, CAUSE: self._cause()}
        self._views[ENVIRONMENT] = self._environment()
        self._name_widgets()
        show(self.segment, False)
        show(self.anyway, False)
        self.show_view(TIMELINE)
        super().__init__(self._arranged())
        self.add_class("wb-panel")

    def show_view(self, name: str) -> None:
        """Shows one of the views, and takes the others out of the page."""
        for other, widget in self._views.items():
            show(widget, other == name)

    def _name_widgets(self) -> None:
        for name, widget in vars(self).copy().items():
            if isinstance(widget, W.DOMWidget):
                widget.add_class(f"wb-{name.removesuffix('_button').replace('_', '-')}")
        for button in self.try_buttons:
            button.add_class("wb-try-one")

    def _timeline(self) -> W.VBox:
        self.zooming = W.HBox([self.zoom, self.zoom_near, self.zoom_all])
        return W.VBox([self.timeline, self.zooming])

    def _environment(self) -> W.VBox:
        return W.VBox([self.environment, self.examination, W.HBox([self.doctor_button, self.machine_button])])

    def _cause(self) -> W.VBox:
        wrapping = W.Layout(flex_flow="row wrap", align_items="center")
        trying = W.HBox([*self.try_buttons, self.try_all], layout=wrapping)
        other = W.HBox([self.change, self.try_button], layout=W.Layout(max_width="46em"))
        self.trying = W.VBox([trying, other])
        return W.VBox([self.verdict, self.onset, self.measure_button, self.experiments, self.trying])

    def _arranged(self) -> list[W.Widget]:
        choose = W.HBox([self.step, self.slider])
        wrapping = W.Layout(flex_flow="row wrap")  # on a narrow page the progress has a line of its own
        buttons = W.HBox([self.replay_button, self.cause_button, self.cancel_button, self.progress], layout=wrapping)
        right = [choose, self.segment, self.step_facts, self.estimate, buttons, self.anyway, self.status]
        both = [self.spikes, W.VBox(right, layout=_flexible())]
        return [
            W.HTML(_LISTS_HAVE_KEYS),
            W.HBox([self.folder, self.run, self.refresh]),
            self.facts,
            W.HBox(both, layout=W.Layout(align_items="flex-start")),
            self.error,
            self.output,
            self.badges,
            self.view,
            *self._views.values(),
            self.code,
        ]


# JupyterLab takes the arrow keys and letters of a list for its own shortcuts, unless the list says otherwise.
_LISTS_HAVE_KEYS = (
    '<img alt="" src="data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7" '
    "style=\"display:none\" onload=\"this.closest('.wb-panel').addEventListener('focusin',function(event){"
    "if(event.target.tagName==='SELECT')event.target.setAttribute('data-lm-suppress-shortcuts','')})\">"
)


def _button(text: str, width: str, **more: object) -> W.Button:
    return W.Button(description=text, layout=W.Layout(width=width), **more)


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


def keep_room(widget: W.Widget, height: str | None) -> None:
    """The place of what will stand there; None: none is kept."""
    widget.layout.min_height = height


def show(widget: W.Widget, visible: bool) -> None:
    """Shows a widget, or takes it out of the page."""
    widget.layout.display = None if visible else "none"
