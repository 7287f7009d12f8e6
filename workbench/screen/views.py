"""What is known of a run and of a step, and how far a replay can be believed, as HTML.

Pure functions from data to text; they know nothing of widgets, files or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import pandas as pd
from msgspec import UNSET

from ..trace import BADGE_COLOURS, badge_text
from .markup import LINES, cell, count, escaped, number, paragraph, small, table

if TYPE_CHECKING:
    from ..compare import Verdict
    from ..manifest import Manifest
    from ..run import Run
    from ..trace import Trace


def run_facts(run: Run, steps: pd.DataFrame, spikes: pd.DataFrame) -> str:
    """What is known of a run before any step is looked at."""
    manifest = run.manifest
    if (only := run.unverifiable()) is not None:
        counted = [count(len(manifest.segments), "segment")] if len(manifest.segments) > 1 else []
        counted = [count(run.last_step, "step"), count(len(spikes), "spike"), *counted]
        return paragraph(" · ".join(counted), *run.telemetry.notices, f"{only}.")
    saved = [str(step) for step, _ in run.checkpoints]
    kept = ", ".join(saved if len(saved) <= 6 else [*saved[:2], "…", *saved[-2:]])
    parameters = sum(math.prod(parameter.shape) for parameter in manifest.parameters)
    dtypes = sorted({parameter.dtype for parameter in manifest.parameters})
    last = manifest.segments[-1].environment
    facts = [
        count(int(steps["step"].max()) if len(steps) else 0, "step"),
        count(len(spikes), "spike"),
        f"checkpoints {kept or 'none'}",
        count(len(manifest.segments), "segment") if len(manifest.segments) > 1 else "",
        f"{parameters:,} parameters ({', '.join(dtypes)})",
        str(manifest.optimizer.get("class", "")),
        f"recorded on {last.get('backend')} with MLX {last.get('mlx')}{_ranks(manifest)}",
    ]
    parent = manifest.parent
    validations = run.validations()
    for loss in validations.loc[validations["step"] == 0, "val_loss"].head(1):
        facts.append(f"validation loss before the first step {number(loss)}")
    origin = f"Forked from step {parent.step} of {parent.path}." if parent is not None else ""
    return paragraph(" · ".join(fact for fact in facts if fact), origin, *run.telemetry.notices)


def _ranks(manifest: Manifest) -> str:
    return "" if manifest.ranks is UNSET else f", by {manifest.ranks.size} ranks together"


def step_facts(row: pd.Series, explanations: Iterable[str], more: Iterable[str] = ()) -> str:
    """The scalars of a step, and why it is a spike if it is one; `more`: further sentences."""
    facts = []
    for name, label in (("loss", "loss"), ("grad_norm", "gradient norm")):
        there = bool(row.get(f"{name}_recorded", True))
        facts.append(f"{label} {number(row[name])}" if there else f"{label} not recorded")
    if (first := row.get("first_step", row["step"])) < row["step"]:
        facts[0] += f" (the mean of steps {first:,} to {row['step']:,}, and not this step's own)"
    facts += [f"{label} {number(row[name])}" for name, label in (("lr", "lr"), ("val_loss", "validation loss")) if
              not math.isnan(row[name])]  # fmt: skip
    return paragraph(f"Step {row['step']:,}: {', '.join(facts)}.", *(f"Spike: {text}." for text in explanations), *more)


def spike_label(row: Any, last: int, segments: bool) -> str:
    """A line of the spike list. `last` is the end of a stretch of non-finite steps, or the step itself."""
    where = f"{row.step:,}" if last == row.step else f"{row.step:,} to {last:,}"
    where += f" · segment {row.segment}" if segments else ""  # before what may be cut off
    what = "gradient norm" if row.rule.startswith("grad_norm") else "loss"
    value = row.explanation if row.rule == "non_finite" else f"{what} {number(row.value)}"
    return f"{where} · {row.rule} · {value}"


TIMELINE, STEP, BATCH, CAUSE, ENVIRONMENT = VIEWS = ("Timeline", "Step", "Batch", "Cause", "Environment")

# What each badge means; what was done for it, the trace says.
MEANINGS = {
    "repeatable": "The same step from the same state gives the same bits again.",
    "faithful": "The replay has the bits that the run logged: it is that very step.",
    "sensitive": "The checker was shown one-bit changes and saw them, so that its agreement says something.",
}


def badges(trace: Trace, origin: str = "") -> str:
    """The answer, the three badges, what stands out in the step, and each item that differs.

    What each badge means and what was done for it is told on hover, and folded away; unfolded where the replay is not
    exact.

    Args:
        origin: where the trace comes from, if not from a replay that was just made.
    """
    chips = "".join(_chip(name, verdict, why, trace.informational) for name, verdict, why in trace.badges())
    told = "".join(
        f"<div><b>{escaped(name)}</b>: {escaped(MEANINGS[name])} Done: {escaped(why)}.</div>"
        for name, _, why in trace.badges()
    )
    if trace.record.certified_probe:
        told += "<div><b>probe pass</b>: certified, its loss and gradients have the exact pass's bits</div>"
    details = f"<details{'' if trace.exact else ' open'}><summary>what was done</summary>{told}</details>"
    doubt = "Probe pass not certified: activation gradients below are of a computation with other bits."
    silent = [_word(name) for name in trace.items.loc[trace.items["verdict"] == "unverified", "item"]]
    missing = f"Not recorded, so not compared: {', '.join(silent)}." if silent else ""
    notices = [doubt if trace.record.certified_probe is False else "", *trace.findings(), *trace.notices]
    shown = paragraph("", *notices) if any(notices) else ""
    return (
        f'<div style="margin-top:4px;{LINES}"><b>{escaped(trace.sentence())}</b><div style="{_ROW}">{chips}</div>'
        f"{kept(origin)}{details}{shown}{small(missing)}{_differing(trace)}</div>"
    )


_ROW = "display:flex;flex-wrap:wrap;gap:4px 8px;margin:4px 0"


def kept(origin: str) -> str:
    """That something shown was not computed just now."""
    return f'<div class="wb-cached" style="{LINES}"><small>{escaped(origin)}</small></div>' if origin else ""


def _chip(name: str, verdict: Verdict, why: str, informational: bool) -> str:
    back, front = BADGE_COLOURS[verdict]
    style = f"background:{back};color:{front};border-radius:4px;padding:1px 10px;font-weight:600;white-space:nowrap"
    text = escaped(badge_text(name, verdict, informational))
    meant = f"{MEANINGS[name]} Done: {why}."
    return f'<span class="wb-badge" style="{style}" title="{escaped(meant)}">{text}</span>'


def _differing(trace: Trace) -> str:
    bad = trace.items[trace.items["verdict"].isin(("mismatch", "within tolerance"))]
    lines = [
        cell(_word(row.item), left=True) + cell(row.verdict, left=True) + cell(row.detail, left=True, wrap=True)
        for row in bad.itertuples()
    ]
    return table(["item", "verdict", "detail"], "".join(f"<tr>{line}</tr>" for line in lines), 16) if lines else ""


def _word(name: str) -> str:
    return name.replace("_", " ")
