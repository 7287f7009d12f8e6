"""Looking at a step in a panel: which step, in which segment and view, and what is seen of it."""

from __future__ import annotations

import re
from functools import partial

import ipywidgets as W

from ..errors import ReplayError
from ..work import child
from .boundary import Boundary
from .controls import BATCH, CAUSE, ENVIRONMENT, STEP, TIMELINE, UNCHOSEN, VIEWS, Controls, set_range, show
from .here import Here
from .looking import Look
from .markup import code_line, paragraph
from .opened import Opened
from .results import Found, Results
from .stored import read_stored

NEAR = 20  # steps on each side


class Viewer:
    """Args:
        remark: goes with what a replay would cost.

    Attributes:
    look: the step that is looked at; None without a run or its first step, and where a segment has to be chosen.
    """

    def __init__(
        self,
        controls: Controls,
        boundary: Boundary,
        results: Results,
        here: Here,
        factory: str | None,
        remark: str,
    ) -> None:
        self.look: Look | None = None
        self._opened: Opened | None = None
        self._controls, self._boundary, self._results, self._here = controls, boundary, results, here
        self._factory, self._remark = factory, remark and paragraph(remark)
        self._at: object = None  # where a person is
        self._shown: tuple[int, int] | None = None  # the steps that the timeline shows; None: all
        W.link((controls.step, "value"), (controls.slider, "value"))
        boundary.on_change(controls.spikes, self._on_spike)
        boundary.on_change(controls.step, self.show)
        boundary.on_change(controls.segment, self._on_segment)
        boundary.on_change(controls.view, self.draw)
        boundary.on_change(controls.zoom, self._on_zoom)
        boundary.on_press(controls.zoom_near, self._zoom_near)
        boundary.on_press(controls.zoom_all, lambda: self._zoom(None))

    def begin(self, opened: Opened | None, step: int | None) -> None:
        """Shows a step of another run: the given one, else the last spike, else the last step."""
        controls, self._opened = self._controls, opened if opened is not None and len(opened) else None
        start, segment, first, last, spikes = 0, None, 0, 0, []
        if self._opened is not None:
            start, segment = self._opened.where_to_begin(step)
            first, last, spikes = self._opened.first, self._opened.last, self._opened.spike_options
        self._shown = None
        with self._boundary.by_itself():
            controls.zoom.value = ""
            controls.spikes.options = spikes
            for control in (controls.step, controls.slider):
                set_range(control, first, last)
            controls.step.value = start
        self.show(segment)

    def go(self, step: int, segment: int) -> None:
        """Moves to a step that the run has."""
        with self._boundary.by_itself():
            self._controls.step.value = step
        self.show(segment)

    def turn_to(self, view: str) -> None:
        """Chooses a view, without drawing it."""
        with self._boundary.by_itself():
            self._controls.view.value = view

    def shows(self, opened_path: object, step: int) -> bool:
        """Whether this is the step of this run that a person is at."""
        return self._opened is not None and (self._opened.run.path, self._controls.step.value) == (opened_path, step)

    def _on_spike(self) -> None:
        """Moves to the chosen spike, in its own segment."""
        if self._controls.spikes.value is not None:
            self.go(*self._controls.spikes.value)

    def _on_zoom(self) -> None:
        """Shows the steps that were typed, or marked with the mouse."""
        text = self._controls.zoom.value.strip()
        self._zoom(None if text in ("", "all") else _range(text))

    def _zoom_near(self) -> None:
        step = self._controls.step.value
        self._zoom((step - NEAR, step + NEAR))

    def _zoom(self, shown: tuple[int, int] | None) -> None:
        if self._opened is None:
            return
        first, last = self._opened.first, self._opened.last
        if shown is not None:
            low, high = max(first, min(shown[0], last - 1)), min(last, max(shown[1], first + 1))
            shown = None if low <= first and high >= last else (low, high)
        self._shown = shown
        self._boundary.clear()
        with self._boundary.by_itself():
            self._controls.zoom.value = "" if shown is None else f"{shown[0]}-{shown[1]}"
        self.draw()

    def _on_segment(self) -> None:
        self.show(None if self._controls.segment.value == UNCHOSEN else self._controls.segment.value)

    def show(self, segment: int | None = None) -> None:
        """Looks at the chosen step, in this segment if it stands there."""
        opened, step = self._opened, self._controls.step.value
        self.look, facts = None, ""
        self._boundary.clear()
        usual, having = (None, []) if opened is None else opened.segments(step)
        chosen = segment if segment in having else usual
        self._offer_segments(having if usual is None else [], chosen)
        with self._boundary.by_itself():
            spike = (step, chosen)
            self._controls.spikes.value = spike if any(at == spike for _, at in self._controls.spikes.options) else None
        if opened is not None and chosen is not None:
            key = (opened.run.manifest.run, step, chosen, child.surroundings())
            here = self._here.environment(opened.run)
            found = self._results.look_up(key, partial(read_stored, opened.run, step, chosen, here))
            self._note_age(found, (opened.run.path, step, chosen))
            self.look = Look(opened, step, chosen, found, self._here)
            facts = self.look.step_facts()
        elif having:
            several = f"Step {step:,} stands in segments {', '.join(map(str, having))}, and they differ: choose one."
            facts = paragraph(several)
        elif opened is not None:
            facts = paragraph(f"Step {step:,} is not in the telemetry.")
        self._controls.step_facts.value = facts
        self._controls.estimate.value = "" if self.look is None else self.look.estimate() + self._remark
        self._controls.badges.value = "" if self.look is None else self.look.badges()
        self.draw()

    def _note_age(self, found: Found, at: object) -> None:
        """What was there when a person came is from the cache."""
        if at != self._at:
            for made in found.made.values():
                made.fresh = False
        self._at = at

    def _offer_segments(self, having: list[int], chosen: int | None) -> None:
        """Offers the choice where the step stands in several segments that differ."""
        show(self._controls.segment, bool(having))
        if having:
            names = [(f"segment {number}", number) for number in having]
            with self._boundary.by_itself():
                self._controls.segment.options = [("choose a segment", UNCHOSEN), *names]
                self._controls.segment.value = UNCHOSEN if chosen is None else chosen

    def draw(self) -> None:
        """Draws the chosen view of the step. Those that are not seen are left empty, and drawn when they are chosen."""
        controls, view = self._controls, self._controls.view.value
        drawn = self._drawn(view)
        controls.code.value = "" if self.look is None else code_line(self.look.code(view, self._factory))
        for name in VIEWS:
            for widget in controls.parts[name]:
                widget.value = drawn.get(widget, "") if name == view else ""
        if view == CAUSE:
            self._offer_changes()
            able = self.look is not None and self.look.opened.unexplained is None
            show(controls.measure_button, able and self.look is not None and self.look.found.context is None)
            show(controls.trying, able)
        show(controls.zooming, self._opened is not None)
        controls.show_view(view)

    def _offer_changes(self) -> None:
        changes = [] if self.look is None else self.look.changes()
        for place, button in enumerate(self._controls.try_buttons):
            show(button, place < len(changes))
            button.description = changes[place] if place < len(changes) else ""

    def _drawn(self, view: str) -> dict[W.HTML, str]:
        controls, look = self._controls, self.look
        if view == TIMELINE and self._opened is not None:
            return {controls.timeline: self._opened.timeline(self._shown).at(controls.step.value, live=True)}
        if look is None:
            return {}
        if view == STEP:
            return {controls.layers: look.layers()}
        if view == BATCH:
            return {controls.batch: look.batch()}
        if view == CAUSE:
            cause = {controls.verdict: look.verdict(), controls.onset: look.onset()}
            return cause | {controls.experiments: look.experiments()}
        if view == ENVIRONMENT:
            return {controls.environment: look.environment(), controls.examination: look.examination()}
        return {}


def _range(text: str) -> tuple[int, int]:
    """A range of steps as a person types it.

    Raises:
        ReplayError: it is none.
    """
    parts = [part.strip().replace(",", "") for part in re.split(r"-|–|\.\.| to ", text)]
    if len(parts) != 2 or not all(part.isdecimal() for part in parts) or int(parts[0]) > int(parts[1]):
        raise ReplayError(f"{text!r} is no range of steps; expected the first and the last, such as 90-110, or nothing")
    return int(parts[0]), int(parts[1])
