"""Recording a training loop: manifest, telemetry every step, checkpoints; and going on from one of them.

    with Recorder("runs/mine", model, optimizer, loss_fn, sampler) as recorder:
        for batch in recorder.batches(steps):
            loss = recorder.step(batch)

What a replay could not rebuild is refused at the first or second step (`selfcheck`), or said in a warning. Knows the
core and the folder's layout; nothing of any particular model or data.
"""

from __future__ import annotations

import copy
import logging
import resource
import sys
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np
from msgspec import UNSET

from . import __version__, norms, script, snapshot
from . import manifest as manifests
from .bits import bits_float, json_float
from .blackbox import LIMIT, BlackBox, Held
from .checkpointer import Checkpointer, Key, committed
from .environment import PROCESS, differences, numeric_environment
from .errors import CheckpointError, ExperimentError, RunError, TrainingUnstable, WorkbenchError
from .experiment import (
    Batch,
    Experiment,
    LossFunction,
    Sampler,
    StepOptions,
    as_batch,
    random_key,
    read_cursor,
    set_random_key,
    state_arrays,
)
from .files import make_folder, sync_folder
from .fingerprint import known_method as fingerprint_method
from .fingerprint import method_here
from .hyperparameters import describe_optimizer, other_parts
from .journal import Journal
from .locking import Lock
from .manifest import DataFile, Manifest, Parameter, Segment
from .observe import Observation, learning_rates, measure_alongside, observe, rate_paths
from .plain_batches import PlainBatches
from .rate_scale import scale_constants, scale_schedules
from .recovery import Recovery, Row, Stability, Trail
from .redrawing import check_cursor
from .run import CHECKPOINTS, TELEMETRY, Run, refuse_existing
from .seams import state_segment
from .selfcheck import SelfCheck
from .snapshot import State
from .sources import changed, code_of
from .spikes import Reading, SpikeDetector, SpikeSettings
from .step import Loss, Stepper
from .stored_batches import BUDGET, BatchStore, verifier
from .telemetry import SCALARS, Edits, Line, Writer

if TYPE_CHECKING:
    from .forks import ForkPoint


UNFINISHED = 2  # checkpoints: one that is being written, and one that waits; each holds a state in memory


log = logging.getLogger("workbench")


class _Drawn(NamedTuple):
    """A batch that was handed out and not used yet: where data and random state stood before it was drawn."""

    cursor: dict[str, Any]
    key: tuple[int, int]
    key_after: tuple[int, int]  # another one if the sampler draws random numbers


class Recorder:
    """Records the steps of a training loop so that any of them can be replayed.

    Args:
        path: the run's folder. It must not hold a run yet, unless `resume` is given.
        model, optimizer, loss_fn, sampler, step_fn, extra: see `Experiment`.
        clip, accumulate, compile, deterministic: see `StepOptions`.
        self_check: perform the first step twice, and draw the second batch twice, to see that a replay of them has the
            same bits; costs one step, one compilation and two batches. False: record what can't be replayed, too.
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
        resume: True: go on from the last checkpoint; a number: from the checkpoint of that step.
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
        loss_fn: LossFunction,
        sampler: Sampler | Iterable[Any] | None = None,
        *,
        step_fn: Callable[..., Any] | None = None,
        extra: dict[str, Any] | None = None,
        clip: float | None = None,
        accumulate: int = 1,
        compile: bool = True,
        deterministic: bool = True,
        self_check: bool = True,
        batch_budget: int = BUDGET,
        save_every: int = 100,
        keep_last: int | None = None,
        keep_every: int | None = None,
        spikes: SpikeSettings | None = SpikeSettings(),  # noqa: B008 - immutable
        black_box: int = LIMIT,
        auto_rollback: Recovery | str = "warn",
        resume: bool | int = False,
        fork: ForkPoint | None = None,
        factory: str | None = None,
        arguments: dict[str, Any] | None = None,
        data: Sequence[DataFile] = (),
        rebuild: dict[str, Any] | None = None,
        copy_telemetry_to: str | Path | None = None,
    ) -> None:
        for name, least in (("save_every", save_every), ("black_box", black_box)):
            if least < 0:
                raise ExperimentError(f"{name} is {least}; expected 0 (never) or more")
        for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
            if value is not None and value < 1:
                raise ExperimentError(f"{name} is {value}; expected at least 1, or none to keep every checkpoint")
        self.path = Path(path)
        options = StepOptions(clip=clip, accumulate=accumulate, compile=compile, deterministic=deterministic)
        # A sampler without a cursor becomes one with it.
        self.experiment = Experiment(model, optimizer, loss_fn, sampler, options, step_fn, extra or {})  # type: ignore[arg-type]
        script.offer(self.experiment)
        self._store = BatchStore(self.path, batch_budget) if isinstance(self.experiment.sampler, PlainBatches) else None
        self._self_check = self_check
        self._first_cursor: dict[str, Any] | None = None
        self._recovery = Recovery.of(auto_rollback)
        if self._recovery.mode == "on" and self._store is not None:
            raise ExperimentError(
                "auto_rollback is on, and goes back to batches that were drawn already; expected a sampler with "
                "state_dict() and load_state_dict(cursor), which can draw them again"
            )
        self._stability, self._trail, self._row = Stability(self._recovery), Trail(0), Row()
        self._left_out: set[int] = set()  # steps whose batch is to be left out when it comes
        self.unstable: str | None = None
        self.rolled_back: int | None = None
        self.rate_factor = 1.0
        self._save_every, self._keep = save_every, (keep_last, keep_every)
        self._spikes, self._detector = spikes, SpikeDetector(spikes) if spikes else None
        self._rebuild = rebuild or (
            {"kind": "factory", "factory": factory, "arguments": arguments or {}}
            if factory
            else {"kind": "none"} | script.description()
        )
        self._data, self._resume, self._parent = list(data), resume, None if fork is None else fork.parent
        self._copy_to = None if copy_telemetry_to is None else Path(copy_telemetry_to)
        self._copy: Writer | None = None
        self._journal: Journal | None = None
        self._unlock: Callable[[], Any] = lambda: None
        self._checkpointer: Checkpointer  # of a run that has begun
        self._saved_at: Key | None = None  # the last checkpoint: durable, or about to be
        self._telling = False  # the user knows that telemetry can't be written just now
        self._whole = True  # the state in memory is that of step_number, not of a step cut off half-way
        self._ended = False
        self._began = time.time()
        self._step_ended = time.perf_counter()
        self.step_number, self.segment = 0, 0
        self.manifest: Manifest  # of a new run only after the first step, which finds the layers' order
        self.reading: Reading | None = None
        # What the last step left, to tell later whether the loop has changed it.
        self._rng: tuple[int, int] | None = None
        self._rates: list[str | None] = []
        self._rate_arrays: dict[str, mx.array] = {}
        self._lanes: dict[str, str] = {}
        self._drawn: _Drawn | None = None
        self._edited = False  # the state between a resume and the first step after it
        self._method = method_here()  # of the fingerprints
        self._box = BlackBox(0)
        self._box_limit = black_box
        self._boxed_before: set[tuple[int, int]] = set()
        self._finite_before = True  # loss and gradient norm of the step before a resume
        if resume is False:
            refuse_existing(self.path)
            self._stepper = measure_alongside(Stepper(self.experiment))  # prepares it
            sampler = self.experiment.sampler
            if fork is not None:
                snapshot.restore(self.experiment, fork.state)
                for _ in range(fork.skip):
                    next(sampler)
                self.step_number, self._rng = fork.state.step, fork.state.rng
                self._scale(fork.rate_factor)
            self._cursor = read_cursor(sampler)
        elif fork is not None:
            raise ExperimentError("resume and fork both say where to start; expected one of them")
        else:
            try:
                self._reopen(resume)
            except BaseException:
                self._unlock()  # a second attempt may follow while this one's traceback is still shown
                raise

    def __enter__(self) -> Recorder:
        return self

    def close(self) -> None:
        """Ends the recording, as the end of a `with` does."""
        self.__exit__(None, None, None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended = True
        if self._journal is None:
            if self._copy is not None:
                self._copy.close()
            self._unlock()
            return
        try:
            self._checkpointer.wait()
            self._tell()
            if self._whole and self._saved_at != (self.step_number, self.segment):
                try:
                    self.checkpoint()
                except ExperimentError as error:
                    warnings.warn(str(error), stacklevel=2)
            if kind is None:
                self._append(type="done", step=self.step_number)
        finally:
            self._close()

    def _close(self) -> None:
        """Ends the recording. If a second Ctrl-C cut the waiting short, what is still being written ends by itself, and
        the run stays taken until the process has ended."""
        self._checkpointer.wait()
        journal, self._journal = self._journal, None
        try:
            if journal is not None:
                journal.close()
                if (failure := journal.failure or journal.copy_failure) is not None:
                    warnings.warn(
                        f"the last lines of telemetry of {self.path} were not written: {failure}", stacklevel=3
                    )
        finally:
            self._unlock()

    def batches(self, steps: int | None = None) -> Iterator[Any]:
        """The sampler's batches, until step `steps` has been performed (None: until the sampler ends)."""
        while steps is None or self.step_number < steps:
            if self._journal is None and self._rng is not None:
                set_random_key(self._rng)  # as in `_start`: the sampler may draw from it
            cursor, key = read_cursor(self.experiment.sampler), random_key()
            try:
                batch = next(self.experiment.sampler)
            except StopIteration:
                return
            self._drawn = _Drawn(cursor, key, random_key())
            try:
                yield batch
            finally:
                self._drawn = None

    def step(self, batch: Any) -> float:
        """Performs one step on `batch`, logs it, and saves a checkpoint when one is due. Returns the loss."""
        arrays = as_batch(batch)
        if self._ended:
            raise RunError(f"the recording of {self.path} has ended; go on with a new Recorder and resume=True")
        self.rolled_back = None
        start = self._start() if self._journal is None else None
        edits = {} if start is not None and self._resume is False else self._edits()
        if (number := self.step_number + 1) in self._left_out:
            self._left_out.remove(number)
            place, key = read_cursor(self.experiment.sampler), random_key()
            if (other := next(self.experiment.sampler, None)) is not None:
                arrays, self._drawn = as_batch(other), _Drawn(place, key, random_key())
                edits = {"before": msgspec.structs.replace(edits.get("before", Edits()), skip=1)}
        cursor = self._cursor_after(arrays)
        self._drawn = None
        check = SelfCheck(self._stepper, start, edits.get("before")) if start is not None and self._self_check else None
        self._whole = False
        result = self._stepper(arrays)
        if check is not None:
            check.first(arrays, result, cursor, self._method)
        if start is not None:
            self._begin(start)
        self.step_number += 1
        self._cursor, self._rng = cursor, random_key()
        self._keep_rates()
        seen = observe(self._stepper, arrays, result, cursor, self._method)
        if self._store is not None:
            try:
                self._store.put(seen.batch_hash, arrays)  # before the line that names it
            except OSError as error:
                warnings.warn(
                    f"the batch of step {self.step_number} was not stored, so that step can't be replayed: {error}. "
                    "Training goes on.",
                    stacklevel=2,
                )
        self._log(seen, edits)
        self._commit_before(seen)
        self._lanes, self._whole = seen.state, True
        if self.unstable is not None and self._recovery.mode == "on" and self._roll_back():
            return Loss(result.loss)
        due = bool(self._save_every) and self.step_number % self._save_every == 0
        if due or self._box.on or self._trail.wants(self.step_number):  # one capture for both
            state = self._captured()
            self._box.hold(Held(state, self.segment, self._lanes))
            self._trail.hold(Held(state, self.segment, self._lanes))
            if due:
                try:
                    if self._store is not None:
                        self._store.sync()
                    self._save(state)
                except OSError as error:
                    warnings.warn(
                        f"checkpoint {state.step} was not saved to {self.path}, since batches can't be: {error}. "
                        "Training goes on; the next one is tried when it is due.",
                        stacklevel=2,
                    )
        self._tell()
        return Loss(result.loss)

    def _cursor_after(self, batch: Batch) -> dict[str, Any]:
        """The cursor after the batch that a step is about to use. That of the second one is checked.

        Raises:
            ExperimentError: the batch can't be drawn again from it, or no longer be stored.
        """
        sampler = self.experiment.sampler
        if isinstance(sampler, PlainBatches):
            assert self._store is not None
            self._store.refuse_beyond(batch)
            sampler.consumed()
            return read_cursor(sampler)
        cursor, before = read_cursor(sampler), self._cursor if self._drawn is None else self._drawn.cursor
        if self._journal is None:
            self._first_cursor = before
        elif self._self_check and self._first_cursor is not None:
            first, self._first_cursor = self._first_cursor, None
            try:
                check_cursor(sampler, batch, before=before, after=cursor, key=self._key(), number=2, first=first)
            except ExperimentError as error:
                raise ExperimentError(
                    f"step {self.step_number + 1} can't be replayed: {error}. (self_check=False records it all the "
                    "same)"
                ) from error
        return cursor

    def log_validation(self, loss: float) -> None:
        """Logs a validation loss beside the last step."""
        self._append(type="val", step=self.step_number, val_loss=json_float(loss))

    def _roll_back(self) -> bool:
        """Goes back from the unstable step just logged. Returns whether: training goes on where that can't be written.

        Raises:
            TrainingUnstable: it was done, and was the last of too many in a row.
        """
        rule, step, left = self._recovery, self.step_number, self.segment
        factor = self.rate_factor * (1.0 if rule.skip_batch else rule.rate)
        try:
            held = self._state_before(step - rule.back)
            manifest = self._with_segment(start=held.state.step, parent=held.segment, rate_factor=factor)
            manifests.write(manifest, self.path)
        except (OSError, WorkbenchError) as error:
            warnings.warn(
                f"step {step} is unstable, and was not taken back: {error}. Training goes on from it.", stacklevel=3
            )
            return False
        count = self._row.add(step, rule.back)
        back = held.state.step
        if (back, held.segment) not in committed(self.path) and self._saved_at != (back, held.segment):
            self._put(f"state {back}, which training went back to,", held.state, held.segment, held.lanes)
        self.manifest, self.segment = manifest, len(manifest.segments) - 1
        snapshot.restore(self.experiment, held.state)
        self.step_number, self._cursor, self._rng = back, held.state.cursor, held.state.rng
        self._append(
            type="rollback",
            step=back,
            unstable_step=step,
            left=left,
            reason=self.unstable,
            rate_factor=factor,
            skip_batch=rule.skip_batch,
            in_a_row=count,
        )
        self._append_meta(held.state)
        self._keep_rates()
        scale_constants(self.experiment.optimizer, factor / manifest.segments[held.segment].rate_factor)
        self._scale(factor)
        self._lanes, self._saved_at = held.lanes, (back, self.segment)  # it has the state of another segment
        self._trail.forget_after(back)
        self._box.hold(Held(held.state, self.segment, held.lanes))
        self._box.finite = True
        if rule.skip_batch:
            self._left_out.add(step)
        self._warm_up(Run(self.path))
        self.rolled_back = step
        log.warning(
            "step %d was taken back: %s. Training goes on from state %d in segment %d%s.",
            step,
            self.unstable,
            back,
            self.segment,
            f", without batch {step}" if rule.skip_batch else f", at {factor:g} times the learning rate",
        )
        self._tell()
        if count >= rule.limit:
            raise TrainingUnstable(
                f"training is unstable; investigate: step {step} of {self.path} led to rollback {count} in a row "
                f"({self.unstable}). The state that it went back to, {back}, is kept, and so is what led to each "
                f"(workbench autopsy {self.path} --step {step} --segment {left})."
            )
        return True

    def _state_before(self, step: int) -> Held:
        """The latest state at or before one of a step, from memory or a checkpoint; or the first one that there is."""
        held = self._trail.before(step)
        self._checkpointer.wait()
        run = Run(self.path)
        run.manifest = self.manifest
        before = run.checkpoints_before(max(step, self.manifest.segments[0].start) + 1, self.segment)
        for number, segment in reversed(before):
            if held is not None and number <= held.state.step:
                break
            try:
                state = snapshot.read(self.path / CHECKPOINTS, number, segment, self.manifest.run)
                self._refuse_other_state(state, run.state_evidence(number, segment))
            except CheckpointError as error:
                log.warning("state %d can't be gone back to: %s", number, error)
                continue
            return Held(state, segment, state.lanes(self._method))
        if held is None:
            raise CheckpointError(f"{self.path} has no whole checkpoint before step {step} to go back to")
        return held

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
        if self._journal is None:
            raise RunError(f"no checkpoint can be saved to {self.path} before its first step or after its end")
        state = self._as_left(self._captured())
        lanes = state.lanes(self._method)
        if unlike := [lane for lane, value in self._lanes.items() if lanes[lane] != value]:
            raise ExperimentError(
                f"no checkpoint of step {self.step_number} was saved to {self.path}: {', '.join(unlike)} changed after "
                "the step, so this is not its state; save it before changing it (recorder.checkpoint())"
            )
        return self._save_now(state)

    def open_segment(self) -> None:
        """After a change to weights, optimizer state, random state or cursor between two steps: goes on from it.

        The state as it is now is committed as a checkpoint, and a segment of the telemetry starts from it, so that the
        steps that follow replay exactly. What was there before stays in the segment before.

        Raises:
            RunError: no step has been performed yet. The first one starts from whatever is there, after a resume in a
                segment of its own if that is another state than the checkpoint's.
        """
        if self._journal is None:
            raise RunError(f"no segment can be opened in {self.path} before its first step or after its end")
        # The batch of the next step may have been drawn already: a replay draws it after it has restored this state.
        cursor = read_cursor(self.experiment.sampler) if self._drawn is None else self._drawn.cursor
        state = snapshot.capture(self.experiment, self.step_number, cursor, self._key())
        manifest = self._with_segment()
        manifests.write(manifest, self.path)  # before anything goes on in it: without it no line of it could be read
        self.manifest, self.segment = manifest, len(manifest.segments) - 1
        self._append_meta(state)
        self._cursor, self._rng = cursor, state.rng
        self._keep_rates()
        self._lanes = state.lanes(self._method)
        self._save_now(state)
        self._box.hold(Held(state, self.segment, self._lanes))

    def _with_segment(self, **changed: Any) -> Manifest:
        """The manifest with one more segment, which goes on from the present one."""
        known = self.manifest.segments
        left = known[self.segment]
        settings = {"segment": len(known), "start": self.step_number, "parent": left.segment, "t": time.time()}
        entry = msgspec.structs.replace(left, **(settings | changed))
        return msgspec.structs.replace(self.manifest, segments=[*known, entry])

    def _key(self) -> tuple[int, int]:
        """The random state between two steps: without what the sampler drew for a batch, which a replay draws again."""
        key = random_key()
        return self._drawn.key if self._drawn is not None and key == self._drawn.key_after else key

    def _edits(self) -> dict[str, Any]:
        """What the loop changed between two steps, of what a replay can change too."""
        key, rates = self._key(), learning_rates(self.experiment)
        found = Edits(rng=None if key == self._rng else key, learning_rate=None if rates == self._rates else rates)
        return {} if found == Edits() else {"before": found}

    def _keep_rates(self) -> None:
        """Remembers the learning rates of this state, for the loop may set others before the next step."""
        self._rates = learning_rates(self.experiment)
        found = state_arrays(self.experiment.optimizer.state)
        self._rate_arrays = {path: copy.copy(found[path]) for path in rate_paths(self.experiment) if path in found}

    def _as_left(self, state: State) -> State:
        """The state with the learning rates that the last step left."""
        return replace(state, optimizer=state.optimizer | self._rate_arrays)

    # ---- beginning

    def _start(self) -> State:
        """The state from which the first step starts, in the form that a restored one has."""
        self._open_copy()  # first: if it can't be opened, there is no run yet
        if self._resume is False:
            refuse_existing(self.path)  # another process may have begun it meanwhile
            self.experiment.prepare()  # again: weights may have been loaded since
        if self._rng is not None:  # the random state is a thread's own, and this is the one that trains
            set_random_key(self._rng if self._drawn is None else self._drawn.key_after)
        cursor = self._cursor if self._drawn is None else self._drawn.cursor
        state = snapshot.capture(self.experiment, self.step_number, cursor, self._key())
        if self._resume is False:
            return state
        left = self._as_left(state)
        self._edited = left.lanes(self._method) != self._lanes
        if not self._edited:
            return left
        self._keep_rates()
        return state

    def _begin(self, start: State) -> None:
        """After the first step, which found the layers' order: manifest, checkpoint 0, the telemetry's first line."""
        self._box = BlackBox.for_experiment(self.experiment, self._box_limit)
        if self._resume is False:
            make_folder(self.path)
            self._lock()
            refuse_existing(self.path)  # before this process had it
            self.manifest = self._first_manifest()
            manifests.write(self.manifest, self.path)
            self._open_telemetry(start)
            self._checkpointer.write(start, self.manifest, self.segment, start.lanes(self._method))
            self._saved_at = (start.step, self.segment)
        else:
            there = {entry.segment for entry in manifests.read(self.path).segments}
            if self._edited and self.segment in there:
                self.manifest = self._with_segment()
                self.segment = len(self.manifest.segments) - 1
            for folder in (self.path, self.path / CHECKPOINTS):
                snapshot.sweep(folder)
            if self.segment not in there:
                manifests.write(self.manifest, self.path)
            self._open_telemetry(start)
            if self._edited:  # as `open_segment`
                self._save_now(start, start.lanes(self._method))
        self._box.committed |= self._boxed_before
        self._box.finite = self._finite_before
        self._box.hold(Held(start, self.segment, start.lanes(self._method)))

    def _open_copy(self) -> None:
        if self._copy_to is None or self._copy is not None:
            return
        self._copy_to.parent.mkdir(parents=True, exist_ok=True)
        if self._copy_to.resolve() == (self.path / TELEMETRY).resolve():
            raise RunError(f"{self._copy_to} is the run's own telemetry; expected another file for the copy")
        if self._copy_to.exists() and self._copy_to.stat().st_size:
            with self._copy_to.open("rb") as file:
                first = file.readline(65536)
            if self._resume is False or self.manifest.run.encode() not in first:
                raise RunError(
                    f"{self._copy_to} is not empty and not a copy of this run's telemetry; expected a new file"
                )
        self._copy = Writer(self._copy_to)

    def _first_manifest(self) -> Manifest:
        environment = numeric_environment()
        return Manifest(
            run=uuid.uuid4().hex,
            created=self._began,
            workbench=__version__,
            rebuild=self._rebuild,
            options=msgspec.to_builtins(self.experiment.options),
            optimizer=describe_optimizer(self.experiment.optimizer),
            data=self._data,
            layers=self._stepper.layers,
            owned=self._stepper.owned,
            parameters=[
                Parameter(path, list(array.shape), str(array.dtype).removeprefix("mlx.core."))
                for path, array in state_arrays(self.experiment.model).items()
            ],
            fingerprint=self._method,
            norms=norms.method_here(),
            save_every=self._save_every,
            keep_last=self._keep[0],
            keep_every=self._keep[1],
            spikes=None if self._spikes is None else msgspec.to_builtins(self._spikes),
            segments=[
                Segment(
                    segment=0,
                    start=self.step_number,
                    parent=None,
                    t=self._began,
                    environment=environment,
                    code=code_of(self.experiment, self._rebuild),
                    rate_factor=self.rate_factor,
                )
            ],
            parent=self._parent,
            recovery=msgspec.to_builtins(self._recovery),
            stored_batches=self._store is not None,
            own_step=self.experiment.step_fn is not None,
            extra=sorted(self.experiment.extra),
        )

    def _open_telemetry(self, state: State) -> None:
        journal = Journal(self.path / TELEMETRY, self._copy)
        sync_folder(self.path)  # the name of the file
        room = self._box.room(self.experiment, UNFINISHED)
        if self._recovery.mode == "on" and self._box.room(self.experiment, UNFINISHED + 2) == UNFINISHED + 2:
            self._trail = Trail(self._recovery.back)  # else checkpoints must do
        self._checkpointer = Checkpointer(self.path, journal, self._method, self._keep, room)
        self._journal = journal
        self._append_meta(state, **({"torn_bytes": self._journal.torn_bytes} if self._journal.torn_bytes else {}))
        self._step_ended = time.perf_counter()

    def _append_meta(self, state: State, **more: Any) -> None:
        lanes = state.lanes(self._method)
        self._append(type="meta", step=state.step, run=self.manifest.run, process=PROCESS, state=lanes, **more)

    # ---- going on

    def _reopen(self, resume: bool | int) -> None:
        run = Run(self.path)
        self._lock()
        self.manifest = run.manifest
        self._method = fingerprint_method(self.manifest.fingerprint, self.path)
        parent = run.manifest.segments[-1].segment
        there = run.checkpoints
        ways = [(step, s) for step, s in there if state_segment(run.manifest, there, step, parent) == s]
        wanted = [key for key in ways if resume is True or key[0] == resume]
        if not wanted:
            raise CheckpointError(
                f"{self.path} has no checkpoint {'at all' if resume is True else f'of step {resume}'}; "
                f"it has {[step for step, _ in ways]}"
            )
        step, segment = wanted[-1]
        self._stepper = measure_alongside(Stepper(self.experiment, self.manifest.layers))
        self._refuse_another()
        if isinstance(self.experiment.sampler, PlainBatches):
            self.experiment.sampler.verify = verifier(run, parent)
        state = snapshot.read(self.path / CHECKPOINTS, step, segment, self.manifest.run)
        self._refuse_other_state(state, run.state_evidence(step, segment))
        snapshot.restore(self.experiment, state)
        self.step_number, self._cursor = step, read_cursor(self.experiment.sampler)
        self._saved_at = (step, segment)
        self._rng, self._lanes = state.rng, state.lanes(self._method)
        self._keep_rates()
        environment = numeric_environment()
        newest = run.telemetry.last_step(parent)
        newest = max(newest, run.manifest.segments[parent].start)
        code = code_of(self.experiment, self.manifest.rebuild)
        last = run.manifest.segments[parent]
        moved = bool(differences(last.environment, environment) or changed([last.code], code))
        # Where nothing was performed yet in the last segment, what it is to start with holds: a rollback's rates, say.
        base = parent if step == newest else segment
        factor, before = (run.manifest.segments[one].rate_factor for one in (base, segment))
        self._scale(factor)
        if factor != before:
            scale_constants(self.experiment.optimizer, factor / before)
        self.segment = parent
        if step != newest or moved or self.manifest.norms_of(parent) != norms.method_here():
            self.segment = len(run.manifest.segments)
            entry = Segment(
                segment=self.segment,
                start=step,
                parent=segment,
                t=self._began,
                environment=environment,
                norms=norms.method_here(),
                code=code,
                rate_factor=factor,
            )
            self.manifest = msgspec.structs.replace(self.manifest, segments=[*self.manifest.segments, entry])
        self._boxed_before = {
            (before, s) for before, s in there if (line := run.line(before + 1, s)) is not None and line.spike is True
        }
        left = run.evidence(step, segment)
        self._finite_before = all(np.isfinite(bits_float(left[name])) for name in SCALARS if name in left)
        run.manifest = self.manifest  # on disk only once a step is performed
        self._warm_up(run)
        for line in run.telemetry.rollbacks:
            if line.step is UNSET or self.manifest.lineage(self.segment, line.step + 1) != line.segment:
                continue  # of another branch
            if isinstance(line.unstable_step, int):
                self._row = Row(line.in_a_row or 0, line.unstable_step)
                if line.skip_batch is True and line.unstable_step > step:
                    self._left_out.add(line.unstable_step)

    def _lock(self) -> None:
        """Two recorders that went on with one run would mix their lines, and make its telemetry unreadable."""
        self._unlock = Lock(self.path).release

    def _refuse_other_state(self, state: State, evidence: Mapping[str, Any]) -> None:
        """A checkpoint whose digests were repaired after a change still contradicts what the run logged at its step."""
        lanes = {f"state.{lane}": value for lane, value in state.lanes(self._method).items()}
        unlike = [lane for lane, value in lanes.items() if evidence.get(lane, value) != value]
        if unlike:
            raise CheckpointError(
                f"checkpoint {state.step} of {self.path} is not the state that its telemetry recorded: "
                f"{', '.join(unlike)} differ. Resume from an earlier checkpoint (--resume STEP)."
            )

    def _refuse_another(self) -> None:
        found, expected = describe_optimizer(self.experiment.optimizer), self.manifest.optimizer
        options = msgspec.to_builtins(self.experiment.options)
        if found != expected or options != self.manifest.options:
            raise ExperimentError(
                f"this is not the experiment that {self.path} recorded: optimizer {found}, recorded {expected}; "
                f"options {options}, recorded {self.manifest.options}"
            )
        if unlike := [*other_parts(self.experiment, self.manifest), *self._other_batches()]:
            raise ExperimentError(f"this is not the experiment that {self.path} recorded: {'; '.join(unlike)}")

    def _other_batches(self) -> list[str]:
        kinds = {True: "without a cursor (its batches are stored)", False: "with a cursor"}
        have, want = self._store is not None, self.manifest.stored_batches
        return [] if have == want else [f"the sampler is one {kinds[have]}, recorded one {kinds[want]}"]

    def _warm_up(self, run: Run) -> None:
        """Detection goes on as if there had been no break, with what it would remember of the way to this state."""
        self._stability.reset()
        for norm in run.history(self.segment, self.step_number, self._recovery.window)["grad_norm"]:
            self._stability.judge(0.0, float(norm))
        if self._detector is None or self._spikes is None:
            return
        self._detector.reset()
        for row in run.history(self.segment, self.step_number, 6 * self._spikes.window).to_dict("records"):
            self._detector.update(
                row["step"],
                row["loss"] if row["loss_recorded"] else None,
                row["grad_norm"] if row["grad_norm_recorded"] else None,
            )

    # ---- writing

    def _log(self, seen: Observation, edits: dict[str, Any]) -> None:
        now = time.perf_counter()
        speed, self._step_ended = 1 / max(now - self._step_ended, 1e-9), now
        fields: dict[str, Any] = {"step_per_s": round(speed, 4), "peak_rss_mb": _peak_mb()}
        if self._detector is not None:
            self.reading = self._detector.update(self.step_number, float(seen.loss), float(seen.grad_norm))
            average = self.reading.moving_average
            fields |= {
                "ma": None if average is None else json_float(average),
                "spike": self.reading.rule is not None,
                "spike_rule": self.reading.rule,
            }
        before, self.unstable = self.unstable, self._stability.judge(float(seen.loss), float(seen.grad_norm))
        if self.unstable is not None:
            fields["unstable"] = self.unstable
            if before is None:  # once for a stretch of them
                log.warning("step %d is unstable: %s", self.step_number, self.unstable)
        self._append(type="step", step=self.step_number, **fields, **edits, **seen.fields())

    def _append(self, **fields: Any) -> None:
        if self._journal is None:
            raise RunError(f"nothing can be logged to {self.path} before its first step or after its end")
        now = time.time()
        when: dict[str, Any] = {"t": round(now, 3), "elapsed_s": round(now - self._began, 3), "segment": self.segment}
        self._journal.put(Line(**when, **fields))

    def _commit_before(self, seen: Observation) -> None:
        """Commits the state before the step just logged, if that is a spike. Training goes on if it can't be saved."""
        rule = self.unstable if self.reading is None else self.reading.rule or self.unstable
        needed = self.unstable is not None and self._recovery.mode == "on"
        held = self._box.due(float(seen.loss), float(seen.grad_norm), rule, needed=needed)
        if held is None or held.state.step == 0 or self._saved_at == (held.state.step, held.segment):
            return
        step, there = held.state.step, committed(self.path)
        if (step, state_segment(self.manifest, there, step, held.segment)) in there:  # maybe of another: after a resume
            return
        self._box.committed.add((step, held.segment))
        self._put(f"state {step}, before a spike,", held.state, held.segment, held.lanes)

    def _captured(self) -> State:
        """The state that the last step left, if nothing has changed it since."""
        return snapshot.capture(self.experiment, self.step_number, self._cursor, self._rng)

    def _save(self, state: State, lanes: dict[str, str] | None = None) -> None:
        """Has it saved as the checkpoint of the last step, while training goes on."""
        self._saved_at = (state.step, self.segment)
        self._put(f"checkpoint {state.step}", state, self.segment, lanes or self._lanes)

    def _save_now(self, state: State, lanes: dict[str, str] | None = None) -> bool:
        """The same, and waits until it is durable. Returns whether it is."""
        self._save(state, lanes)
        self._checkpointer.wait()
        self._tell()
        return self._saved_at == (state.step, self.segment)

    def _put(self, what: str, state: State, segment: int, lanes: dict[str, str]) -> None:
        self._checkpointer.put(what, state, self.manifest, segment, lanes, self._box.committed)

    def _tell(self) -> None:
        """Warns of what could not be written meanwhile. A full disk stops no training."""
        for failure in self._checkpointer.failed():
            if self._saved_at == failure.key:
                self._saved_at = None
            self._box.committed.discard(failure.key)
            warnings.warn(
                f"{failure.what} was not saved to {self.path}: {failure.error}. Training goes on; the checkpoints "
                "before it are untouched, and the next one is tried when it is due.",
                stacklevel=3,
            )
        assert self._journal is not None
        error, telling = self._journal.failure or self._journal.copy_failure, self._telling
        self._telling = error is not None
        if error is not None and (not telling or self._journal.lost):
            warnings.warn(
                f"telemetry of step {self.step_number} can't be written to {self.path}: {error}. "
                + (
                    "Nothing more is recorded." if self._journal.lost else "Training goes on; its lines wait in memory."
                ),
                stacklevel=3,
            )


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux, bytes on macOS
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)
