"""Replays of many steps, of one run or of many, spread over processes: a verdict each.

    wb.replay_many([("runs/a", 4218), ("runs/b", 977)], workers=2)
    wb.open_run("runs/a").replay_many(range(100, 201, 10))

Steps that have their nearest checkpoint in common are one piece of work: one restore, one roll-forward. Nothing is
written, no step is repeated, and no probe pass made: `Run.replay` is for looking at one of them. Plans and collects;
imports no MLX before a step is performed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from .errors import ChangedByHand, ReplayError, WorkbenchError
from .fan_out import fan_out
from .recorded.plan import asked_steps
from .run import Run

if TYPE_CHECKING:
    import pandas as pd

Progress = Callable[[int, int, str], None]
_ALONE = threading.Lock()  # a step that is measured holds on to classes of layers: see `capture`


class Replayed(msgspec.Struct):
    """A step of `replay_many`; the columns of its table.

    Attributes:
        run: the folder, as it was given.
        verdict: "exact": all recorded items have the run's bits, and so had those of every step on the way;
            "mismatch"; "unverified": there is nothing to compare with, or this machine computes differently; None: it
            could not be replayed.
        first_difference: the earliest, on the way or at the step itself; None if there is none.
        compared: how many recorded items were equal.
        loss: replayed, float32.
        checkpoint: step of the checkpoint it was rolled forward from.
        rolled: steps from there to this one, itself left out.
        error: why it could not be replayed, a sentence; None: it was.
    """

    run: str
    step: int
    segment: int | None = None
    verdict: str | None = None
    first_difference: str | None = None
    compared: int = 0
    loss: float | None = None
    checkpoint: int | None = None
    rolled: int | None = None
    error: str | None = None


class Group(msgspec.Struct):
    """Steps of a run, ascending, that are rolled forward to from one checkpoint.

    Attributes:
        run: the folder, as it was given; `path`: absolute, for workers that stand elsewhere.
    """

    run: str
    path: str
    segment: int
    checkpoint: int
    steps: list[int]
    factory: str | None
    other_environment: bool


def replay_many(
    items: Iterable[tuple[Run | str | os.PathLike[str], int]],
    *,
    workers: int | None = None,
    executor: Executor | None = None,
    segment: int | None = None,
    factory: str | None = None,
    other_environment: bool = False,
    progress: Progress | None = None,
) -> pd.DataFrame:
    """Replays steps and compares each with what its run recorded. Writes nothing.

    A step that can't be replayed is a row that says why, and stops no other.

    Args:
        items: (run, step) each; the run open, or its folder.
        workers: processes; None: as many as processors may be used; 0: none, all is done here. Each holds a model and
            its state in memory. A script that asks for processes must do so under `if __name__ == "__main__":`, for
            each of them imports it.
        executor: another engine, any `concurrent.futures.Executor` whose workers see the same folders:
            `client.get_executor()` of dask.distributed (`pip install spike-workbench[dask]`), or loky's. Dask limits
            the threads of its workers, which may move bits, so that they refuse to replay: before the cluster is made,
            `dask.config.set({"distributed.nanny.pre-spawn-environ": {}})`.
        segment: where steps stand in several segments that disagree.
        factory: of runs of your own loop, the "module:function" that rebuilds them: passing it is consent to import it.
        other_environment: go on although this machine computes differently; those rows are then "unverified".
        progress: called as `progress(done, total, what)`, in steps performed; an exception that it raises stops all.

    Returns:
        One row an item, in their order: the attributes of `Replayed`.

    Raises:
        RunError: a folder holds no run.
        ExperimentError: `workers` or `executor` is none.
        KeyboardInterrupt: after a Ctrl-C; no process is left.
    """
    import pandas as pd

    opened: dict[str, Run] = {}
    rows: list[Replayed] = []
    for given, asked in items:
        name = str(given.path if isinstance(given, Run) else os.fspath(given))
        if name not in opened:
            opened[name] = given if isinstance(given, Run) else Run(Path(given))
        rows += [Replayed(name, step) for step in asked_steps(asked)]
    groups = _grouped(rows, opened, segment, factory, other_environment)
    total = sum(group.steps[-1] - group.checkpoint for group in groups)
    places = {(row.run, row.step): row for row in rows}
    count = 0

    def done(number: int, result: list[Replayed] | Exception) -> None:
        nonlocal count
        group = groups[number]
        if isinstance(result, Exception):
            said = _sentence(result)
            result = [Replayed(group.run, step, group.segment, error=said) for step in group.steps]
        for one in result:
            places[one.run, one.step] = one
        count += group.steps[-1] - group.checkpoint
        if progress is not None:
            progress(count, total, f"{Path(group.path).name}, steps {group.steps[0]} to {group.steps[-1]}")

    if progress is not None and groups:
        progress(0, total, f"{len(groups)} roll-forwards")
    fan_out(performed, groups, workers=workers, executor=executor, done=done)
    names = Replayed.__struct_fields__
    found = [[getattr(places[row.run, row.step], name) for name in names] for row in rows]
    whole = dict.fromkeys(("step", "compared"), "int64") | dict.fromkeys(("segment", "checkpoint", "rolled"), "Int64")
    return pd.DataFrame(found, columns=list(names), dtype=object).astype(whole | {"loss": "float64"})


def _grouped(
    rows: Sequence[Replayed], opened: dict[str, Run], segment: int | None, factory: str | None, other_environment: bool
) -> list[Group]:
    """Longest first, so that the last ones to be done are short; a row that can't be planned gets its error."""
    found: dict[tuple[str, int, tuple[int, int]], set[int]] = {}
    for row in rows:
        run = opened[row.run]
        try:
            if (why := run.unverifiable()) is not None:
                raise ReplayError(why)
            plan = run.plan(row.step, segment, passes=1)
        except WorkbenchError as error:
            row.error = _sentence(error)
        else:
            row.segment = plan.segment
            found.setdefault((row.run, plan.segment, plan.checkpoint), set()).add(row.step)
    groups = [
        Group(name, str(opened[name].path.absolute()), one, checkpoint[0], sorted(steps), factory, other_environment)
        for (name, one, checkpoint), steps in found.items()
    ]
    return sorted(groups, key=lambda group: group.checkpoint - group.steps[-1])


def performed(group: Group) -> list[Replayed]:
    """Replays the steps of a group, in the process that this is called in; there, one group at a time."""
    with _ALONE:
        return _performed(group)


def _performed(group: Group) -> list[Replayed]:
    from .proving import outcomes_of
    from .replaying.preparation import undisturbed

    found, waiting = [], list(group.steps)
    try:
        run = Run(Path(group.path))
        with undisturbed():
            for ready, outcome in outcomes_of(
                run,
                group.steps,
                group.segment,
                experiment=None,
                factory=group.factory,
                other_environment=group.other_environment,
            ):
                difference = outcome.first_difference
                verdict = "mismatch" if difference is not None else "exact" if outcome.exact else "unverified"
                found.append(
                    Replayed(
                        run=group.run,
                        step=outcome.step,
                        segment=group.segment,
                        verdict="unverified" if ready.unlike else verdict,
                        first_difference=None
                        if difference is None
                        else f"{difference.item} at step {difference.step} ({difference.where}): {difference.detail}",
                        compared=sum(item.verdict == "exact" for item in outcome.items.values()),
                        loss=float(outcome.observation.loss),
                        checkpoint=ready.plan.checkpoint[0],
                        rolled=outcome.step - 1 - ready.plan.checkpoint[0],
                    )
                )
                waiting.remove(outcome.step)
    except ChangedByHand as error:  # nothing was performed yet
        able = [step for step in waiting if error.step is not None and step < error.step]
        found += _performed(msgspec.structs.replace(group, steps=able)) if able else []
        found += [Replayed(group.run, step, group.segment, error=str(error)) for step in waiting if step not in able]
    except Exception as error:  # of any kind: a user's model raises what it likes
        said = _sentence(error)
        found += [Replayed(group.run, step, group.segment, error=said) for step in waiting]
    return found


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, WorkbenchError) else f"{type(error).__name__}: {error}"
