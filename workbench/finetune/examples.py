"""Batches of mlx-lm's examples, with a cursor: the very batches that `mlx_lm.tuner.trainer.iterate_batches` yields.

Tokens, truncation, padding and lengths are mlx-lm's own work; what is here is where in its order a batch stands.
Knows mlx-lm's datasets; nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import CheckpointError, ExperimentError
from .settings import mlx_lm
from .shuffles import Shuffles

Examples = Any  # mlx-lm's CacheDataset: example j is (tokens, length of the prompt), made on first use


class Batches:
    """The batches that a set of examples is cut into, before any shuffling.

    Args:
        examples: a CacheDataset of mlx-lm.
        size: examples a batch.
        longest: tokens an example at most; the rest is cut off.

    Raises:
        ExperimentError: there are fewer examples than a batch takes.
    """

    def __init__(self, examples: Examples, size: int, longest: int) -> None:
        if len(examples) < size:
            raise ExperimentError(
                f"batch_size is {size}, and one of the files of data has only {len(examples)} examples; expected more"
            )
        self._examples, self._size, self._longest = examples, size, longest
        order = sorted(range(len(examples)), key=examples.itemlen)
        self._rows = [order[start : start + size] for start in range(0, len(order) - size + 1, size)]
        self.truncated: set[int] = set()  # examples that were too long, of those used

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, number: int) -> list[int]:
        """Which examples batch `number` holds, by their place in the file."""
        return self._rows[number]

    def batch(self, number: int) -> tuple[mx.array, mx.array]:
        """Tokens, (size, width) int32, and what counts of each row, (size, 2) int32: after the prompt, up to the end.

        Width is mlx-lm's: a multiple of 32 and one more, at most the longest.
        """
        rows = []
        for place in self._rows[number]:
            tokens, offset = self._examples[place]
            if len(tokens) > self._longest:
                self.truncated.add(place)
            rows.append((tokens[: self._longest], offset))
        with _global_numpy_state_kept():
            tokens, lengths = next(mlx_lm("tuner.trainer").iterate_batches(_in_order(rows), self._size, self._longest))
        return tokens, lengths

    def in_order(self, numbers: Sequence[int]) -> Iterator[tuple[mx.array, mx.array]]:
        return (self.batch(number) for number in numbers)


def _in_order(rows: list[Any]) -> Examples:
    class Rows(mlx_lm("tuner.datasets").CacheDataset):  # type: ignore[misc]
        """Examples that stay in the order given: mlx-lm would sort them by length again."""

        def __init__(self) -> None:
            self._proc_data, self._data = rows, rows

        def itemlen(self, idx: int) -> int:
            return 0

    return Rows()


@contextmanager
def _global_numpy_state_kept() -> Iterator[None]:
    """mlx-lm shuffles even a single batch with numpy's global state, which belongs to the user's own code."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


class ExampleSampler:
    """mlx-lm's stream of training batches, one step at a time.

    Without accumulation a batch is mlx-lm's: tokens (B, T) int32 and lengths (B, 2) int32. A step of n micro-batches
    holds them one below the other, tokens padded with 0 to the widest, (n·B, T), lengths (n·B, 2), and a third array
    without elements, (n·B, 0, T_1, …, T_n), whose shape is the width of each: shapes are all that a compiled step knows
    when it is traced, and a micro-batch keeps its own width, for padding moves bits.

    Args:
        batches: of the training set.
        shuffles: their order.
        accumulate: micro-batches a step.
    """

    def __init__(self, batches: Batches, shuffles: Shuffles, accumulate: int) -> None:
        self.batches, self.shuffles, self.accumulate = batches, shuffles, accumulate
        self.iteration = 0  # of the micro-batch handed out last, counted from 1 as mlx-lm does

    def __iter__(self) -> ExampleSampler:
        return self

    def __next__(self) -> tuple[mx.array, ...]:
        parts = [self.batches.batch(number) for number in self.numbers(self.iteration + 1)]
        self.iteration += self.accumulate
        return parts[0] if len(parts) == 1 else packed(parts)

    def numbers(self, iteration: int) -> list[int]:
        """The batches of the step whose first micro-batch is `iteration`, as `Batches` numbers them."""
        places = [divmod(one - 1, len(self.batches)) for one in range(iteration, iteration + self.accumulate)]
        return [int(self.shuffles.training(epoch)[index]) for epoch, index in places]

    def rows(self, step: int) -> list[int]:
        """Which examples are in the batch of a step, row by row: lines of train.jsonl, counted from 0."""
        numbers = self.numbers((step - 1) * self.accumulate + 1)
        return [row for number in numbers for row in self.batches.rows(number)]

    def state_dict(self) -> dict[str, Any]:
        """The cursor: micro-batches consumed, as epochs and the place in the epoch, and the seed of the order."""
        epoch, index = divmod(self.iteration, len(self.batches))
        return {"seed": self.shuffles.seed, "epoch": epoch, "index": index}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        """Goes to a cursor.

        Raises:
            CheckpointError: it is not one of this stream.
        """
        numbers = [cursor.get(key) for key in ("seed", "epoch", "index")]
        whole = all(type(number) is int and number >= 0 for number in numbers) and len(cursor) == len(numbers)
        if not whole or cursor["seed"] != self.shuffles.seed or cursor["index"] >= len(self.batches):
            raise CheckpointError(
                f"the cursor {cursor} is not one of this data: expected seed {self.shuffles.seed}, an epoch, and an "
                f"index below {len(self.batches)}"
            )
        iteration = cursor["epoch"] * len(self.batches) + cursor["index"]
        if iteration % self.accumulate:
            raise CheckpointError(
                f"the cursor {cursor} stands after {iteration} micro-batches, in the middle of a step of "
                f"{self.accumulate}; expected a multiple of them"
            )
        self.iteration = iteration


def packed(parts: Sequence[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array, mx.array]:
    """The micro-batches of a step as one batch; see `ExampleSampler`."""
    widths = [tokens.shape[1] for tokens, _ in parts]
    tokens = mx.concatenate([mx.pad(part, [(0, 0), (0, max(widths) - part.shape[1])]) for part, _ in parts])
    lengths = mx.concatenate([lengths for _, lengths in parts])
    return tokens, lengths, mx.zeros((tokens.shape[0], 0, *widths), mx.int32)


def unpacked(tokens: mx.array, lengths: mx.array, widths: mx.array) -> list[tuple[mx.array, mx.array]]:
    """The inverse of `packed`.

    Raises:
        ExperimentError: the rows are not a multiple of the micro-batches: which of them lacks one can't be told.
    """
    shape, rows = widths.shape[2:], tokens.shape[0]
    if rows % len(shape):
        raise ExperimentError(
            f"{rows} rows can't be cut into the {len(shape)} micro-batches of this step; expected a multiple"
        )
    size = rows // len(shape)
    return [
        (tokens[number * size : (number + 1) * size, :width], lengths[number * size : (number + 1) * size])
        for number, width in enumerate(shape)
    ]
