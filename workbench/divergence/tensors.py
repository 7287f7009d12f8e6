"""The tensors of one performed step in order of execution, and the first in which two performances differ.

They are what the step itself returns and leaves behind, never outputs added for the purpose: in a compiled graph those
can move fusion boundaries and so bits. Knows performed steps and states; nothing of files or of who performed them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from ..bits import ulp_difference
from ..experiment import Batch
from ..files import canonical_json
from ..fingerprint import lane_of
from ..host import raw_views
from ..snapshot import State
from ..step import StepResult
from .difference import TensorDifference

Key = tuple[str, str]  # kind and path, see `TensorDifference`
Tensors = dict[Key, mx.array]
Raw = tuple[str, np.ndarray]  # dtype, and the elements; bfloat16 as uint16


def step_tensors(
    layers: Sequence[str], owned: Mapping[str, Sequence[str]], batch: Batch, result: StepResult, after: State
) -> Tensors:
    """All that a step read, computed and left behind, in order of execution.

    Args:
        layers: paths in order of execution.
        owned: the trainable parameters of each layer.
        batch: what the step was performed on.
        result: what it returned.
        after: the state that it left.
    """
    found: Tensors = {("batch", str(number)): array for number, array in enumerate(batch)}
    found |= {("activation", path): result.activations[path] for path in layers if path in result.activations}
    if result.token_loss is not None:
        found["token_loss", ""] = result.token_loss
    found["loss", ""] = mx.array(np.asarray(result.loss))
    for layer in reversed(layers):  # gradients flow backwards
        found |= {("gradient", path): result.gradients[path] for path in owned[layer]}
    found["grad_norm", ""] = mx.array(np.asarray(result.grad_norm))
    return found | state_tensors([path for layer in layers for path in owned[layer]], after)


def state_tensors(parameters: Sequence[str], state: State) -> Tensors:
    """The tensors of a state as an update computes them: Adam's m and v, the weights, all else.

    Args:
        parameters: in the order in which they are to be named.
    """
    place = {path: number for number, path in enumerate(parameters)}

    def order(path: str) -> tuple[int, str]:
        owner = path.rpartition(".")[0]
        names = (path, owner, owner.split(".", 2)[-1])  # of a weight, a moment, a moment of a MultiOptimizer's member
        return min(place.get(name, len(place)) for name in names), path

    moments = {lane: [path for path in state.optimizer if lane_of(path) == lane] for lane in ("adam_m", "adam_v")}
    found: Tensors = {}
    for lane, paths in moments.items():
        found |= {(lane, path.rpartition(".")[0]): state.optimizer[path] for path in sorted(paths, key=order)}
    found |= {("weight", path): state.weights[path] for path in sorted(state.weights, key=order)}
    found |= {("other", path): array for path, array in state.optimizer.items() if lane_of(path) == "other"}
    found["rng", ""] = mx.array(state.rng, mx.uint32)
    found["cursor", ""] = mx.array(np.frombuffer(canonical_json(state.cursor), np.uint8))
    return found


def raw(array: mx.array) -> Raw:
    return str(array.dtype).removeprefix("mlx.core."), raw_views([array])[0]


def differing(reference: Tensors, other: Tensors) -> tuple[TensorDifference | None, int]:
    """The first tensor that differs, in the reference's order, and how many do. What only one has differs."""
    first, count = None, 0
    for key in dict.fromkeys((*reference, *other)):
        sides = [raw(tensors[key]) if key in tensors else None for tensors in (reference, other)]
        if same_bits(*sides):
            continue
        count += 1
        first = first or difference(key, *sides)
    return first, count


def same_bits(left: Raw | None, right: Raw | None) -> bool:
    if left is None or right is None or left[0] != right[0] or left[1].shape != right[1].shape:
        return False
    ours, theirs = (np.ascontiguousarray(side[1]).reshape(-1).view(np.uint8) for side in (left, right))
    return bool(np.array_equal(ours, theirs))


def difference(key: Key, reference: Raw | None, other: Raw | None) -> TensorDifference:
    """Describes two tensors of which it is known that they differ."""
    one = reference or other
    assert one is not None
    known: dict[str, Any] = {"kind": key[0], "path": key[1], "dtype": one[0], "shape": list(one[1].shape)}
    if key[0] == "cursor":  # text, whose bytes say nothing to anyone
        sides = [side[1].tobytes().decode() if side else "nothing" for side in (reference, other)]
        return TensorDifference(**known, detail=f"{sides[0]} against {sides[1]}")
    if reference is None or other is None:
        return TensorDifference(**known, detail=f"only in {'the other' if reference is None else 'the recorded'} way")
    shown = [f"{dtype}{list(elements.shape)}" for dtype, elements in (reference, other)]
    if shown[0] != shown[1]:
        return TensorDifference(**known, detail=f"{shown[0]} against {shown[1]}")
    apart = ulp_difference(reference[1], other[1], reference[0])
    return TensorDifference(
        **known,
        size=apart.size,
        differing=apart.differing,
        nonfinite=apart.nonfinite,
        max_ulp=apart.max_ulp,
        max_abs=apart.max_abs,
    )
