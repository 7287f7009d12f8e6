"""The three badges: repeatable, faithful, sensitive (what "exact" means).

Knows what was compared; performs no step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import mlx.core as mx
import numpy as np

from .compare import ESSENTIAL, Item, missed_flips, overall, with_bits
from .experiment import Batch, batch_hash
from .fingerprint import lane_of
from .host import raw_views
from .numbered_batch import with_array
from .observe import Observation
from .snapshot import State, first_difference
from .trace import Difference, Gate, Gates

NOTHING = "the run recorded nothing to compare with"


def repeatable(unequal: Sequence[str]) -> Gate:
    if unequal:
        return Gate(
            verdict="mismatch",
            explanation=f"the same step from the same state gave other bits in this process: {', '.join(unequal)}",
        )
    return Gate(
        verdict="exact", explanation="the same step from the same state gave the same bits again in this process"
    )


def faithful(items: Mapping[str, Item], departed: Difference | None) -> Gate:
    compared = [name for name, item in items.items() if item.verdict != "unverified"]
    if departed is not None:
        return Gate(
            verdict="mismatch",
            explanation=f"{departed.where}: {departed.item} differs from the run at step {departed.step}",
        )
    verdict = overall(items)
    good = [name for name in compared if items[name].verdict == "exact"]
    explanation = f"{len(good)} of {len(compared)} recorded items have the run's bits"
    if verdict == "unverified":
        missing = [name for name in ESSENTIAL if name not in good]
        explanation = f"{explanation}, but the run did not record {', '.join(missing)}" if compared else NOTHING
    return Gate(verdict=verdict, explanation=explanation)


def shown(repeatable: Gate, faithful: Gate, sensitive: Gate) -> Gates:
    """The three together: a checker that missed a planted change makes nothing green."""
    if sensitive.verdict != "exact":
        why = "the checker missed a planted one-bit change, so its verdict says nothing"
        repeatable, faithful = (
            Gate(verdict="unverified", explanation=why) if gate.verdict == "exact" else gate
            for gate in (repeatable, faithful)
        )
    return Gates(repeatable=repeatable, faithful=faithful, sensitive=sensitive)


def sensitive(batch: Batch, after: State, observation: Observation) -> Gate:
    """Shows the checker one-bit changes: in each item, and in the real thing behind each lane and the batch."""
    evidence = observation.evidence()
    missed = missed_flips(evidence)
    planted = len(with_bits(evidence))
    where = max((index for index, array in enumerate(batch) if array.size), default=None)
    if where is None:
        missed.append("a bit of the batch, which is empty")
    elif batch_hash(with_array(batch, where, _flipped(batch[where]))) == observation.batch_hash:
        missed.append("a bit of the batch")
    sample = _sample(after)  # the fingerprints of all of it are compared already: here it is whether a bit is seen
    lanes = sample.lanes(observation.method)
    for lane, name, changed in _one_a_lane(sample):
        planted += 1
        found = changed.lanes(observation.method)
        if [other for other in lanes if found[other] != lanes[other]] != [lane] or first_difference(
            _only(sample, name), _only(changed, name)
        ) != name:
            missed.append(f"a bit of {name}")
    if missed:
        return Gate(verdict="mismatch", explanation=f"the checker did not see a planted one-bit change in {missed}")
    return Gate(verdict="exact", explanation=f"the checker saw each of {planted + 1} planted one-bit changes")


def _sample(state: State) -> State:
    """The state with one tensor a lane: hashing whole ones once for each change would cost more than the step's own."""
    weights = {path: array for path, array in state.weights.items() if array.size}
    kept: dict[str, str] = {}
    for path, array in state.optimizer.items():
        if array.size:
            kept.setdefault(lane_of(path), path)
    return replace(
        state,
        weights=dict(list(weights.items())[:1]),
        optimizer={path: state.optimizer[path] for path in kept.values()},
    )


def _one_a_lane(state: State) -> Iterator[tuple[str, str, State]]:
    """Lane, name of what was changed in it (as `first_difference` has it), and the state with that change."""
    found: dict[str, tuple[str, State]] = {}
    for path, array in state.weights.items():
        if array.size and "weights" not in found:
            changed = replace(state, weights=state.weights | {path: _flipped(array)})
            found["weights"] = (f"weights {path}", changed)
    for path, array in state.optimizer.items():
        if array.size and lane_of(path) not in found:
            changed = replace(state, optimizer=state.optimizer | {path: _flipped(array)})
            found[lane_of(path)] = (f"optimizer {path}", changed)
    high, low = state.rng
    found["rng"] = ("rng", replace(state, rng=(high, low ^ 1)))
    number = next((key for key, value in state.cursor.items() if type(value) is int), "planted")
    moved = state.cursor | {number: state.cursor.get(number, 0) ^ 1}
    found["cursor"] = ("cursor", replace(state, cursor=moved))
    for lane, (name, changed) in found.items():
        yield lane, name, changed


def _only(state: State, name: str) -> State:
    """The state without all tensors but the named one: comparing two whole ones would cost as much as hashing them."""
    what, _, path = name.partition(" ")
    return replace(
        state,
        weights={path: state.weights[path]} if what == "weights" else {},
        optimizer={path: state.optimizer[path]} if what == "optimizer" else {},
    )


def _flipped(array: mx.array) -> mx.array:
    """A copy with the lowest bit of its middle byte changed."""
    if array.size == 0:
        return array
    (view,) = raw_views([array])
    raw = np.frombuffer(bytearray(view.tobytes()), dtype=np.uint8).copy()
    raw[raw.size // 2] ^= 1
    values = raw.view(view.dtype).reshape(view.shape)
    changed = mx.array(values, array.dtype) if array.dtype == mx.float64 else mx.array(values)
    return changed.view(array.dtype) if changed.dtype != array.dtype else changed
