"""The batch of any step of a run, drawn again by its sampler from the cursor of a checkpoint, and verified.

Knows a run's folder and samplers; performs no step.
"""

from __future__ import annotations

from ..checkpoints.commit import CURSOR, read_commit, stem
from ..errors import CheckpointError, ReplayError
from ..experiment import Batch, Sampler, as_batch, batch_hash
from ..files import sha256
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..untrusted import decode, read_file


def redraw(run: Run, sampler: Sampler, step: int, segment: int, notices: list[str]) -> Batch:
    """Draws the batch of a step, from the nearest checkpoint before it. Leaves the sampler after that batch.

    Args:
        segment: where the step stands, or a later one on the way from it.
        notices: receives a sentence if the run did not log the batch's hash.

    Raises:
        ReplayError: no checkpoint comes before the step, the stream ends before it, or it gives another batch than the
            one that the run logged.
        CheckpointError: the checkpoint's cursor is damaged.
    """
    return redraw_through(run, sampler, step, step, segment, notices)[step]


def redraw_through(
    run: Run, sampler: Sampler, first: int, step: int, segment: int, notices: list[str]
) -> dict[int, Batch]:
    """As `redraw`, and with the batches from step `first` on as far as they can be had; by step.

    Args:
        notices: receives also which of the earlier ones are left out, and why.
    """
    before = run.checkpoints_before(first, segment) or run.checkpoints_before(step, segment)[:1]
    if not before:
        raise ReplayError(f"no checkpoint of {run.path} comes before step {step}, so its batch can't be drawn again")
    start, other = before[-1]
    sampler.load_state_dict(_cursor(run, start, other))
    found: dict[int, Batch] = {}
    for one in range(start + 1, step + 1):
        try:
            drawn = next(sampler)
        except StopIteration:
            raise ReplayError(
                f"the sampler ran out before step {step}; rebuild it with the data that the run had"
            ) from None
        if one < first:
            continue
        batch, recorded = as_batch(drawn, numpy=run.manifest.numpy), run.evidence(one, segment).get("batch_hash")
        if recorded is None:
            notices.append(f"the batch of step {one} was drawn again, and the run logged no hash to verify it by")
        elif batch_hash(batch) != recorded:
            unlike = (
                f"the batch of step {one}, drawn again from checkpoint {start}, is not the one that {run.name} logged: "
                "the sampler depends on more than its cursor (the random state, say), so only steps around the "
                "replayed one have their batches"
            )
            if one == step:
                raise ReplayError(unlike)
            notices.append(f"left out: {unlike}")
            continue
        found[one] = batch
    return found


def _cursor(run: Run, step: int, segment: int) -> dict:
    folder, name = run.path / CHECKPOINTS, stem(step, segment) + CURSOR
    entry = read_commit(folder, step, segment).files[name]
    try:
        content = read_file(folder / name)
    except OSError as error:
        raise CheckpointError(f"{folder / name} can't be read ({error.strerror})") from error
    if sha256(content) != entry.sha256:
        raise CheckpointError(f"{folder / name} was changed since it was committed")
    try:
        return decode(content, dict)
    except ValueError as error:
        raise CheckpointError(f"{folder / name} can't be decoded: {error}") from error
