"""Which data was in a step of a loop other than the built-in trainer's: read from the batches that the run stored,
drawn again by mlx-lm's sampler or by one that the user names, or taken from a trace.

Knows run folders; reads no weights of a checkpoint and performs no step.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .. import traces
from ..errors import DataError
from . import rowfacts
from .batch_files import as_numpy, stored_batch
from .fact_table import Contents, complete, facts, last_seen, with_losses

if TYPE_CHECKING:
    from ..experiment import Experiment
    from ..run import Run
    from ..trace import Trace

Arrays = tuple[np.ndarray, ...]
PAST = 8  # as of the built-in trainer's batches
VOCABULARY = 1 << 22  # integers beyond are taken for other things than token ids; no tokenizer has as many
FEW = 4  # values of a row's array that are shown themselves; of more the range


def own_facts(
    run: Run,
    step: int,
    segment: int,
    trace: Trace | None,
    notices: list[str],
    *,
    experiment: Experiment | None = None,
    factory: str | None = None,
) -> pd.DataFrame:
    """As `batchfacts.batch_facts`, for a run of another loop."""
    found = {one: traces.of_step(run, one, segment, trace, notices) for one in (step, step - 1) if one >= 1}
    mine = found[step]
    if run.manifest.stored_batches:
        batches = _stored(run, step, segment, trace, notices)
    elif run.manifest.rebuild.get("kind") == "mlx-lm":
        from .example_lines import example_facts

        frame = example_facts(run, step, segment, found, notices)
        _say_of_losses(run, step, mine, frame, notices)
        return frame
    elif experiment is not None or factory is not None:
        batches = _drawn(run, step, segment, experiment, factory, notices)
    elif trace is not None and trace.batch is not None:
        batches = {step: trace.batch}
    elif mine is not None and mine.record.row_loss is not None:
        notices.append(
            "a trace file holds the losses of the rows, not the batch itself; for its contents name what has the "
            f"sampler: {_command(run, step)}"
        )
        rows = pd.DataFrame({"step": step, "row": range(len(mine.record.row_loss))})
        return complete([with_losses(rows, mine)])
    else:
        raise DataError(
            f"{run.name} was recorded from a loop of your own with a sampler that has a cursor, so its batches are not "
            "stored: only that sampler has them. Name the function or the script that has it, and the batch is drawn "
            f"again: {_command(run, step)}"
        )
    notices.append(
        f"{run.name} was recorded from a loop of your own: where in its data the rows came from, and how usual they "
        "are there, only that loop knows"
    )
    with_rows = _with_rows(batches[step])
    if with_rows and not _is_tokens(with_rows):
        notices.append("the batch is not one of token ids: of each array of a row the range is shown")
    if not with_rows:
        notices.append("the arrays of the batch have no leading axis in common: one line is one array")
    frame = complete([_of_batch(one, batches, found[one]) for one in (step, step - 1) if one in batches])
    _say_of_losses(run, step, mine, frame, notices)
    return frame


def _command(run: Run, step: int) -> str:
    rebuild = run.manifest.rebuild
    named = str(rebuild.get("factory") or rebuild.get("script") or "module:function")
    return f"workbench batch {shlex.quote(str(run.path))} --step {step} --factory {shlex.quote(named)}"


def _stored(run: Run, step: int, segment: int, trace: Trace | None, notices: list[str]) -> dict[int, Arrays]:
    found: dict[int, Arrays] = {}
    for one in range(max(1, step - 1 - PAST), step + 1):
        try:
            found[one] = stored_batch(run, one, segment)
        except DataError as error:
            if one == step:
                if trace is None or trace.batch is None:
                    raise
                found[one] = trace.batch
            instead = "is the one of the trace" if one == step else "is left out"
            notices.append(f"the batch of step {one} {instead}: {error}")
    return found


def _drawn(
    run: Run, step: int, segment: int, experiment: Experiment | None, factory: str | None, notices: list[str]
) -> dict[int, Arrays]:
    from ..rebuild import rebuild
    from ..replaying.as_found import left_as_found
    from ..replaying.preparation import undisturbed  # imports MLX
    from .redraw import redraw_through

    with undisturbed(), left_as_found(experiment):
        sampler = (experiment or rebuild(run.manifest, run.path, factory)).sampler
        drawn = redraw_through(run, sampler, max(1, step - 1 - PAST), step, segment, notices)
    return {one: as_numpy(batch) for one, batch in drawn.items()}


def _of_batch(step: int, batches: dict[int, Arrays], trace: Trace | None) -> pd.DataFrame:
    whole, batch = batches[step], _with_rows(batches[step])
    if not batch:
        return pd.DataFrame({"step": step, "row": range(len(whole)), "text": [_described(array) for array in whole]})
    past = {one: _with_rows(batches[one]) for one in range(step - PAST, step) if one in batches}
    past = {one: other for one, other in past.items() if other}
    if _is_tokens(batch):
        before = {one: Contents.of(other) for one, other in past.items() if _is_tokens(other)}
        rows = facts(step, Contents.of(batch), before)
        rows["text"] = ["".join(f"⟨{token}⟩" for token in row) for row in batch[0].tolist()]
    else:
        keys = rowfacts.row_keys(batch)
        rows = pd.DataFrame({"step": step, "row": range(len(batch[0]))})
        rows["copy_of"] = pd.array(rowfacts.alike(keys), dtype="Int64")
        rows["seen_at"] = last_seen(keys, {one: rowfacts.row_keys(other) for one, other in past.items()})
        rows["text"] = ["; ".join(_described(array[row]) for array in batch) for row in range(len(batch[0]))]
    return with_losses(rows, trace)


def _with_rows(batch: Sequence[np.ndarray]) -> Arrays:
    """Those arrays that have rows, if all have as many. An empty one says something of the batch, not of a row."""
    if not all(array.ndim for array in batch):
        return ()
    found = tuple(array for array in batch if len(array))
    return found if len({len(array) for array in found}) == 1 else ()


def _is_tokens(batch: Sequence[np.ndarray]) -> bool:
    first = batch[0]
    whole = first.dtype.kind in "iu" and first.ndim == 2
    return whole and int(first.min(initial=0)) >= 0 and int(first.max(initial=0)) < VOCABULARY


def _described(array: Any) -> str:
    """`float32[8] -1.2 to 0.9`: type, shape, and the range of the finite values; of few the values themselves."""
    array = np.asarray(array)
    head, values = f"{array.dtype}{list(array.shape)}", array.ravel()
    if values.dtype.kind == "c":
        head, values = f"{head} magnitudes", np.abs(values)
    if values.dtype.kind == "b":
        return f"{head} {int(values.sum())} of {values.size} true"
    if values.size <= FEW:
        return f"{head} {' '.join(f'{value:.6g}' for value in values.tolist())}".rstrip()
    finite = values[np.isfinite(values)]
    broken = f", {values.size - finite.size} not finite" if finite.size < values.size else ""
    return f"{head} {finite.min():.6g} to {finite.max():.6g}{broken}" if finite.size else f"{head}{broken[1:]}"


def _say_of_losses(run: Run, step: int, trace: Trace | None, frame: pd.DataFrame, notices: list[str]) -> None:
    own = frame[frame["step"] == step]
    if own["share"].notna().any():
        if trace is not None and (unknown := int(trace.rows["targets"].isna().sum())):
            notices.append(
                f"the mean loss a token of {unknown} of {len(own)} rows is not known: a loss of 0 may be a target or "
                'none, and nothing says which; a loss function that returns {"token_loss": …, "mask": …} does'
            )
        return
    if trace is None:
        notices.append(f"step {step} was not replayed, so the losses of its rows are not known")
    elif trace.record.row_loss is None:
        notices.append(f"the trace of step {step} has no loss of each row: {_why_no_rows(run, trace)}")


def _why_no_rows(run: Run, trace: Trace) -> str:
    how = 'the loss function must return it beside the mean, as (loss, {"token_loss": …})'
    if not run.manifest.own_step or trace.record.certified_probe:
        return how
    if trace.record.certified_probe is None:
        why = f": {trace.record.probe_unmade}" if trace.record.probe_unmade else ""
        return f"of a step of your own the probe pass finds it, by the loss function, and none was made{why}"
    return (
        "of a step of your own the probe pass finds it, by the loss function, whose loss and gradients must then be "
        "the step's to the bit, and they are not"
    )
