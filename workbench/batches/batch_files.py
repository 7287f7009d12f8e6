"""Whether the batches that a run stored are all there, each with the contents that its name is the hash of; and the
batch of a step, read from there without weights or code.

Knows a run's folder; draws nothing and performs no step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import UNSET

from ..enumeration import some
from ..errors import DataError
from ..ranks.own_line import own_line
from ..recorded.layout import BATCHES
from ..verification import Check

if TYPE_CHECKING:
    from ..run import Run

NAMED = 3  # files that a sentence names; a hash of 64 digits is cut to 12


def check_batches(run: Run, progress: Callable[[int, int], None] = lambda done, total: None) -> Iterator[Check]:
    """Checks of kind "batch": every batch that a step of a run with stored batches logged has its file, and the file
    has the contents that the hash is of. Nothing for other runs, whose batches are drawn again.

    Args:
        progress: told how many files of how many were read.

    Raises:
        TelemetryError: the telemetry can't be read.
    """
    if not run.manifest.stored_batches:
        return
    from ..stored_batches import BatchStore  # imports MLX

    used, unnamed = dict[str, list[int]](), list[int]()
    for line in run.telemetry.lines:
        if line.type != "step" or not isinstance(line.step, int):
            continue
        for entry in () if line.ranks is UNSET else line.ranks:
            if isinstance(entry.get("batch_hash"), str):
                used.setdefault(entry["batch_hash"], []).append(line.step)
        if isinstance(line.batch_hash, str):
            used.setdefault(line.batch_hash, []).append(line.step)
        else:
            unnamed.append(line.step)
    store, missing, damaged = BatchStore(run.path), list[str](), list[str]()
    there = {path.stem for path in store.folder.glob("*.safetensors")}
    for done, name in enumerate(used):
        progress(done, len(used))
        if name not in there:
            missing.append(name)
            continue
        try:
            store.get(name)
        except DataError:
            damaged.append(name)
    folder = f"{BATCHES}/"
    if missing:
        said = f"{_files(len(missing), len(used))} missing: {_named(missing, used)}; nothing else has them"
        yield Check("batch", folder, "mismatch", said)
    if damaged:
        said = f"{_files(len(damaged), len(used))} damaged, the contents not being those of the hash: "
        yield Check("batch", folder, "mismatch", said + _named(damaged, used))
    if unnamed:
        yield Check("batch", folder, "unverified", f"the telemetry does not say which batch steps {some(unnamed)} used")
    if used and not missing and not damaged:
        steps = sum(map(len, used.values()))
        yield Check("batch", folder, "exact", f"{len(used)} stored batches of {steps} steps have the logged hashes")


def stored_batch(run: Run, step: int, segment: int) -> tuple[np.ndarray, ...]:
    """The batch of a step as the run stored it; bfloat16, which numpy lacks, as float32. Of a data-parallel run those
    of all ranks, one after the other.

    Raises:
        DataError: the run stores none, the step logged no hash, or the file is missing or was changed.
    """
    line = run.line(step, segment)
    if not run.manifest.stored_batches or line is None or not isinstance(line.batch_hash, str):
        raise DataError(f"{run.name} has no stored batch of step {step}: expected one under the hash that it logged")
    from ..stored_batches import BatchStore  # imports MLX

    store = BatchStore(run.path)
    if line.ranks is not UNSET:
        of_ranks = [as_numpy(store.get(str(own_line(line, rank).batch_hash))) for rank in range(len(line.ranks))]
        if all(array.ndim for batch in of_ranks for array in batch):
            return tuple(np.concatenate(arrays) for arrays in zip(*of_ranks, strict=True))
    return as_numpy(store.get(line.batch_hash))


def as_numpy(batch: Any) -> tuple[np.ndarray, ...]:
    """The arrays of a batch for looking at; bfloat16, which numpy lacks, as float32."""
    import mlx.core as mx

    return tuple(np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array) for array in batch)


def _files(count: int, total: int) -> str:
    return f"{count} of {total} stored batches {'is' if count == 1 else 'are'}"


def _named(names: list[str], used: dict[str, list[int]]) -> str:
    """The first files, and the steps that need them; how many more there are."""
    return some((f"{name[:12]}….safetensors (step {some(used[name], 1)})" for name in names), NAMED)
