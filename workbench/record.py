"""Recording a training loop: manifest, telemetry every step, checkpoints; and going on from one of them.

    with Recorder("runs/mine", model, optimizer, loss_fn, sampler) as recorder:
        for batch in recorder.batches(steps):
            loss = recorder.step(batch)

What a replay could not rebuild is refused at the first or second step (`selfcheck`), or said in a warning. The parts of
a recorder are in `recording`. Knows the core and the folder's layout; nothing of any particular model or data.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from . import manifest as manifests
from . import script, snapshot
from .bits import json_float
from .blackbox import LIMIT, Held
from .errors import ExperimentError, RunError, WorkbenchError
from .experiment import (
    Experiment,
    LossFunction,
    Sampler,
    StepOptions,
    as_batch,
    random_key,
    read_cursor,
    set_random_key,
)
from .hyperparameters import describe_optimizer
from .interrupts import Deferral, Interrupted
from .manifest import DataFile, Manifest
from .objections import other_dtypes
from .observe import Observation, measure_alongside, observe
from .ranks.crew import SHARED, crew_here
from .ranks.rank_writer import writer
from .ranks.world import anywhere, everywhere
from .rate_scale import scale_constants, scale_schedules
from .rebinding import Handed
from .recording import failed_writes, terms
from .recording.by_hand import ByHand, Change
from .recording.continuation import Continuation, continuation, origin, take_up
from .recording.cut_off import Line, Opening
from .recording.draws import Draws
from .recording.dropped import Dropped
from .recording.judgement import Judge
from .recording.modes import Modes
from .recording.python_values import PythonValues
from .recording.relaid import Relaid
from .recording.remembered import Remembered
from .recording.repeated import Repeated
from .recording.returned_loss import ReturnedLoss
from .recording.rollback import rollback
from .recovery import Recovery, Row
from .run import Run, refuse_existing
from .selfcheck import SelfCheck
from .snapshot import State
from .spikes import Reading, SpikeSettings
from .step import Stepper
from .stored_batches import BUDGET
from .telemetry import Edits

if TYPE_CHECKING:
    from .forks import ForkPoint


WITHOUT_CHECK = "it was recorded without a self-check (self_check=False)"
TOLD = 5  # stretches of unstable steps that the log tells of: a run whose gradients are rough has hundreds
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
        terms.refuse_out_of_range(save_every, black_box, keep_last, keep_every)
        self.path, names = Path(path), terms.names_of(ignore)
        resume = terms.goes_on(resume, self.path)
        compile = step_fn is None if compile is None else compile
        options = StepOptions(clip=clip, accumulate=accumulate, compile=compile, deterministic=deterministic)
        # A sampler without a cursor becomes one with it.
        self.experiment = Experiment(model, optimizer, loss_fn, sampler, options, step_fn, extra or {})  # type: ignore[arg-type]
        self._dropped = Dropped(self.experiment)  # before anything else refers to what is handed over
        script.offer(self.experiment)
        self._handed = Handed(self.experiment) if self_check else None  # before its arrays are laid out
        self._self_check = self_check
        self._draws = Draws(self.experiment, self.path, batch_budget, check=self_check)
        recovery = Recovery.of(auto_rollback)
        if recovery.mode == "on" and self._draws.stored:
            raise ExperimentError(
                "auto_rollback is on, and goes back to batches that were drawn already; expected a sampler with "
                "state_dict() and load_state_dict(cursor), which can draw them again"
            )
        # The link to the other ranks of a data-parallel run; None: there are none.
        self._crew = crew_here(self.experiment, self.path, recovery.mode == "on")
        self.unstable: str | None = None
        self._told = 0 if self._crew is None or self._crew.leads else TOLD  # rank 0 tells for all
        self.rolled_back: int | None = None
        self.rate_factor = 1.0
        self._terms = terms.Terms(
            rebuild=rebuild or terms.way_to_rebuild(factory, arguments),
            data=list(data),
            save_every=save_every,
            keep=(keep_last, keep_every),
            spikes=spikes,
            recovery=recovery,
            parent=None if fork is None else fork.parent,
            ignore=names,
        )
        self._resume, self._judge, self._row = resume, Judge(spikes, recovery), Row()
        self._begins_again, self._goes_on_in = begins_again, 0  # the latter is a thread's number
        self._out = writer(self.path, self._terms, black_box, time.time(), self._crew)
        self._copy_to = None if copy_telemetry_to is None else Path(copy_telemetry_to)
        self._validated: list[float] = []  # before the first step, which opens the telemetry
        self._whole = True  # the state in memory is that of step_number, not of a step cut off half-way
        self._ended = False
        self._line: Line | None = None  # that is being written
        self._opening: Opening | None = None  # the segment that is being opened
        self._drawing = False  # a step has begun to take its batch
        self._empty: int | None = None  # the segment that was opened and has no step yet
        self._unsettled: int | None = None  # the segment of the last step, whose state is not held or saved yet
        self.step_number = 0
        self.reading: Reading | None = None
        self._left, self._by_hand = Remembered(), ByHand(save_every)
        self._lanes: dict[str, str] = {}  # of the state that the last step left
        self._found: Continuation | None = None  # by a resume
        self._edited = False  # the state between a resume and the first step after it
        self._repeated: Repeated | None = None  # batches, by a loop that begins them again
        self._check: SelfCheck | None = None  # of the step before
        if resume is False:
            refuse_existing(self.path)
            self._stepper = measure_alongside(Stepper(self.experiment), hold=True)  # prepares it
            sampler = self.experiment.sampler
            if fork is not None:
                snapshot.restore(self.experiment, fork.state)
                for _ in range(fork.skip):
                    next(sampler)
                self.step_number, self._left.rng = fork.state.step, fork.state.rng
                self._scale(fork.rate_factor)
            self._draws.cursor = read_cursor(sampler)
        elif fork is not None:
            raise ExperimentError("resume and fork both say where to start; expected one of them")
        else:
            try:
                self._reopen(resume)
            except BaseException:
                self._out.unlock()  # a second attempt may follow while this one's traceback is still shown
                raise
        self._values, self._modes = PythonValues(self.experiment, names), Modes(self.experiment)
        self._starts_at, self._due_before = self.step_number, False
        self._remarks = list[str]()
        self._since: int | None = None
        self._asked = False
        self._relaid = Relaid()

    def __enter__(self) -> Recorder:
        return self

    def close(self) -> None:
        """Ends the recording, as the end of a `with` does."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        again = kind is not None and issubclass(kind, KeyboardInterrupt)  # one more is not to wait
        with contextlib.nullcontext() if again else Deferral():
            if self._out.logbook is None:
                self._out.close()
                if kind is None and self._repeated is not None and (unfinished := self._repeated.unfinished()):
                    warnings.warn(unfinished, stacklevel=2)
                if kind is None and self._validated:
                    warnings.warn(
                        f"validation losses {self._validated} are not in {self.path}: no step was performed after them",
                        stacklevel=2,
                    )
                return
            try:
                self._take_up_line()
                if self._opening is not None and self.segment != self._opening.before:
                    self._open_segment()  # else it would start from a state that is nowhere
                self._out.saves.checkpointer.wait()
                self._tell()
                if self._whole and self._out.saves.last != (self.step_number, self.segment):
                    try:
                        self.checkpoint()
                    except ExperimentError as error:
                        warnings.warn(str(error), stacklevel=2)
                if kind is None:
                    noticed = self._notice(self.step_number, due=True)
                    self._out.append(type="done", step=self.step_number, **self._remarked())
                    for sentence in noticed:
                        warnings.warn(sentence, stacklevel=2)
            finally:
                if (said := self._out.close()) is not None:
                    warnings.warn(said, stacklevel=2)
                if self._crew is not None and kind is not None and issubclass(kind, Interrupted):
                    self._crew.end()

    @property
    def step_number(self) -> int:
        self._asked = True
        return self._step_number

    @step_number.setter
    def step_number(self, number: int) -> None:
        self._step_number = number

    @property
    def manifest(self) -> Manifest:
        return self._out.manifest

    @property
    def segment(self) -> int:
        return self._out.segment

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """The sampler's batches, until step `steps` has been performed (None: until the sampler ends)."""
        while steps is None or self.step_number < steps:
            if self._out.logbook is None and self._left.rng is not None:
                set_random_key(self._left.rng)  # as in `_start`: the sampler may draw from it
            try:
                batch = self._draws.draw()
            except StopIteration:
                return
            try:
                yield batch
            finally:
                self._draws.drawn = None

    def step(self, batch: Any, *others: Any) -> float:
        """Performs one step on `batch`, logs it, and saves a checkpoint when one is due. Returns the loss.

        Raises:
            ExperimentError: the step can't be replayed, or the batch is none.
            RunError: the recording has ended.
        """
        if others:
            names = ", ".join(f"part{number}" for number in range(1, len(others) + 2))
            raise ExperimentError(
                f"step got {len(others) + 1} arguments; expected one batch, as a tuple of its parts: step(({names}))"
            )
        with self._told_of_folder():
            arrays = as_batch(batch)
            if self._ended:
                raise RunError(f"the recording of {self.path} has ended; go on with a new Recorder and resume=True")
            if self._repeated is not None and (logged := self._repeated.take(arrays, asked=self._asked)) is not None:
                return logged
            self.rolled_back = None
            self._take_up_line()
            start = self._start() if self._out.logbook is None else None
            if start is not None and self._crew is not None:
                start = self._crew.begin(start, start.lanes(self._out.method), self._facts())
            first = start is not None and self._resume is False
            try:
                self._stepper.refuse_other_containers()  # before what was changed in them is looked for
            except ExperimentError:
                self._whole = False  # the state of no step
                raise
            by_hand = self._changed_by_hand() if start is None else None
            if self._unsettled is not None and self._crew is None:  # the last step was cut off after its line
                self._settle_late(changed=by_hand is not None)
            self._look_at_extra()
            edits = Edits() if first else self._left.edits(self.experiment, self._draws.key())
            if by_hand is not None:
                edits = msgspec.structs.replace(edits, by_hand=by_hand.name, unkept=not by_hand.kept)
            self._drawing = True
            if (other := self._draws.instead(self.step_number + 1)) is not None:
                arrays, edits = other, msgspec.structs.replace(edits, skip=1)
            cursor = self._draws.use(arrays, self.step_number + 1, first=self._out.logbook is None)
            self._draws.drawn = None
            before = None if edits == Edits() else edits
            if start is not None:
                trained = self._modes.begin(self.step_number)
                said_first = [] if trained is None else [trained]
                for changed in said_first + self._values.at_first_step(self.step_number):
                    self._remark(changed, self.step_number)
                    warnings.warn(changed, stacklevel=2)
            checked = self._check if self._check is not None and self._check.outside and self._crew is None else None
            before_step = None if checked is None else snapshot.capture(self.experiment, self.step_number, cursor)
            check = self._check = self._self_checking(start, before)
            self._whole, self._drawing = False, False
            self._by_hand.forget()
            result = self._stepper(arrays)
            if (said := self._relaid.notice(self._stepper.relaid)) is not None:
                log.warning(said)
            if check is not None:
                check.first(arrays, result, cursor, self._out.method)
            elif start is not None and (said := other_dtypes(start, self.experiment)):
                warnings.warn(f"step {start.step + 1} can't be replayed, nor any after it: {said}", stacklevel=2)
            if checked is not None and before_step is not None:
                checked.second(before_step, arrays, result, cursor, self._out.method)
            with Deferral():  # a Ctrl-C waits until line, state and checkpoint are those of one step
                if start is not None:
                    if self._crew is not None:
                        after = snapshot.capture(self.experiment, self.step_number + 1, cursor)
                        self._crew.compare(after.lanes(self._out.method))
                    self._begin(start)
                    if self._self_check or self.experiment.options.compile:
                        self._values.leave_out_changed()  # by the step itself: told already, or only when it is traced
                number, key = self.step_number + 1, random_key()
                self._left.keep_rates(self.experiment)
                seen = observe(self._stepper, arrays, result, cursor, self._out.method)
                self._by_hand.keep(self.experiment, seen.arrays)
                if said := self._draws.store(seen.batch_hash, arrays, number):  # before the line that names it
                    warnings.warn(said, stacklevel=2)
                more = {} if before is None else {"before": before}
                if self._crew is not None:
                    seen = self._crew.share(seen, cursor, key, more)
                due = self._due(number)
                noticed = self._notice(number, due=due)
                self._line = Line(number, cursor, key, seen.state)
                self._log(number, seen, more)
                self._follow(self._line)
                for sentence in noticed:
                    warnings.warn(sentence, stacklevel=2)
                if self._crew is not None:
                    try:
                        self._crew.refuse_diverged(number)
                    except WorkbenchError:
                        self._whole = False  # the state of no run, not to be saved
                        raise
                self._save_before(seen)
                if self.unstable is not None and self._terms.recovery.mode == "on" and self._roll_back():
                    return ReturnedLoss(result.loss)
                self._settle(due, seen)
                self._tell()
                return ReturnedLoss(result.loss)

    def _follow(self, line: Line) -> None:
        """The state is now that of this line, which is in the telemetry."""
        # No call between these, where an exception out of a signal's handler could part them.
        self._step_number, self._draws.cursor, self._left.rng = line.step, line.cursor, line.rng
        self._lanes, self._whole, self._unsettled = line.lanes, True, self._out.segment
        self._remarks, self._since, self._line, self._empty = [], None, None, None

    def _take_up_line(self) -> None:
        """After a step that was cut off while its line was written: it counts if the line is there, else it is none.
        After one that was cut off before it began: its batch was not used."""
        if self._drawing:
            self._draws.take_back()
            self._drawing = False
        if self._line is None:
            return
        if self._out.logged == (self.segment, self._line.step):
            self._follow(self._line)
            return
        if self._crew is None:
            with contextlib.suppress(OSError, WorkbenchError):  # it has judged a step that is none
                self._judge.warm_up(Run(self.path), self.segment, self._step_number)
        self._line = None

    def _due(self, step: int) -> bool:
        return bool(self._terms.save_every) and step % self._terms.save_every == 0

    def _settle(self, due: bool, seen: Observation | None = None) -> None:
        """Holds the state of the last step, and has it saved if that is due; `seen` found its arrays."""
        self._due_before = due
        if due or self._out.saves.wants(self.step_number):  # one capture for both
            state = self._captured(seen) if seen is not None else self._left.as_left(self._captured())
            held = Held(state, self.segment, self._lanes)
            self._out.saves.hold(held)
            said = self._draws.sync(self.step_number) if due else None
            if due and self._crew is not None:
                said = self._crew.stored(said, self.step_number)
            if said:
                warnings.warn(said, stacklevel=3)
            elif due:
                self._out.saves.save(held, self.manifest)
        self._unsettled = None

    def _settle_late(self, *, changed: bool) -> None:
        """Before the next step, after one that was cut off between its line and the end.

        Args:
            changed: the loop has changed the state meanwhile.
        """
        due = self._due(self.step_number)
        if not changed and self._unsettled == self.segment:
            self._settle(due)
        elif due:
            warnings.warn(failed_writes.of_cut_off_step(self.step_number, self.path), stacklevel=3)
        self._unsettled = None

    @contextlib.contextmanager
    def _told_of_folder(self) -> Iterator[None]:
        """A refusal at the second step says that the first is in the folder."""
        try:
            yield
        except ExperimentError as error:
            if self._out.logbook is None or self._resume is not False or self.step_number > self._starts_at + 1:
                raise
            raise ExperimentError(f"{error}. {failed_writes.of_one_step(self.path)}") from error

    def _look_at_extra(self) -> None:
        """Between two steps: whether what was handed over is still what the loop and the step use.

        Raises:
            ExperimentError: at the start, if it can be proven that it is not.
        """
        handed, check = self._handed, self._check
        if handed is not None and check is None:  # the first step is next
            handed.refuse_replaced("before the first step the loop put")
            handed.laid_out()
        if check is not None:
            try:
                check.refuse_replaced()
            except ExperimentError:
                self._whole = False
                raise
        due, self._due_before = self._due_before, False

        def own(part: Any) -> int:
            return self._by_hand.holds(part) + (0 if check is None else check.holds(part))

        for sentence in self._dropped.look(due=due, own=own):
            self._remark(sentence, self._starts_at)
            warnings.warn(sentence, stacklevel=3)

    def _remark(self, sentence: str, since: int) -> None:
        """Has the next line say what the user is warned of now."""
        self._remarks.append(sentence.rstrip("."))
        self._since = since if self._since is None else min(since, self._since)

    def _changed_by_hand(self) -> Change | None:
        """Looks whether the loop has changed the state since the last step, and goes on from there in a segment.

        Returns:
            What was changed, if no checkpoint holds it.

        Raises:
            ExperimentError: it was, right after the first step of a process that checks itself.
        """
        step, change = self.step_number, self._by_hand.changed(self.experiment)
        cut_off = change is None and (not self._whole or self._opening is not None or self._draws.passed_over)
        if cut_off and (half := self._left_by_half_a_step()) is not None:
            change = Change(half)  # a step was cut off, and the loop goes on all the same
        if not everywhere(change is not None) or change is None:  # what one rank changed alone is named after the step
            return None
        name = change.name
        if self._check is not None and not cut_off:
            self._whole = False  # the state of no step
            raise ExperimentError(self._by_hand.refusal(change, step))
        if not change.kept:
            self._tell_of_lost(name)
            return change
        try:
            due = self._opening is not None or self._by_hand.save_due(step, cut_off=not self._whole)
            saved = due and self._open_segment()
        except OSError:  # the manifest can't be written: that is no reason to end a training
            if self._crew is not None:
                raise
            saved = False
        said = self._by_hand.saved(name, step, self.segment) if saved else self._by_hand.not_saved(name, step)
        if said is not None and (self._crew is None or self._crew.leads):
            warnings.warn(said, stacklevel=3)
        return None if saved else change

    def _tell_of_lost(self, name: str) -> None:
        """Of a change that no checkpoint can hold."""
        if (said := self._by_hand.lost(name, self.step_number)) is None:
            return
        self._remark(said, self.step_number)
        if self._crew is None or self._crew.leads:
            warnings.warn(said, stacklevel=4)

    def _left_by_half_a_step(self) -> str | None:
        """What is not as the last whole step left it, in words."""
        self._draws.take_back()
        lanes = self._left.as_left(self._captured()).lanes(self._out.method)
        unlike = [f"the lane {lane}" for lane in SHARED if lanes[lane] != self._lanes.get(lane)]
        if not unlike and self._opening is not None:
            return "the state"  # and back, but a segment was begun from it
        return next(iter(unlike), "the data cursor" if self._draws.passed_over else None)

    def _self_checking(self, start: State | None, before: Edits | None) -> SelfCheck | None:
        """What checks the first step, if that is next."""
        if start is None or not self._self_check:
            return None
        handed, self._handed = self._handed, None
        return SelfCheck(self._stepper, start, before, anywhere, self._terms.ignore, handed)

    def log_validation(self, loss: float) -> None:
        """Logs a validation loss of the state as it is: beside the last step, or of state 0 (after a resume, of the
        checkpoint's) before the first one; then its line is written with that of the first step.

        Raises:
            RunError: the recording has ended.
        """
        if self._passing:
            return  # it was logged
        self._take_up_line()
        if self._out.logbook is None and not self._ended:
            self._validated.append(loss)
        else:
            self._out.append(type="val", step=self._step_number, val_loss=json_float(loss))

    def _roll_back(self) -> bool:
        """Goes back from the unstable step just logged. Returns whether: training goes on where that can't be written.

        Raises:
            TrainingUnstable: it was done, and was the last of too many in a row.
        """
        recovery, step = self._terms.recovery, self.step_number
        try:
            self._out.saves.checkpointer.wait()
            run, trail, factor = self._out.run(), self._out.saves.trail, self.rate_factor
            back = rollback(run, self.segment, step, self.unstable, recovery=recovery, trail=trail, factor=factor)
            manifests.write(back.manifest, self.path)
        except (OSError, WorkbenchError) as error:
            warnings.warn(failed_writes.of_rollback(step, error), stacklevel=3)
            return False
        count, state = self._row.add(step, recovery.back), back.held.state
        self._whole, self._unsettled = False, None
        self._out.saves.go_back_to(back.held, self.manifest)
        self._out.enter(back.manifest)
        snapshot.restore(self.experiment, state)
        self.step_number, self._draws.cursor, self._left.rng = state.step, state.cursor, state.rng
        self._out.append(**back.fields(count))
        self._out.append_meta(state.step, back.held.lanes)
        self._left.keep_rates(self.experiment)
        scale_constants(self.experiment.optimizer, back.rate_change)
        self._scale(back.rate_factor)
        self._by_hand.keep(self.experiment)
        self._lanes, self._whole = back.held.lanes, True
        self._out.saves.went_back(back.held, self.segment)
        if recovery.skip_batch:
            self._draws.left_out.add(step)
        self._judge.warm_up(Run(self.path), self.segment, state.step)
        self.rolled_back = step
        back.say()
        self._tell()
        if count >= recovery.limit:
            raise back.too_many(count, self.path)
        return True

    def _scale(self, factor: float) -> None:
        self.rate_factor = factor
        scale_schedules(self.experiment.optimizer, factor)

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
        if self._passing:
            return True  # of a state that was left behind
        if self._out.logbook is None:
            raise RunError(f"no checkpoint can be saved to {self.path} before its first step or after its end")
        self._take_up_line()
        state = self._left.as_left(self._captured())
        lanes = state.lanes(self._out.method)
        if unlike := [lane for lane, value in self._lanes.items() if lanes[lane] != value]:
            raise ExperimentError(
                f"no checkpoint of step {self.step_number} was saved to {self.path}: {', '.join(unlike)} changed after "
                "the step, so this is not its state; save it before changing it (recorder.checkpoint())"
            )
        return self._save_now(state)

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
        if self._passing:
            return  # it was opened
        if self._out.logbook is None:
            raise RunError(f"no segment can be opened in {self.path} before its first step or after its end")
        self._take_up_line()
        if not self._whole:
            self._draws.take_back()
        if (change := self._by_hand.changed(self.experiment)) is not None and not change.kept:
            self._tell_of_lost(change.name)
        self._open_segment()

    def _open_segment(self) -> bool:
        """Returns whether the state from which it starts is on the disk."""
        with Deferral():
            return self._go_on_in_segment()

    def _go_on_in_segment(self) -> bool:
        # The batch of the next step may have been drawn already: a replay draws it after it has restored this state.
        drawn = self._draws.drawn
        cursor = read_cursor(self.experiment.sampler) if drawn is None else drawn.cursor
        state = snapshot.capture(self.experiment, self.step_number, cursor, self._draws.key())
        lanes = state.lanes(self._out.method)
        if self._crew is not None:
            state = self._crew.moved(state, lanes)
        opening = self._opening = self._opening or Opening(self.segment)
        again = self._empty == self.segment and not self._whole  # its first step was cut off
        if self.segment == opening.before and not again:  # else an attempt was cut off, and no step is in it yet
            try:
                self._out.add_segment(self.step_number)
            except OSError:
                self._opening = None
                raise
        self._out.append_meta(state.step, lanes)
        saved = self._save_now(state, lanes)
        self._out.saves.box.hold(Held(state, self.segment, lanes))
        self._by_hand.keep(self.experiment)
        self._left.keep_rates(self.experiment)
        self._draws.cursor, self._left.rng = cursor, state.rng
        self._lanes, self._whole, self._opening, self._empty = lanes, True, None, self._out.segment
        return saved

    # ---- beginning

    def _start(self) -> State:
        """The state from which the first step starts, in the form that a restored one has."""
        self._out.open_copy(self._copy_to, new=self._resume is False)  # first: if that fails, there is no run yet
        if self._resume is False:
            refuse_existing(self.path)  # another process may have begun it meanwhile
            self.experiment.prepare()  # again: weights may have been loaded since
        # After the state was restored: no part of it. The random state is a thread's own.
        drawn_by_loop = random_key() if self._passing or self._goes_on_in == threading.get_ident() else None
        if self._left.rng is not None:  # the random state is a thread's own, and this is the one that trains
            set_random_key(self._left.rng if self._draws.drawn is None else self._draws.drawn.key_after)
        state = snapshot.capture(self.experiment, self.step_number, self._draws.place, self._draws.key())
        if self._resume is False:
            return state
        if drawn_by_loop is not None:
            set_random_key(drawn_by_loop)
        left = self._left.as_left(state)
        self._edited = anywhere(left.lanes(self._out.method) != self._lanes)
        if not self._edited:
            return left
        self._left.keep_rates(self.experiment)
        return state

    def _begin(self, start: State) -> None:
        """After the first step, which found the layers' order: manifest, checkpoint 0, the telemetry's first line."""
        lanes, again = start.lanes(self._out.method), self._passing
        self._lanes = lanes
        self._out.remarks = [WITHOUT_CHECK] if self._check is None else self._check.remarks
        self._out.reads = [] if self._check is None else self._check.files
        if self._resume is False:
            self._out.create(self.experiment, self._stepper, start, self.rate_factor)
        else:
            self._out.go_on(self.experiment, start, edited=self._edited)
            if self._found is not None:  # before anything is thinned
                self._out.saves.know(self._found.boxed, self._found.finite)
            if self._edited:  # as `open_segment`
                self._save_now(start, lanes)
        for loss in () if again else self._validated:  # of a loop that began again: the run's first, logged then
            self._out.append(type="val", step=start.step, val_loss=json_float(loss))
        self._validated = []
        self._out.saves.box.hold(Held(start, self.segment, lanes))

    # ---- going on

    def _reopen(self, resume: bool | int) -> None:
        run, key = self._out.reopen(), random_key()
        start, newest = origin(run, resume), run.manifest.segments[-1].segment
        self._stepper, state = take_up(run, start, self.experiment)
        self.step_number, self._draws.cursor = start.step, read_cursor(self.experiment.sampler)
        self._out.saves.last = start
        self._left.rng, self._lanes = state.rng, state.lanes(self._out.method)
        self._left.keep_rates(self.experiment)
        self._tell_of_repetition(run, start.step, resume)
        self._found = found = continuation(run, start, self.experiment, self._out.began)
        self._out.manifest, self._out.segment = found.manifest, found.segment
        self._scale(found.rate_factor)
        if found.rate_factor != found.rate_factor_before:
            scale_constants(self.experiment.optimizer, found.rate_factor / found.rate_factor_before)
        run.manifest = self.manifest  # on disk only once a step is performed
        self._judge.warm_up(run, self.segment, self.step_number)
        self._row, self._draws.left_out = found.row, set(found.left_out)
        if self._draws.handed_over:
            if self._begins_again is not False or start.step == run.manifest.segments[0].start:
                set_random_key(key)  # a loop that begins again draws from what its script begins with
            else:
                self._goes_on_in = threading.get_ident()
            back = functools.partial(snapshot.restore, self.experiment, state)
            self._repeated = Repeated(run, newest, start.step, back, self._begins_again)

    def _tell_of_repetition(self, run: Run, start: int, resume: bool | int) -> None:
        """Of steps that the run had performed already; unless they were asked for, by the number of a checkpoint."""
        got = max((run.telemetry.last_step(entry.segment) for entry in run.manifest.segments[-1:]), default=start)
        if resume is True and got > start and not self._told:
            which = f"step {got} is" if got == start + 1 else f"steps {start + 1} to {got} are"
            log.warning(
                "%s goes on from checkpoint %d, its last one: %s performed again, in a new segment. A recorder saves a "
                "checkpoint each save_every steps (%d here), and at its end: use it in a `with`, and Ctrl-C saves one, "
                "too",
                self.path,
                start,
                which,
                self._terms.save_every,
            )

    @property
    def _passing(self) -> bool:
        """Whether a loop that begins its batches again has been handing over the run's, and nothing since."""
        return self._repeated is not None and self._repeated.passed > 0 and self._out.logbook is None

    # ---- writing

    def _log(self, step: int, seen: Observation, edits: dict[str, Any]) -> None:
        assert self._out.logbook is not None
        effort = self._out.logbook.effort()
        judged = self._judge.judge(step, float(seen.loss), float(seen.grad_norm))
        if judged.unstable is not None and self.unstable is None:  # once for a stretch of them
            self._told += 1
            if self._told <= TOLD:
                last = "; further ones are noted in the telemetry only" if self._told == TOLD else ""
                log.warning("step %d is unstable: %s%s", step, judged.unstable, last)
        self.reading, self.unstable = judged
        self._out.append(
            type="step",
            step=step,
            **effort,
            **judged.fields(),
            **edits,
            **seen.fields(),
            **self._remarked(),
        )

    def _save_before(self, seen: Observation) -> None:
        """Saves the state before the step just logged, if that is a spike. Training goes on if it can't be saved."""
        rule = self.unstable if self.reading is None else self.reading.rule or self.unstable
        needed = self.unstable is not None and self._terms.recovery.mode == "on"
        self._out.saves.before_spike(self.manifest, float(seen.loss), float(seen.grad_norm), rule, needed=needed)

    def _captured(self, seen: Observation | None = None) -> State:
        """The state that the last step left, if nothing has changed it since; `seen` found its arrays."""
        found = None if seen is None else seen.arrays
        state = snapshot.capture(self.experiment, self.step_number, self._draws.cursor, self._left.rng, found)
        return state if self._crew is None else self._crew.whole(state)

    def _facts(self) -> dict[str, Any]:
        """What all ranks of a data-parallel run have to have in common."""
        again = {} if self._resume is False else {"the run": self.manifest.run, "the segment": self.segment}
        return again | {
            "the optimizer": describe_optimizer(self.experiment.optimizer),
            "the step's options": msgspec.to_builtins(self.experiment.options),
        }

    def _save_now(self, state: State, lanes: dict[str, str] | None = None) -> bool:
        """Has it saved as the checkpoint of the last step, and waits until it is durable. Returns whether it is."""
        self._out.saves.save(Held(state, self.segment, lanes or self._lanes), self.manifest)
        self._out.saves.checkpointer.wait()
        self._tell()
        return self._out.saves.last == (state.step, self.segment)

    def _notice(self, step: int, *, due: bool) -> list[str]:
        """After a step: sentences on what its code reads and no checkpoint holds, if that is another one now. The next
        line has them, too.

        Args:
            due: look at all of it, not only at what is cheap to look at.
        """
        said = [*self._modes.changed(step)]
        if due:
            said += self._values.changed(step)
        for sentence, since in said:
            self._remark(sentence, since)
        return [sentence for sentence, _ in said]

    def _remarked(self) -> dict[str, Any]:
        """Fields of a line: what there is to be said since the last step's."""
        return {"remarks": self._remarks, "since": self._since} if self._remarks else {}

    def _tell(self) -> None:
        """Warns of what could not be written meanwhile."""
        for said in self._out.troubles(self.step_number):
            warnings.warn(said, stacklevel=3)
