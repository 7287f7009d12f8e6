"""What came of a case of SpikeBench: the record that a trial writes, and that the scores are made from.

Knows the format; runs nothing and imports no MLX.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..faults import KINDS, parse
from .casebook import Case

NOTHING = "nothing planted"  # expected where a rule fired on its own: several verdicts may be right, and others not

# In the folder of a case: what it is, what came of it, its run, and the label of its fault.
CASE, OUTCOME, RUN, LABEL = "case.json", "outcome.json", "run", "label.json"


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was asked, and what was said.

    Attributes:
        step: asked about.
        rule: of spike detection that flagged it; None: it is not flagged.
        expected: verdict by the label; no-spike where no rule fired; NOTHING.
        culprit: by the label.
        said: the autopsy's JSON; None: it failed.
        failed: why.
        seconds: from the question to the answer.
        loudest: layer with the largest gradient norm, or the first whose norm is not finite; None: not recorded.
        tripled: whether the loss was above 3 times its moving average, here or within WITHIN steps of the fault.
    """

    step: int
    rule: str | None
    expected: str
    culprit: dict[str, Any]
    said: dict[str, Any] | None = None
    failed: str | None = None
    seconds: float | None = None
    loudest: str | None = None
    tripled: bool = False


class Outcome(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What came of a case.

    Attributes:
        failed: why there is none: the case counts as wrong.
        applied: how the fault is applied; None: none is planted.
        visible: whether a rule of spike detection fired because of the fault; None: none is planted.
        answers: one a question.
        judged: healthy steps at which the rules were not silent: those before the fault, or all of a healthy run. Those
            of a natural run are not healthy.
        alarms: those of them that were flagged.
        tripled: those of them whose loss was above 3 times its moving average.
        training_seconds: None: the run was there already.
    """

    case: Case
    failed: str | None = None
    applied: str | None = None
    visible: bool | None = None
    answers: list[Answer] = []
    judged: int = 0
    alarms: list[int] = []
    tripled: list[int] = []
    training_seconds: float | None = None
    environment: dict[str, Any] = {}


def hopeless(case: Case, why: str) -> Outcome:
    """The outcome of a case that could not be performed: one wrong answer to the question that it was made for."""
    fault = None if case.fault is None else parse(case.fault)
    expected = NOTHING if case.natural else "no-spike" if fault is None else KINDS[fault.name].verdict
    answers = [Answer(step=case.steps, rule=None, expected=expected, culprit={}, failed=why)]
    applied = None if fault is None else fault.kind.applied
    visible = None if fault is None else expected != "no-spike"
    return Outcome(case=case, failed=why, applied=applied, visible=visible, answers=answers)
