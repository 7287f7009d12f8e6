"""A loop that hands over its batches itself and begins them again when its run is gone on with: those used are passed.

Nothing is computed for them: each is held against the hash that the run logged, its logged loss is returned, and the
random state of MLX is the one that the step left, so that a loop which draws from it between steps draws the same.
Knows a run and batches; nothing of steps or recorders.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import mlx.core as mx

from ..bits import bits_float
from ..errors import ExperimentError
from ..experiment import Batch, batch_hash, random_key, set_random_key
from ..run import Run
from .random_keys import Key, left_by
from .returned_loss import ReturnedLoss
from .users_line import warn

log = logging.getLogger("workbench")


class Repeated:
    """Asked for each batch of a loop, from the first on, until `ended`.

    Args:
        run: that the loop goes on with.
        segment: on the way to which its steps are.
        last: the step whose state training goes on from.
        restore: puts the experiment in that state; called when the last batch has been passed, for the loop may have
            changed weights or drawn random numbers meanwhile, as it did before.
        began: called once it is known that the loop begins again, before anything is put back.
        begins_again: whether the loop does, or goes on with the batch after `last`; None: its first batch tells.

    Attributes:
        passed: batches so far.
        ended: the next batch is to be trained on.
    """

    def __init__(
        self,
        run: Run,
        segment: int,
        last: int,
        restore: Callable[[], None],
        began: Callable[[], None],
        begins_again: bool | None = None,
    ) -> None:
        self._run, self._segment, self._last, self._restore, self._began = run, segment, last, restore, began
        self._said, self._key = begins_again, random_key()
        self._first = run.manifest.segments[0].start + 1
        self.passed, self.ended = 0, last < self._first or begins_again is False

    def take(self, batch: Batch, *, asked: bool = False) -> ReturnedLoss | None:
        """The loss that the run logged for this batch; None: it is to be trained on.

        Args:
            asked: whether the loop has asked for the step that training goes on from.

        Raises:
            ExperimentError: the loop began with the run's first batch, and goes on with others than the run; or the run
                does not say which batch a step used; or whether the loop begins again or goes on can't be told.
        """
        if self.ended:
            self._warn_of_another(batch)
            return None
        found, step = batch_hash(batch), self._first + self.passed
        if not self.passed:
            if not self._begins_again(found, asked):
                self._end()
                return None
            self._began()
        hashed, loss, key = self._logged(step)
        if hashed != found:
            raise ExperimentError(
                f"the loop began with the first batch of {self._run.path} again, but its batch for step {step} has the "
                f"hash {found}, and the run's had {hashed}: it hands over other batches each time, so the run "
                "can't be gone on with from its beginning. Seed what they are drawn with (mx.random.seed before the "
                f"recorder is made), or begin with the batch of step {self._last + 1} and pass begins_again=False"
            )
        self.passed += 1
        if key is not None:
            set_random_key(key)
        if step == self._last:
            self._restore()
            self._end()
        return ReturnedLoss(bits_float(loss), getattr(mx, self._run.manifest.loss))

    def _warn_of_another(self, batch: Batch) -> None:
        """Of a loop that goes on: once, if the run had used another batch before it broke off."""
        line = self._run.line(self._last + 1, self._segment) if self._said is False else None
        self._said = None
        if line is not None and isinstance(line.batch_hash, str) and line.batch_hash != batch_hash(batch):
            warn(
                f"the batch of step {self._last + 1} is another than the one that {self._run.path} used before it was "
                "broken off: the run goes on otherwise than it would have without a break (numbers that the loop drew "
                "after the last checkpoint are not drawn again)",
            )

    def _end(self) -> None:
        self.ended = True
        self._restore = self._began = lambda: None  # which hold a state

    def unfinished(self) -> str | None:
        """A sentence, if the loop ended before the state was reached that training goes on from."""
        if self.ended or not self.passed:
            return None
        return (
            f"the loop ended after {self.passed} batches, all of which {self._run.path} had used already: nothing was "
            f"trained. Its state is that of step {self._last}; a loop that is to go on from there begins with the "
            f"batch of step {self._last + 1}"
        )

    def _begins_again(self, found: str, asked: bool) -> bool:
        steps = range(self._first, self._run.telemetry.last_step(self._segment) + 1)
        used = [step for step in steps if (line := self._run.line(step, self._segment)) and line.batch_hash == found]
        nxt = self._last + 1
        self._refuse_unclear(self._first in used, nxt in used, asked)
        if self._first in used:
            log.warning(
                "The loop begins with the first batch of %s again: the batches of steps %d to %d are compared with the "
                "run's, and not trained on again. Training goes on with that of step %d.",
                *(self._run.path, self._first, self._last, nxt),
            )
            if len(used) > 1:
                warn(
                    f"the run used its first batch again at step {used[1]}, so a loop that goes on by itself might "
                    "begin with it, too; it is taken for one that begins again. If this one begins with the batch of "
                    f"step {nxt}, hand its batches over as the sampler, from the run's first on",
                )
            return True
        earlier = [step for step in used if step <= self._last]
        if earlier and nxt not in used:
            warn(
                f"the first batch handed over is taken as that of step {nxt}, and {self._run.path} used the same one "
                f"at step {earlier[-1]}: a loop that is rerun from its beginning begins with the batch of step "
                f"{self._first}, and one that goes on with the batch of step {nxt}",
            )
        if not used:
            log.warning(
                "The first batch handed over is none that %s has used: it is taken as that of step %d. A loop that is "
                "to begin again must hand over the run's first batch; one that draws batches with MLX's random numbers "
                "can't, for these depend on the steps between.",
                *(self._run.path, nxt),
            )
        return False

    def _refuse_unclear(self, first: bool, nxt: bool, asked: bool) -> None:
        """
        Args:
            first, nxt: whether the loop's first batch is the run's first, and the one after `last`.
        """
        if self._said and not first:
            raise ExperimentError(
                f"begins_again=True, but the first batch handed over is not the first of {self._run.path}: it is drawn "
                "otherwise each time. Seed what it is drawn with before the recorder is made"
            )
        if self._said is None and first and asked:
            raise ExperimentError(
                f"the loop has asked for recorder.step_number ({self._last}), as one that goes on from there does, and "
                f"its first batch is the first of {self._run.path}, as of one that begins again: which of the two it "
                f"is can't be told. {self._how()}"
            )
        if self._said is None and not first and not nxt and random_key() != self._key:
            raise ExperimentError(
                f"the loop drew random numbers of MLX, and its first batch is none that {self._run.path} used: it may "
                f"be another than a run without a break would have at step {self._last + 1}. {self._how()}"
            )

    def _how(self) -> str:
        return (
            "Pass begins_again=True if it hands over its batches from the run's first on (those used are passed over), "
            "and seed them (mx.random.seed before the recorder is made); pass begins_again=False if its first batch is "
            f"that of step {self._last + 1}, as in `for step in range(recorder.step_number, steps)`: it then draws "
            "from the random state that the last step left"
        )

    def _logged(self, step: int) -> tuple[str, str, Key | None]:
        """Hash of the batch of a step, the bits of its loss, and the random state that it left, if that is known."""
        line = self._run.line(step, self._segment)
        if line is None or not isinstance(line.batch_hash, str) or not isinstance(line.loss_bits, str):
            raise ExperimentError(
                f"the telemetry of {self._run.path} does not say which batch step {step} used, or its loss, so the "
                f"loop can't begin again; begin with the batch of step {self._last + 1}"
            )
        rng = line.state.get("rng") if isinstance(line.state, dict) else None
        return line.batch_hash, line.loss_bits, left_by(random_key(), rng) if isinstance(rng, str) else None
