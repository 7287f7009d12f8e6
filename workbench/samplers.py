"""A sampler for data that is indexed: anything with `__len__` and `__getitem__`.

The order of each epoch is a seeded permutation, computed index by index (`trainer.permutation`, whose order no
platform or numpy version changes), so the cursor is a few numbers whatever the size. Knows numpy; nothing of MLX or
experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from .errors import DataError
from .trainer.permutation import permute


class Indexed(Protocol):
    """A data set."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


def stacked(items: Sequence[Any]) -> tuple[np.ndarray, ...]:
    """Items as a batch: arrays, or tuples (lists) of arrays, stacked along a new leading axis."""
    rows = [item if isinstance(item, (tuple, list)) else (item,) for item in items]
    return tuple(np.stack([np.asarray(part) for part in parts]) for parts in zip(*rows, strict=True))


class IndexedSampler:
    """Batches of an indexed data set, each epoch in an order of its own, which follows from the seed.

    Args:
        dataset: `dataset[i]` gives item i, the same whenever it is asked.
        batch_size: items a batch.
        seed: from 0 to 2**64 - 1.
        shuffle: False: in the data set's own order.
        drop_last: leave out the items of an epoch that fill no batch; False: a smaller last batch.
        epochs: how often the data is gone through; None: without end.
        collate: makes a batch (an array or a tuple of arrays) of a list of items.

    Attributes:
        epoch, index: where the stream stands: items of this epoch handed out so far.

    Raises:
        DataError: an argument is out of range, or the data set is smaller than a batch.
    """

    def __init__(
        self,
        dataset: Indexed,
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        drop_last: bool = True,
        epochs: int | None = None,
        collate: Callable[[list[Any]], Any] = stacked,
    ) -> None:
        size = len(dataset)
        if batch_size < 1 or not 0 <= seed < 2**64:
            raise DataError(f"batch_size is {batch_size} and seed {seed}; expected at least 1, and 0 to 2**64 - 1")
        if size < (batch_size if drop_last else 1):
            raise DataError(f"the data set has {size} items, which fill no batch of {batch_size}")
        self._dataset, self._collate = dataset, collate
        self._size, self._batch, self._seed, self._shuffle = size, batch_size, seed, shuffle
        self._end = size - size % batch_size if drop_last else size  # of an epoch
        self._epochs = epochs
        self.epoch = self.index = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        epoch, start = (self.epoch + 1, 0) if self.index >= self._end else (self.epoch, self.index)
        if self._epochs is not None and epoch >= self._epochs:
            raise StopIteration
        stop = min(start + self._batch, self._end)
        places = np.arange(start, stop, dtype=np.uint64)
        if self._shuffle:
            places = permute(places, np.full(places.shape, epoch, np.uint64), self._seed, self._size)
        batch = self._collate([self._dataset[int(place)] for place in places])
        self.epoch, self.index = epoch, stop
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"seed": self._seed, "size": self._size, "batch": self._batch, "epoch": self.epoch, "index": self.index}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        """
        Raises:
            DataError: the cursor is of another data set, batch size or seed.
        """
        own = self.state_dict()
        if unlike := [
            f"{key} is {own[key]}, and {cursor.get(key)!r} in the cursor"
            for key in ("seed", "size", "batch")
            if cursor.get(key) != own[key]
        ]:
            raise DataError(f"the cursor is not of this data set and order: {'; '.join(unlike)}")
        self.epoch, self.index = cursor["epoch"], cursor["index"]
