"""What a step that an exception cut off has left behind, as the next call of the recorder finds it.

Knows where a recording stands, and the last line in its folder; nothing of loops.
"""

from __future__ import annotations

import contextlib

from ..errors import ExperimentError, WorkbenchError
from ..ranks.crew import SHARED
from ..run import Run
from .judgement import Judge
from .standing import Standing


def take_up(standing: Standing, judge: Judge) -> None:
    """After a step that was cut off while its line was written: it counts if the line is there, else it is none.
    After one that was cut off before it began: its batch was not used."""
    unwritten = not standing.whole and standing.out.logbook is None  # the first one, of which nothing was written
    if standing.drawing or unwritten:
        standing.draws.take_back(standing.at.cursor)
        standing.drawing = False
    if standing.line is None:
        return
    if standing.out.logged == (standing.segment, standing.line.step):
        standing.follow(standing.line)
        return
    if standing.crew is None:
        with contextlib.suppress(OSError, WorkbenchError):  # it has judged a step that is none
            judge.warm_up(Run(standing.out.path), standing.segment, standing.at.step)
    standing.line = None


def half_done(standing: Standing) -> str | None:
    """What is not as the last whole step left it, in words."""
    at, draws = standing.at, standing.draws
    draws.take_back(at.cursor)
    try:
        lanes = standing.as_left().lanes(standing.out.method)
    except RuntimeError as error:
        if "without a primitive" not in str(error):
            raise
        raise ExperimentError(
            f"step {at.step + 1} was cut off while MLX traced it, which leaves no numbers in model and optimizer "
            "(without a recorder, too). Go on from the last checkpoint, in a new process (resume=True)"
        ) from error
    unlike = [f"the lane {lane}" for lane in SHARED if lanes[lane] != at.lanes.get(lane)]
    if not unlike and standing.opening is not None:
        return "the state"  # and back, but a segment was begun from it
    return next(iter(unlike), "the data cursor" if draws.passed_over(at.cursor) else None)
