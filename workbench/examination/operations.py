"""One operation, repeated on fixed inputs: how many different results does it give?

Knows arrays and their bits; nothing of particular operations (`catalogue`), steps or reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..fingerprint import fingerprint

REPEATS = 8  # on an H200, stock embedding and attention gradients gave 6 results in 6 repeats
UNEXPECTED = "not expected, no remedy known; please report it with the output of --json"

Run = Callable[[], Any]  # performs the operation on its fixed inputs: an array, or a tree of them


@dataclass(frozen=True)
class Operation:
    """One row of the catalogue.

    Attributes:
        name: in plain words.
        dtype: of its inputs.
        make: draws the inputs and returns what is to be repeated; on each call anew, so that memory is freed between.
        remedy: what to do where its results vary.
        elsewhere: not a part of a plain transformer's step.
    """

    name: str
    dtype: str
    make: Callable[[], Run]
    remedy: str = UNEXPECTED
    elsewhere: bool = False


def count_distinct(run: Run, repeats: int, disturb: Callable[[int], None] = lambda number: None) -> int:
    """How many different results, by raw bytes, `repeats` runs give. `disturb` is called before each of them."""
    found = set()
    for number in range(repeats):
        disturb(number)
        leaves: Any = tree_flatten(run())
        arrays = {path: leaf for path, leaf in leaves if isinstance(leaf, mx.array)}
        mx.eval(arrays)
        found.add(fingerprint(arrays))
    return len(found)


def disturbance() -> Callable[[int], None]:
    """Other work for a GPU to do at the same time, different before each repeat, so that scheduling varies as in a real
    step. On the CPU nothing: its operations run one after the other."""
    if mx.default_device().type == mx.DeviceType.cpu:
        return lambda number: None
    side = mx.new_stream(mx.default_device())

    def disturb(number: int) -> None:
        with mx.stream(side):
            square = mx.ones((512 * (1 + number % 3), 1024))
            for _ in range(number % 4):
                square = square @ mx.ones((1024, 1024)) * 1e-3
            mx.async_eval(square)

    return disturb


def with_one_bit_flipped(array: mx.array) -> mx.array:
    """A copy with the lowest bit of its middle byte changed."""
    raw = array.reshape(-1).view(mx.uint8)
    where = mx.arange(raw.size) == raw.size // 2
    return mx.where(where, raw ^ mx.array(1, mx.uint8), raw).view(array.dtype).reshape(array.shape)
