"""Does a checkpoint lead back onto the run's own way? The state that it restores, and the steps from it on, each judged
against the same run as it went on past the checkpoint.

The two are told apart: a state that differs was saved or restored wrongly; a state that agrees, with steps that do not,
means that a step depends on something which no checkpoint holds. That a resumed run trains on plausibly shows neither.
The bridge between run folders and the core; writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from .compare import Item, compare_evidence, overall
from .errors import ReplayError
from .lines.line import LANES
from .replay import Outcome, Progress, replay_steps
from .replaying.preparation import Prepared, prepared, undisturbed
from .replaying.reasons import reasons
from .run import Run
from .trace import Difference, difference_at

if TYPE_CHECKING:
    import pandas as pd

Verdict = Literal["exact", "mismatch", "unverified"]


class Resumption(msgspec.Struct, frozen=True, kw_only=True):
    """What `Run.resumption` returns.

    Attributes:
        run: its name.
        checkpoint, segment: the state that was restored, and the segment whose telemetry it is compared with.
        asked: the last step that was asked for.
        state: the restored state, lane by lane, beside what the run logged of it.
        steps: each performed step with its items, up to the first that differs.
        state_difference, trajectory_difference: the first differing item of either, None where all agree.
        sensitive: whether the checker, shown one-bit changes, saw them.
        environment_differences: from the machine that recorded; with any, nothing is exact.
        notices: what the user should know beside it.
    """

    run: str
    checkpoint: int
    segment: int
    asked: int
    state: dict[str, Item]
    steps: dict[int, dict[str, Item]]
    state_difference: Difference | None
    trajectory_difference: Difference | None
    sensitive: bool
    environment_differences: list[str]
    notices: list[str]

    @property
    def restored_state(self) -> Verdict:
        """Exact: each lane was logged, and agrees."""
        if self.state_difference is not None:
            return "mismatch"
        return self._if_sure(all(item.verdict == "exact" for item in self.state.values()))

    @property
    def trajectory(self) -> Verdict:
        """Exact: every step that was asked for has the run's bits."""
        if self.trajectory_difference is not None:
            return "mismatch"
        return self._if_sure(bool(self.steps) and all(overall(items) == "exact" for items in self.steps.values()))

    def _if_sure(self, agrees: bool) -> Verdict:
        return "exact" if agrees and self.sensitive and not self.environment_differences else "unverified"

    @property
    def table(self) -> pd.DataFrame:
        """One row for the restored state and one a step: step, what ("restored state" or "trajectory"), compared,
        verdict, first (the first differing item), detail."""
        import pandas as pd

        rows = [_row(self.checkpoint, "restored state", self.state, self.state_difference, self.restored_state)]
        for step, items in self.steps.items():
            found = difference_at(items, step, "step")
            verdict = self._if_sure(overall(items) == "exact") if found is None else "mismatch"
            rows.append(_row(step, "trajectory", items, found, verdict))
        return pd.DataFrame(rows)

    def sentences(self) -> list[str]:
        """The answer in two sentences, and what was not as it should be to give it."""
        lanes = sum(item.verdict != "unverified" for item in self.state.values())
        state = f"Restored state {self.checkpoint}: {self.restored_state}"
        if self.state_difference is not None:
            state += f", first in {self.state_difference.item}: {self.state_difference.detail}."
        else:
            state += f" ({lanes} of {len(self.state)} lanes were logged and agree)."
        way = f"Trajectory, steps {self.checkpoint + 1} to {self.asked} of the run as it went on: {self.trajectory}"
        if (found := self.trajectory_difference) is not None:
            way += f", first at step {found.step} in {found.item}: {found.detail}."
        else:
            way += f" ({len(self.steps)} steps performed)."
        said = [state, way]
        if self.restored_state == "exact" and self.trajectory == "mismatch":
            said.append("As the state agrees, those steps depend on something that no checkpoint of this run holds.")
        if self.environment_differences:
            said.append(f"This machine computes differently: {'; '.join(self.environment_differences)}.")
        if not self.sensitive:
            said.append("The checker missed a planted one-bit change, so that its agreement says nothing.")
        return said + self.notices

    def to_json(self) -> str:
        document = msgspec.to_builtins(self) | {"restored_state": self.restored_state, "trajectory": self.trajectory}
        return msgspec.json.format(msgspec.json.encode(document)).decode()

    def __repr__(self) -> str:
        return "\n".join(self.sentences())


def _row(step: int, what: str, items: dict[str, Item], found: Difference | None, verdict: Verdict) -> dict[str, Any]:
    return {
        "step": step,
        "what": what,
        "compared": sum(item.verdict != "unverified" for item in items.values()),
        "verdict": verdict,
        "first": "" if found is None else found.item,
        "detail": "" if found is None else found.detail,
    }


def resumption_of(run: Run, checkpoint: int, steps: int, *, segment: int | None, **options: Any) -> Resumption:
    """See `Run.resumption`."""
    if steps < 1:
        raise ReplayError(f"steps is {steps}; expected 1 or more steps after the checkpoint")
    last = min(checkpoint + steps, run.last_step)
    if segment is not None and segment in range(len(run.manifest.segments)):
        performed = (step for step in range(last, checkpoint, -1) if run.line(step, segment) is not None)
        last = next(performed, checkpoint)
    if last <= checkpoint:
        where = "" if segment is None else f" in segment {segment}"
        raise ReplayError(
            f"{run.name} has no step after checkpoint {checkpoint}{where} to compare with, and ends at step "
            f"{run.last_step}; take an earlier checkpoint"
        )
    with undisturbed():
        return _resumption(run, checkpoint, last, segment, **options)


def _resumption(
    run: Run, checkpoint: int, last: int, segment: int | None, *, progress: Progress, **options: Any
) -> Resumption:
    plan = run.plan(range(checkpoint + 1, last + 1), segment, passes=1, checkpoint=checkpoint)
    with prepared(run, plan, **options) as ready:
        lanes = {f"state.{lane}": value for lane, value in ready.start.lanes(ready.method).items()}
        compared = compare_evidence(ready.evidence(checkpoint), lanes, run.manifest.layers)
        state = {f"state.{lane}": compared[f"state.{lane}"] for lane in LANES}
        performed: dict[int, dict[str, Item]] = {}
        departed, sensitive = None, True
        for outcome in _performed(ready, progress):
            performed[outcome.step] = outcome.items
            sensitive = sensitive and outcome.gates.sensitive.verdict == "exact"
            departed = difference_at(outcome.items, outcome.step, "step")
            if departed is not None:
                break
    if departed is not None and not ready.unlike:
        ready.notices[:0] = reasons(ready, plan.segment, departed.step)
    return Resumption(
        run=run.name,
        checkpoint=checkpoint,
        segment=run.manifest.lineage(plan.segment, last),
        asked=last,
        state=state,
        steps=performed,
        state_difference=difference_at(state, checkpoint, "restored state"),
        trajectory_difference=departed,
        sensitive=sensitive,
        environment_differences=ready.unlike,
        notices=ready.notices,
    )


def _performed(ready: Prepared, progress: Progress) -> Iterator[Outcome]:
    return replay_steps(
        ready.experiment,
        ready.start,
        ready.plan.steps,
        ready.evidence,
        layers=ready.run.manifest.layers,
        method=ready.method,
        checkpoint=ready.committed,
        edits=ready.edits,
        with_probe=False,
        repeat=lambda step: False,
        progress=progress,
    )
