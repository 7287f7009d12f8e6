"""What a comparison of two runs found, as a record: one sentence, tables, JSON. Reads no files and computes no step."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import pandas as pd

from ..bits import bits_float
from ..enumeration import listed, some
from .knobs import Setting, order

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

Attribution = Literal["identical", "one setting", "not attributable", "unverified"]
_ITEMS = {
    "batch_hash": "the batch",
    "per_layer_act_norms": "the activation norms",
    "loss": "the loss",
    "per_layer_grad_norms": "the gradient norms of layers",
    "grad_norm": "the global gradient norm",
    "adam_m_norms": "the norms of Adam's m",
    "adam_v_norms": "the norms of Adam's v",
    "state.adam_m": "the fingerprint of Adam's m",
    "state.adam_v": "the fingerprint of Adam's v",
    "state.weights": "the fingerprint of the weights",
    "state.other": "the fingerprint of the optimizer's other state",
    "state.rng": "the random state",
    "state.cursor": "the data cursor",
}
_AROUND = 2  # rows of the table shown on each side of where the runs part


@dataclass(frozen=True)
class Parting:
    """Where two runs part.

    Attributes:
        step: a step; with `start`, the state that both start from.
        item: named as in a trace.
        layer: of an item with an entry a layer, the first to differ in order of execution.
        a, b: both values, as bits or digests; null where undefined.
        ulp: their distance, if they are finite float32 values.
    """

    step: int
    item: str
    layer: str | None
    a: str | None
    b: str | None
    ulp: int | None
    start: bool = False

    def __str__(self) -> str:
        layer = "" if self.layer is None else f" of layer {self.layer or '(model)'}"
        where = f"in state {self.step}, from which both start," if self.start else f"at step {self.step}"
        values = ""
        if all(isinstance(side, str) and side.startswith("0x") for side in (self.a, self.b)):
            apart = "" if self.ulp is None else f", {self.ulp:,} ULP apart"
            left, right = (str(bits_float(side)) for side in (self.a, self.b))  # type: ignore[arg-type]
            values = f" ({left} against {right}{apart})"
        return f"{where} in {_ITEMS.get(self.item, self.item)}{layer}{values}"


@dataclass(frozen=True)
class Comparison:
    """What `compare_runs` returns.

    Attributes:
        a, b: the runs' names.
        table: one row a step that both have: step, loss_a, loss_b, difference (b - a), ulp (distance of the losses),
            verdict (`exact`, `mismatch`, or `unverified` where too little was logged), first (the first item that
            differs, in order of execution).
        settings: what differs in the manifests, and the logged learning rate.
        parting: where the runs part; None: nowhere.
        layer: the first layer whose norms differ, which may be later than `parting`; None: no layer's do.
        attribution: `identical`; `one setting`: the difference is due to it alone; `not attributable`; `unverified`:
            the runs agree, but logged too little to be called identical.
        sentence: the answer.
        notices: what was not compared, and why.
    """

    a: str
    b: str
    table: pd.DataFrame
    settings: list[Setting]
    parting: Parting | None
    layer: Parting | None
    attribution: Attribution
    sentence: str
    notices: list[str]

    @property
    def knobs(self) -> list[Setting]:
        return [one for one in self.settings if one.kind == "knob"]

    @property
    def differences(self) -> pd.DataFrame:
        """The settings that differ: setting, kind, a, b."""
        rows = [(one.name, one.kind, one.a, one.b) for one in self.settings]
        return pd.DataFrame(rows, columns=["setting", "kind", "a", "b"], dtype=object)

    def figure(self, unit: str = "") -> Figure:
        """Both loss curves, and their difference below; see `pair_figure.loss_pair`."""
        from .pair_figure import loss_pair

        parted = None if self.parting is None else self.parting.step
        return loss_pair(self.table, a=self.a, b=self.b, parting=parted, unit=unit)

    def details(self) -> list[str]:
        """Sentences beside the answer."""
        said = []
        if self.parting is not None:
            said.append(f"The runs part {self.parting}.")
        if self.layer is not None and (self.layer.step, self.layer.item) != (self.parting.step, self.parting.item):  # type: ignore[union-attr]
            said.append(f"A layer differs first {self.layer}.")
        return [*said, *self.notices]

    def to_json(self) -> str:
        rows = [
            {key: None if pd.isna(value) else value for key, value in row.items()}
            for row in self.table.to_dict("records")
        ]
        document = {
            "a": self.a,
            "b": self.b,
            "attribution": self.attribution,
            "sentence": self.sentence,
            "parting": self.parting,
            "layer": self.layer,
            "settings": self.settings,
            "notices": self.notices,
            "steps": rows,
        }
        return msgspec.json.format(msgspec.json.encode(document)).decode()

    def shown_rows(self) -> pd.DataFrame:
        """The rows around where the runs part, and the last."""
        table = self.table
        if self.parting is None:
            return table.tail(1)
        near = (table["step"] - self.parting.step).abs() <= _AROUND
        return table[near | (table.index == table.index[-1])]

    def __repr__(self) -> str:
        return f"Comparison({self.sentence!r})"

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(text)}</p>" for text in self.details())
        tables = [self.differences, self.shown_rows()] if self.settings else [self.shown_rows()]
        shown = "".join(table.to_html(index=False, na_rep="") for table in tables)
        return f"<p><b>{html.escape(self.sentence)}</b></p>{said}{shown}"

    def __rich__(self) -> RenderableType:
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        from .knobs import shown

        parts: list[Any] = [Text(self.sentence, style="bold"), *(Text(text) for text in self.details())]
        if self.settings:
            table = Table("setting", "kind", self.a, self.b, box=box.SIMPLE_HEAD, pad_edge=False)
            for one in self.settings:
                table.add_row(one.name, one.kind, Text(shown(one.a)), Text(shown(one.b)))
            parts.append(table)
        names = ("step", f"loss of {self.a}", f"loss of {self.b}", "difference", "ULP", "first item to differ")
        table = Table(*names[:-1], box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column(names[-1], overflow="fold")
        for row in self.shown_rows().itertuples():
            numbers = [f"{row.loss_a:.6g}", f"{row.loss_b:.6g}", f"{row.difference:.3g}"]
            first = "" if pd.isna(row.first) else str(row.first)
            table.add_row(f"{row.step}", *numbers, "" if pd.isna(row.ulp) else f"{row.ulp:,}", first)
        return Group(*parts, table)


def conclude(
    *,
    names: tuple[str, str],
    steps: Sequence[int],
    settings: Sequence[Setting],
    parting: Parting | None,
    verdicts: pd.Series,
    acts: Mapping[str, int],
    varies: str | None,
    own_loop: bool,
    batches: Sequence[int],
    silent: Sequence[int],
    edits: Sequence[int],
) -> tuple[Attribution, str]:
    """The answer in one sentence.

    Args:
        verdicts: of each step.
        acts: for each knob the first step in which it can act; of one that reaches the start, that state.
        varies: why a step may vary by itself here, if that is not ruled out.
        own_loop: a run is not the built-in trainer's, so that no manifest holds its code.
        batches: steps whose batches differ although no knob decides them.
        silent: steps, up to where the runs part, of which too little was logged to say that they are alike.
        edits: steps before which only one loop changed the state, or both did in other ways.
    """
    knobs = [one for one in settings if one.kind == "knob"]
    count = f"{len(steps)} step{'s' if len(steps) != 1 else ''} ({steps[0]} to {steps[-1]})"
    both = f"{names[0]} and {names[1]}"
    if parting is None:
        changed = f", although they differ in {listed([str(one) for one in knobs])}" if knobs else ""
        if (verdicts != "exact").any():
            return "unverified", (
                f"{both} agree over {count} in all that both logged{changed}, but that is too little to call them "
                "identical: expected at least batch, loss and fingerprint of the weights."
            )
        return "identical", f"{both} are identical, bit for bit, over {count}{changed}."
    against = _objections(settings, knobs, parting, acts, varies, own_loop, batches, silent, edits)
    if against:
        what = knobs[0].name if len(knobs) == 1 else "one setting"
        reasons = "; ".join(against)
        return "not attributable", f"The difference between {both} can't be put down to {what}: {reasons}."
    caveat = "as far as manifests tell, which do not hold the code of a loop of your own, " if own_loop else ""
    where = f"at step {parting.step} in {_ITEMS.get(parting.item, parting.item)}"
    if parting.start:
        where = "in the state that they start from"
    later = min((step for step in edits if step > parting.step), default=None)
    until = "" if later is None else f" up to step {later - 1}, after which the loops changed the state themselves"
    return "one setting", (
        f"The difference between {both} is due to {knobs[0]} alone{until}: {caveat}environment and all other settings "
        f"are the same, and they have the same bits until they part {where}, where that setting acts."
    )


def _objections(
    settings: Sequence[Setting],
    knobs: Sequence[Setting],
    parting: Parting,
    acts: Mapping[str, int],
    varies: str | None,
    own_loop: bool,
    batches: Sequence[int],
    silent: Sequence[int],
    edits: Sequence[int],
) -> list[str]:
    """Every reason not to put the difference down to one setting, the likeliest cause first."""
    found = []
    here = (parting.step, -1 if parting.start else order(parting.item))
    if batches:
        found.append(
            f"the batches differ from step {batches[0]} on, and no setting that differs decides them, so the order of "
            "the data is another: look at the sampler and its seed before suspecting any kernel"
        )
    elif not any((acts[one.name], order(one.reach)) <= here for one in knobs):
        before = f", before {listed([one.name for one in knobs])} can act" if knobs else ""
        found.append(f"{'' if knobs else 'no setting differs, and yet '}they part {parting}{before}")
        if not knobs:
            found[-1] += (
                "; code, seeds and data of a loop of your own are not in its manifest"
                if own_loop
                else "; workbench doctor RUN says whether a step repeats there"
            )
    if len(knobs) > 1:
        found.append(f"{len(knobs)} settings differ: {listed([str(one) for one in knobs])}")
    for kind, words in (("environment", "the environments differ"), ("code", "the code differs")):
        if unlike := [one for one in settings if one.kind == kind]:
            found.append(f"{words}: {some(unlike, 3)}")
    if varies:
        found.append(varies)
    if silent:
        found.append(
            f"of step {silent[0]} too little was logged to say that it was alike: expected at least batch, loss and "
            "fingerprint of the weights"
        )
    if early := [step for step in edits if step <= parting.step]:
        found.append(f"before step {early[0]} the training loops themselves changed the state in different ways")
    return found
