"""What the divergence ladder found, as a record: JSON, sentences, a table for the terminal and one for a notebook.

Knows the numbers only; performs no step and imports no MLX.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pandas as pd

from ..enumeration import listed
from .difference import TensorDifference

if TYPE_CHECKING:
    from rich.console import RenderableType

Verdict = Literal["equal", "differs", "skipped", "unverified"]


class Departure(msgspec.Struct, frozen=True, kw_only=True):
    """Where two ways of rolling forward from one checkpoint part.

    Attributes:
        start, stop: the state they started from, and the last step looked at.
        step: the first step after which their states differ; null: none up to `stop`.
        computed: steps performed to find it, both ways together.
        first: the first tensor that differs at that step, both ways starting it from the state before.
    """

    start: int
    stop: int
    step: int | None
    computed: int
    first: TensorDifference | None = None

    def __str__(self) -> str:
        if self.step is None:
            return f"the same states from {self.start} to {self.stop} ({self.computed} steps computed)"
        where = f", first in {self.first}" if self.first else ""
        return f"departs from state {self.start} on at step {self.step} ({self.computed} steps computed){where}"


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """The step performed in one way, compared with the recorded way of performing it here.

    Attributes:
        name: of the way.
        intervention: whether anything was changed on purpose. If not, it is a repetition, and must be equal.
        verdict: `equal` in every bit of every tensor, `differs`, `skipped`, or `unverified`: nothing to compare with.
        detail: why it was skipped; for the run's record, what was compared.
        compared, differing: how many tensors.
        first: the first that differs, in order of execution.
        departure: where rolling forward in this way departs, if that was asked for.
    """

    name: str
    intervention: bool = False
    verdict: Verdict
    detail: str = ""
    compared: int = 0
    differing: int = 0
    first: TensorDifference | None = None
    departure: Departure | None = None


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """What `Run.diverge` returns. No part of it is evidence about the run but `record`.

    Attributes:
        run: name of the run.
        step, segment: the step looked at.
        checkpoint: step of the state that the roll-forward started from.
        options: how the run performs a step; each intervention changes one of them, or the device.
        record: the recorded way, performed here, compared with what the run logged.
        rungs: the other ways, from the nearest to the farthest.
        environment: as in the manifest, of this machine.
        environment_differences: what differs in it from the run's, one phrase each.
        notices: what the user should know beside it.
    """

    run: str
    step: int
    segment: int
    checkpoint: int
    options: dict[str, Any]
    record: Rung
    rungs: list[Rung]
    environment: dict[str, Any]
    environment_differences: list[str]
    notices: list[str]

    def __getitem__(self, name: str) -> Rung:
        return next(rung for rung in (self.record, *self.rungs) if rung.name == name)

    @property
    def table(self) -> pd.DataFrame:
        """One row a rung: rung, intervention, verdict, tensors (compared), unequal (how many of them), first (the first
        of those), dtype, differing (of its elements), size, max_ulp, departs (the first departing step of a
        roll-forward), detail.
        """
        rows = []
        for rung in (self.record, *self.rungs):
            first = rung.first
            rows.append(
                {
                    "rung": rung.name,
                    "intervention": rung.intervention,
                    "verdict": rung.verdict,
                    "tensors": rung.compared,
                    "unequal": rung.differing,
                    "first": first.name if first else "",
                    "dtype": first.dtype if first else "",
                    "differing": first.differing if first else None,
                    "size": first.size if first else None,
                    "max_ulp": first.max_ulp if first else None,
                    "departs": rung.departure.step if rung.departure else None,
                    "detail": rung.detail or (first.detail if first else ""),
                }
            )
        return pd.DataFrame(rows).astype(dict.fromkeys(("differing", "size", "max_ulp", "departs"), "Int64"))

    def sentences(self) -> list[str]:
        """The answer: what the step has in common with the run, what repeats, what moves bits, what was not tried."""
        said = [self._of_record()]
        for some, start in (
            ([rung for rung in self.rungs if not rung.intervention], "Repeated: "),
            ([rung for rung in self.rungs if rung.intervention], "Interventions: "),
        ):
            words = [_of_rung(rung) for rung in some if rung.verdict == "differs"]
            if same := [rung.name for rung in some if rung.verdict == "equal"]:
                words.insert(0, f"the same bits in every tensor with {listed(same)}")
            if words:
                said.append(f"{start}{'; '.join(words)}.")
        if any(rung.verdict == "differs" for rung in self.rungs if not rung.intervention):
            said.append("As the step varies by itself here, an intervention that differs may have moved nothing.")
        said += [f"Rolling forward with {r.name}: {r.departure}." for r in self.rungs if r.departure]
        if skipped := [f"{rung.name} ({rung.detail})" for rung in self.rungs if rung.verdict == "skipped"]:
            said.append(f"Not tried: {'; '.join(skipped)}.")
        return said

    def _of_record(self) -> str:
        replayed = f"Step {self.step} of {self.run}, replayed in the recorded way, "
        if self.record.verdict == "equal":
            said = f"{replayed}has the run's bits: {self.record.detail}."
        elif self.record.verdict == "differs":
            first = f"; first tensor of the checkpoint to differ: {self.record.first}" if self.record.first else ""
            said = f"{replayed}departs from the run: {self.record.detail}{first}."
        else:
            said = f"{replayed}can't be judged: {self.record.detail}."
        if self.environment_differences:
            said += f" This is informational: {'; '.join(self.environment_differences)}."
        return said

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self)).decode()

    def __repr__(self) -> str:
        return f"Ladder(step={self.step}, {', '.join(f'{rung.name}: {rung.verdict}' for rung in self.rungs)})"

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(text)}</p>" for text in (*self.sentences(), *self.notices))
        return said + self.table.to_html(index=False, na_rep="")

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("rung", "result", "first tensor to differ", "elements", "max ULP"):
            table.add_column(column)
        for rung in (self.record, *self.rungs):
            differs = "yellow" if rung.intervention else "bold red"
            style = {"equal": "green", "differs": differs}.get(rung.verdict, "dim")
            name = f"{rung.name} (intervention)" if rung.intervention else rung.name
            table.add_row(name, Text(rung.verdict, style=style), *_cells(rung))
        return Group(*(Text(text) for text in (*self.sentences(), *self.notices)), table)


def _of_rung(rung: Rung) -> str:
    return f"{rung.name} differs first in the {rung.first}; {rung.differing} of {rung.compared} tensors differ"


def _cells(rung: Rung) -> Sequence[str]:
    first = rung.first
    if first is None:
        return "", "", ""
    elements = first.detail if first.size is None else f"{first.differing:,} of {first.size:,}"
    return first.name, elements, "" if first.max_ulp is None else f"{first.max_ulp:,}"
