"""Did the run go on from a state other than the one that it had left, and is that what made the spike?

The clue is `Run.seam`. The proof is a counterfactual: the steps from there on, from the state that was left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..checkpoints import checkpoint_reader
from ..errors import WorkbenchError
from ..forks import state_at
from ..recorded.layout import CHECKPOINTS
from ..run import Run
from ..seams import state_segment
from ..snapshot import State
from .counterfactual import Shot, Trials
from .damage import Damage, damages

# A level that lasts for more than half of the window of spike detection is a new level, no longer a spike
# (`spikes.SpikeDetector`), and the default window is 50: what a resume broke shows within this many steps or never.
REACH = 25


@dataclass(frozen=True)
class Seam:
    """A segment that started from another state than the one that was left.

    Attributes:
        segment: it; parent: the segment whose state was left, after step `start`.
        lanes: of the state that differ.
    """

    segment: int
    parent: int
    start: int
    lanes: list[str]


@dataclass
class Resumed:
    """What came of redoing the steps after a seam from the state that was left.

    Attributes:
        left: that state; None: it can't be had, and `why` says why.
        shots: the steps from the seam on, from that state.
        damages: what differs in the state that the segment started from.
    """

    seam: Seam
    left: State | None = None
    why: str = ""
    shots: list[Shot] = field(default_factory=list)
    damages: list[Damage] = field(default_factory=list)


def seams(run: Run, segment: int, step: int) -> Iterator[Seam]:
    """Seams at most `REACH` steps before a step on the way to it, the latest first."""
    for entry in reversed(run.manifest.segments):
        on_the_way = entry.parent is not None and run.manifest.lineage(segment, entry.start + 1) == entry.segment
        if on_the_way and entry.start < step <= entry.start + REACH and (lanes := run.seam(entry.segment)):
            assert entry.parent is not None
            holder = state_segment(run.manifest, run.checkpoints, entry.start, entry.parent)
            yield Seam(entry.segment, holder, entry.start, lanes)


def redone(trials: Trials, seam: Seam, *, beyond: int, **opening: object) -> Resumed:
    """The steps after a seam once more, from the state that was left.

    Args:
        beyond: steps after N to perform too.
        opening: `experiment` or `factory`, for a run of another loop whose left state has no checkpoint.
    """
    run = trials.scene.run
    try:
        with trials.scene.at_rest():  # the replay that it may take uses the same experiment
            left = state_at(run, seam.start, segment=seam.parent, **opening)[0]  # type: ignore[arg-type]
        started = checkpoint_reader.read(run.path / CHECKPOINTS, seam.start, seam.segment, run.manifest.run)
    except WorkbenchError as error:
        return Resumed(seam, why=str(error))
    parameters = [parameter.path for parameter in run.manifest.parameters]
    found = Resumed(seam, left, damages=damages(left, started, parameters))
    found.shots = trials.drawn(left, beyond=beyond)
    return found
