"""A loop that hands over its batches itself and begins them again when its run is gone on with: those used are passed.

Nothing is computed for them: each is held against the hash that the run logged, and its logged loss is returned. Knows
a run and batches; nothing of steps or recorders.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

from ..bits import bits_float
from ..errors import ExperimentError
from ..experiment import Batch, batch_hash
from ..run import Run
from ..step import Loss

log = logging.getLogger("workbench")


class Repeated:
    """Asked for each batch of a loop, from the first on, until `ended`.

    Args:
        run: that the loop goes on with.
        segment: on the way to which its steps are.
        last: the step whose state training goes on from.
        restore: puts the experiment in that state; called when the last batch has been passed, for the loop may have
            changed weights or drawn random numbers meanwhile, as it did before.

    Attributes:
        passed: batches so far.
        ended: the next batch is to be trained on.
    """

    def __init__(self, run: Run, segment: int, last: int, restore: Callable[[], None]) -> None:
        self._run, self._segment, self._last, self._restore = run, segment, last, restore
        self._first = run.manifest.segments[0].start + 1
        self.passed, self.ended = 0, last < self._first

    def take(self, batch: Batch) -> Loss | None:
        """The loss that the run logged for this batch; None: it is to be trained on.

        Raises:
            ExperimentError: the loop began with the run's first batch, and goes on with others than the run; or the run
                does not say which batch a step used.
        """
        if self.ended:
            return None
        found, step = batch_hash(batch), self._first + self.passed
        if not self.passed and not self._begins_again(found):
            self._end()
            return None
        hashed, loss = self._logged(step)
        if hashed != found:
            raise ExperimentError(
                f"the loop began with the first batch of {self._run.path} again, but its batch for step {step} has the "
                f"hash {found}, and the run's had {hashed}: it hands over other batches each time, so the run "
                "can't be gone on with from its beginning. Seed what they are drawn with (random numbers of MLX that "
                f"the loop draws between steps depend on those steps), or begin with the batch of step {self._last + 1}"
            )
        self.passed += 1
        if step == self._last:
            self._restore()
            self._end()
        return Loss(bits_float(loss))

    def _end(self) -> None:
        self.ended = True
        self._restore = lambda: None  # which holds a state

    def unfinished(self) -> str | None:
        """A sentence, if the loop ended before the state was reached that training goes on from."""
        if self.ended or not self.passed:
            return None
        return (
            f"the loop ended after {self.passed} batches, all of which {self._run.path} had used already: nothing was "
            f"trained. Its state is that of step {self._last}; a loop that is to go on from there begins with the "
            f"batch of step {self._last + 1}"
        )

    def _begins_again(self, found: str) -> bool:
        steps = range(self._first, self._run.telemetry.last_step(self._segment) + 1)
        used = [step for step in steps if (line := self._run.line(step, self._segment)) and line.batch_hash == found]
        nxt = self._last + 1
        if self._first in used:
            log.warning(
                "The loop begins with the first batch of %s again: the batches of steps %d to %d are compared with the "
                "run's, and not trained on again. Training goes on with that of step %d.",
                *(self._run.path, self._first, self._last, nxt),
            )
            if len(used) > 1:
                warnings.warn(
                    f"the run used its first batch again at step {used[1]}, so a loop that goes on by itself might "
                    "begin with it, too; it is taken for one that begins again. If this one begins with the batch of "
                    f"step {nxt}, hand its batches over as the sampler, from the run's first on",
                    stacklevel=5,
                )
            return True
        earlier = [step for step in used if step <= self._last]
        if earlier and nxt not in used:
            warnings.warn(
                f"the first batch handed over is taken as that of step {nxt}, and {self._run.path} used the same one "
                f"at step {earlier[-1]}: a loop that is rerun from its beginning begins with the batch of step "
                f"{self._first}, and one that goes on with the batch of step {nxt}",
                stacklevel=5,
            )
        if not used:
            log.warning(
                "The first batch handed over is none that %s has used: it is taken as that of step %d. A loop that is "
                "to begin again must hand over the run's first batch; one that draws batches with MLX's random numbers "
                "can't, for these depend on the steps between.",
                *(self._run.path, nxt),
            )
        return False

    def _logged(self, step: int) -> tuple[str, str]:
        """Hash of the batch of a step, and the bits of its loss."""
        line = self._run.line(step, self._segment)
        if line is None or not isinstance(line.batch_hash, str) or not isinstance(line.loss_bits, str):
            raise ExperimentError(
                f"the telemetry of {self._run.path} does not say which batch step {step} used, or its loss, so the "
                f"loop can't begin again; begin with the batch of step {self._last + 1}"
            )
        return line.batch_hash, line.loss_bits
