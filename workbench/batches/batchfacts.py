"""Which data was in a step: the rows of its batch and of the one before, where they came from, and what is odd in them.

Drawn again from the run's data files, so it needs no weights, no replay and no MLX; where a replay of the step has
left a trace, its losses stand beside the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .. import traces
from ..errors import DataError
from ..trainer.data import WindowSampler
from . import rowfacts
from .batch import sampler_of, verified_batch

if TYPE_CHECKING:
    from ..run import Run
    from ..trace import Trace

PAST = 8  # steps whose rows are "the run's other data"
COUNTED = 1 << 26  # tokens; of a longer corpus the frequencies are those of evenly spread stretches
_STRETCH = 1 << 16

COLUMNS = {
    **{"step": "int64", "row": "int64", "loss": "float64", "share": "float64"},
    **{"source": "string", "offset": "Int64", "epoch": "Int64"},
    **{"period": "Int64", "repeats": "Int64", "position": "Int64"},
    **{f"{name}{suffix}": "float64" for name in rowfacts.MEASURES for suffix in ("", "_z")},
    **{"outlier": "float64", "follow": "float64", "copy_of": "Int64", "seen_at": "Int64", "text": "string"},
}


def batch_facts(run: Run, step: int, trace: Trace | None = None, *, segment: int | None = None) -> pd.DataFrame:
    """The rows of the batch of a step and of the step before, whose update set the state up.

    Args:
        run: the run.
        step: counted from 1.
        trace: a replay of this step; None: the one that lies among the run's traces, if there is one.
        segment: where the step stands in several segments that disagree.

    Returns:
        One row a row of either batch; what is not known is missing (pandas.NA, NaN). First those of `step`. By share of
        the loss where that is known, rows whose loss is not finite first; otherwise by `outlier`, the largest first.

        - step, row (from 0); loss (mean a token) and share (of the step's summed loss), from a trace;
        - source (name of the data file), offset (of its first token), epoch;
        - period, repeats, position: of the first stretch that repeats itself too often (`rowfacts.repetition`);
        - distinct, compressed, log_likelihood: see `rowfacts`; each with its robust z against the rows of the 8 steps
          before (`_z`), and `outlier`, the largest |z|;
        - follow: share of the targets that are the next input token;
        - copy_of: another row of the batch with the same contents; seen_at: the last of the 8 steps before that had it;
        - text: control characters and the like made visible.

        `attrs["notices"]` is a list of sentences on what could not be known.

    Raises:
        DataError: a data file is missing or has changed; or only the run's own loop knows its batches, and there is no
            trace.
        ReplayError: the step is not in the telemetry, or the trace is of another step.
    """
    chosen, notices = run.segment_of(step, segment if trace is None else trace.record.segment)
    if trace is not None:
        traces.refuse_other_step(trace, step)
    if run.manifest.rebuild.get("kind") == "trainer":
        frame = _of_trainer(run, step, chosen, trace, notices)
    else:
        frame = _of_own_loop(run, step, chosen, trace, notices)
    frame.attrs["notices"] = notices
    return frame


# ---- batches of the built-in trainer


def _of_trainer(run: Run, step: int, segment: int, trace: Trace | None, notices: list[str]) -> pd.DataFrame:
    hashed = all("batch_hash" in run.evidence(one, segment) for one in (step, max(step - 1, 1)))
    sampler = sampler_of(run, verify=not hashed)
    counts = token_counts(sampler)
    batches = {step: verified_batch(run, sampler, step, segment)}
    for earlier in range(max(1, step - 1 - PAST), step):
        try:
            batches[earlier] = verified_batch(run, sampler, earlier, segment)
        except DataError as error:
            notices.append(f"the batch of step {earlier} is left out: {error}")
    if step == 1:
        notices.append("step 1 has no batch before it, and no earlier rows to compare its own with")
    parts = []
    for one in [step, *({step - 1} & batches.keys())]:
        past = {other: batches[other] for other in range(one - PAST, one) if other in batches}
        frame = _facts(one, batches[one], past, counts)
        places = sampler.provenance(one)
        frame["source"] = [Path(run.manifest.data[place.source].path).name for place in places]
        frame["offset"], frame["epoch"] = [place.offset for place in places], [place.epoch for place in places]
        frame["text"] = [_text(sampler, place.source, place.offset) for place in places]
        parts.append(_with_losses(frame, traces.of_step(run, one, segment, trace, notices)))
    return _complete(parts)


def _text(sampler: WindowSampler, source: int, offset: int) -> str:
    corpus = sampler.sources[source]
    return corpus.decode(corpus.tokens[offset : offset + sampler.ctx + 1])


def token_counts(sampler: WindowSampler) -> np.ndarray:
    """How often each token id stands in the training range, of a mixture in all of them together: int64 (256,) for
    bytes, (65536,) otherwise. Of a range of more than `COUNTED` tokens, in evenly spread stretches of it."""
    counts = np.zeros(256 if sampler.sources[0].kind == "bytes" else 65536, np.int64)
    for feed in sampler.feeds:
        length = feed.stop - feed.start
        stretches = -(-length // _STRETCH) if length <= COUNTED else COUNTED // _STRETCH
        for number in range(stretches):
            first = number * _STRETCH if length <= COUNTED else number * (length - _STRETCH) // stretches
            tokens = feed.corpus.tokens[feed.start + first : min(feed.start + first + _STRETCH, feed.stop)]
            counts += np.bincount(tokens, minlength=len(counts))
    return counts


# ---- batches of any loop


def _of_own_loop(run: Run, step: int, segment: int, trace: Trace | None, notices: list[str]) -> pd.DataFrame:
    found = traces.of_step(run, step, segment, trace, notices)
    if found is None or (found.batch is None and found.record.row_loss is None):
        raise DataError(
            f"{run.name} was recorded from a loop of your own, so only that loop's sampler knows its batches, and no "
            f"trace of step {step} is there to say what it took; replay the step, and pass the trace: "
            f"run.batch_facts({step}, run.replay({step}, …))"
        )
    notices.append(
        f"{run.name} was recorded from a loop of your own: where its rows came from, their text, how usual they are in "
        "its data and whether earlier steps had them can't be known without its sampler"
    )
    if found.batch is None:
        notices.append("a trace file holds losses, not the batch itself; pass the trace of a replay for its contents")
        rows = pd.DataFrame({"step": step, "row": range(len(found.record.row_loss or ()))})
    else:
        batch = found.batch
        sizes = {len(array) if array.ndim else 0 for array in batch}
        if len(sizes) != 1 or sizes == {0}:
            raise DataError(f"the arrays of the batch of step {step} have leading axes {sorted(sizes)}: it has no rows")
        tokens = batch[0].dtype.kind in "iu" and batch[0].ndim == 2 and int(batch[0].min(initial=0)) >= 0
        if tokens:
            counts = np.zeros(int(batch[0].max(initial=0)) + 1, np.int64)
            rows = _facts(step, batch, {}, counts).drop(columns="log_likelihood")
        else:
            notices.append("the batch is not one of token ids, so nothing is said of its rows' contents")
            rows = pd.DataFrame({"step": step, "row": range(len(batch[0])), "copy_of": rowfacts.copies(batch)})
    return _complete([_with_losses(rows, found)])


# ---- what both share


def _facts(
    step: int, batch: Sequence[np.ndarray], past: Mapping[int, Sequence[np.ndarray]], counts: np.ndarray
) -> pd.DataFrame:
    inputs = batch[0]
    found: dict[str, Any] = {"step": step, "row": range(len(inputs))}
    found |= rowfacts.unlike(inputs, [other[0] for other in past.values()], counts)
    repeated = [rowfacts.repetition(row) for row in inputs]
    for name in ("period", "repeats", "position"):
        found[name] = pd.array([None if one is None else getattr(one, name) for one in repeated], dtype="Int64")
    if len(batch) == 2 and batch[1].shape == inputs.shape:
        found["follow"] = rowfacts.follow(inputs, batch[1])
    found["copy_of"] = pd.array(rowfacts.copies(batch), dtype="Int64")
    seen = {key: other for other in sorted(past) for key in rowfacts.row_keys(past[other])}
    found["seen_at"] = pd.array([seen.get(key) for key in rowfacts.row_keys(batch)], dtype="Int64")
    return pd.DataFrame(found)


def _with_losses(frame: pd.DataFrame, trace: Trace | None) -> pd.DataFrame:
    """With the losses of a trace, if it has one of each row; in the order that `batch_facts` promises."""
    if trace is not None and len(trace.rows) == len(frame):
        frame = frame.merge(trace.rows.astype({"row": "int64"}), on="row", how="left")
        order = frame.assign(broken=~np.isfinite(frame["loss"])).sort_values(["broken", "share"], ascending=False)
    elif "outlier" in frame:
        order = frame.sort_values("outlier", ascending=False, kind="stable")
    else:
        order = frame
    return frame.loc[order.index]


def _complete(parts: Sequence[pd.DataFrame]) -> pd.DataFrame:
    columns = list(COLUMNS)
    return pd.concat([part.reindex(columns=columns).astype(COLUMNS) for part in parts], ignore_index=True)
