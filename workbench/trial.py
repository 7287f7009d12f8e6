"""One case of SpikeBench, performed in a process of its own: trained, looked for spikes in, asked about.

`python -m workbench.trial FOLDER` reads `case.json` there and writes `outcome.json`. The label of the planted fault is
moved out of the run's folder before anything is asked, so that no answer can come from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from . import baselines
from .casebook import HORIZON, WITHIN, Case
from .environment import numeric_environment
from .errors import WorkbenchError
from .faults import KINDS, parse
from .files import pretty_json, write_atomic
from .planting import LABELS
from .run import Run, open_run
from .share import shared
from .spikes import SpikeSettings
from .training import Quiet, fresh

CASE, OUTCOME, RUN, LABEL = "case.json", "outcome.json", "run", "label.json"
SAVE_EVERY = 50

Ask = Callable[[Run, int], Any]  # gives what has `to_json()` as the verdict of an autopsy has


class Answer(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What was asked, and what was said.

    Attributes:
        step: asked about.
        rule: of spike detection that flagged it; None: it is not flagged.
        expected: verdict by the label, or no-spike where no rule fired.
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
        judged: healthy steps at which the rules were not silent: those before the fault, or all of a healthy run.
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


def perform(case: Case, folder: Path, ask: Ask | None = None) -> Outcome:
    """Makes the run of a case in `folder` unless it is there, and asks about it.

    Args:
        ask: instead of the autopsy.

    Raises:
        WorkbenchError: the run can't be made. An answer that fails is in the outcome.
    """
    seconds = None
    if not (folder / LABEL).exists():
        began = time.perf_counter()
        _train(case, folder / RUN)
        label: dict[str, Any] = {}
        if case.fault is not None:
            (label,) = msgspec.json.decode((folder / RUN / LABELS).read_bytes())
            (folder / RUN / LABELS).unlink()
        write_atomic(folder / LABEL, pretty_json(label))  # last: from here on the run is whole
        seconds = time.perf_counter() - began
    label = msgspec.json.decode((folder / LABEL).read_bytes())
    run = open_run(folder / RUN)
    found = _look(case, run, label)
    found.training_seconds, found.environment = seconds, numeric_environment()
    for answer in found.answers:
        _ask(answer, run, ask or _autopsy)
    return found


def _train(case: Case, out: Path) -> None:
    given = {"out": out, "corpus": shared("data") / "shakespeare.txt", "seed": case.seed, "device": "cpu"}
    faults = [] if case.fault is None else [case.fault]
    job = fresh(given | case.options | {"steps": HORIZON, "faults": faults, "save_every": SAVE_EVERY})
    job.config = msgspec.structs.replace(job.config, steps=case.steps)  # the schedule stays as it is
    job.run(Quiet())


def _look(case: Case, run: Run, label: dict[str, Any]) -> Outcome:
    """Which steps are to be asked about, and what is expected there."""
    rules = {int(row.step): str(row.rule) for row in run.spikes().itertuples()}
    tripled = baselines.above_average(run.steps)
    window = SpikeSettings().window
    if not label:
        healthy = range(window + 1, run.last_step + 1)
        questions = _unflagged(case, rules)
        found = Outcome(case=case, answers=[_question(step, rules, "no-spike", {}) for step in questions])
    else:
        lasting = label["applied"] == "option"
        healthy = range(0) if lasting else range(window + 1, label["step"])
        last = run.last_step if lasting else label["step"] + WITHIN
        late = [step for step in sorted(rules) if label["step"] <= step <= last]
        expected = label["expected_verdict"]
        if lasting and expected == "no-spike":
            late = []  # what is flagged in such a run is flagged in any
        visible = bool(late)
        if visible:
            questions = late[:1]
        else:
            questions = _unflagged(case, rules) if lasting else [label["shows"] or label["step"]]
        answers = [_question(step, rules, expected if visible else "no-spike", label["culprit"]) for step in questions]
        found = Outcome(case=case, applied=label["applied"], visible=visible, answers=answers)
        for answer in found.answers:
            answer.tripled = any(answer.step <= step <= last for step in tripled)
    for answer in found.answers:
        answer.loudest = baselines.loudest_layer(run, answer.step)
        answer.tripled = answer.tripled or answer.step in tripled
    found.judged = len(healthy)
    found.alarms = [step for step in sorted(rules) if step in healthy]
    found.tripled = [step for step in tripled if step in healthy]
    return found


def _question(step: int, rules: dict[int, str], expected: str, culprit: dict[str, Any]) -> Answer:
    return Answer(step=step, rule=rules.get(step), expected=expected, culprit=culprit)


def _unflagged(case: Case, rules: dict[int, str]) -> Sequence[int]:
    return [step for step in dict.fromkeys(case.ask) if step not in rules][: case.asks]


def _autopsy(run: Run, step: int) -> Any:
    return run.autopsy(step)


def _ask(answer: Answer, run: Run, ask: Ask) -> None:
    began = time.perf_counter()
    try:
        said = ask(run, answer.step).to_json()
        answer.said = msgspec.json.decode(said) if isinstance(said, str | bytes) else msgspec.to_builtins(said)
    except Exception as error:  # whatever it is, the bench counts it as a wrong answer
        answer.failed = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - began


def hopeless(case: Case, why: str) -> Outcome:
    """The outcome of a case that could not be performed: one wrong answer to the question that it was made for."""
    fault = None if case.fault is None else parse(case.fault)
    expected = "no-spike" if fault is None else KINDS[fault.name].verdict
    answers = [Answer(step=case.steps, rule=None, expected=expected, culprit={}, failed=why)]
    applied = None if fault is None else fault.kind.applied
    visible = None if fault is None else expected != "no-spike"
    return Outcome(case=case, failed=why, applied=applied, visible=visible, answers=answers)


def main(folder: Path) -> None:
    """Reads the case, and writes its outcome."""
    case = msgspec.json.decode((folder / CASE).read_bytes(), type=Case)
    write_atomic(folder / OUTCOME, pretty_json(perform(case, folder)))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except WorkbenchError as problem:
        sys.exit(str(problem))
