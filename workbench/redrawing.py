"""Whether a sampler gives a batch again from its cursor, and if not, why: it reads ahead, or depends on something else.

Knows samplers; nothing of steps, folders or recorders.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np

from .errors import ExperimentError
from .experiment import Batch, Sampler, as_batch, batch_hash, random_key, read_cursor, set_random_key
from .numbered_batch import numpy_of

AHEAD = 64  # batches among which one that comes too early is looked for


class Generators:
    """The random states of Python and numpy that a whole process shares, at one moment."""

    def __init__(self) -> None:
        self._then = self._now()

    def moved(self) -> list[str]:
        """Those that have been drawn from since, by name."""
        return [name for name, state in self._now().items() if state != self._then[name]]

    def put_back(self) -> None:
        """Gives them the states that they had."""
        if moved := self.moved():
            (kind, words, *rest), state = self._then["numpy.random"], self._then["Python's random"]
            if "numpy.random" in moved:
                np.random.set_state((kind, np.frombuffer(words, np.uint32), *rest))
            if "Python's random" in moved:
                random.setstate(state)

    def _now(self) -> dict[str, Any]:
        kind, words, *rest = np.random.get_state(legacy=True)
        return {"Python's random": random.getstate(), "numpy.random": (kind, np.asarray(words).tobytes(), *rest)}


def draw_again(sampler: Sampler, batch: Batch, cursor: dict[str, Any], number: int, first: dict[str, Any]) -> Batch:
    """Draws the batch that the sampler gave after `cursor`, where the sampler has been put back already.

    Args:
        batch: what a step uses.
        number: of that batch since `first`, from 1.
        first: the cursor before batch 1.

    Raises:
        ExperimentError: it is another batch.
    """
    generators = Generators()
    numpy = bool(numpy_of(batch))
    drawn = _next(sampler, numpy=numpy)
    moved = generators.moved()
    if drawn is not None and batch_hash(drawn) == batch_hash(batch):
        return drawn
    said = f"drawn again from the cursor {cursor}, its batch is another than the one that the step was given"
    if moved:
        raise ExperimentError(
            f"{said}: the sampler draws from {' and '.join(moved)}, whose state its cursor does not hold; use a "
            "generator of its own, seeded from what the cursor says"
        )
    if drawn is not None and (ahead := _ahead(sampler, first, drawn, number, numpy=numpy)):
        raise ExperimentError(
            f"{said}: the cursor is off by {ahead}. It stands after a batch fetched ahead, {ahead} after the one "
            "handed out last; state_dict() must say where the stream stands after the batch handed out"
        )
    raise ExperimentError(
        f"{said}: load_state_dict does not put the stream where state_dict said it stood, or the batch is not as the "
        "sampler gave it (then do in the sampler, or in the loss function, what the loop does to it)"
    )


def refuse_other_cursor(sampler: Sampler, cursor: dict[str, Any]) -> None:
    """After a batch has been drawn again the cursor must be the one after it.

    Raises:
        ExperimentError: it is another.
    """
    if (now := read_cursor(sampler)) != cursor:
        raise ExperimentError(
            f"after its batch the sampler's cursor was {cursor}, and after the same batch drawn again it is {now}: it "
            "counts more than the batches handed out. A loop that draws ahead must do so behind a state_dict of its own"
        )


def check_cursor(
    sampler: Sampler,
    batch: Batch,
    *,
    before: dict[str, Any],
    after: dict[str, Any],
    key: tuple[int, int],
    number: int,
    first: dict[str, Any],
) -> None:
    """Draws a batch again, and leaves sampler and random state as they were.

    Args:
        before, after: the sampler's cursor before and after the batch was drawn.
        key: the random state before it was drawn.
        number, first: see `draw_again`.

    Raises:
        ExperimentError: it is another batch, or the cursor after it is another.
    """
    left = random_key()
    set_random_key(key)
    sampler.load_state_dict(dict(before))
    draw_again(sampler, batch, before, number, first)
    refuse_other_cursor(sampler, after)
    set_random_key(left)


def _next(sampler: Iterator[Any], *, numpy: bool) -> Batch | None:
    try:
        return as_batch(next(sampler), numpy=numpy)
    except StopIteration:
        return None


def _ahead(sampler: Sampler, first: dict[str, Any], drawn: Batch, number: int, *, numpy: bool) -> int:
    """How many batches after batch `number` of the stream from `first` the drawn one comes; 0: it was not found."""
    wanted = batch_hash(drawn)
    sampler.load_state_dict(dict(first))
    for place in range(1, number + AHEAD + 1):
        found = _next(sampler, numpy=numpy)
        if found is None:
            break
        if batch_hash(found) == wanted:
            return max(place - number, 0)
    return 0
