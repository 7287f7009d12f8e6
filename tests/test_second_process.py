"""What the repeatable gate says of a fresh process, beside what was found in this one."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from workbench import gates
from workbench.replaying import second_process
from workbench.trace import Gate, Gates

HERE = "the same step from the same state gave"
REPEATED = {
    "same": gates.repeatable([]),
    "other": gates.repeatable(["loss"]),
    "not": Gate(verdict="unverified", explanation="not repeated"),
}


@dataclass
class Outcome:
    gates: Gates
    step: int = 3
    exact: bool = False
    observation: object = field(default_factory=lambda: SimpleNamespace(evidence=lambda: {"loss": "0x1", "lr": "0x2"}))


@pytest.mark.parametrize(
    ("repeated", "there", "verdict", "sentence"),
    [
        ("same", "0x1", "exact", f"{HERE} the same bits again in this process, and in a fresh process"),
        ("same", "0x9", "mismatch", "a fresh process gave other bits: loss"),
        (
            *("other", "0x1", "mismatch"),
            f"{HERE} other bits in this process: loss, while a fresh process gave those of the first time",
        ),
        (
            *("other", "0x9", "mismatch"),
            f"{HERE} other bits in this process: loss, and a fresh process gave other bits, too: loss",
        ),
        ("not", "0x1", "exact", "not repeated in this process, but a fresh process gave the same bits"),
        ("not", "0x9", "mismatch", "a fresh process gave other bits: loss"),
    ],
)
def test_each_process_is_spoken_of_as_it_was(monkeypatch, repeated, there, verdict, sentence):
    monkeypatch.setattr(second_process, "independently_recorded", lambda *given: False)
    good = Gate(verdict="exact", explanation="")
    outcome = Outcome(Gates(repeatable=REPEATED[repeated], faithful=good, sensitive=good))
    child = SimpleNamespace(evidence=lambda step, say: {"loss": there, "lr": "0x2"})
    gate = second_process.with_other_process(None, None, outcome, child, True, print).gates.repeatable
    assert (gate.verdict, gate.explanation) == (verdict, sentence)
