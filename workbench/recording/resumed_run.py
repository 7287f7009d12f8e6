"""The beginning of a recording that goes on with a run: from one of its checkpoints, in its last segment or a new one.

Knows where a recording stands, and the run; of the loop only whether it begins its batches again (`repeated`).
"""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path
from typing import Any

from .. import snapshot
from ..errors import CheckpointError, RunError
from ..experiment import Batch, random_key, read_cursor, set_random_key
from ..ranks.world import anywhere
from ..rate_scale import scale_constants
from ..run import Run
from ..snapshot import State
from ..step import Stepper
from . import failed_writes
from .beginning import Beginning
from .continuation import Continuation, continuation, origin, take_up
from .judgement import Judge
from .keeper import Keeper
from .repeated import Repeated
from .retreat import Retreat
from .returned_loss import ReturnedLoss
from .saved_state import saved_state
from .standing import Place, Standing
from .undone import changed, changed_in
from .users_line import warn

log = logging.getLogger("workbench")


class ResumedRun(Beginning):
    """Puts the experiment into the state of the checkpoint.

    Args:
        judge: of the steps, who is to remember those before.
        keeper: of the states.
        retreat: which goes on as it was in the run.
        resume, begins_again: as a Recorder's; the former not False.

    Raises:
        RunError: the folder holds no run, or another recorder has it.
        CheckpointError: there is no such checkpoint, or it is damaged.
        ExperimentError: this is not the experiment that the run recorded.
    """

    def __init__(
        self,
        standing: Standing,
        judge: Judge,
        keeper: Keeper,
        retreat: Retreat,
        copy_to: Path | None,
        resume: bool | int,
        begins_again: bool | None,
    ) -> None:
        super().__init__(standing, copy_to)
        self._judge, self._keeper, self._retreat = judge, keeper, retreat
        self._found: Continuation
        self._edited = False  # the state between this and the first step
        self._moved: str | None = None  # what was, if that is an array
        self._restored: State | None = None  # until the first step
        self._repeated: Repeated | None = None  # batches, by a loop that begins them again
        self._goes_on_in = 0  # the thread of a loop that goes on with its own batches
        try:
            self._reopen(resume, begins_again)
        except BaseException:
            standing.out.unlock()  # a second attempt may follow while this one's traceback is still shown
            raise

    @property
    def passing(self) -> bool:  # type: ignore[override]
        return self._repeated is not None and self._repeated.passed > 0 and self._standing.out.logbook is None

    @property
    def may_repeat(self) -> bool:  # type: ignore[override]
        return self._repeated is not None and not self._repeated.ended

    def take(self, batch: Batch, *, asked: bool) -> ReturnedLoss | None:
        return None if self._repeated is None else self._repeated.take(batch, asked=asked)

    def unfinished(self) -> str | None:
        return None if self._repeated is None else self._repeated.unfinished()

    def _reopen(self, resume: bool | int, begins_again: bool | None) -> None:
        here, out = self._standing, self._standing.out
        run, key = out.reopen(), random_key()
        here.experiment.numpy = run.manifest.numpy
        start, newest = origin(run, resume), run.manifest.segments[-1].segment
        self.stepper, state = take_up(run, start, here.experiment)
        cursor = read_cursor(here.experiment.sampler)
        here.begin_at(Place(start.step, cursor, state.rng, state.lanes(out.method)))
        self._restored = state
        out.saves.last = start
        here.left.keep_rates(here.experiment)
        if resume is True and here.leads:
            self._tell_of_repetition(run, start.step)
        self._found = found = continuation(run, start, here.experiment, out.began)
        out.manifest, out.segment = found.manifest, found.segment
        if found.other_code and here.leads:
            warn(
                f"{out.path} goes on with other code than it was recorded with: {'; '.join(found.other_code)}. Steps "
                f"after {start.step} are in segment {found.segment} and replay with the code of now; those before with "
                "that of then, so keep both"
            )
        self._retreat.scale(found.rate_factor)
        if found.rate_factor != found.rate_factor_before:
            scale_constants(here.experiment.optimizer, found.rate_factor / found.rate_factor_before)
        run.manifest = out.manifest  # on disk only once a step is performed
        self._judge.warm_up(run, out.segment, start.step)
        self._retreat.row, here.draws.left_out = found.row, set(found.left_out)
        if here.draws.handed_over:
            if begins_again is not False or start.step == run.manifest.segments[0].start:
                set_random_key(key)  # a loop that begins again draws from what its script begins with
            else:
                self._goes_on_in = threading.get_ident()
            back = functools.partial(snapshot.restore, here.experiment, state)
            self._repeated = Repeated(run, newest, start.step, back, self._tell_of_undone, begins_again)

    def _tell_of_repetition(self, run: Run, start: int) -> None:
        """Of steps that the run had performed already."""
        got = max((run.telemetry.last_step(entry.segment) for entry in run.manifest.segments[-1:]), default=start)
        if got > start:
            which = f"step {got} is" if got == start + 1 else f"steps {start + 1} to {got} are"
            log.warning(
                "%s goes on from checkpoint %d, its last one: %s performed again, in a new segment. A recorder saves a "
                "checkpoint each save_every steps (%d here), and at its end: use it in a `with`, and Ctrl-C saves one, "
                "too",
                self._standing.out.path,
                start,
                which,
                self._standing.terms.save_every,
            )

    def _tell_of_undone(self) -> None:
        """Before a loop that begins again has its first batch passed: of what it changed in the state, unless it did
        the same when the run was new."""
        here, run = self._standing, Run(self._standing.out.path)

        def first() -> State | None:
            try:
                return saved_state(run, run.manifest.segments[0].start, 0)
            except CheckpointError:
                return None

        assert self._restored is not None
        if (name := changed(self._restored, here.experiment, first)) is not None and here.leads:
            warn(
                f"{name} was changed after the recorder was made and before the loop's first batch, and is put back: "
                f"the loop begins its batches again, so training goes on from the state of step {here.at.step} as it "
                "was saved. To go on from the changed state begin with the batch of "
                f"step {here.at.step + 1}, and pass begins_again=False"
            )

    def _state(self) -> State:
        here, out = self._standing, self._standing.out
        restored, self._restored = self._restored, None
        out.open_copy(self._copy_to, new=False)
        # After the state was restored: no part of it. The random state is a thread's own.
        drawn_by_loop = random_key() if self.passing or self._goes_on_in == threading.get_ident() else None
        state = self._captured()
        if drawn_by_loop is not None:
            set_random_key(drawn_by_loop)
        left = here.left.as_left(state)
        self._edited = anywhere(left.lanes(out.method) != here.at.lanes)
        if not self._edited:
            return left
        if restored is not None and (name := changed_in(restored, left)) is not None:
            self._moved = name
        here.left.keep_rates(here.experiment)
        return state

    def _facts(self) -> dict[str, Any]:
        out = self._standing.out
        return {"the run": out.manifest.run, "the segment": out.segment} | super()._facts()

    def _write(self, stepper: Stepper, start: State, lanes: dict[str, str]) -> None:
        out = self._standing.out
        try:
            out.go_on(self._standing.experiment, start, edited=self._edited)
        except OSError as error:
            raise RunError(failed_writes.of_resume(start.step + 1, out.path, error)) from error
        if self._moved is not None and self._standing.leads:
            log.warning(
                "%s was changed after the recorder was made and before its first step: %s goes on from the changed "
                "state in segment %d, and not from that of step %d as it was saved",
                *(self._moved, out.path, out.segment, start.step),
            )
        out.saves.know(self._found.boxed, self._found.finite)  # before anything is thinned
        if self._edited and not self._keeper.save(start, lanes):  # as `Segments.open`
            self._standing.unsaved = "the state"
            warn(failed_writes.of_start(start.step, out.segment, out.path))
