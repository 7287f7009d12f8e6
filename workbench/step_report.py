"""A report on one step of a run: a single HTML file that can be attached to an issue.

It reads what is there (telemetry, data files, and what replays and autopsies wrote) and computes nothing. The file
loads nothing, runs nothing and says so to the browser (a Content-Security-Policy); whatever comes from the run is
escaped.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .batches.batch import batch_table
from .errors import DataError, RunError, WorkbenchError
from .files import write_atomic
from .kind_names import moment_names
from .screen import batch_view, cause_view, environment_view, layer_view, onset_view, views
from .screen.markup import escaped, heading, paragraph, small
from .screen.norm_chart import norm_chart
from .screen.opened import Opened
from .screen.results import Found
from .screen.stored import read_stored
from .screen.tokens import token_table

if TYPE_CHECKING:
    from .run import Run

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
MARK = '<meta name="generator" content="spike-workbench'
_STYLE = """
:root{color-scheme:light dark}
body{font:14px/1.45 system-ui,sans-serif;margin:24px auto;max-width:940px;padding:0 16px}
h1{font-size:1.5em;margin:0 0 4px}h2{font-size:1.15em;margin:26px 0 6px;border-bottom:1px solid rgba(127,127,127,.4)}
table{border-collapse:collapse;font-size:13px}th,td{border-bottom:1px solid rgba(127,127,127,.25);vertical-align:top}
code,pre{font-family:ui-monospace,monospace}summary{cursor:pointer}
.jp-RenderedHTMLCommon{max-height:none!important}
@media (prefers-color-scheme:dark){html .wb-norms{--wb-dot:#56B4E9;--wb-ring:#E69F00;--wb-bad:#FF8A3D}
html .wb-differs{color:#FF8A3D}}
@media print{*{-webkit-print-color-adjust:exact;print-color-adjust:exact}
details{display:block}details::details-content{content-visibility:visible}
body{max-width:none}[style*="max-height"]{max-height:none!important}td[style*="align:left"]{white-space:normal!important}
h2{break-after:avoid}img,svg,tr{break-inside:avoid}}
"""


def report_html(run: Run, step: int, *, segment: int | None = None) -> str:
    """What is known of a step, as one HTML page without scripts and without anything to load.

    Args:
        step: counted from 1.
        segment: where the step stands in several segments that disagree.

    Raises:
        ReplayError: the step is not in the telemetry, or stands in several segments that differ.
        RunError, TelemetryError: the run can't be read.
    """
    chosen, notices = run.segment_of(step, segment)
    opened = Opened(run.path)
    found = read_stored(opened.run, step, chosen, None)
    parts = [
        ("", opened.facts + _facts(opened, step, chosen)),
        ("Timeline", opened.timeline().at(step)),
        ("Replay", _replay(run, step, found)),
        ("Why the loss spiked", _verdict(run, step, found)),
        ("Where it began", onset_view.onset(opened, step, chosen, found.trace)),
        ("Layers", _layers(opened, step, chosen, found)),
        ("Batch", _batch(opened.run, step, chosen, found)),
        ("Experiments", "" if found.experiments is None else cause_view.experiments(found.experiments, step)),
        ("Environment", _environment(run, step, chosen, found)),
    ]
    title = f"Step {step:,} of {run.name}"
    body = "".join(f"<h2>{escaped(name)}</h2>{inner}" if name else inner for name, inner in parts if inner)
    notes = small(" ".join([*notices, *found.notices]))
    made = small(f"Made by spike-workbench {__version__}. This file loads nothing and runs nothing.")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(POLICY)}">'
        f'{MARK} {escaped(__version__)}"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escaped(title)}</title><style>{_STYLE}</style></head>"
        f"<body><h1>{escaped(title)}</h1>{notes}{body}<hr>{made}</body></html>\n"
    )


def write_report(run: Run, step: int, path: str | os.PathLike[str], *, segment: int | None = None) -> Path:
    """Writes `report_html` to a file; returns its path. A report that is there already is replaced, no other file is.

    Raises:
        RunError: the path holds something else.
        OSError: it can't be written.
        WorkbenchError: as `report_html`.
    """
    out = Path(path)
    if out.is_dir() or (out.exists() and MARK.encode() not in out.read_bytes()[:1000]):
        raise RunError(f"{out} is there already and is no report; choose another file for it (--out FILE)")
    write_atomic(out, report_html(run, step, segment=segment).encode())
    return out


# ---- its parts


def _facts(opened: Opened, step: int, segment: int) -> str:
    explanations, carried = opened.explanations(step, segment), opened.carried(step, segment)
    return views.step_facts(opened.row(step, segment), explanations, carried)


def _replay(run: Run, step: int, found: Found) -> str:
    if found.trace is not None:
        return views.badges(found.trace, found.origin("trace", "replayed"))
    try:
        how = run.plan(step).sentence()
    except WorkbenchError as error:
        return paragraph(f"Not replayed, and it can't be: {error}.")
    return paragraph(f"Not replayed. {how}: workbench replay {shlex.quote(str(run.path))} --step {step}")


def _verdict(run: Run, step: int, found: Found) -> str:
    if run.unverifiable() is not None:
        return paragraph("Not examined: this is only a log.")
    if found.verdict is None:
        return paragraph(f"Not examined: workbench autopsy {shlex.quote(str(run.path))} --step {step}")
    return cause_view.verdict_card(found.verdict)


def _layers(opened: Opened, step: int, segment: int, found: Found) -> str:
    run, trace = opened.run, found.trace
    nearby, names = run.norms(step, segment, layer_view.AROUND), moment_names(run.manifest.optimizer)
    layers = layer_view.telemetry_layers(run, run.line(step, segment)) if trace is None else trace.layers
    if not len(layers):
        return paragraph("No per-layer norms are recorded at this step.")
    alt = f"Norms of each layer at step {step}, and the range of the steps nearby"
    chart = norm_chart(layers, nearby, step=step, alt=alt, names=names)
    return chart + layer_view.layer_table(layers, nearby, step, trace, names)


def _batch(run: Run, step: int, segment: int, found: Found) -> str:
    if run.unverifiable() is not None:
        return paragraph("Not shown: this is only a log, which has no batches.")
    trace = found.trace
    try:
        rows = batch_table(run, step, trace, segment=segment)
    except WorkbenchError as error:
        return paragraph(f"Not shown: {error}.")
    tokens: Any = None
    try:
        tokens = token_table(run, step, trace, segment=segment)
    except DataError:  # rows of numbers
        pass
    vocabulary = None if trace is None or trace.record.logits is None else trace.record.logits.vocabulary
    return batch_view.batch(rows, tokens, vocabulary, button=False)


def _environment(run: Run, step: int, segment: int, found: Found) -> str:
    if run.unverifiable() is not None:
        return paragraph("Not known: a log does not say what computed it.")
    recorded = run.manifest.segments[run.manifest.lineage(segment, step)].environment
    record = found.trace.record if found.trace is not None else found.verdict
    if record is None:
        return environment_view.recorded_only(recorded)
    return heading("“here” is the machine that replayed it") + environment_view.environment(
        recorded, record.environment
    )
