"""The doctor's answer in one sentence. Knows the counts only; runs nothing and imports no MLX."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..enumeration import listed
from .diagnosis import SUFFIX, OperationRow, SelfTest, StepRow, named


def conclude(
    operations: Sequence[OperationRow],
    step: Sequence[StepRow],
    test: SelfTest,
    *,
    elsewhere: Collection[str] = (),
    fresh: bool = True,
) -> str:
    """The answer for a machine.

    Args:
        elsewhere: names of operations that the examined step does not contain.
        fresh: whether fresh processes took part.
    """
    if refusal := _blind(test):
        return refusal
    vary = [row for row in operations if row.distinct > 1]
    good, bad = [row for row in step if row.distinct == 1], [row for row in step if row.distinct > 1]
    where = "on this machine" if fresh else "within one process on this machine"
    clauses = [f"Replay is bit-exact {where} for {_spans(good)}"] if good else []
    explained: set[str] = set()
    if bad:
        causes = [row for row in vary if row.name not in elsewhere and _takes_part(row, bad, operations)]
        explained = {row.name for row in causes}
        why = named(causes, operations) or f"no operation of the catalogue, but {_first(bad)}"
        clauses.append(f"{'not bit-exact' if good else f'Replay is not bit-exact {where}'} for {_spans(bad)}: {why}")
    sound = {(row.name, row.dtype) for row in operations if row.distinct == 1}
    rest = [row for row in vary if row.name not in explained and (row.name + SUFFIX, row.dtype) not in sound]
    if rest:
        clauses.append(f"not bit-exact for a model that uses {named(rest, operations)}")
    return "; ".join(clauses) + "."


def _takes_part(row: OperationRow, bad: Sequence[StepRow], operations: Sequence[OperationRow]) -> bool:
    """Whether one of these steps performs the operation: with deterministic operations the replaced ones are not."""
    replaced = any(other.name == row.name + SUFFIX for other in operations)
    settings = {other.deterministic for other in bad if other.dtype == row.dtype}
    return (not row.name.endswith(SUFFIX) and False in settings) or (not replaced and True in settings)


def conclude_run(name: str, step: Sequence[StepRow], varying: int, test: SelfTest) -> str:
    """The answer for a run.

    Args:
        step: the run's own setting first.
        varying: how many gradients vary in it.
    """
    if refusal := _blind(test):
        return refusal
    own = step[0]
    how = f"{own.dtype}, {own.mode}, {own.operations} operations"
    times = f"{own.repeats} repetitions here" + (f" and {own.processes} in a fresh process" if own.processes else "")
    if own.distinct == 1:
        where = "on this machine" if own.processes else "within one process on this machine"
        return f"Replay is bit-exact {where} for {name} ({how}): {times} gave one result."
    module = f" (module {own.module})" if own.module else ""
    more = f"; {varying} gradients vary in all" if varying > 1 else ""
    said = f"Replay is not bit-exact on this machine for {name} ({how}): the {own.first}{module} varies first{more}"
    if own.first == "batch":
        said += ", so its sampler does not give the same batch from the same cursor"
    if not own.deterministic and any(row.deterministic and row.distinct == 1 for row in step):
        said += "; with deterministic operations (the default) it would be exact, so record with them"
    return said + "."


def _blind(test: SelfTest) -> str:
    missed = test.planted - test.found
    return (
        f"Nothing is proven: the doctor missed {missed} of {test.planted} one-bit changes that it planted itself."
        * (missed > 0)
    )


def _first(rows: Sequence[StepRow]) -> str:
    return f"the {rows[0].first} varies first"


def _spans(rows: Sequence[StepRow]) -> str:
    """Settings in words, shortest form first: `float32 and bfloat16, eager and compiled, with stock operations`."""
    operations: dict[str, list[str]] = {}
    for deterministic in (True, False):
        some = [(row.dtype, row.mode) for row in rows if row.deterministic == deterministic]
        if some:
            name = "with deterministic operations (the default)" if deterministic else "with stock operations"
            operations.setdefault(_product(some), []).append(name)
    return " and for ".join(f"{what}, {listed(names)}" for what, names in operations.items())


def _product(pairs: Sequence[tuple[str, str]]) -> str:
    dtypes, modes = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (0, 1))
    if len(pairs) == len(dtypes) * len(modes):
        return f"{listed(dtypes)}, {listed(modes)}"
    return listed([f"{dtype} {mode}" for dtype, mode in pairs])
