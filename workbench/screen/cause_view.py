"""Why the loss spiked, as HTML: the verdict on a step with its evidence, and the table of experiments on it.

Pure functions from records to text; they know nothing of widgets, files or MLX.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from .markup import LINES, cell, cell_html, copied, escaped, four_digits, number, small, table

if TYPE_CHECKING:
    from ..verdict import Remedy, Verdict

# Background of the verdict's name, under white text at 5 to 1 or more: something was found, nothing was, no spike.
_FOUND, _OPEN, _CALM = "#00588B", "#5F5F5F", "#006B4F"
_LIST = "margin:0;padding-left:1.4em"


def verdict_card(verdict: Verdict, *, button: bool = False) -> str:
    """The verdict: culprit, evidence, what refuted the others, what was not checked, and what was tried to get out.

    Args:
        button: whether commands have a button that copies them, for pages that let it work. Without, one click selects.
    """
    colour = {"unknown": _OPEN, "no-spike": _CALM}.get(verdict.verdict, _FOUND)
    chip = f"background:{colour};color:white;border-radius:4px;padding:2px 10px;font-weight:600;white-space:nowrap"
    unlike = " (informational: this machine differs from the run's)" if verdict.environment_differences else ""
    name = f'<span style="{chip}">{escaped(verdict.verdict)}</span> <b>{escaped(verdict.reason)}</b>{escaped(unlike)}'
    head = f'<div style="font-size:1.1em;margin-bottom:4px">{name}</div>'
    refuted: dict[str, list[str]] = {}
    for one in verdict.refuted:
        refuted.setdefault(one.sentence, []).append(one.cause)
    ruled_out = [f"<b>{escaped(', '.join(causes))}</b>: {escaped(why)}" for why, causes in refuted.items()]
    unchecked = [f"<b>{escaped(one.what)}</b>: {escaped(one.why)}" for one in verdict.unchecked]
    parts = [
        head,
        small(verdict.which()),
        _culprit(verdict.culprit),
        _listed("Evidence", [_evidence(one.sentence, one.supports, verdict.verdict) for one in verdict.evidence]),
        _listed("It would have been refuted by", [escaped(verdict.would_refute)] if verdict.would_refute else []),
        _remedies(verdict, button),
        f"<div><b>{escaped(said)}</b></div>" if (said := verdict.no_way_out()) else "",
        _listed("Ruled out", ruled_out),
        _listed("Not checked", unchecked),
        _listed("To be known", [escaped(one) for one in verdict.besides()]),
        _outliers(verdict),
        small(verdict.footer()),
    ]
    box = f"border:1px solid rgba(127,127,127,.4);border-left:5px solid {colour};padding:8px 14px;margin:4px 0;{LINES}"
    label = escaped(f"Verdict on step {verdict.step}")
    return f'<div class="wb-verdict" role="region" aria-label="{label}" style="{box}">{"".join(parts)}</div>'


def _outliers(verdict: Verdict) -> str:
    """Folded away where a cause was found: they are not it."""
    lines = "".join(f"<li>{escaped(one.sentence)}</li>" for one in verdict.outliers)
    if not lines:
        return ""
    opened = " open" if verdict.verdict in ("unknown", "no-spike") else ""
    summary = '<summary style="font-weight:600">Also out of the ordinary</summary>'
    return f'<details{opened} style="margin-top:6px">{summary}<ul style="{_LIST}">{lines}</ul></details>'


def _evidence(sentence: str, supports: str, verdict: str) -> str:
    """Evidence for "unknown" is evidence for none in particular."""
    other = "" if supports in (verdict, "unknown") else f" <small>(speaks for {escaped(supports)})</small>"
    return escaped(sentence) + other


def _culprit(culprit: Mapping[str, Any]) -> str:
    """What is named, in one line: rows with their places first."""
    facts = [_place(row) for row in culprit.get("rows", [])]
    facts += [f"{key.replace('_', ' ')} {_value(value)}" for key, value in culprit.items() if key != "rows"]
    return f"<div>Culprit: {' · '.join(escaped(fact) for fact in facts)}</div>" if facts else ""


def _place(row: Any) -> str:
    if not isinstance(row, Mapping):
        return f"row {row}"
    source, offset = row.get("source"), row.get("offset")
    where = "" if source is None else f" ({source}{'' if offset is None else f', offset {offset:,}'})"
    return f"row {row.get('row')}{where}"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _listed(title: str, items: Iterable[str]) -> str:
    """Items are HTML."""
    lines = "".join(f"<li>{item}</li>" for item in items)
    return f'{_title(title)}<ul style="{_LIST}">{lines}</ul>' if lines else ""


# ---- ways out


def _remedies(verdict: Verdict, button: bool) -> str:
    if not verdict.remedies:
        return ""
    step, first = verdict.began, verdict.remedies[0]
    rows = [_remedy_row("untouched", first, "_untouched", "")]
    for one in verdict.remedies:
        at = "" if one.state == step - 1 else f" at state {one.state:,}"
        rows.append(_remedy_row(one.change + at, one, "", "✓ yes" if one.helps else "no"))
    title = "Tried on the state before it: interventions, not what the run did"
    head = ["change", f"loss of|step {step:,}", *_after(len(first.steps)), "helps"]
    commands = [copied(one.command, button) for one in verdict.remedies if one.helps and one.command]
    return (
        f"{_title(title)}{table(head, ''.join(rows), height=20)}"
        f"{_title('To go on from there') if commands else ''}{''.join(commands)}"
    )


def _remedy_row(name: str, remedy: Remedy, suffix: str, helps: str) -> str:
    names = (f"loss{suffix}", f"next_mean{suffix}", f"next_max{suffix}")
    loss, mean, highest = (remedy.numbers[one] if one in remedy.numbers.values else None for one in names)
    note = f"<br><small>{escaped(remedy.note)}</small>" if remedy.note and not suffix else ""
    cells = [
        cell_html(f"{escaped(name)}{note}", left=True, wrap=True),
        cell("left out" if loss is None else four_digits(loss)),
        cell("" if mean is None else four_digits(mean)),
        cell("" if highest is None else four_digits(highest)),
        cell(helps),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _after(steps: int) -> list[str]:
    """Headings for the mean and the highest loss of so many steps."""
    which = f"the {steps} steps after" if steps else "the steps after"
    return [f"mean loss of|{which}", f"highest of|{which}"]


def _title(text: str) -> str:
    return f'<div style="font-weight:600;margin-top:6px">{escaped(text)}</div>'


# ---- experiments

LABEL = "Interventions: each is a replay of step {step:,} with exactly one thing changed, and not what the run did."


def experiments(frame: pd.DataFrame, step: int) -> str:
    """Experiments beside the untouched step.

    Args:
        frame: as `Run.whatif`, the untouched row first.
    """
    first = frame.iloc[0]
    lines = []
    for place, row in enumerate(frame.itertuples()):
        beside = first if place else None
        skipped = bool(place) and not row.worst and math.isnan(row.update_norm)
        cells = [
            cell_html(escaped(row.change) if place else "<b>untouched</b>", left=True),
            cell("left out") if skipped else _beside(row, "loss", beside),
            cell("" if skipped else four_digits(row.grad_norm)),
            cell("" if skipped else four_digits(row.update_norm)),
            _beside(row, "next_mean", beside),
            _beside(row, "next_max", beside),
            cell_html(
                f"<small>{number(row.worst_ratio, 2)}</small> {escaped(row.worst)}" if row.worst else "", left=True
            ),
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    head = [
        "change",
        "loss",
        "gradient|norm",
        "update|norm",
        *_after(int(first["steps"]) - 1),
        "moved most|for its size",  # last: a name may reach out of a narrow page
    ]
    return (
        f'<div style="{LINES}">{escaped(LABEL.format(step=step))} {escaped(frame.attrs.get("sentence", ""))}</div>'
        + table(head, "".join(lines), height=24)
        + "".join(small(f"{', '.join(changes)}: {note}.") for note, changes in _notes(frame).items())
        + small(" ".join(frame.attrs.get("notices", [])))
    )


def _notes(frame: pd.DataFrame) -> dict[str, list[str]]:
    """What is to be said of changes, and of which ones: below the table, which they would make too wide."""
    said: dict[str, list[str]] = {}
    for row in frame.itertuples():
        if row.notes:
            said.setdefault(row.notes, []).append(row.change)
    return said


def _beside(row: Any, name: str, untouched: pd.Series | None) -> str:
    """A cell with a number and how far it is from the untouched one, to as many decimals."""
    value = getattr(row, name)
    text = four_digits(value)
    if untouched is not None and math.isfinite(value) and math.isfinite(untouched[name]):
        text += f' <small style="opacity:.85">{_difference(value - untouched[name], text)}</small>'
    return cell_html(text)


def _difference(difference: float, beside: str) -> str:
    sign = "+" if difference > 0 else "\N{MINUS SIGN}"
    if difference == 0:
        return "±0"
    if "e" in beside:
        return f"{sign}{number(abs(difference), 3)}"
    text = f"{abs(difference):.{len(beside.partition('.')[2])}f}"
    return f"{sign}{text}" if float(text) else "≈\N{NO-BREAK SPACE}0"
