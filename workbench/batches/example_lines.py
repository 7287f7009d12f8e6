"""The batch of a step of a run of mlx-lm: which lines of train.jsonl it held, and the text that their tokens are.

Draws the batch again by mlx-lm's own tokenizer and order, and verifies it by the logged hash. Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..errors import DataError
from ..trainer.corpus import visible
from .batch_files import as_numpy
from .fact_table import Contents, complete, facts, with_losses

if TYPE_CHECKING:
    from ..run import Run
    from ..trace import Trace

PAST = 8  # as of the built-in trainer's batches


def example_facts(
    run: Run, step: int, segment: int, traces: Mapping[int, Trace | None], notices: list[str]
) -> pd.DataFrame:
    """As `batchfacts.batch_facts`. Padding is left out of a row, and what is said of its tokens is said of those that
    the example has.

    Args:
        traces: of this step and of the one before.

    Raises:
        DataError: a file is missing, or the batch is not the one that was logged.
        ExperimentError: mlx-lm is not installed, or the manifest is damaged.
    """
    from ..finetune.tuned import stream  # imports MLX
    from ..rebuild import find
    from ..replaying.preparation import undisturbed

    with undisturbed():
        sampler, tokenizer = stream(run.manifest.rebuild, [find(entry, run.path) for entry in run.manifest.data])
        held, lines = dict[int, Contents](), dict[int, list[int]]()
        for one in range(max(1, step - 1 - PAST), step + 1):
            try:
                held[one] = _verified(run, sampler, one, segment)
                lines[one] = sampler.rows(one)
            except DataError as error:
                if one == step:
                    raise
                notices.append(f"the batch of step {one} is left out: {error}")
    source = next((Path(name).name for name in run.manifest.rebuild["files"] if name.endswith("train.jsonl")), "train")
    parts = []
    for one in (each for each in (step, step - 1) if each in held):
        rows = facts(one, held[one], {other: held[other] for other in range(one - PAST, one) if other in held})
        rows["source"], rows["line"] = source, [line + 1 for line in lines[one]]
        rows["epoch"] = _epochs(sampler, one)
        rows["text"] = ["".join(map(visible, tokenizer.decode(row.tolist()))) for row in held[one].rows]
        parts.append(with_losses(rows, traces.get(one)))
    return complete(parts)


def _verified(run: Run, sampler: Any, step: int, segment: int) -> Contents:
    from ..experiment import batch_hash

    sampler.iteration = (step - 1) * sampler.accumulate
    batch, recorded = next(sampler), run.evidence(step, segment).get("batch_hash")
    if recorded is not None and batch_hash(batch) != recorded:
        raise DataError(
            f"the batch of step {step}, made of train.jsonl again, is not the one that {run.name} consumed: a file of "
            "the data or of the tokenizer has changed (workbench verify says which), another version of mlx-lm or of "
            "the tokenizers makes other tokens, or a rollback left a batch out"
        )
    tokens, lengths, *_ = as_numpy(batch)
    rows = [row[:end] for row, end in zip(tokens, lengths[:, 1].tolist(), strict=True)]
    return Contents(rows, [np.ascontiguousarray(row).tobytes() for row in rows])


def _epochs(sampler: Any, step: int) -> list[int]:
    """Of each row of a step, counted from 0."""
    first, size = (step - 1) * sampler.accumulate, len(sampler.rows(step)) // sampler.accumulate
    return [(first + part) // len(sampler.batches) for part in range(sampler.accumulate) for _ in range(size)]
