"""A sampler, and its cursor: where its stream of batches stands. Knows JSON; nothing of batches or experiments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from .errors import ExperimentError
from .plain_json import plain_json


@runtime_checkable
class Sampler(Protocol):
    """A stream of batches that knows where it stands.

    `state_dict()` is the cursor: a few JSON values that say where the stream stands after the batch handed out last,
    never after one that was fetched ahead. `load_state_dict(cursor)` puts the stream there.
    """

    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, cursor: dict[str, Any]) -> None: ...


def read_cursor(sampler: Sampler) -> dict[str, Any]:
    """The sampler's cursor, copied all the way down: a sampler may hand out the object that it goes on changing.

    Raises:
        ExperimentError: JSON would not give the same cursor again (a tuple becomes a list, and that is all).
    """
    cursor = plain_json(sampler.state_dict(), "the sampler's cursor", "state_dict()")
    if not isinstance(cursor, dict):
        raise ExperimentError(f"the sampler's cursor is a {type(cursor).__name__}; expected a dict of JSON values")
    return cursor
