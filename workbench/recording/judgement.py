"""What a recorder says of a step that it has performed: whether it is a spike, and whether it is unstable.

Knows numbers, and the run that they were logged to; nothing of states or MLX's arrays.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from ..bits import json_float
from ..recovery import Recovery, Stability
from ..run import Run
from ..spikes import Reading, SpikeDetector, SpikeSettings

TOLD = 5  # stretches of unstable steps that the log tells of: a run whose gradients are rough has hundreds
log = logging.getLogger("workbench")


class Judgement(NamedTuple):
    """
    Attributes:
        reading: what spike detection says of the step; None: it is off.
        unstable: why it is unstable; None if it is not.
    """

    reading: Reading | None
    unstable: str | None

    def fields(self) -> dict[str, Any]:
        """What of it is logged with the step."""
        found: dict[str, Any] = {}
        if self.reading is not None:
            average = self.reading.moving_average
            found |= {
                "ma": None if average is None else json_float(average),
                "spike": self.reading.rule is not None,
                "spike_rule": self.reading.rule,
            }
        return found if self.unstable is None else found | {"unstable": self.unstable}


class Judge:
    """Judges one step after another.

    Args:
        spikes: settings of spike detection; None: it is off.
        recovery: what makes a step unstable.
        tells: whether unstable steps are told of in the log.

    Attributes:
        last: what was said of the last step.
    """

    def __init__(self, spikes: SpikeSettings | None, recovery: Recovery, *, tells: bool) -> None:
        self._spikes, self._detector = spikes, SpikeDetector(spikes) if spikes else None
        self._stability = Stability(recovery)
        self._told = 0 if tells else TOLD
        self.last = Judgement(None, None)

    def judge(self, step: int, loss: float, grad_norm: float | None) -> Judgement:
        """Takes the next step, and tells of it if it is the first of a stretch of unstable ones.

        Args:
            grad_norm: None: of a step whose update was left out, and with it its gradients.
        """
        reading = None if self._detector is None else self._detector.update(step, loss, grad_norm)
        judged = Judgement(reading, self._stability.judge(loss, grad_norm))
        if judged.unstable is not None and self.last.unstable is None:
            self._tell(step, judged.unstable)
        self.last = judged
        return judged

    def warm_up(self, run: Run, segment: int, step: int) -> None:
        """Goes on as if there had been no break, with what it would remember of the way to the state of a step."""
        self._stability.reset()
        for norm in run.history(segment, step, self._stability.settings.window)["grad_norm"]:
            self._stability.judge(0.0, float(norm))
        if self._detector is None or self._spikes is None:
            return
        self._detector.reset()
        for row in run.history(segment, step, 6 * self._spikes.window).to_dict("records"):
            self._detector.update(
                row["step"],
                row["loss"] if row["loss_recorded"] else None,
                row["grad_norm"] if row["grad_norm_recorded"] else None,
            )

    def _tell(self, step: int, reason: str) -> None:
        self._told += 1
        if self._told <= TOLD:
            last = "; further ones are noted in the telemetry only" if self._told == TOLD else ""
            log.warning("step %d is unstable: %s%s", step, reason, last)
