"""The state that the next step depends on: captured, put back strictly, and compared.

Knows MLX arrays and experiments; nothing of files (`checkpoints` has them), telemetry or trainers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from .enumeration import some
from .errors import CheckpointError
from .experiment import (
    Experiment,
    ensure_initialised,
    kept_arrays,
    put_arrays,
    put_kept,
    random_key,
    set_random_key,
    settled,
    state_arrays,
    state_handles,
)
from .extras import of_object
from .fingerprint import lanes, method_here
from .frozen import Frozen
from .host import raw_views
from .plain_json import copied
from .ranks.rank_parts import RankPart
from .rate_scale import rate_paths

_WORD = np.dtype(np.uint64)  # in which most bytes are compared: faster than one by one
_STRETCH = 1 << 17  # elements compared at a time, so that what says of each whether it is alike stays in the cache


@dataclass(frozen=True)
class State:
    """A state in memory. MLX arrays are immutable, so holding references is a snapshot and costs no copy.

    Attributes:
        step: N, counted from 1; state 0 is the initialisation.
        weights: every parameter of the model, frozen ones too, by dotted path.
        optimizer: every array of the optimizer's state, by dotted path, and of `Experiment.extra`, by "path@name".
        rng: the two words of the random state.
        cursor: where the data stream stands after the batch of step N.
        frozen: what knows which of the weights no step trains; None: nothing is known.
        ranks: of a data-parallel run, what each rank has for itself; `rng` and `cursor` are then this rank's.
    """

    step: int
    weights: dict[str, mx.array]
    optimizer: dict[str, mx.array]
    rng: tuple[int, int]
    cursor: dict[str, Any]
    frozen: Frozen | None = None
    ranks: tuple[RankPart, ...] | None = None

    def lanes(self, method: str | None = None) -> dict[str, str]:
        """Fingerprint of each lane, by a method of `fingerprint`; None: the one that costs least here."""
        return lanes(self.weights, self.optimizer, self.rng, self.cursor, method or method_here())


def capture(
    experiment: Experiment,
    step: int,
    cursor: dict[str, Any],
    rng: tuple[int, int] | None = None,
    arrays: tuple[dict[str, mx.array], dict[str, mx.array]] | None = None,
) -> State:
    """The experiment's present state. New handles of the same buffers: `a += 1` in a user's code changes its handle.

    Args:
        rng: the random state that the step left, where this thread's may have moved on since; None: this thread's.
        arrays: new handles of its arrays, weights and optimizer, where somebody has found them just now.
    """
    if arrays is not None:
        return State(step, *arrays, rng or random_key(), copied(cursor), experiment.frozen)
    weights, optimizer = state_handles(experiment)
    mx.eval(weights, optimizer)
    return State(step, weights, optimizer, rng or random_key(), copied(cursor), experiment.frozen)


def restore(experiment: Experiment, state: State) -> None:
    """Puts a state into an experiment, in place, and its sampler at the cursor.

    Arrays go into the existing containers, so a step that is already compiled goes on working. The random state comes
    last: positioning a sampler may draw from it.

    Raises:
        CheckpointError: an entry is missing, unexpected, or of another shape or dtype. Nothing is changed then.
    """
    ensure_initialised(experiment.optimizer, experiment.model)
    trained: dict[str, Any] = dict(tree_flatten(experiment.model.trainable_parameters()))
    _refuse_differences("weights", state.weights, state_arrays(experiment.model), trained)
    optimizer = {path: array for path, array in kept_arrays(experiment).items() if not of_object(path)}
    fixed = {path: array for path, array in state.optimizer.items() if not of_object(path)}
    rates = {path for path in rate_paths(experiment.optimizer) if path in fixed and path in optimizer}
    # `optimizer.learning_rate = 0` makes it an integer, in the middle of a run: it is what the checkpoint says.
    fixed, optimizer = ({path: one[path] for path in one.keys() - rates} for one in (fixed, optimizer))
    _refuse_differences("optimizer state", fixed, optimizer, optimizer.keys())
    experiment.sampler.load_state_dict(copied(state.cursor))  # which may keep the object and change it
    # New handles here too, and laid out as `Experiment.prepare` leaves them.
    weights = {path: settled(array) for path, array in state.weights.items()}
    optimizer = {path: settled(array) for path, array in state.optimizer.items()}
    mx.eval(weights, optimizer)
    put_arrays(experiment.model, weights)
    put_kept(experiment, optimizer)
    set_random_key(state.rng)


def _refuse_differences(
    what: str, found: dict[str, mx.array], expected: dict[str, mx.array], typed: Collection[str]
) -> None:
    """`typed` are the paths whose dtype must agree. The forward pass of a BatchNorm in bfloat16 makes its running
    statistics float32, so what is not trained takes the checkpoint's."""
    problems = []
    if missing := sorted(expected.keys() - found.keys()):
        problems.append(f"missing {some(missing)}")
    if extra := sorted(found.keys() - expected.keys()):
        problems.append(f"unexpected {some(extra)}")
    for path in sorted(found.keys() & expected.keys()):
        have, want = found[path], expected[path]
        if have.shape != want.shape or (have.dtype != want.dtype and path in typed):
            problems.append(f"{path} is {have.dtype}{have.shape}, expected {want.dtype}{want.shape}")
    if problems:
        raise CheckpointError(
            f"the {what} of the checkpoint and this model and optimizer do not fit: "
            f"{some(problems, joint=';')}. Rebuild the experiment that the run was recorded with."
        )


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether two contiguous arrays of the same type and shape have the same bytes. Not the same values: NaN is unlike
    itself, and 0 is like -0."""
    left, right = (array.reshape(-1).view(np.uint8) for array in (one, other))
    if left.size % _WORD.itemsize == 0:
        left, right = left.view(_WORD), right.view(_WORD)
    starts = range(0, left.size, _STRETCH)
    return all(np.array_equal(left[at : at + _STRETCH], right[at : at + _STRETCH]) for at in starts)


def same_arrays(left: Mapping[str, mx.array], right: Mapping[str, mx.array]) -> bool:
    """Whether two mappings have the same arrays under the same paths: type, shape and every bit."""
    if left.keys() != right.keys():
        return False
    for path, one in left.items():
        other = right[path]
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        plain = [array.view(mx.uint16) if array.dtype == mx.bfloat16 else copy(array) for array in (one, other)]
        mx.eval(plain)
        # As they lie: the gradient of a matrix is laid out transposed, and making it row-major would cost more.
        ours, theirs = (np.asarray(array).view(f"u{one.itemsize}") for array in plain)
        if not np.array_equal(ours, theirs):
            return False
    return True


def first_difference(left: State, right: State) -> str | None:
    """Name of the first tensor (or `rng`, `cursor`) whose bytes differ between two states; None if none does."""
    for what, ours, theirs in (
        ("weights", left.weights, right.weights),
        ("optimizer", left.optimizer, right.optimizer),
    ):
        for path in sorted(ours.keys() | theirs.keys()):
            if path not in ours or path not in theirs:
                return f"{what} {path} (only in one)"
            if ours[path].dtype != theirs[path].dtype or ours[path].shape != theirs[path].shape:
                return f"{what} {path} (dtype or shape)"
            one, other = raw_views([ours[path], theirs[path]])
            if not same_bytes(one, other):
                return f"{what} {path}"
    if left.rng != right.rng:
        return "rng"
    return None if left.cursor == right.cursor else "cursor"
