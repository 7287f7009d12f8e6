"""Which layer left its usual range first, as a map: of the replays of a step and those before it that a run's folder
holds; where these are too few, of the norms that telemetry logged.

Reads files; performs nothing and imports no MLX. (A replay of all of them at once is `probes.context`.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import traces
from ..figures import picture
from ..kind_names import moment_names
from ..probes.logged_norms import YARDSTICK, logged_norms
from ..probes.neighbours import BEFORE, Context
from ..spikes import SMALLEST_WINDOW
from ..surroundings import differences
from . import departure
from .heatmap import onset_map
from .markup import paragraph, small

if TYPE_CHECKING:
    from ..trace import Trace
    from .opened import Opened


def onset(opened: Opened, step: int, segment: int, trace: Trace | None) -> str:
    """A sentence and the map, as HTML; the sentence alone where no step is scored; nothing where no norm is known.

    Args:
        trace: the replay of the step, if there is one.
    """
    run, names = opened.run, moment_names(opened.run.manifest.optimizer)
    flagged = departure.flagged_before(opened, step)
    context = None if trace is None else stored_context(opened, trace, segment, flagged)
    if context is not None and len(context.traces) > SMALLEST_WINDOW and context.frame["z"].notna().any():
        scores, source = context.frame, "replay"
        notes = ["Each of these steps was replayed; the traces are in the run's folder.", *_unlike(context)]
    else:
        scores, source = departure.logged_scores(run, step, segment, flagged), "telemetry"
        notes = [
            "Norms as the run logged them. Replayed ones have activation gradients and updates, too: "
            f"workbench replay {run.path} --step {max(1, step - BEFORE)}..{step}"
        ]
    said = departure.sentence(scores, run.manifest.layers, step, source, names)
    if not scores["z"].notna().any():
        return paragraph(said) if said else ""
    first = int(scores["step"].min())
    alt = f"How far each layer's norms stood from their healthy steps, from step {first} to {step}, by {source}"
    drawn = onset_map(scores, step=step, layers=run.manifest.layers, names=names)
    if spikes := sorted(other for other in flagged if other >= first):
        notes.append(f"Spikes among these steps, which are no yardstick: {', '.join(map(str, spikes))}.")
    return paragraph(said) + picture(drawn, alt) + small(" ".join(notes))


def stored_context(opened: Opened, trace: Trace, segment: int, flagged: list[int]) -> Context | None:
    """The replay of a step with those of the steps just before it that the run's folder holds, up to 8; None: none is.

    Only replays that were measured alike and in the same environment are put beside each other.
    """
    found, measured = [trace], set(trace.layers["kind"])
    for step in range(trace.step - 1, max(0, trace.step - 1 - BEFORE), -1):
        before = traces.of_step(opened.run, step, segment, None, [])
        if before is None or set(before.layers["kind"]) != measured:
            break
        if differences(before.record.environment, trace.record.environment):
            break
        found.insert(0, before)
    first = found[0].step
    logged = logged_norms(opened.run, first - YARDSTICK, first - 1, segment)
    return Context(trace.step, found, flagged, logged=logged) if len(found) > 1 else None


def _unlike(context: Context) -> list[str]:
    steps = [trace.step for trace in context.traces if not trace.exact]
    return [f"Not exact, so maybe not what the run computed: steps {', '.join(map(str, steps))}."] if steps else []
