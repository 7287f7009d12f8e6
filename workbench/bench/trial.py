"""One case of SpikeBench, performed in a process of its own: trained, looked for spikes in, asked about.

`python -m workbench.bench.trial FOLDER` reads `case.json` there and writes `outcome.json`. The label of the planted
fault is moved out of the run's folder before anything is asked, so that no answer can come from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..environment import numeric_environment
from ..errors import WorkbenchError
from ..files import pretty_json, write_atomic
from ..run import Run, open_run
from ..sabotage.planting import LABELS
from ..share import shared
from ..spikes import SpikeSettings
from ..trainer.training import Quiet, fresh
from . import baselines
from .casebook import HORIZON, WITHIN, Case
from .outcome import CASE, LABEL, NOTHING, OUTCOME, RUN, Answer, Outcome

SAVE_EVERY = 50
NATURE = {"data": "data", "schedule": "schedule", "state": "resume", "transient": "transient-fault"}

Ask = Callable[[Run, int], Any]  # gives what has `to_json()` as the verdict of an autopsy has


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
    questions: Sequence[int]
    if case.natural:
        healthy = range(0)
        found = Outcome(case=case, answers=[_question(step, rules, NOTHING, {}) for step in sorted(rules)[:1]])
    elif not label:
        healthy = range(window + 1, run.last_step + 1)
        questions = _unflagged(case, rules)
        found = Outcome(case=case, answers=[_question(step, rules, "no-spike", {}) for step in questions])
    else:
        lasting = label["applied"] == "option"
        healthy = range(window + 1, label["step"])
        quiet = lasting and label["expected_verdict"] == "no-spike"  # what is flagged in such a run is flagged in any
        span = range(label["step"], (run.last_step if lasting else label["step"] + WITHIN) + 1)
        late = [] if quiet else [step for step in sorted(rules) if step in span]
        if late:
            questions = late[:1]
        else:
            questions = _unflagged(case, rules) if lasting else [label["step"]]
        expected = _expected(label) if late else "no-spike"
        answers = [_question(step, rules, expected, label["culprit"]) for step in questions]
        found = Outcome(case=case, applied=label["applied"], visible=bool(late), answers=answers)
        for answer in found.answers:
            answer.tripled = not quiet and any(step in span for step in tripled)
    for answer in found.answers:
        answer.loudest = baselines.loudest_layer(run, answer.step)
        answer.tripled = answer.tripled or answer.step in tripled
    found.judged = len(healthy)
    found.alarms = [step for step in sorted(rules) if step in healthy]
    found.tripled = [step for step in tripled if step in healthy]
    return found


def _expected(label: dict[str, Any]) -> str:
    """The verdict on a fault that a rule saw; where its label has it that none would, what it is by its nature."""
    said = str(label["expected_verdict"])
    return NATURE[label["applied"]] if said == "no-spike" else said


def _question(step: int, rules: dict[int, str], expected: str, culprit: dict[str, Any]) -> Answer:
    return Answer(step=step, rule=rules.get(step), expected=expected, culprit=culprit)


def _unflagged(case: Case, rules: dict[int, str]) -> Sequence[int]:
    return [step for step in dict.fromkeys(case.ask) if step not in rules][: case.asks]


def _autopsy(run: Any, step: int) -> Any:
    return run.autopsy(step)


def _ask(answer: Answer, run: Run, ask: Ask) -> None:
    began = time.perf_counter()
    try:
        said = ask(run, answer.step).to_json()
        answer.said = msgspec.json.decode(said) if isinstance(said, str | bytes) else msgspec.to_builtins(said)
    except Exception as error:  # whatever it is, the bench counts it as a wrong answer
        answer.failed = f"{type(error).__name__}: {error}"
    answer.seconds = time.perf_counter() - began


def main(folder: Path) -> None:
    """Reads the case, and writes its outcome."""
    case = msgspec.json.decode((folder / CASE).read_bytes(), type=Case)
    write_atomic(folder / OUTCOME, pretty_json(perform(case, folder)))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except WorkbenchError as problem:
        sys.exit(str(problem))
