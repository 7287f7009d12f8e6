"""One rank's rows of each batch that the ranks of a data-parallel run share. Knows any sampler of numpy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from .prefetch import Sampler


class Shard:
    """Rows `rank * rows` to `(rank + 1) * rows - 1` of each batch of a sampler, which every rank draws whole: so all
    ranks have the sampler's own cursor, and what one of them trained on can be drawn again anywhere.

    Args:
        sampler: its batches are tuples of arrays with `ranks * rows` rows each.
        rank: from 0.
        rows: of one rank.
    """

    def __init__(self, sampler: Sampler, rank: int, rows: int) -> None:
        self._sampler, self._rows = sampler, slice(rank * rows, (rank + 1) * rows)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> tuple[np.ndarray, ...]:
        return tuple(np.ascontiguousarray(array[self._rows]) for array in next(self._sampler))

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
