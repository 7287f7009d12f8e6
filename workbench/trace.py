"""A trace: what the replay of one step measured, as a JSON file with a published schema, and as tables.

Knows the format; nothing of how a replay is done. Importable without MLX.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from .bits import bits_float
from .compare import ITEMS, Item, Verdict, mismatches
from .errors import WorkbenchError
from .files import pretty_json, write_atomic
from .probes import trace_tables
from .probes.findings import findings
from .probes.measured import Attention, Logits, NonFinite, Row, Update
from .probes.trace_tables import KINDS as KINDS
from .ranks.rank_trace import RankTrace
from .untrusted import decode, read_file

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
BADGE_MARKS = {"exact": "✓", "mismatch": "✗", "within tolerance": "≈", "unverified": "?"}
# Background and text: at least 4.5 to 1, and the marks and words say the same without colour.
BADGE_COLOURS = {
    "exact": ("#006B4F", "white"),
    "mismatch": ("#A94700", "white"),
    "within tolerance": ("#E69F00", "black"),
    "unverified": ("#5F5F5F", "white"),
}


class Gate(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One of the three badges: its verdict, and the sentence that says what was done."""

    verdict: Verdict
    explanation: str


class Gates(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    repeatable: Gate
    faithful: Gate
    sensitive: Gate


class Difference(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The earliest difference from the run. `step` is before the replayed one when the way there already departed."""

    step: int
    where: Literal["restored state", "roll-forward", "step"]
    item: str
    detail: str
    consequences: list[str]  # later differing items of the same step


class TraceRecord(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON form. Per-layer arrays follow `layers`; item values are bits (or digests)."""

    replay_trace_version: Literal[1] = 1
    run: str
    step: int
    segment: int
    provenance: Literal["replay"] = "replay"
    exact: bool
    first_difference: Difference | None
    gates: Gates
    certified_probe: bool | None  # null: no probe pass was made
    probe_unmade: str | UnsetType = UNSET  # why not, where one was asked for
    items: dict[str, Item]
    batch_hash: str
    loss: float | None
    loss_bits: str
    grad_norm: float | None  # before clipping
    grad_norm_bits: str
    lr: float | None
    layers: list[str]
    per_layer_act_norms: list[float | None]
    per_layer_grad_norms: list[float | None]
    adam_m_norms: list[float | None]
    adam_v_norms: list[float | None]
    per_layer_act_norms_bits: list[str | None] | UnsetType = UNSET
    per_layer_grad_norms_bits: list[str | None] | UnsetType = UNSET
    adam_m_norms_bits: list[str | None] | UnsetType = UNSET
    adam_v_norms_bits: list[str | None] | UnsetType = UNSET
    state: dict[str, str]
    owned: dict[str, list[str]]  # the trainable parameters of each layer
    rows: list[Row] = []
    row_loss: list[float | None] | None = None  # summed loss of each row of the batch
    token_loss: list[list[float | None]] | None = None
    row_targets: list[int | None] | None = None  # that count in each row's loss; null: not known, or an older trace
    targets: int | None = None  # tokens that count in the loss; null: not known
    updates: list[Update] = []  # one a trainable parameter
    attention: list[Attention] | None = None  # in execution order; null: not measured, empty: no call was seen
    logits: Logits | None = None  # null: not measured, or no logits were seen on their way into the loss
    certified_forward: bool | None = None  # as `certified_probe`, of attention and logits
    first_nonfinite: NonFinite | None = None  # null: all finite, or no probe pass was made
    # Of a data-parallel run: `loss` is the mean over ranks, the rows are those of rank 0, then of rank 1, …, an item is
    # that of the first rank in which it differs, and all else is rank 0's.
    ranks: list[RankTrace] | UnsetType = UNSET
    untrained: list[str] | UnsetType = UNSET  # parameters that no step trains, and that are no base of adapters
    carried: str | UnsetType = UNSET  # which rank's batch carried the loss, in a sentence
    checkpoint: int  # step of the checkpoint that was restored
    rolled: int  # steps rolled forward from it to state N-1
    environment: dict[str, Any]
    environment_differences: list[str]  # against the run's; not empty: the verdict is informational
    options: dict[str, Any]
    wall_s: float


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a trace file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **msgspec.json.schema(TraceRecord)}


class Trace:
    """A replayed step: badges first, then tables.

    Attributes:
        record: the JSON form.
        path: the trace file, or None if it was not written.
        batch: the arrays of the batch (numpy), or None for a trace read from a file.
        notices: what the user should know besides the verdicts.
    """

    def __init__(
        self,
        record: TraceRecord,
        path: Path | None = None,
        batch: tuple[np.ndarray, ...] | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        self.record, self.path, self.batch, self.notices = record, path, batch, list(notices)

    @property
    def step(self) -> int:
        return self.record.step

    @property
    def exact(self) -> bool:
        """Every recorded item has the run's bits, and so had every step on the way."""
        return self.record.exact

    @property
    def informational(self) -> bool:
        """It was made where numbers come out otherwise than on the run's own machine: no verdict on the run."""
        return bool(self.record.environment_differences)

    @property
    def loss(self) -> float:
        return float(bits_float(self.record.loss_bits))

    @property
    def grad_norm(self) -> float:
        return float(bits_float(self.record.grad_norm_bits))

    @property
    def items(self) -> pd.DataFrame:
        """item, verdict, detail: one row an exactness item, in execution order."""
        import pandas as pd

        rows = [(name, item.verdict, item.detail) for name, item in ordered(self.record.items)]
        return pd.DataFrame(rows, columns=["item", "verdict", "detail"])

    @property
    def layers(self) -> pd.DataFrame:
        """One row a layer and kind: layer, kind, l2, rms, max_abs, mean, zero_fraction, nonfinite, recorded.

        `l2` of activation, gradient, adam_m and adam_v is what the exact pass logged; `recorded` is the run's own value
        (NaN: not recorded, or undefined). A layer with several parameters has their joint norm.
        """
        return trace_tables.layers(self.record)

    @property
    def parameters(self) -> pd.DataFrame:
        """One row a measured tensor: path, kind, dtype, size, l2, rms, max_abs, mean, zero_fraction, nonfinite."""
        return trace_tables.parameters(self.record)

    @property
    def updates(self) -> pd.DataFrame:
        """One row a trainable parameter: path, dtype, ratio, cosine, staleness_rms, eps_fraction, stuck_fraction.

        NaN where a quantity is undefined, as the second moment's for an optimizer without one. See
        `workbench.probes.quantities`.
        """
        return trace_tables.updates(self.record)

    @property
    def attention(self) -> pd.DataFrame:
        """One row an attention call and head: path, call, head, logit_max, entropy (nats), source.

        Empty without a probe pass, and where no call of `mx.fast.scaled_dot_product_attention` or softmax over the last
        of four axes was seen.
        """
        return trace_tables.attention(self.record)

    @property
    def rows(self) -> pd.DataFrame:
        """One row a row of the batch, by share: row, loss (mean over its own targets), share (of the step's summed
        loss), targets (how many it has; Int64). Empty without a token loss.

        Rows whose loss is not finite come first; shares are then of the sum of the others. A loss of exactly 0 may be a
        target that was certain or no target at all: where neither the batch, nor the loss function's own count, nor the
        step's mean tells which (`workbench.batches.row_targets`), `targets` is missing and `loss` NaN. Extras tell it
        with `"mask"`, or `"targets"` (how many, or zeros and ones), beside `"token_loss"`. A row without targets has a
        NaN `loss` too. Of a loss function that gives one loss a row that is the one target.
        """
        return trace_tables.rows(self.record)

    def findings(self) -> list[str]:
        """What stands out in this step, a sentence each; see `workbench.probes.findings`."""
        return findings(self.record)

    def badges(self) -> list[tuple[str, Verdict, str]]:
        """Name, verdict and explanation of the three gates."""
        gates = self.record.gates
        return [
            (name, getattr(gates, name).verdict, getattr(gates, name).explanation) for name in Gates.__struct_fields__
        ]

    def sentence(self) -> str:
        """The answer in one sentence."""
        record = self.record
        informational = " (informational: this machine differs from the run's)" if self.informational else ""
        if record.exact:
            compared = sum(item.verdict == "exact" for item in record.items.values())
            return f"Step {record.step} is exact: all {compared} recorded items have the run's bits{informational}."
        difference = record.first_difference
        if difference is None:
            return f"Step {record.step} is unverified: {record.gates.faithful.explanation}{informational}."
        return (
            f"Step {record.step} is not exact: the first difference is {difference.item} at step {difference.step} "
            f"({difference.where}): {difference.detail}{informational}."
        )

    def __repr__(self) -> str:
        badges = ", ".join(f"{name}: {verdict}" for name, verdict, _ in self.badges())
        return f"Trace(step={self.step}, {badges}{', informational' if self.informational else ''})"

    def _repr_html_(self) -> str:
        badges = " ".join(
            f'<span title="{html.escape(why)}" style="background:{BADGE_COLOURS[verdict][0]};'
            f'color:{BADGE_COLOURS[verdict][1]};border-radius:4px;padding:2px 8px;font-weight:600">'
            f"{badge_text(name, verdict, self.informational)}</span>"
            for name, verdict, why in self.badges()
        )
        bad = "".join(
            f"<tr><td>{html.escape(name)}</td><td>{item.verdict}</td><td>{html.escape(item.detail)}</td></tr>"
            for name, item in ordered(self.record.items)
            if item.verdict not in ("exact", "unverified")
        )
        silent = [f"{name} ({i.detail})" for name, i in ordered(self.record.items) if i.verdict == "unverified"]
        rest = f"<p>Not compared: {html.escape(', '.join(silent))}.</p>" if silent else ""
        table = f"<table><tr><th>item</th><th>verdict</th><th>detail</th></tr>{bad}</table>" if bad else ""
        found = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.findings())
        return f"<div><p>{badges}</p><p>{html.escape(self.sentence())}</p>{found}{table}{rest}</div>"


def badge_text(name: str, verdict: Verdict, informational: bool) -> str:
    """What stands on a badge."""
    return f"{BADGE_MARKS[verdict]} {name}: {verdict}{', informational' if informational else ''}"


def ordered(items: Mapping[str, Item]) -> list[tuple[str, Item]]:
    """The exactness items in the order of execution."""
    return [(name, items[name]) for name in ITEMS if name in items]


def difference_at(
    items: Mapping[str, Item], step: int, where: Literal["restored state", "roll-forward", "step"]
) -> Difference | None:
    """The first differing item of a step in execution order, the others as its consequences; None if none differs."""
    names = mismatches(items)
    if not names:
        return None
    detail = items[names[0]].detail
    return Difference(step=step, where=where, item=names[0], detail=detail, consequences=names[1:])


def file_name(record: TraceRecord) -> str:
    return f"{record.step:08d}{f'.s{record.segment}' if record.segment else ''}.json"


def write(record: TraceRecord, folder: Path) -> Path:
    """Writes ``SSSSSSSS.json`` (``SSSSSSSS.sK.json`` in segment K), validated; returns its path.

    Raises:
        OSError: the folder can't be written.
    """
    data = pretty_json(record)
    msgspec.json.decode(data, type=TraceRecord)  # what we publish must be what we read
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / file_name(record)
    write_atomic(path, data)
    return path


def read(path: Path) -> Trace:
    """Reads a trace file.

    Raises:
        WorkbenchError: it is missing, damaged, or of another version.
    """
    try:
        return Trace(decode(read_file(Path(path)), TraceRecord), Path(path))
    except OSError as error:
        raise WorkbenchError(f"{path} can't be read ({error.strerror}); expected a trace") from error
    except ValueError as error:
        raise WorkbenchError(f"{path} is not a trace of version {VERSION}: {error}. Replay the step again.") from error
