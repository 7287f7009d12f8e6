"""SpikeBench's figures: how often the verdict was right, and how often a baseline would have been.

Knows outcomes; runs nothing and imports no MLX.

A question is answered right when the verdict is the expected one. Top-1 accuracy is over the questions about faults
that change the loss or the gradient norm, so that a rule of spike detection fires; a case or an answer that failed
counts as wrong. The culprit is right when the verdict is, and it names what the label names:

    data        the set of rows, each with its source and offset
    schedule    the step whose learning rate it was
    option      the option; the layer where it was of one
    state       the lanes of the state; layer and parameter where it was one
    transient   the layer, or the item of the log

Where rules fire on their own, in runs that are trained too fast, several verdicts may be right; but bad data, a jump of
the schedule, numbers out of range, a bad resume and a transient fault would be invented.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd

from ..faults import parse
from .baselines import leave_one_out
from .casebook import HEALTHY
from .outcome import NOTHING, Answer, Outcome

FAILED = "failed"
VERDICTS = (
    *("data", "optimizer", "schedule", "curvature", "attention-logits", "precision", "resume", "transient-fault"),
    *("unknown", "no-spike", FAILED),
)
INVENTED = ("data", "schedule", "precision", "resume", "transient-fault")  # where nothing was planted
NAMED = {  # what of a label's culprit has to be named, by how the fault is applied
    "data": ("rows",),
    "schedule": ("step",),
    "option": ("option", "layer"),
    "state": ("lanes", "layer", "parameter"),
    "transient": ("layer", "item"),
}


class Share(msgspec.Struct, frozen=True):
    """Some of how many; `rate` is null of none."""

    right: int
    of: int

    @property
    def rate(self) -> float | None:
        return self.right / self.of if self.of else None


def verdict(answer: Answer) -> str:
    """What the autopsy said, or `FAILED`."""
    return FAILED if answer.said is None else str(answer.said.get("verdict"))


def missed(outcome: Outcome, answer: Answer) -> list[str]:
    """What of the label's culprit the answer does not name: empty if it is right, or there is nothing to name."""
    said = (answer.said or {}).get("culprit") or {}
    wanted = [key for key in NAMED.get(outcome.applied or "", ()) if key in answer.culprit]
    return [key for key in wanted if _canonical(key, said) != _canonical(key, answer.culprit)]


def _canonical(key: str, culprit: dict[str, Any]) -> Any:
    """Order says nothing, of rows nor of lanes."""
    value = culprit.get(key)
    if key == "rows" and isinstance(value, list):
        rows = [row for row in value if isinstance(row, dict)]
        places = [(repr(row.get("row")), Path(str(row.get("source"))).name, repr(row.get("offset"))) for row in rows]
        return sorted(places), len(value)
    return sorted(value) if key == "lanes" and isinstance(value, list) else value


def table(outcomes: Sequence[Outcome]) -> pd.DataFrame:
    """One row a question: case, name (of the fault), fault (as planted), applied, seed, size, step, rule, visible,
    expected, verdict, right, missed, culprit_right (None: nothing to name), exact (the replay, by the autopsy),
    seconds, step_times, loudest, layer, tripled, failed."""
    return pd.DataFrame(list(_rows(outcomes)), columns=list(_COLUMNS), dtype=object)  # so that None stays None


_COLUMNS = (
    *("case", "name", "fault", "applied", "seed", "size", "step", "rule", "visible", "expected", "verdict", "right"),
    *("missed", "culprit_right", "exact", "seconds", "step_times", "loudest", "layer", "tripled", "failed"),
)


def _rows(outcomes: Sequence[Outcome]) -> Iterator[tuple[Any, ...]]:
    for outcome in outcomes:
        case = outcome.case
        for answer in outcome.answers:
            said, shows = verdict(answer), answer.expected not in ("no-spike", NOTHING)
            right = said not in (*INVENTED, FAILED) if answer.expected == NOTHING else said == answer.expected
            misses = missed(outcome, answer) if shows else []
            names = any(key in answer.culprit for key in NAMED.get(outcome.applied or "", ()))
            culprit = right and not misses if shows and (names or answer.said is None) else None
            yield (
                *(
                    case.name,
                    parse(case.fault).name if case.fault else HEALTHY,
                    case.fault,
                    outcome.applied,
                    case.seed,
                    case.size,
                    answer.step,
                    answer.rule,
                ),
                *(outcome.visible, answer.expected, said, right, misses, culprit),
                *((answer.said or {}).get("exact"), answer.seconds, (answer.said or {}).get("step_times")),
                *(answer.loudest, answer.culprit.get("layer"), answer.tripled, outcome.failed or answer.failed),
            )


def confusion(frame: pd.DataFrame) -> pd.DataFrame:
    """Counts: expected verdicts as rows, verdicts given as columns, both in the order of `VERDICTS`; those that are
    there, and others that were given after them."""
    known = [*VERDICTS, *sorted(set(frame["verdict"]) - set(VERDICTS)), NOTHING]
    counts = pd.crosstab(frame["expected"], frame["verdict"])
    rows = [name for name in known if name in counts.index]
    return counts.reindex(index=rows, columns=[name for name in known if name in counts.columns], fill_value=0)


class Scores(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of a bench.

    Attributes:
        top1: verdicts that are right, over the visible faults.
        by_fault: the same for each fault.
        culprits: culprits that are right, over the visible faults that have one; by how they are applied.
        data_and_state: the same over faults of data and state.
        quiet: no-spike answered, over questions about steps where nothing shows.
        inexact: causes other than transient-fault claimed, over questions whose replay was not exact, or could not be
            for a transient fault.
        invented: causes claimed that were not there, over steps that a rule flags though nothing is planted.
        alarms, alarms_healthy: healthy steps that spike detection flagged, over those it judged: all, and those of runs
            without a fault. Before a fault a run is healthy.
        missed: faults that no rule saw, by name of case, whatever was expected of them.
        failed: cases or answers that failed.
        seconds, step_times: median and maximum over the answers; None: no answer has any.
        layer: layer with the largest gradient norm: the right one, over visible faults of one layer.
        layer_cause: the commonest cause where the same layer stood out in other cases: right, over visible faults.
        tripled: loss above 3 times its moving average: seen, over visible faults.
        tripled_cause: the same taken for bad data (its batch is what one skips): right, over visible faults.
        tripled_alarms: healthy steps that it flagged.
        majority: the commonest cause of all, and how often it is right over the visible faults.
    """

    top1: Share
    by_fault: dict[str, Share]
    culprits: dict[str, Share]
    data_and_state: Share
    quiet: Share
    inexact: Share
    invented: Share
    alarms: Share
    alarms_healthy: Share
    missed: list[str]
    failed: list[str]
    seconds: tuple[float, float] | None
    step_times: tuple[float, float] | None
    layer: Share
    layer_cause: Share
    tripled: Share
    tripled_cause: Share
    tripled_alarms: Share
    majority: tuple[str, Share]


def score(outcomes: Sequence[Outcome]) -> Scores:
    """The figures of some outcomes."""
    rows = table(outcomes).to_dict("records")
    shown = [row for row in rows if row["expected"] not in ("no-spike", NOTHING)]
    named = [row for row in shown if row["culprit_right"] is not None]
    layered = [row for row in shown if row["layer"] is not None]
    truths = [row["expected"] for row in shown]
    majority = Counter(truths).most_common(1)[0][0] if truths else "no-spike"
    guesses = leave_one_out([row["loudest"] for row in shown], truths)
    inexact = [row["verdict"] for row in rows if row["applied"] == "transient" or row["exact"] is False]
    healthy = [one for one in outcomes if one.case.fault is None]  # and natural, which has no healthy steps
    return Scores(
        top1=_share(row["right"] for row in shown),
        by_fault={
            name: _share(row["right"] for row in shown if row["name"] == name)
            for name in dict.fromkeys(row["name"] for row in shown)
        },
        culprits={
            kind: _share(row["culprit_right"] for row in named if row["applied"] == kind)
            for kind in dict.fromkeys(row["applied"] for row in named)
        },
        data_and_state=_share(row["culprit_right"] for row in named if row["applied"] in ("data", "state")),
        quiet=_share(row["right"] for row in rows if row["expected"] == "no-spike"),
        inexact=_share(said not in ("transient-fault", "unknown", "no-spike", FAILED) for said in inexact),
        invented=_share(not row["right"] for row in rows if row["expected"] == NOTHING),
        alarms=Share(sum(len(one.alarms) for one in outcomes), sum(one.judged for one in outcomes)),
        alarms_healthy=Share(sum(len(one.alarms) for one in healthy), sum(one.judged for one in healthy)),
        missed=[one.case.name for one in outcomes if one.visible is False],
        failed=list(dict.fromkeys(row["case"] for row in rows if row["verdict"] == FAILED)),
        seconds=_spread(row["seconds"] for row in rows),
        step_times=_spread(row["step_times"] for row in rows),
        layer=_share(row["loudest"] == row["layer"] for row in layered),
        layer_cause=_share(guess == truth for guess, truth in zip(guesses, truths, strict=True)),
        tripled=_share(row["tripled"] for row in shown),
        tripled_cause=_share(row["tripled"] and row["expected"] == "data" for row in shown),
        tripled_alarms=Share(sum(len(one.tripled) for one in outcomes), sum(one.judged for one in outcomes)),
        majority=(majority, _share(truth == majority for truth in truths)),
    )


def _share(values: Iterable[bool]) -> Share:
    found = list(values)
    return Share(sum(map(bool, found)), len(found))


def _spread(values: Iterable[float | None]) -> tuple[float, float] | None:
    numbers = [float(value) for value in values if value is not None]
    return (statistics.median(numbers), max(numbers)) if numbers else None
