"""Parameters that were one array and ceased to be: `head.weight = embedding.weight` is no tie in MLX.

A model's parameters are what its paths hold, and an optimizer puts a new array at each: two paths to one array have a
gradient each, and part at the first update. What ties them is to compute with one, as `embedding.as_linear(x)` does.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from ..enumeration import some


class Shared:
    """Which parameters of a model are one array; made before anything lays them out.

    Args:
        model: of which only what is trained is looked at.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        holders: dict[int, list[str]] = {}
        arrays: dict[str, mx.array] = dict(tree_flatten(model.trainable_parameters()))
        for path, array in arrays.items():
            holders.setdefault(id(array), []).append(path)
        self._groups = [paths for paths in holders.values() if len(paths) > 1]

    def parted(self) -> list[str]:
        """A sentence for each that is one no longer, once; to be asked after a step."""
        groups, self._groups = self._groups, []
        if not groups:
            return []
        now = dict(tree_flatten(self._model.parameters()))
        return [
            f"{some(paths)} were one array when the first step began, and differ after it: in MLX that ties no "
            "weights, each is trained by itself. To tie them, leave one out and compute with the other (such as "
            "`embedding.as_linear(x)`)."
            for paths in groups
            if any(path in now and not _equal(now[paths[0]], now[path]) for path in paths[1:])
        ]


def _equal(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and bool(mx.array_equal(one, other, equal_nan=True))
