"""Samplers whose batches reach a step in the form in which they did when a run was recorded.

Knows batches and samplers; nothing of runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .batch_arrays import Batch, as_batch
from .cursors import Sampler


class OfNumpy:
    """A sampler whose arrays of numpy reach the step as such, as they did when the run was recorded."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return as_batch(next(self._sampler), numpy=True)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        self._sampler.load_state_dict(cursor)


class WithoutNumbers:
    """A sampler whose batches are of arrays alone, as they were in runs recorded before numbers were kept."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return tuple(as_batch(next(self._sampler)))

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, cursor: dict[str, Any]) -> None:
        self._sampler.load_state_dict(cursor)
