"""Whether what a data-parallel run says of its ranks agrees: each line with itself and with those beside it, and the
parts of each rank in a checkpoint with what that rank logged.

Knows lines and states; performs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..enumeration import some
from ..errors import WorkbenchError
from ..fingerprint import fingerprint_json
from ..lines.line import Line
from ..snapshot import State
from ..verification import Check
from .attendance import setup_of
from .own_line import complaint, own_line

if TYPE_CHECKING:
    from ..run import Run

OWN = ("batch_hash", "state.rng", "state.cursor")  # what hardly comes to be equal in two ranks at one step only


def check_ranks(run: Run) -> Iterator[Check]:
    """Checks of kind "telemetry" on the lines of a data-parallel run; none for another.

    A line leaves out what of a rank is as in rank 0. Where an entry lacks what others of its rank have, that was so, or
    it was dropped since: unverified, and only where the lines have no seals, which would tell.
    """
    if (setup := setup_of(run.manifest)) is None:
        return
    having, lacking = set[tuple[int, str]](), dict[tuple[int, str], list[int]]()
    for line in run.telemetry.lines:
        if line.type != "step" or not isinstance(line.step, int):
            continue
        if (wrong := complaint(line, setup.size)) is not None:
            told = f"the line of step {line.step} does not agree with itself: {wrong}"
            yield Check("telemetry", "ranks", "mismatch", told)
            return
        for rank in range(1, setup.size):
            entry = _own(line, rank)
            for name in OWN:
                if name in entry:
                    having.add((rank, name))
                else:
                    lacking.setdefault((rank, name), []).append(line.step)
    yield Check("telemetry", "ranks", "exact", f"each line has {setup.size} ranks, and the mean of their losses")
    if run.manifest.sealed:
        return
    for rank, name in sorted(having & lacking.keys()):
        steps = lacking[rank, name]
        which = f"step{'' if len(steps) == 1 else 's'} {some(steps)}"
        told = f"{name} is missing from the line of {which}, and others have it: "
        yield Check("telemetry", f"rank {rank}", "unverified", f"{told}it was that of rank 0, or was dropped since")


def _own(line: Line, rank: int) -> set[str]:
    """What an entry of a line has, of `state` each lane."""
    assert isinstance(line.ranks, list)
    entry = line.ranks[rank]
    state = entry.get("state")
    return {*entry, *(f"state.{lane}" for lane in (state if isinstance(state, dict) else ()))}


def differing_parts(run: Run, state: State, line: Line | None) -> str | None:
    """Which parts of which rank of a checkpoint are not those that it logged, in a phrase; None: none.

    Args:
        line: of the step, or of the segment's start, whose state it is.
    """
    setup = setup_of(run.manifest)
    if setup is None:
        return None
    if state.ranks is None or len(state.ranks) != setup.size:
        return f"it has the parts of {len(state.ranks or ())} ranks, and {setup.size} trained"
    if line is None:
        return None
    for rank, part in enumerate(state.ranks):
        try:
            logged = own_line(line, rank).evidence()
        except WorkbenchError as error:
            return str(error)
        found = {"rng": fingerprint_json(list(part.rng)), "cursor": fingerprint_json(part.cursor)}
        unlike = [lane for lane, value in found.items() if logged.get(f"state.{lane}", value) != value]
        if unlike:
            return f"{' and '.join(unlike)} of rank {rank} differ{'s' if len(unlike) == 1 else ''} from what it logged"
    return None
