"""The batch of a step, for people: the text of each row, where it came from, and the loss that it carried.

Draws the rows again from the run's data files; needs no weights and no MLX. What is shown is the batch that the run
consumed, or an error: its hash must be the one in the telemetry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pandas as pd
from msgspec import UNSET

from ..errors import DataError, ExperimentError, ReplayError
from ..files import sha256
from ..rebuild import find, locate
from ..sabotage.alterations import Relabelling, Repetition, Substitution
from ..trainer.corpus import Corpus
from ..trainer.data import Batch, WindowSampler, training_windows
from .batch_files import stored_batch

if TYPE_CHECKING:
    from ..run import Run
    from ..trace import Trace

FIRST_VALUES = 12  # of a row of another loop's batch, whose meaning is unknown here


def batch_table(run: Run, step: int, trace: Trace | None = None, *, segment: int | None = None) -> pd.DataFrame:
    """What the rows of a step's batch hold.

    Args:
        run: the run.
        step: the step that consumed the batch, counted from 1.
        trace: a replay of this step: it adds the losses, and for a run of your own loop that does not store its batches
            it is the only source.
        segment: where the step stands in several segments that disagree.

    Returns:
        One row a row of the batch: row, source (name of the data file), offset (of its first token), text. With a
        trace that has a loss of each row also loss (mean a token: over the row's own targets, NaN where those are not
        known: see `Trace.rows`) and share (of the step's summed loss), ordered by share, rows whose loss is not finite
        first. What is not known is missing (pandas.NA, NaN).

    Raises:
        DataError: a data file is missing or has changed, or only a replay knows the batch.
        ReplayError: the step is not in the telemetry, or the trace is of another step.
    """
    if trace is not None and trace.step != step:
        raise ReplayError(f"the trace is of step {trace.step}; expected one of step {step}")
    chosen = run.segment_of(step, segment if trace is None else trace.record.segment)[0]
    try:
        table = _drawn(run, step, chosen)
    except DataError:
        if trace is not None and trace.batch is not None:
            table = _values(trace.batch, run.manifest.rebuild.get("kind") == "trainer")
        elif run.manifest.stored_batches:
            table = _values(stored_batch(run, step, chosen), False)
        else:
            raise
    return table if trace is None else _with_losses(table, trace)


def _with_losses(table: pd.DataFrame, trace: Trace) -> pd.DataFrame:
    losses = trace.rows
    if len(losses) != len(table):  # no loss of each row was measured, or it is not one a row
        return table
    joined = losses.astype({"row": "int64"}).merge(table, on="row", how="left")  # in the order of the trace's rows
    return joined[["row", "loss", "share", "source", "offset", "text"]]


# ---- batches of the built-in trainer


class _Model(msgspec.Struct):
    ctx: int


class _Share(msgspec.Struct):
    weight: float


class _Stream(msgspec.Struct):
    """What decides the data stream, of the trainer's config. Its other fields are ignored: `TrainConfig` needs MLX."""

    model: _Model
    batch: int
    seed: int
    val_split: float
    accumulate: int = 1
    mixture: tuple[_Share, ...] = ()
    substitutions: tuple[Substitution, ...] = ()
    relabellings: tuple[Relabelling, ...] = ()
    repetitions: tuple[Repetition, ...] = ()
    skipped: tuple[int, ...] = ()


def sampler_of(run: Run, *, verify: bool = True) -> WindowSampler:
    """The data stream of a run of the built-in trainer.

    Args:
        verify: read each data file once to check its SHA-256. Needless where the hash of a batch is checked.

    Raises:
        DataError: a data file is missing or has changed, or the run is of another loop.
        ExperimentError: the config in the manifest is damaged.
    """
    rebuild = run.manifest.rebuild
    if rebuild.get("kind") == "mlx-lm":
        raise DataError(
            f"{run.name} was recorded by `workbench mlx-lm`; run.batch_facts(step) and `workbench batch` say which "
            "lines of train.jsonl a step had; a replay shows them here"
        )
    if rebuild.get("kind") != "trainer":
        raise DataError(
            f"{run.name} was recorded from a loop of your own, so only that loop knows its batches; replay the step"
        )
    try:
        stream = msgspec.convert(rebuild.get("config"), _Stream)
    except msgspec.ValidationError as error:
        raise ExperimentError(f"the trainer config of this run is damaged: {error}") from error
    if not run.manifest.data:
        raise DataError(f"the manifest of {run.path} names no data file; expected the corpus of the run")
    corpora = [Corpus.open((locate if verify else find)(entry, run.path)) for entry in run.manifest.data]
    return training_windows(
        corpora,
        batch=stream.batch * stream.accumulate * (1 if run.manifest.ranks is UNSET else run.manifest.ranks.size),
        ctx=stream.model.ctx,
        seed=stream.seed,
        val_split=stream.val_split,
        weights=[share.weight for share in stream.mixture],
        substitutions=stream.substitutions,
        relabellings=stream.relabellings,
        repetitions=stream.repetitions,
        skipped=stream.skipped,
    )


def shares(run: Run, batch: Batch) -> Iterator[tuple[Run, Batch]]:
    """The rows of each rank of a data-parallel run, and the run as that rank saw it; of any other run the whole."""
    if run.manifest.ranks is UNSET:
        yield run, batch
        return
    from ..ranks.rank_run import RankRun

    rows = len(batch[0]) // run.manifest.ranks.size
    for rank in range(run.manifest.ranks.size):
        part = slice(rank * rows, (rank + 1) * rows)
        yield RankRun(run.path, rank), (batch[0][part], batch[1][part])


def verified_batch(run: Run, sampler: WindowSampler, step: int, segment: int) -> Batch:
    """The batch of a step, drawn again; where the telemetry has its hash, it must be this one's.

    Raises:
        DataError: it is another one.
    """
    batch = sampler.batch_at(step)
    for seen, part in shares(run, batch):
        recorded = seen.evidence(step, segment).get("batch_hash")
        if recorded is None or _hash(part) == recorded:
            continue
        sampler_of(run)  # says so if a data file has changed
        raise DataError(
            f"the batch of step {step} drawn from {sampler.sources[0].path} is not the one that {run.name} consumed: "
            f"its hash differs from the telemetry's {recorded[:16]}…; replay the step to see its own batch"
        )
    return batch


def _drawn(run: Run, step: int, segment: int) -> pd.DataFrame:
    # The hash proves the batch itself; reading a large corpus for its digest would take longer and prove less.
    sampler = sampler_of(run, verify="batch_hash" not in run.evidence(step, segment))
    verified_batch(run, sampler, step, segment)
    rows = []
    for number, row in enumerate(sampler.provenance(step)):
        corpus = sampler.sources[row.source]
        window = corpus.tokens[row.offset : row.offset + sampler.ctx + 1]
        name = Path(run.manifest.data[row.source].path).name
        rows.append((number, name, row.offset, corpus.decode(window)))
    return _table(rows)


def _hash(batch: Sequence[np.ndarray]) -> str:
    """As `experiment.batch_hash`, of numpy arrays."""
    return sha256(
        chunk for array in batch for chunk in (f"mlx.core.{array.dtype}{array.shape}".encode(), array.tobytes())
    )


# ---- batches of any loop, from a replay


def _values(batch: Sequence[np.ndarray], tokens: bool) -> pd.DataFrame:
    """Rows of a batch whose text is not to be had: token ids, or the first values of each array."""
    counts = {len(array) if array.ndim else 0 for array in batch}
    if tokens:
        rows = [(number, pd.NA, pd.NA, "".join(f"⟨{token}⟩" for token in row)) for number, row in enumerate(batch[0])]
    elif len(counts) == 1 and counts != {0}:
        rows = [
            (number, pd.NA, pd.NA, "; ".join(_first(array[number]) for array in batch))
            for number in range(counts.pop())
        ]
    else:  # no common leading axis: one line an array
        rows = [(number, pd.NA, pd.NA, _first(array)) for number, array in enumerate(batch)]
    return _table(rows)


def _first(array: Any) -> str:
    array = np.asarray(array)
    flat = array.ravel()
    shown = " ".join(f"{value:.6g}" for value in flat[:FIRST_VALUES].tolist())
    return f"{array.dtype}{list(array.shape)}: {shown}{' …' if flat.size > FIRST_VALUES else ''}"


def _table(rows: list[tuple[Any, ...]]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["row", "source", "offset", "text"])
    return frame.astype({"row": "int64", "source": "string", "offset": "Int64", "text": "string"})
