"""The batches that a recorded loop draws, and where data and random state stood before each.

Knows samplers and stored batches; nothing of steps, telemetry or checkpoints.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ExperimentError
from ..experiment import Batch, Experiment, as_batch, batch_hash, random_key, read_cursor
from ..numbered_batch import without_numpy
from ..outside_state import of_sampler
from ..plain_batches import PlainBatches
from ..redrawing import Generators, check_cursor
from ..standins import other_threads
from ..stored_batches import BatchStore
from . import failed_writes


class Drawn(NamedTuple):
    """A batch that was handed out and not used yet: where data and random state stood before it was drawn."""

    cursor: dict[str, Any]
    key: tuple[int, int]
    key_after: tuple[int, int]  # another one if the sampler draws random numbers
    batch: Any  # as the sampler gave it


class Draws:
    """
    Args:
        experiment: whose sampler is drawn from.
        path: the run's folder, where the batches of a sampler without a cursor are stored.
        budget: bytes that they may take.
        check: whether the second batch is drawn twice.

    Attributes:
        drawn: the batch that the next step is to use; None: it is not drawn yet, or by the loop itself.
        left_out: steps whose batch is to be left out when it comes.
    """

    def __init__(self, experiment: Experiment, path: Path, budget: int, *, check: bool) -> None:
        self._experiment, self._path, self._check = experiment, path, check
        self._store = BatchStore(path, budget) if isinstance(experiment.sampler, PlainBatches) else None
        self._lacking: list[int] = []  # steps whose batch was not stored, since one was
        self._first: dict[str, Any] | None = None  # the cursor before the first batch
        self._as_drawn: bool | None = None  # the loop hands over the very objects it was given; None: unknown
        self._moves, self._told = False, False  # a batch moves the cursor; the user was told that one did not
        self.drawn: Drawn | None = None
        self.left_out: set[int] = set()

    @property
    def stored(self) -> bool:
        """Whether batches are stored, since they can't be drawn again."""
        return self._store is not None

    @property
    def handed_over(self) -> bool:
        """Whether the loop hands over each batch itself."""
        return isinstance(self._experiment.sampler, PlainBatches) and self._experiment.sampler.handed_over

    def draw(self) -> Any:
        """The sampler's next batch, as it gives it.

        Raises:
            StopIteration: there is none.
        """
        cursor, key = read_cursor(self._experiment.sampler), random_key()
        batch = next(self._experiment.sampler)
        self.drawn = Drawn(cursor, key, random_key(), batch)
        return batch

    def batch(self, given: Any) -> Batch:
        """What a loop or sampler gives, in the form in which the step is to get it.

        Raises:
            ExperimentError: it is no batch.
        """
        if self._experiment.numpy is False:
            return without_numpy(as_batch(given))
        return as_batch(given, numpy=True)

    def instead(self, number: int) -> Batch | None:
        """If the batch of a step is to be left out: draws the one after it, to be used in its place.

        Returns:
            That batch; None: the step's own is used, for it is not to be left out, or there is no other.
        """
        if number not in self.left_out:
            return None
        self.left_out.remove(number)
        cursor, key = read_cursor(self._experiment.sampler), random_key()
        other = next(self._experiment.sampler, None)
        if other is None:
            return None
        batch = self.batch(other)
        self.drawn = Drawn(cursor, key, random_key(), batch)
        return batch

    def place(self, left: dict[str, Any]) -> dict[str, Any]:
        """The cursor of the state that the next step starts from.

        Args:
            left: that of the state that the last step left.
        """
        return left if self.drawn is None else self.drawn.cursor

    def passed_over(self, left: dict[str, Any]) -> bool:
        """Whether a batch was drawn before that of the next step, and no step used it; `left` as of `place`."""
        return self.place(left) != left

    def take_back(self, left: dict[str, Any]) -> None:
        """After a step that was cut off: of batches that are stored, its own was not used; `left` as of `place`."""
        if self._store is not None:
            self._experiment.sampler.load_state_dict(left)

    def key(self) -> tuple[int, int]:
        """The random state between two steps: without what the sampler drew for a batch, which a replay draws again."""
        key = random_key()
        return self.drawn.key if self.drawn is not None and key == self.drawn.key_after else key

    def use(self, batch: Batch, number: int, left: dict[str, Any], *, first: bool) -> dict[str, Any]:
        """The cursor after the batch that step `number` is about to use. That of the second one is checked.

        Args:
            left: as of `place`.
            first: no step was performed before it.

        Raises:
            ExperimentError: the batch can't be drawn again from it, or no longer be stored.
        """
        sampler = self._experiment.sampler
        if isinstance(sampler, PlainBatches):
            assert self._store is not None
            self._store.refuse_beyond(batch)
            sampler.consumed()
            return read_cursor(sampler)
        cursor, before = read_cursor(sampler), self.place(left)
        if first:
            self._first = before
        elif self._check and self._first is not None:
            start, self._first = self._first, None
            generators, around = Generators(), of_sampler(self._experiment)
            try:
                check_cursor(sampler, batch, before=before, after=cursor, key=self.key(), number=2, first=start)
            except ExperimentError as error:
                raise ExperimentError(
                    f"step {number} can't be replayed: {error}. (self_check=False records it all the same)"
                ) from error
            if not other_threads():
                generators.put_back()
                if around is not None:
                    around.put_back()
        return cursor

    def repeated(self, number: int, left: dict[str, Any], cursor: dict[str, Any]) -> str | None:
        """A sentence, if step `number` is about to use no batch of its own, though its sampler gives each step one.
        Only the first time: it is a loop that makes several steps of a batch.

        Args:
            left: as of `place`.
            cursor: after the batch.
        """
        moved = cursor != self.place(left)
        again, self._moves = self._moves and not moved, self._moves or moved
        if not again or self._told:
            return None
        self._told = True
        return (
            f"step {number} was given a batch that an earlier step used: the cursor of the sampler is as step "
            f"{number - 1} left it. A replay draws the batch after it, so no step like this one can be replayed, "
            "nor any between it and the next checkpoint. Draw a batch for each step, or leave the sampler out: the "
            "recorder then stores the batches that it is given"
        )

    def altered(self, number: int, given: Any, batch: Batch) -> str | None:
        """A sentence, if step `number` is about to use another batch than the sampler gave, though the loop used to
        hand over the sampler's own. (Of one that converts each, the first two are compared.)

        Args:
            given: what the loop hands over.
            batch: that, as the step gets it.
        """
        if self.drawn is None or self.stored:
            return None
        mine, its = (list(one) if isinstance(one, (tuple, list)) else [one] for one in (self.drawn.batch, given))
        same = len(mine) == len(its) and all(one is other for one, other in zip(mine, its, strict=True))
        if self._as_drawn is None:
            self._as_drawn = same
        if same or not self._as_drawn or batch_hash(self.batch(self.drawn.batch)) == batch_hash(batch):
            return None
        return (
            f"step {number} can't be replayed: it was given another batch than the sampler gave for it, which is what "
            "a replay draws. Do in the sampler, or in the step, what the loop does to a batch; or leave the sampler "
            "out: the recorder then stores the batches that it is given"
        )

    def store(self, name: str, batch: Batch, step: int) -> str | None:
        """Stores the batch of a step under its hash, if batches are stored. Returns a sentence if it is the first that
        can't be, or the first that could be after several."""
        if self._store is None:
            return None
        try:
            self._store.put(name, batch)
        except ExperimentError as error:
            return f"step {step} can't be replayed: {error}"
        except OSError as error:
            self._lacking.append(step)
            return failed_writes.of_batch(step, error) if len(self._lacking) == 1 else None
        return self.lacking()

    def lacking(self) -> str | None:
        """A sentence on batches that were not stored, where no more than the first of several was told."""
        steps, self._lacking = self._lacking, []
        return failed_writes.of_batches(steps[0], steps[-1], len(steps)) if len(steps) > 1 else None

    def sync(self, step: int) -> str | None:
        """Makes what was stored durable, before the checkpoint of a step. Returns a sentence if that fails."""
        try:
            if self._store is not None:
                self._store.sync()
        except OSError as error:
            return failed_writes.of_checkpoint_without_batches(step, self._path, error)
        return None
