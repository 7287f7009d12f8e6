"""What a recorder was about when an exception cut it off, so that its next call can tell how far it got."""

from __future__ import annotations

from typing import Any, NamedTuple


class Line(NamedTuple):
    """A step whose line is being written: the state that the recorder is in once it is there.

    Attributes:
        step: the number of the step.
        cursor, rng: the place in the data, and the random state, after it.
        lanes: the fingerprints of its state.
    """

    step: int
    cursor: dict[str, Any]
    rng: tuple[int, int]
    lanes: dict[str, str]


class Opening(NamedTuple):
    """
    Attributes:
        before: the segment from which another one is being opened.
    """

    before: int
