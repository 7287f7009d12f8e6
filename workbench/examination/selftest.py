"""The doctor's proof that it can see: changes of one bit, planted where it looks. Knows steps and counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx

from ..compare import missed_flips
from ..experiment import as_batch, read_cursor
from ..observe import observe
from ..snapshot import State, capture, first_difference, restore
from ..step import Stepper
from . import operations
from .catalogue import FLOATS, Inputs
from .diagnosis import SelfTest
from .operations import REPEATS, with_one_bit_flipped
from .repeats import digests, tally


def self_test(stepper: Stepper, start: State) -> SelfTest:
    """Plants changes of one bit where the doctor looks, and counts those that it sees: in the result of an operation,
    in each item of a step's evidence, in a gradient, and in a tensor of the state."""
    seen = [_sees_operation(dtype) for dtype in FLOATS]
    experiment = stepper.experiment
    restore(experiment, start)
    batch = as_batch(next(experiment.sampler))
    cursor = read_cursor(experiment.sampler)
    result = stepper(batch)
    evidence = observe(stepper, batch, result, cursor).evidence()
    missed = missed_flips(evidence)
    seen += [name not in missed for name in evidence]
    path = next(reversed(result.gradients))
    changed = replace(result, gradients=result.gradients | {path: with_one_bit_flipped(result.gradients[path])})
    counted = tally([dict(digests(stepper, batch, one)) for one in (result, changed)])
    seen.append((counted.distinct, counted.first) == (2, f"gradient of {path}"))
    after = capture(experiment, start.step + 1, cursor)
    for lane, name, other in _one_bit_apart(after):
        lanes, theirs = after.lanes(), other.lanes()
        apart = [one for one in lanes if lanes[one] != theirs[one]]
        seen.append(len(apart) == 1 and apart[0].startswith(lane) and first_difference(after, other) == name)
    return SelfTest(len(seen), sum(seen))


def _sees_operation(dtype: str) -> bool:
    values = Inputs(dtype).normal(64)
    calls = itertools.count(1)

    def planted() -> mx.array:
        return with_one_bit_flipped(values) if next(calls) == REPEATS else values

    return (operations.count_distinct(planted, REPEATS), operations.count_distinct(lambda: values, REPEATS)) == (2, 1)


def _one_bit_apart(state: State) -> Iterator[tuple[str, str, State]]:
    """The beginning of a lane's name, what was changed as `first_difference` has it, and the state with that change."""
    path = next(reversed(state.weights))
    yield "weights", f"weights {path}", replace(state, weights=state.weights | _flipped(state.weights, path))
    moments = [path for path in state.optimizer if path.endswith(".m") and state.optimizer[path].size]
    for path in moments[:1]:
        yield "adam_m", f"optimizer {path}", replace(state, optimizer=state.optimizer | _flipped(state.optimizer, path))


def _flipped(arrays: dict[str, mx.array], path: str) -> dict[str, mx.array]:
    return {path: with_one_bit_flipped(arrays[path])}
