"""Batches of a stream that doesn't know where it stands, or that the loop hands over itself: a recorder stores them.

The cursor is the number of the last step. Knows nothing of MLX, stores or experiments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .errors import ExperimentError


class PlainBatches:
    """
    Args:
        stream: an iterable of batches, gone through once; None: the loop hands each batch to the recorder.

    Attributes:
        verify: called when a resume passes over a batch that the run has used already, with the step, that batch, and
            the iterator of those that follow; raises if it is another one.
    """

    def __init__(self, stream: Iterable[Any] | None) -> None:
        if stream is not None and not isinstance(stream, Iterable):
            raise ExperimentError(
                f"the sampler is a {type(stream).__name__}; expected an iterator with state_dict() and "
                "load_state_dict(cursor), any other iterable of batches, or none if the loop hands over each batch"
            )
        self._stream = None if stream is None else iter(stream)
        self._step = self._drawn = 0
        self.verify: Callable[[int, Any, Iterator[Any]], None] = lambda step, batch, following: None

    @property
    def handed_over(self) -> bool:
        """Whether the loop hands over each batch."""
        return self._stream is None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._stream is None:
            raise ExperimentError(
                "no sampler was given, so there is nothing to draw batches from; hand each to recorder.step(batch)"
            )
        batch = next(self._stream)
        self._drawn += 1
        return batch

    def consumed(self) -> None:
        """A step is about to use a batch."""
        self._step += 1

    def state_dict(self) -> dict[str, int]:
        return {"step": self._step}

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        """To the state after a step. Batches that it lies ahead of what was drawn are drawn, verified, and left out.

        Raises:
            ExperimentError: the cursor is that of another kind of sampler, or the stream ends before it.
        """
        if cursor.keys() != {"step"} or type(cursor["step"]) is not int:
            raise ExperimentError(
                f"the cursor {cursor} is not that of batches that a recorder stored; pass the sampler that wrote it"
            )
        self._step = cursor["step"]
        while self._stream is not None and self._drawn < self._step:
            try:
                self.verify(self._drawn + 1, next(self), self)
            except StopIteration:
                raise ExperimentError(
                    f"the iterator ended after {self._drawn} batches, before that of step {self._step}; pass one that "
                    "gives the run's batches from its first step on, or none and hand each batch to recorder.step"
                ) from None
