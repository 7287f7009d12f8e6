"""SpikeBench's answer: tables for the terminal and for a notebook, and JSON. Runs nothing and imports no MLX."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import pandas as pd

from .casebook import FIRST_UNSEEN, WITHIN
from .outcome import NOTHING, Outcome
from .scores import Scores, Share, confusion, score, table

if TYPE_CHECKING:
    from rich.console import RenderableType


class Bench:
    """Outcomes of SpikeBench, and the figures made from them.

    Attributes:
        outcomes: one a case, in the order of the plan.
        seeds: those that were asked for.
        reused: how many of the cases had been finished before.
    """

    def __init__(self, outcomes: Sequence[Outcome], seeds: Sequence[int], reused: int = 0) -> None:
        self.outcomes, self.seeds, self.reused = list(outcomes), list(seeds), reused

    @cached_property
    def table(self) -> pd.DataFrame:
        """One row a question; see `scores.table`."""
        return table(self.outcomes)

    @cached_property
    def confusion(self) -> pd.DataFrame:
        """Counts: expected verdicts as rows, verdicts given as columns."""
        return confusion(self.table)

    @cached_property
    def scores(self) -> Scores:
        return score(self.outcomes)

    @property
    def wrong(self) -> pd.DataFrame:
        """The rows of `table` with a wrong verdict or culprit."""
        return self.table[[not right or culprit is False for right, culprit in self._judged()]]

    def _judged(self) -> Iterator[tuple[bool, bool | None]]:
        return zip(self.table["right"].tolist(), self.table["culprit_right"].tolist(), strict=True)

    def sentence(self) -> str:
        """Which cases these are, and whether rules of the autopsy may have been derived from their seeds."""
        sizes = ", ".join(dict.fromkeys(outcome.case.size for outcome in self.outcomes))
        training = [seed for seed in self.seeds if seed < FIRST_UNSEEN]
        kind = "unseen" if not training else "for deriving rules" if len(training) == len(self.seeds) else "some seen"
        healthy = sum(outcome.case.fault is None and not outcome.case.natural for outcome in self.outcomes)
        seeds = ", ".join(map(str, self.seeds))
        return (
            f"{len(self.outcomes)} runs, {healthy} of them healthy; {len(self.table)} questions; "
            f"seed{'' if len(self.seeds) == 1 else 's'} {seeds} ({kind}); sizes {sizes}"
        )

    def notices(self) -> list[str]:
        """What a reader of the figures should know."""
        machines = list(dict.fromkeys(filter(None, (_machine(outcome.environment) for outcome in self.outcomes))))
        scores, found = self.scores, []
        if any(seed < FIRST_UNSEEN for seed in self.seeds):
            found.append(
                f"Seeds below {FIRST_UNSEEN} are those that rules may be derived from: figures to report need others."
            )
        if self.reused:
            found.append(f"Finished in an earlier call, and not repeated: {self.reused} (--again asks anew)")
        if scores.missed:
            found.append(
                f"Not visible: no rule fired within {WITHIN} steps of the fault, so no-spike is expected: "
                + ", ".join(scores.missed)
            )
        if scores.failed:
            found.append(f"Failed, and counted as wrong: {', '.join(scores.failed)}")
        return [*found, *(f"Made with {machine}" for machine in machines)]

    def to_json(self) -> str:
        """The figures, the confusion matrix, and the outcomes in full."""
        document = {
            "seeds": self.seeds,
            "unseen": all(seed >= FIRST_UNSEEN for seed in self.seeds),
            "scores": self.scores,
            "confusion": {str(name): {str(said): int(n) for said, n in row.items()} for name, row in self._counts()},
            "notices": self.notices(),
            "outcomes": self.outcomes,
        }
        return msgspec.json.format(msgspec.json.encode(document)).decode()

    def _counts(self) -> Any:
        return self.confusion.iterrows()

    def figures(self) -> pd.DataFrame:
        """One row a figure, one column a method: text such as "41 of 43 (95.3%)"; "-" where it says nothing of it."""
        scores = self.scores
        rows = [
            ("cause (top-1)", scores.top1, scores.layer_cause, scores.tripled_cause, scores.majority[1]),
            ("spike seen", None, None, scores.tripled, None),
            ("false alarms on healthy steps", scores.alarms, None, scores.tripled_alarms, None),
            ("… of healthy runs", scores.alarms_healthy, None, None, None),
            ("culprit, data and state faults", scores.data_and_state, None, None, None),
            *((f"… {kind} faults", share, None, None, None) for kind, share in scores.culprits.items()),
            ("layer", None, scores.layer, None, None),
            ("no-spike where nothing shows", scores.quiet, None, None, None),
            ("another cause claimed, replay not exact", scores.inexact, None, None, None),
            ("cause invented, nothing planted", scores.invented, None, None, None),
        ]
        names = ["workbench", "largest gradient-norm layer", "loss > 3x average", f"always {scores.majority[0]}"]
        cells = [[_text(share) for share in row[1:]] for row in rows]
        return pd.DataFrame(cells, index=[row[0] for row in rows], columns=names)

    def _costs(self) -> str:
        scores = self.scores
        said = [
            f"median {spread[0]:.3g}, longest {spread[1]:.3g} {unit}"
            for spread, unit in ((scores.seconds, "s"), (scores.step_times, "step-times"))
            if spread is not None
        ]
        return f"A verdict takes: {'; '.join(said) or 'unknown'} (with other cases running beside it)"

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        matrix = Table("expected \\ given")
        for name in self.confusion.columns:
            matrix.add_column(str(name), justify="right")
        for name, row in self._counts():
            cells = (
                Text(
                    str(n) if n else ".",
                    style="dim" if not n else "bold green" if said == name else "red" if name != NOTHING else "",
                )
                for said, n in row.items()
            )
            matrix.add_row(str(name), *cells)
        figures = Table("", *self.figures().columns)
        for name, values in self.figures().iterrows():
            figures.add_row(str(name), *values)
        parts: list[RenderableType] = [Text(self.sentence(), style="bold"), matrix, figures, Text(self._costs())]
        if len(self.wrong):
            wrong = Table("case", "fault", "step", "expected", "given", "why", title="Wrong", title_justify="left")
            for row in self.wrong.to_dict("records"):
                wrong.add_row(
                    *(row["case"], row["fault"] or "", str(row["step"]), row["expected"], row["verdict"], _why(row))
                )
            parts.append(wrong)
        return Group(*parts, *(Text(notice) for notice in self.notices()))

    def _repr_html_(self) -> str:
        notices = "".join(f"<p>{html.escape(text)}</p>" for text in (self._costs(), *self.notices()))
        head = f"<p><b>{html.escape(self.sentence())}</b></p>"
        return f"{head}{self.confusion.to_html()}{self.figures().to_html()}{notices}"

    def __repr__(self) -> str:
        top1 = self.scores.top1
        return f"Bench({len(self.outcomes)} cases, seeds={self.seeds}, top1={top1.right}/{top1.of})"


def _text(share: Share | None) -> str:
    if share is None or share.rate is None:
        return "-"
    return f"{share.right} of {share.of} ({share.rate:.{1 if share.rate > 0.02 or not share.right else 2}%})"


def _why(row: dict[str, Any]) -> str:
    if row["failed"]:
        return str(row["failed"])
    return f"culprit: {', '.join(row['missed'])} not named" if row["missed"] else ""


def _machine(environment: dict[str, Any]) -> str:
    if not environment:
        return ""
    blas = environment.get("blas") or {}
    return f"mlx {environment.get('mlx')}, {environment.get('device')}, {blas.get('library', 'no BLAS known')}"
