"""Which data was in a step: the rows of its batch and of the one before, where they came from, and what is odd in them.

Of the built-in trainer drawn again from the run's data files, so it needs no weights, no replay and no MLX; where a
replay of the step has left a trace, its losses stand beside the rows. What other loops took, `own_batches` knows.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from msgspec import UNSET

from .. import traces
from ..errors import DataError
from ..trainer.data import WindowSampler
from .batch import sampler_of, verified_batch
from .fact_table import COLUMNS as COLUMNS
from .fact_table import Contents, complete, facts, with_losses

if TYPE_CHECKING:
    from ..experiment import Experiment
    from ..run import Run
    from ..trace import Trace

PAST = 8  # steps whose rows are "the run's other data"
COUNTED = 1 << 26  # tokens; of a longer corpus the frequencies are those of evenly spread stretches
_STRETCH = 1 << 16


def batch_facts(
    run: Run,
    step: int,
    trace: Trace | None = None,
    *,
    segment: int | None = None,
    experiment: Experiment | None = None,
    factory: str | None = None,
) -> pd.DataFrame:
    """The rows of the batch of a step and of the step before, whose update set the state up.

    Args:
        run: the run.
        step: counted from 1.
        trace: a replay of this step; None: the one that lies among the run's traces, if there is one.
        segment: where the step stands in several segments that disagree.
        experiment, factory: of a loop of your own whose batches the run does not store: what has its sampler, as for
            `Run.replay`. The sampler draws the batches again, from the cursor of a checkpoint.

    Returns:
        One row a row of either batch; what is not known is missing (pandas.NA, NaN). First those of `step`. By share of
        the loss where that is known, rows whose loss is not finite first; otherwise by `outlier`, the largest first.

        - step, row (from 0); loss (mean a token: over the row's own targets, NaN where those are not known: see
          `Trace.rows`) and share (of the step's summed loss), from a trace;
        - source (name of the data file), line (in it, counted from 1: of a run of mlx-lm), offset (of its first token),
          epoch;
        - period, repeats, position: of the first stretch that repeats itself too often (`rowfacts.repetition`).
          Padding is no part of a row in this line and the next, where the batch says what counts (`batches.padding`);
        - distinct, compressed, log_likelihood: see `rowfacts`; each with its robust z against the rows of the 8 steps
          before (`_z`), and `outlier`, the largest |z|;
        - follow: share of the targets that count which are the next input token;
        - copy_of: another row of the batch with the same contents; seen_at: the last of the 8 steps before that had it;
        - text: control characters and the like made visible; of a loop of your own the token ids, or of each array the
          type, the shape and the range of its values.

        `attrs["notices"]` is a list of sentences on what could not be known.

    Raises:
        DataError: a data file or a stored batch is missing or has changed; or only the run's own program has the
            sampler that knows its batches, and there is neither that nor a trace with the losses of the rows.
        ReplayError: the step is not in the telemetry, or the trace is of another step; or the sampler gives another
            batch than the one that was logged.
        ExperimentError: the factory can't be used.
    """
    chosen, notices = run.segment_of(step, segment if trace is None else trace.record.segment)
    if trace is not None:
        traces.refuse_other_step(trace, step)
    if run.manifest.rebuild.get("kind") == "trainer":
        frame = _of_trainer(run, step, chosen, trace, notices)
    else:
        from .own_batches import own_facts

        frame = own_facts(run, step, chosen, trace, notices, experiment=experiment, factory=factory)
    frame.attrs["notices"] = notices
    return frame


# ---- batches of the built-in trainer


def _of_trainer(run: Run, step: int, segment: int, trace: Trace | None, notices: list[str]) -> pd.DataFrame:
    hashed = all("batch_hash" in run.evidence(one, segment) for one in (step, max(step - 1, 1)))
    sampler = sampler_of(run, verify=not hashed)
    counts = token_counts(sampler)
    batches = {step: Contents.of(verified_batch(run, sampler, step, segment))}
    for earlier in range(max(1, step - 1 - PAST), step):
        try:
            batches[earlier] = Contents.of(verified_batch(run, sampler, earlier, segment))
        except DataError as error:
            notices.append(f"the batch of step {earlier} is left out: {error}")
    if run.manifest.ranks is not UNSET:
        size = run.manifest.ranks.size
        each = sampler.batch // size
        notices.append(f"{size} ranks shared each batch: rank R had the {each} rows from {each} · R on")
    if step == 1:
        notices.append("step 1 has no batch before it, and no earlier rows to compare its own with")
    parts = []
    for one in [step, *({step - 1} & batches.keys())]:
        past = {other: batches[other] for other in range(one - PAST, one) if other in batches}
        frame = facts(one, batches[one], past, counts)
        places = sampler.provenance(one)
        frame["source"] = [Path(run.manifest.data[place.source].path).name for place in places]
        frame["offset"], frame["epoch"] = [place.offset for place in places], [place.epoch for place in places]
        frame["text"] = [_text(sampler, place.source, place.offset) for place in places]
        parts.append(with_losses(frame, traces.of_step(run, one, segment, trace, notices)))
    return complete(parts)


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
