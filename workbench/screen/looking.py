"""A step as it is looked at: what is known of it, as the HTML of each view. Reads files, and computes nothing slow."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pandas as pd
from matplotlib.figure import Figure

from .. import plots, traces
from ..batches.batch import batch_table
from ..errors import DataError, ReplayError, WorkbenchError
from ..figures import picture
from ..interventions.changes import parse_change
from ..kind_names import moment_names
from ..probes.neighbours import BEFORE
from . import batch_view, cause_view, departure, environment_view, layer_view, views
from .code_view import Code
from .heatmap import onset_map
from .markup import heading, paragraph, small
from .norm_chart import norm_chart
from .opened import Opened
from .tokens import token_table
from .views import BATCH, CAUSE, ENVIRONMENT, STEP, TIMELINE

if TYPE_CHECKING:
    from .here import Here
    from .results import Found

USUAL_STEPS = 50  # whose median gradient norm is a limit to try for clipping


class Look:
    """A step in one segment, and what was found of it.

    Attributes:
        opened, step, segment: what is looked at.
        found: traces and the like; empty for a step of which nothing was computed.
        here: what is known of this machine.
        names: of kinds that are not what they are called.
    """

    def __init__(self, opened: Opened, step: int, segment: int, found: Found, here: Here) -> None:
        self.opened, self.run = opened, opened.run
        self.step, self.segment, self.found, self.here = step, segment, found, here
        self.names = moment_names(self.run.manifest.optimizer)

    # ---- in a few words

    def step_facts(self) -> str:
        explanations = self.opened.explanations(self.step, self.segment)
        more = self.opened.unjudged(self.step, self.segment) + self.opened.carried(self.step, self.segment)
        return views.step_facts(self.opened.row(self.step, self.segment), explanations, more)

    def estimate(self) -> str:
        if self.run.unverifiable() is not None:
            return paragraph("No replay: there is only the log, as said above.")
        only = "" if self.opened.unexplained is None else f"{self.opened.unexplained}."
        try:
            return paragraph(f"A replay: {self.run.plan(self.step, self.segment).sentence()}.", only)
        except ReplayError as error:
            return paragraph(f"No replay: {error}.")

    def badges(self) -> str:
        notes = small(" ".join(_sentence(note) for note in self.found.notices))
        if self.found.trace is None:
            return notes
        origin = self.found.origin("trace", "replayed")
        return views.badges(self.found.trace, f"{origin} Press Replay to compute it again." if origin else "") + notes

    # ---- views

    def layers(self) -> str:
        layers, nearby = self._layer_frames()
        if not len(layers):
            return paragraph("No per-layer norms are recorded at this step.")
        source = "from the telemetry" if self.found.trace is None else "replayed"
        alt = f"Norms of each layer at step {self.step}, {source}, and the range of the steps nearby"
        drawn = norm_chart(layers, nearby, step=self.step, alt=alt, names=self.names)
        table = layer_view.layer_table(layers, nearby, self.step, self.found.trace, self.names)
        return heading(f"Layers at step {self.step:,}") + paragraph(self.first_departure()) + drawn + table

    def first_departure(self) -> str:
        """Which layer left its usual range first, in a sentence."""
        layers, context = self.run.manifest.layers, self.found.context
        if context is not None:
            return departure.sentence(context.frame, layers, self.step, "replay", self.names)
        flagged = departure.flagged_before(self.opened, self.step)
        scores = departure.logged_scores(self.run, self.step, self.segment, flagged)
        return departure.sentence(scores, layers, self.step, "telemetry", self.names)

    def batch(self) -> str:
        title, trace = heading(f"Batch of step {self.step:,}"), self.found.trace
        if (only := self.run.unverifiable()) is not None:
            return title + paragraph(f"{only}.")
        try:
            rows = batch_table(self.run, self.step, trace, segment=self.segment)
        except WorkbenchError as error:
            return title + paragraph(f"Not shown: {error}.")
        try:
            tokens = token_table(self.run, self.step, trace, segment=self.segment)
        except DataError:  # rows of numbers
            tokens = None
        vocabulary = None if trace is None or trace.record.logits is None else trace.record.logits.vocabulary
        return title + batch_view.batch(rows, tokens, vocabulary)

    def verdict(self) -> str:
        if (only := self.opened.unexplained) is not None:
            return paragraph(f"{only}.")
        if self.found.verdict is None:
            return paragraph(
                f"“Find the cause” replays step {self.step:,} and the steps before it, performs experiments on it, and "
                "says what made the loss spike, with the evidence."
            )
        origin = views.kept(self.found.origin("verdict", "examined"))
        return origin + cause_view.verdict_card(self.found.verdict, button=True)

    def onset(self) -> str:
        context = self.found.context
        title = heading("Where it began")
        if self.opened.unexplained is not None:
            return ""
        if context is None:
            steps = f"steps {max(1, self.step - BEFORE):,} to {self.step:,}"
            return title + paragraph(f"A map of every layer's norms at {steps}, replayed in one roll-forward.")
        notes = [context.sentence(), *context.notices]
        if not context.frame["z"].notna().any():
            return title + paragraph(*notes)
        alt = f"How far each layer's norms stood from their healthy steps, from step {context.steps[0]} to {self.step}"
        self.found.onset = self.found.onset or picture(self._draw_onset(), alt)
        return title + self.found.onset + small(" ".join(_sentence(note) for note in notes))

    def experiments(self) -> str:
        title, made = heading("Experiments"), self.found.experiments
        if self.opened.unexplained is not None:
            return ""
        if made is None:
            text = "Press a change to see what the step, and the steps after it, would have done with it."
            return title + paragraph(cause_view.LABEL.format(step=self.step), text)
        origin = views.kept(self.found.origin("experiments", "the last of them was made"))
        return title + origin + cause_view.experiments(made, self.step)

    def environment(self) -> str:
        """What recorded the step against what is known of this machine."""
        if (only := self.run.unverifiable()) is not None:
            return paragraph(f"{only}.")
        segment = self.run.manifest.lineage(self.segment, self.step)
        recorded = self.run.manifest.segments[segment].environment
        alike = [one.segment for one in self.run.manifest.segments if one.environment == recorded]
        several = alike if len(self.run.manifest.segments) > 1 else []
        return environment_view.environment(recorded, self.here.environment(self.run), several)

    def examination(self) -> str:
        """What the doctor said last."""
        if self.here.report is None:
            return environment_view.examination(None)
        report, when = self.here.report
        return environment_view.examination(report, time.strftime(" Examined at %H:%M:%S.", time.localtime(when)))

    def code(self, view: str, factory: str | None = None) -> str:
        """Python that gives what a view shows."""
        trace, verdict = self.found.trace, self.found.verdict
        own = trace is not None and trace.path is not None and trace.path.parent in traces.folders(self.run)
        segment = self.segment if len(self.run.telemetry.segments_with(self.step)) > 1 else None
        code = Code(self.run.path, self.step, segment, factory, own, verdict is not None)
        made = self.found.experiments
        changes = [] if made is None else made["change"].iloc[1:].tolist()
        lines = {
            TIMELINE: code.timeline,
            STEP: lambda: code.step(trace is not None),
            BATCH: lambda: code.batch(trace is not None),
            CAUSE: lambda: code.cause([] if verdict is not None else changes),
            ENVIRONMENT: code.environment,
        }
        return lines[view]()

    # ---- what else is asked for

    def changes(self) -> list[str]:
        """Experiments that suit the step, for one click each: as `changes.parse_change` reads them."""
        found = ["lr=0.5x", "batch=skip", "reset=m,v", "v=max"]
        trace = self.found.trace
        if trace is not None and len(trace.rows) > 1:
            found.insert(2, f"drop-row={int(trace.rows['row'].iloc[0])}")
        norms = self.run.history(self.segment, self.step - 1, USUAL_STEPS)["grad_norm"]
        usual = float(norms.median()) if len(norms) else 0.0
        clip = self.run.manifest.options.get("clip")
        if 0 < usual < (float("inf") if clip is None else clip):
            found.append(str(parse_change(f"clip={usual:.2g}")))
        elif clip is not None:
            found.append("clip=off")
        return found

    def figures(self) -> list[Figure]:
        """For a still picture: the timeline, and what was found."""
        drawn = [self.opened.draw(self.step)]
        if self.found.trace is not None:
            drawn.append(self._draw_layers(*self._layer_frames()))
        if self.found.context is not None and self.found.context.frame["z"].notna().any():
            drawn.append(self._draw_onset())
        return drawn

    def _layer_frames(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        """Layer rows of the step, and the logged ones of the steps around it."""
        nearby = self.run.norms(self.step, self.segment, layer_view.AROUND)
        if self.found.trace is not None:
            return self.found.trace.layers, nearby
        return layer_view.telemetry_layers(self.run, self.run.line(self.step, self.segment)), nearby

    def _draw_layers(self, layers: pd.DataFrame, nearby: pd.DataFrame) -> Figure:
        neighbours = nearby[nearby["step"] != self.step]
        return plots.layer_norms(
            layers, step=self.step, neighbours=neighbours if len(neighbours) else None, names=self.names
        )

    def _draw_onset(self) -> Figure:
        assert self.found.context is not None
        return onset_map(self.found.context.frame, step=self.step, layers=self.run.manifest.layers, names=self.names)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}"
