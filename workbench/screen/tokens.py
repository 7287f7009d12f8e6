"""The tokens of a step's batch as a person reads them, each with the loss of predicting it.

Needs no weights and no MLX: tokens are drawn again from the run's data files, losses come from a trace.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .. import traces
from ..batches.batch import sampler_of, verified_batch
from ..errors import DataError
from ..sabotage.alterations import IGNORED

if TYPE_CHECKING:
    from ..run import Run
    from ..trace import Trace

COLUMNS = {"row": "int64", "position": "int64", "token": "int64", "text": "string", "counted": "bool", "loss": float}


def token_table(run: Run, step: int, trace: Trace | None = None, *, segment: int | None = None) -> pd.DataFrame:
    """The tokens of each row of a step's batch, and what it cost to predict them.

    Position 0 is the first input; position j is the j-th target, which the model had to predict from the j tokens
    before it. Where a row's targets are not its next inputs, as in a relabelled batch, it is the targets that stand
    here. A target that does not count is shown as the input at its place; the last one of a row is then left out.

    Args:
        run: the run.
        step: the step that consumed the batch, counted from 1.
        trace: a replay of this step: it adds the losses, and for a run of your own loop it is the only source.
        segment: where the step stands in several segments that disagree.

    Returns:
        One row a token, in the batch's order: row and position (from 0), token (its id), text (see `readable`; empty
        for the later tokens of one character), counted (whether the loss counts it; never at position 0), and loss
        (float64, of predicting it; NaN where it is unknown, does not count or is not finite).
        `attrs["known"]` says whether losses are known.

    Raises:
        DataError: a data file is missing or has changed, only a replay knows the batch, or it is not one of tokens.
        ReplayError: the step is not in the telemetry, or the trace is of another step.
    """
    if trace is not None:
        traces.refuse_other_step(trace, step)
    chosen = run.segment_of(step, segment if trace is None else trace.record.segment)[0]
    inputs, targets, kind = _batch(run, step, chosen, trace)
    losses = _losses(trace, targets.shape)
    parts = [
        _row(number, inputs[number], targets[number], kind, None if losses is None else losses[number])
        for number in range(len(inputs))
    ]
    frame = pd.concat(parts, ignore_index=True).astype(COLUMNS)
    frame.attrs["known"] = losses is not None
    return frame


def readable(ids: Sequence[int] | np.ndarray, kind: str) -> list[str]:
    """Each token as text: control characters as escapes such as \\n, invisible ones as ⟨U+200B⟩.

    Args:
        ids: token ids, (n,).
        kind: "bytes": a byte each, read as UTF-8; what is no UTF-8 is an escape such as \\xff. Otherwise the ids
            themselves are shown: ⟨17⟩.

    Returns:
        n texts; those of the second and later bytes of one character are empty.
    """
    if kind != "bytes":
        return [f"⟨{token}⟩" for token in np.asarray(ids).tolist()]
    return list(_characters(bytes(np.asarray(ids, np.uint8).tolist())))


def _characters(content: bytes) -> Iterator[str]:
    place = 0
    while place < len(content):
        size = _size(content[place])
        try:
            character = content[place : place + size].decode("utf-8")
        except UnicodeDecodeError:
            character, size = f"\\x{content[place]:02x}", 1
        else:
            character = visible(character)
        yield character
        yield from [""] * (size - 1)
        place += size


def _size(lead: int) -> int:
    """Bytes of the character that begins so; 1 where none does."""
    return 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1


_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def visible(character: str) -> str:
    """The character, or what stands for one that can't be seen or would change the direction of others."""
    code, category = ord(character), unicodedata.category(character)
    if code < 0x80 and category == "Cc":
        return _ESCAPES.get(character, f"\\x{code:02x}")
    hidden = category in ("Cc", "Cf", "Co", "Cn", "Zl", "Zp") or (category == "Zs" and character != " ")
    return f"⟨U+{code:04X}⟩" if hidden else character


def _row(number: int, inputs: np.ndarray, targets: np.ndarray, kind: str, losses: np.ndarray | None) -> pd.DataFrame:
    counts = targets >= 0
    asked = np.where(counts, targets, np.append(inputs[1:], IGNORED))
    ids, counted = np.append(inputs[:1], asked), np.append(False, counts)
    known = np.full(len(targets), np.nan) if losses is None else np.where(counts, losses, np.nan)
    table = {"row": number, "position": np.arange(len(ids)), "token": ids, "counted": counted}
    frame = pd.DataFrame(table | {"loss": np.append(np.nan, known)})[ids >= 0]
    return frame.assign(text=readable(frame["token"], kind))[list(COLUMNS)]


def _batch(run: Run, step: int, segment: int, trace: Trace | None) -> tuple[np.ndarray, np.ndarray, str]:
    """Inputs and targets, both (rows, tokens), and what a token is."""
    try:
        sampler = sampler_of(run, verify="batch_hash" not in run.evidence(step, segment))
        inputs, targets = verified_batch(run, sampler, step, segment)
        return inputs, targets, sampler.sources[0].kind
    except DataError:
        if trace is None or trace.batch is None:
            raise
    batch = [np.asarray(array) for array in trace.batch]
    if not _tokens(batch):
        shapes = ", ".join(f"{array.dtype}{list(array.shape)}" for array in batch)
        raise DataError(
            f"the batch of step {step} is not one of tokens: it has {shapes}; expected inputs and targets, two arrays "
            "of integers, (rows, tokens)"
        )
    return batch[0], batch[1], "ids"


def _tokens(batch: Sequence[np.ndarray]) -> bool:
    if len(batch) != 2 or any(array.ndim != 2 or array.dtype.kind not in "iu" for array in batch):
        return False
    return batch[0].shape == batch[1].shape and batch[0].size > 0 and int(batch[0].min()) >= 0


def _losses(trace: Trace | None, shape: tuple[int, ...]) -> Any:
    """(rows, tokens) float64; None where the trace has no loss of each token."""
    if trace is None or trace.record.token_loss is None:
        return None
    rows = trace.record.token_loss
    if [len(row) for row in rows] != [shape[1]] * shape[0]:
        return None
    return np.array(rows, dtype=float)
