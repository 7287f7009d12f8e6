"""What an autopsy says of a step: the cause, the evidence for it, what refuted the others, what was not looked at, and
what was tried to get out. A record with a published schema, sentences and tables.

Knows the format; performs no step and imports no MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
import numpy as np
import pandas as pd

from .bits import bits_float, float_bits
from .errors import WorkbenchError
from .files import pretty_json, write_atomic
from .trace import Difference
from .untrusted import decode, read_file

VERSION = 1
Cause = Literal[
    "data",
    "optimizer",
    "schedule",
    "curvature",
    "attention-logits",
    "precision",
    "resume",
    "transient-fault",
    "unknown",
    "no-spike",
]
CAUSES: tuple[str, ...] = get_args(Cause)
COLUMNS = (
    *("loss", "loss_untouched", "grad_norm", "grad_norm_untouched"),
    *("next_mean", "next_mean_untouched", "next_max", "next_max_untouched"),
)


class Numbers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Named numbers. One that is not finite is null, and its float32 bits say what it is; one that is null and has no
    bits is undefined."""

    values: dict[str, float | None]
    bits: dict[str, str] = {}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Numbers:
        known = {name: None if value is None else float(value) for name, value in values.items()}
        odd = {name: value for name, value in known.items() if value is not None and not np.isfinite(value)}
        return cls(
            {name: None if name in odd else value for name, value in known.items()},
            {name: float_bits(value) for name, value in odd.items()},
        )

    def __getitem__(self, name: str) -> float | None:
        """The number, NaN and infinities too; None where it is undefined.

        Raises:
            KeyError: there is none of this name.
        """
        return float(bits_float(self.bits[name])) if name in self.bits else self.values[name]


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An observation, and the cause that it speaks for."""

    name: str
    sentence: str
    numbers: Numbers = Numbers({})
    supports: Cause


class Refuted(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cause that was considered, and the observation against it."""

    cause: Cause
    sentence: str


class Unchecked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was not looked at, and why."""

    what: str
    why: str


class Outlier(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands out in the step, whether or not it has to do with the cause."""

    name: str
    sentence: str
    numbers: Numbers = Numbers({})


class Remedy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A way out that was tried.

    Attributes:
        change: as `changes.parse_change` reads it, or in words.
        state: the state that it was tried on.
        numbers: loss, gradient norm and update norm of the diagnosed step, mean and maximum of the losses after it:
            with the change, and `…_untouched`. Undefined where the step was left out.
        steps: those that the means are of.
        helps: the step's rise is gone, and the losses after it are no higher than untouched.
        command: what forks the run with it; "" where no fork can have it.
        note: what else is to be known.
    """

    change: str
    state: int
    numbers: Numbers
    steps: list[int]
    helps: bool
    command: str = ""
    note: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `Run.autopsy` returns.

    Attributes:
        run, name: identity and folder name of the run.
        step, segment: the step asked about.
        began: the first step of the spike that it stands in; the diagnosis is of this one. The step itself, unless
            the steps before it are flagged too.
        flagged: the rule of spike detection that names `began`; null: none does.
        exact: the replay of `began`, and the way there, had the run's bits.
        first_difference: the earliest difference from the run.
        verdict: the cause.
        reason: it, in a sentence.
        culprit: what there is to name of step, rows (row, source, offset), layer, parameter, head, lanes, option, …
        would_refute: the observation that would have refuted this verdict.
        seconds: taken in all.
        step_times: steps computed beside the roll-forward to `began` - 9, in units of a step.
        checkpoint, rolled: step of the checkpoint restored, and steps from there to the state before `began`.
        environment: of this machine; environment_differences: in what it differs from the run's.
        notices: what the user should know besides.
    """

    autopsy_version: Literal[1] = 1
    run: str
    name: str
    step: int
    segment: int
    began: int
    flagged: str | None
    exact: bool
    first_difference: Difference | None
    verdict: Cause
    reason: str
    culprit: dict[str, Any]
    would_refute: str
    evidence: list[Evidence]
    refuted: list[Refuted]
    unchecked: list[Unchecked]
    outliers: list[Outlier]
    remedies: list[Remedy]
    seconds: float
    step_times: float
    checkpoint: int | None
    rolled: int
    environment: dict[str, Any]
    environment_differences: list[str]
    notices: list[str]

    def sentence(self) -> str:
        """The answer in one or two sentences."""
        informational = " (informational: this machine differs from the run's)" if self.environment_differences else ""
        return f"Step {self.step}: {self.verdict}{informational}. {self.reason}"

    def which(self) -> str:
        """Of which step it is, where that is not the one asked about; "" otherwise."""
        if self.began == self.step:
            return ""
        return f"Step {self.step:,} stands in a spike that began at step {self.began:,}: this is of that one."

    def besides(self) -> list[str]:
        """`notices`, without that of `which`."""
        return [one for one in self.notices if not (self.which() and one.startswith(f"step {self.step} stands in"))]

    def no_way_out(self) -> str:
        """What to do where nothing that was tried helps; "" where something does, or there is no spike."""
        if self.verdict in ("no-spike", "transient-fault") or self.remedy is not None:
            return ""
        tried = ", ".join(dict.fromkeys(one.change for one in self.remedies))
        states = sorted({one.state for one in self.remedies}) or [self.began - 1]
        if self.remedies:
            said = f"Nothing that was tried helps ({tried})."
        elif self.exact:
            said = "No way out was tried."
        else:
            return ""
        named = self.culprit.get("option")
        what = f"with another {named}" if isinstance(named, str) else "with a change of your own"
        commands = " ".join(one.command for one in self.remedies)
        ways = [f"`workbench train --fork RUN --from {states[0]} --set …`"] if "wb.fork_point" not in commands else []
        if "workbench train" not in commands:
            ways.append(f"wb.fork_point(run, {states[0]}, …) and Recorder(fork=…) in a loop of your own")
        left = "; what was not checked, and why, is listed" if self.unchecked else ""
        return f"{said} Fork from state {states[0]} {what} ({'; '.join(ways)}){left}."

    @property
    def remedy(self) -> Remedy | None:
        """The first that helps."""
        return next((remedy for remedy in self.remedies if remedy.helps), None)

    @property
    def evidence_table(self) -> pd.DataFrame:
        """One row a number: evidence, supports, number, value, sentence; one row for evidence without numbers."""
        rows = [
            (one.name, one.supports, name, value, one.sentence)
            for one in self.evidence
            for name, value in (_pairs(one.numbers) or [("", np.nan)])
        ]
        frame = pd.DataFrame(rows, columns=["evidence", "supports", "number", "value", "sentence"])
        return frame.astype({"value": "float64"})

    @property
    def remedy_table(self) -> pd.DataFrame:
        """One row a remedy: change, state, loss, …, `…_untouched`, helps, command, note. NaN where undefined."""
        rows = []
        for one in self.remedies:
            numbers = {name: one.numbers[name] for name in COLUMNS if name in one.numbers.values}
            row = {"change": one.change, "state": one.state} | numbers
            rows.append(row | {"helps": one.helps, "command": one.command, "note": one.note})
        frame = pd.DataFrame(rows, columns=["change", "state", *COLUMNS, "helps", "command", "note"])
        return frame.astype(dict.fromkeys(COLUMNS, "float64"))

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def __repr__(self) -> str:
        return f"Verdict(step={self.step}, verdict={self.verdict!r}, culprit={self.culprit!r})"

    def _repr_html_(self) -> str:
        from .screen.cause_view import verdict_card

        return verdict_card(self)

    def footer(self) -> str:
        """What it took."""
        exact = "exact" if self.exact else "not exact" if self.first_difference else "unverified"
        return (
            f"The replay is {exact}. {self.rolled} steps rolled forward, {self.step_times:.0f} step-times beside, "
            f"{self.seconds:.1f} s."
        )


def _pairs(numbers: Numbers) -> list[tuple[str, float]]:
    known = ((name, numbers[name]) for name in numbers.values)
    return [(name, np.nan if value is None else value) for name, value in known]


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of an autopsy's file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(Verdict)}


def file_name(step: int, segment: int) -> str:
    """``SSSSSSSS.autopsy.json``, ``SSSSSSSS.sK.autopsy.json`` in segment K."""
    return f"{step:08d}{f'.s{segment}' if segment else ''}.autopsy.json"


def write(verdict: Verdict, folder: Path) -> Path:
    """Writes it to its own file, validated; returns the path.

    Raises:
        OSError: the folder can't be written.
    """
    data = pretty_json(verdict)
    msgspec.json.decode(data, type=Verdict)  # what we publish must be what we read
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(verdict.step, verdict.segment)
    write_atomic(path, data)
    return path


def read(path: Path) -> Verdict:
    """Reads the file of an autopsy.

    Raises:
        WorkbenchError: it is missing, damaged, or of another version.
    """
    try:
        return decode(read_file(Path(path)), Verdict)
    except OSError as error:
        raise WorkbenchError(f"{path} can't be read ({error.strerror}); expected an autopsy's file") from error
    except ValueError as error:
        raise WorkbenchError(f"{path} is not an autopsy of version {VERSION}: {error}. Make it again.") from error
