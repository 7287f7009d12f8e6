"""Recording a training loop: manifest, telemetry every step, checkpoints; and going on from one of them.

    with Recorder("runs/mine", model, optimizer, loss_fn, sampler) as recorder:
        for batch in recorder.batches(steps):
            loss = recorder.step(batch)

What a replay could not rebuild is refused at the first or second step (`selfcheck`), or said in a warning. The parts of
a recorder are in `recording`. Knows the core and the folder's layout; nothing of any particular model or data.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from . import script
from .bits import json_float
from .blackbox import LIMIT
from .errors import ExperimentError, RunError
from .experiment import Experiment, LossFunction, Sampler, StepOptions, set_random_key
from .interrupts import Deferral, Interrupted
from .lines.line import Edits
from .manifest import DataFile, Manifest
from .objections import other_dtypes
from .ranks.crew import crew_here
from .ranks.rank_writer import writer
from .recording import terms
from .recording.beginning import Beginning
from .recording.cut_off import take_up
from .recording.draws import Draws
from .recording.dropped import Dropped
from .recording.first_steps import FirstSteps
from .recording.judgement import Judge
from .recording.keeper import Keeper
from .recording.new_run import NewRun
from .recording.relaid import Relaid
from .recording.resumed_run import ResumedRun
from .recording.retreat import Retreat
from .recording.returned_loss import ReturnedLoss
from .recording.segments import Segments
from .recording.shown_only import shown_only
from .recording.standing import Standing
from .recording.step_log import StepLog
from .recording.unkept import Unkept
from .recording.users_line import warn
from .recovery import Recovery
from .snapshot import State
from .spikes import Reading, SpikeSettings
from .stored_batches import BUDGET
from .token_loss import not_of_rows

if TYPE_CHECKING:
    from .forks import ForkPoint


log = logging.getLogger("workbench")


class Recorder:
    """Records the steps of a training loop so that any of them can be replayed.

    Args:
        path: the run's folder. It must not hold a run yet, unless `resume` is given.
        model, optimizer, loss_fn, sampler, step_fn, extra: see `Experiment`. With a `step_fn`, `loss_fn` is for the
            probe of a replay, and may be left out.
        clip, accumulate, deterministic: see `StepOptions`.
        compile: run the step through `mx.compile`, which reads Python values once. None: unless it is a `step_fn`.
        self_check: perform the first step twice, and draw the second batch twice, to see that a replay of them has the
            same bits; costs one step, one compilation and two batches, and a second step if the first changed something
            beside the state. All that the step can reach is put back as one step left it; where it can't be, the step
            is not performed twice, and a warning says "unverified". False: record what can't be replayed, too.
        batch_budget: bytes that the batches of a sampler without a cursor may take in the run's folder.
        save_every: a checkpoint each so many steps; 0: only the first and the last state. Written while training goes
            on: it holds the state in memory until it is on the disk, and a third waits until the first of two is. One
            that can't be written is told in a warning, and the next is tried when it is due.
        keep_last, keep_every: thin older checkpoints: keep the last so many and every one whose step is a multiple of
            `keep_every`. The first is always kept, and those from which a segment starts. None: nothing is thinned.
        spikes: settings of spike detection; None switches it off.
        black_box: how many spikes have the state before them committed as a checkpoint, whatever `save_every` is, so
            that they replay without rolling forward; 0: none. Takes memory for one state; off where a state is larger
            than a quarter of the device's memory.
        auto_rollback: what to do about a step that is unstable: "off", "warn" (say so, note it in the telemetry, and
            keep the state before it), "on" (also go back, and on at half the learning rate), or a `Recovery` with
            settings of your own. Going back takes memory for two states.
        ignore: names of what the step changes beside its state, and no step depends on, such as a counter that is only
            printed: ("gstep",). That is taken on trust: the self-check refuses a number that the step changes, for a
            later step may ask it. The manifest keeps the names, and a replay that is not exact recalls them.
        resume: True: go on from the last checkpoint; "auto": likewise, if the folder holds a run, else begin one; a
            number: from the checkpoint of that step. A loop that hands over
            its batches itself may begin them again: those that the run has used are compared, and not trained on again;
            meanwhile `step` returns the losses that were logged, and `step_number` stays that of the checkpoint.
        begins_again: whether a loop that hands over its batches itself, resumed, begins them again (True), or goes on
            with the batch of step `step_number + 1` (False), drawing from the random state that the last step left.
            None: its first batch tells, and where that can't tell it is refused.
        fork: start from a state of another run (`workbench.fork_point`), which is left as it is.
        factory, arguments: "module:function" and JSON arguments that rebuild the experiment, for replays from the
            command line. Without it a replay needs the experiment passed, or the script that records named.
        data: data files, pinned by size and SHA-256: a replay refuses others.
        rebuild: how to rebuild the experiment; the built-in trainer's alternative to `factory`.
        copy_telemetry_to: a file that receives each telemetry line too. The run keeps its own: it is the evidence.

    Attributes:
        step_number: the step whose state this is: the last one performed, or the one that a rollback went back to.
        reading: what spike detection said of the last step performed.
        unstable: why it is unstable; None if it is not.
        rolled_back: the last step, if it was taken back; else None.
        rate_factor: what rollbacks have multiplied the learning rate by.

    Raises:
        RunError: the folder already holds a run, or (resuming) holds none.
        ExperimentError: the experiment can't be recorded, or is not the one that the run recorded.
    """

    def __init__(
        self,
        path: str | Path,
        model: Any,
        optimizer: Any,
        loss_fn: LossFunction | None = None,
        sampler: Sampler | Iterable[Any] | None = None,
        *,
        step_fn: Callable[..., Any] | None = None,
        extra: dict[str, Any] | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        compile: bool | None = None,
        deterministic: bool = True,
        self_check: bool = True,
        batch_budget: int = BUDGET,
        save_every: int = 100,
        keep_last: int | None = None,
        keep_every: int | None = None,
        spikes: SpikeSettings | None = SpikeSettings(),  # noqa: B008 - immutable
        black_box: int = LIMIT,
        auto_rollback: Recovery | str = "warn",
        ignore: Sequence[str] = (),
        resume: bool | int | Literal["auto"] = False,
        begins_again: bool | None = None,
        fork: ForkPoint | None = None,
        factory: str | None = None,
        arguments: dict[str, Any] | None = None,
        data: Sequence[DataFile] = (),
        rebuild: dict[str, Any] | None = None,
        copy_telemetry_to: str | Path | None = None,
    ) -> None:
        terms.refuse_out_of_range(save_every, black_box, keep_last, keep_every, batch_budget)
        self.path, names = Path(path), terms.names_of(ignore)
        resume, copy_to = terms.goes_on(resume, self.path), terms.copy_file(copy_telemetry_to)
        compile = step_fn is None if compile is None else compile
        options = StepOptions(clip=clip, accumulate=accumulate, compile=compile, deterministic=deterministic)
        # A sampler without a cursor becomes one with it.
        self.experiment = Experiment(model, optimizer, loss_fn, sampler, options, step_fn, extra or {})  # type: ignore[arg-type]
        dropped = Dropped(self.experiment)  # before anything else refers to what is handed over
        if script.offer(self):
            return
        draws = Draws(self.experiment, self.path, batch_budget, check=self_check)
        recovery = Recovery.of(auto_rollback)
        if recovery.mode == "on" and draws.stored:
            raise ExperimentError(
                "auto_rollback is on, and goes back to batches that were drawn already; expected a sampler with "
                "state_dict() and load_state_dict(cursor), which can draw them again"
            )
        terms.refuse_other_fork(fork)
        if resume is not False and fork is not None:
            raise ExperimentError("resume and fork both say where to start; expected one of them")
        crew = crew_here(self.experiment, self.path, recovery.mode == "on")
        given = terms.Terms(
            rebuild=rebuild or terms.way_to_rebuild(factory, arguments),
            data=terms.files(data),
            save_every=save_every,
            keep=(keep_last, keep_every),
            spikes=spikes,
            recovery=recovery,
            parent=None if fork is None else fork.parent,
            ignore=names,
        )
        self._out = writer(self.path, given, black_box, time.time(), crew)
        here = self._standing = Standing(self.experiment, given, self._out, draws, crew)
        self._first_steps = FirstSteps(here, dropped, check=self_check)  # before its arrays are laid out
        self._judge, self._keeper, self._relaid = Judge(spikes, recovery, tells=here.leads), Keeper(here), Relaid()
        self._segments, self._retreat = Segments(here, self._keeper), Retreat(here, self._judge, self._keeper)
        self._beginning: Beginning
        if resume is False:
            self._beginning = NewRun(here, self._retreat, copy_to, fork)
        else:
            parts = self._judge, self._keeper, self._retreat
            self._beginning = ResumedRun(here, *parts, copy_to, resume, begins_again)
        self._stepper = self._beginning.stepper
        self._unkept = Unkept(self.experiment, names, here.remarks)
        self._log = StepLog(here, self._judge, self._unkept)
        self._asked = False  # whether the loop may go by the step that it goes on from
        self._ended = False
        self._within = False  # a `with`, whose end saves the last whole step

    def __enter__(self) -> Recorder:
        self._within = True
        return self

    def close(self) -> None:
        """Ends the recording, as the end of a `with` does."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended, self._within = True, False
        again = kind is not None and issubclass(kind, KeyboardInterrupt)  # one more is not to wait
        with contextlib.nullcontext() if again else Deferral():
            if self._out.logbook is None:
                self._end_before_the_first_step(whole=kind is None)
                return
            here = self._standing
            try:
                take_up(here, self._judge)
                self._segments.end()
                self._keeper.end()
                if kind is None:
                    self._log.end()
            finally:
                if (said := self._out.close()) is not None:
                    warn(said)
                if here.crew is not None and kind is not None and issubclass(kind, Interrupted):
                    here.crew.end()

    def _end_before_the_first_step(self, *, whole: bool) -> None:
        self._out.close()
        if whole and (unfinished := self._beginning.unfinished()):
            warn(unfinished)
        if whole and (validated := self._beginning.validated):
            warn(f"validation losses {validated} are not in {self.path}: no step was performed after them")

    @property
    def step_number(self) -> int:
        if not self._asked and self._beginning.may_repeat:
            self._asked = not shown_only(sys._getframe(1))
        return self._standing.at.step

    @property
    def reading(self) -> Reading | None:
        return self._judge.last.reading

    @property
    def unstable(self) -> str | None:
        return self._judge.last.unstable

    @property
    def rolled_back(self) -> int | None:
        return self._retreat.rolled_back

    @property
    def rate_factor(self) -> float:
        return self._retreat.rate_factor

    @property
    def manifest(self) -> Manifest:
        return self._out.manifest

    @property
    def segment(self) -> int:
        return self._out.segment

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """The sampler's batches, until step `steps` has been performed (None: until the sampler ends)."""
        here = self._standing
        while steps is None or here.at.step < steps:
            if self._out.logbook is None and here.at.rng is not None:
                set_random_key(here.at.rng)  # as in `Beginning.start`: the sampler may draw from it
            try:
                batch = here.draws.draw()
            except StopIteration:
                return
            try:
                yield batch
            finally:
                here.draws.drawn = None

    def step(self, batch: Any, *others: Any) -> float:
        """Performs one step on `batch`, logs it, and saves a checkpoint when one is due. Returns the loss.

        Within a `with` of the recorder the first Ctrl-C waits for the step's end, so that the way out saves a whole
        one; the second does not wait.

        Raises:
            ExperimentError: the step can't be replayed, or the batch is none.
            RunError: the recording has ended.
        """
        if others:
            names = ", ".join(f"part{number}" for number in range(1, len(others) + 2))
            raise ExperimentError(
                f"step got {len(others) + 1} arguments; expected one batch, as a tuple of its parts: step(({names}))"
            )
        here, out, draws = self._standing, self._out, self._standing.draws
        with self._to_its_end(), self._beginning.told_of():
            arrays = draws.batch(batch)
            if self._ended:
                raise RunError(f"the recording of {self.path} has ended; go on with a new Recorder and resume=True")
            if (logged := self._beginning.take(arrays, asked=self._asked)) is not None:
                return logged
            self._retreat.rolled_back = None
            take_up(here, self._judge)
            start = self._beginning.start() if out.logbook is None else None
            edits, number = self._look_between(start), here.at.step + 1
            here.drawing = True
            if (other := draws.instead(number)) is not None:
                batch = arrays = other
                edits = msgspec.structs.replace(edits, skip=1)
            cursor = draws.use(arrays, number, here.at.cursor, first=start is not None)
            if (said := draws.repeated(number, here.at.cursor, cursor)) is not None:
                here.remarks.add(said, here.at.step)
                warn(said)
            if (said := draws.altered(number, batch, arrays)) is not None:
                here.remarks.add(said, here.at.step)
                warn(said)
            draws.drawn = None
            before = None if edits == Edits() else edits
            if start is not None:
                self._unkept.begin(here.at.step)
                if here.terms.of_users:
                    out.values = self._unkept.start_values()
            first, second = self._first_steps.of_next(self._stepper, start, before, cursor)
            here.whole, here.drawing = False, False
            here.by_hand.forget()
            with self._beginning.put_back_if_cut_off(start if second is None else second[1]):
                arrays, result = self._first_steps.perform(self._stepper, arrays, batch, cursor)
                if (said := self._relaid.notice(self._stepper.relaid)) is not None:
                    log.warning(said)
                if first is not None:
                    first.first(arrays, result, cursor, out.method)
                elif start is not None and (said := other_dtypes(start, self.experiment)):
                    warn(f"step {number} can't be replayed, nor any after it: {said}")
                if start is not None and here.leads and (said := not_of_rows(result.token_loss, arrays)):
                    warn(said)
                if second is not None:
                    check, left = second
                    check.second(left, arrays, result, cursor, out.method)
            with Deferral():  # a Ctrl-C waits until line, state and checkpoint are those of one step
                if start is not None:
                    self._beginning.write(self._stepper, start, cursor, first)
                    if self._first_steps.check or self.experiment.options.compile:
                        self._unkept.leave_out_changed()  # told already, or only read when the step is traced
                due = self._keeper.due(number)
                seen = self._log.write(self._stepper, arrays, result, cursor, before, due=due)
                self._keeper.save_before(seen, self._judge.last)
                if not self._retreat.take():
                    self._keeper.settle(due, seen)
                    self._keeper.tell()
                return ReturnedLoss(result.loss, *self.experiment.loss_form)

    def _to_its_end(self) -> AbstractContextManager[None]:
        """A step that a Ctrl-C does not cut off, if there is somebody to save what it leaves."""
        return Deferral(told=True) if self._within else contextlib.nullcontext()

    def _look_between(self, start: State | None) -> Edits:
        """Between two steps: what the loop has done since the last one that a replay has to do, too.

        Args:
            start: the state from which the first step starts; None: it is a later one that is next.
        """
        here = self._standing
        try:
            self._stepper.refuse_other_containers()  # before what was changed in them is looked for
        except ExperimentError:
            here.whole = False  # the state of no step
            raise
        by_hand = None if start is not None else self._segments.look(checked=self._first_steps.last is not None)
        self._keeper.settle_late(changed=by_hand is not None)
        due, self._keeper.was_due = self._keeper.was_due, False
        self._first_steps.look(due=due)
        if start is not None and self._beginning.new:
            return Edits()
        edits = here.left.edits(self.experiment, here.draws.key(), here.at.rng)
        if by_hand is None:
            return edits
        return msgspec.structs.replace(edits, by_hand=by_hand.name, unkept=not by_hand.kept)

    def log_validation(self, loss: float) -> None:
        """Logs a validation loss of the state as it is: beside the last step, or of state 0 (after a resume, of the
        checkpoint's) before the first one; then its line is written with that of the first step.

        Raises:
            ExperimentError: it is no number.
            RunError: the recording has ended.
        """
        loss = terms.validation_loss(loss)
        if self._beginning.passing:
            return  # it was logged
        take_up(self._standing, self._judge)
        if self._out.logbook is None and not self._ended:
            self._beginning.validated.append(loss)
        else:
            self._out.append(type="val", step=self._standing.at.step, val_loss=json_float(loss))

    def checkpoint(self) -> bool:
        """Saves the state that the last step left, and waits until it is on the disk; then older ones are thinned if
        that was asked for. (Those of `save_every` are written while training goes on.)

        Returns:
            Whether it is on the disk. Where it can't be written a warning says why, and training goes on.

        Raises:
            ExperimentError: weights or optimizer state were changed since that step, so they are no longer its state.
                (A learning rate set for the next step is no such change: the checkpoint has that of the last.)
            RunError: no step has been performed yet.
        """
        if self._beginning.passing:
            return True  # of a state that was left behind
        if self._out.logbook is None:
            raise RunError(f"no checkpoint can be saved to {self.path} before its first step or after its end")
        take_up(self._standing, self._judge)
        return self._keeper.checkpoint()

    def open_segment(self) -> None:
        """After a change to weights, optimizer state, random state or cursor between two steps: goes on from it.

        The state as it is now is committed as a checkpoint, and a segment of the telemetry starts from it, so that the
        steps that follow replay exactly. What was there before stays in the segment before. A change without this call
        is noticed before the next step: right after the first step of a process it is refused (unless `self_check` is
        False); later such a segment is opened, with a warning, at most each `save_every` steps and 20 times (see
        `recording.by_hand`); beyond that the step is marked in the telemetry, and a replay that would have to pass it
        is refused by name.

        Raises:
            RunError: no step has been performed yet. The first one starts from whatever is there, after a resume in a
                segment of its own if that is another state than the checkpoint's.
        """
        if self._beginning.passing:
            return  # it was opened
        if self._out.logbook is None:
            raise RunError(f"no segment can be opened in {self.path} before its first step or after its end")
        take_up(self._standing, self._judge)
        self._segments.begin()
