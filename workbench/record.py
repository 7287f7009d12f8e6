"""Recording a training loop: manifest, telemetry every step, checkpoints; and going on from one of them.

    with Recorder("runs/mine", model, optimizer, loss_fn, sampler) as recorder:
        for batch in recorder.batches(steps):
            loss = recorder.step(batch)

Knows the core and the folder's layout; nothing of any particular model or data.
"""

from __future__ import annotations

import copy
import os
import resource
import sys
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import msgspec
import numpy as np

from . import __version__, norms, snapshot
from . import manifest as manifests
from .bits import bits_float, json_float
from .blackbox import LIMIT, BlackBox
from .environment import PROCESS, differences, numeric_environment
from .errors import CheckpointError, ExperimentError, RunError
from .experiment import (
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
from .files import lock
from .fingerprint import known_method as fingerprint_method
from .fingerprint import method_here
from .hyperparameters import describe_optimizer
from .journal import Journal
from .manifest import DataFile, Manifest, Parameter, Segment
from .observe import Observation, learning_rates, measure_alongside, observe, rate_paths
from .run import CHECKPOINTS, TELEMETRY, Run, refuse_existing
from .seams import state_segment
from .snapshot import State
from .spikes import Reading, SpikeDetector, SpikeSettings
from .step import Stepper
from .telemetry import SCALARS, Edits, Line, Writer

if TYPE_CHECKING:
    from .forks import ForkPoint


class _Drawn(NamedTuple):
    """A batch that was handed out and not used yet: where data and random state stood before it was drawn."""

    cursor: dict[str, Any]
    key: tuple[int, int]
    key_after: tuple[int, int]  # another one if the sampler draws random numbers


class Recorder:
    """Records the steps of a training loop so that any of them can be replayed.

    Args:
        path: the run's folder. It must not hold a run yet, unless `resume` is given.
        model, optimizer, loss_fn, sampler: see `Experiment`.
        clip, accumulate, compile, deterministic: see `StepOptions`.
        save_every: a checkpoint each so many steps; 0: only the first and the last state.
        keep_last, keep_every: thin older checkpoints: keep the last so many and every one whose step is a multiple of
            `keep_every`. The first is always kept, and those from which a segment starts. None: nothing is thinned.
        spikes: settings of spike detection; None switches it off.
        black_box: how many spikes have the state before them committed as a checkpoint, whatever `save_every` is, so
            that they replay without rolling forward; 0: none. Takes memory for one state; off where a state is larger
            than a quarter of the device's memory.
        resume: True: go on from the last checkpoint; a number: from the checkpoint of that step.
        fork: start from a state of another run (`workbench.fork_point`), which is left as it is.
        factory, arguments: "module:function" and JSON arguments that rebuild the experiment, for replays from the
            command line. Without it a replay needs the experiment passed.
        data: data files, pinned by size and SHA-256: a replay refuses others.
        rebuild: how to rebuild the experiment; the built-in trainer's alternative to `factory`.
        copy_telemetry_to: a file that receives each telemetry line too. The run keeps its own: it is the evidence.

    Attributes:
        step_number: the last step performed.
        reading: what spike detection said of it.

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
        sampler: Sampler,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        compile: bool = True,
        deterministic: bool = True,
        save_every: int = 100,
        keep_last: int | None = None,
        keep_every: int | None = None,
        spikes: SpikeSettings | None = SpikeSettings(),  # noqa: B008 - immutable
        black_box: int = LIMIT,
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
        self.experiment = Experiment(model, optimizer, loss_fn, sampler, options)
        self._save_every, self._keep = save_every, (keep_last, keep_every)
        self._spikes, self._detector = spikes, SpikeDetector(spikes) if spikes else None
        self._rebuild = rebuild or (
            {"kind": "factory", "factory": factory, "arguments": arguments or {}} if factory else {"kind": "none"}
        )
        self._data, self._resume, self._parent = list(data), resume, None if fork is None else fork.parent
        self._copy_to = None if copy_telemetry_to is None else Path(copy_telemetry_to)
        self._copy: Writer | None = None
        self._journal: Journal | None = None
        self._unlock: Callable[[], Any] = lambda: None
        self._saved_at: tuple[int, int] | None = None
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
            if fork is not None:
                snapshot.restore(self.experiment, fork.state)
                for _ in range(fork.skip):
                    next(sampler)
                self.step_number, self._rng = fork.state.step, fork.state.rng
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
            if self._whole and self._saved_at != (self.step_number, self.segment):
                try:
                    self.checkpoint()
                except ExperimentError as error:
                    warnings.warn(str(error), stacklevel=2)
            if kind is None:
                self._append(type="done", step=self.step_number)
        finally:
            journal, self._journal = self._journal, None
            try:
                journal.close()
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
        start = self._start() if self._journal is None else None
        edits = {} if start is not None and self._resume is False else self._edits()
        self._drawn = None
        cursor = read_cursor(self.experiment.sampler)
        self._whole = False
        result = self._stepper(arrays)
        if start is not None:
            self._begin(start)
        self.step_number += 1
        self._cursor, self._rng = cursor, random_key()
        self._keep_rates()
        seen = observe(self._stepper, arrays, result, cursor, self._method)
        self._log(seen, edits)
        self._commit_before(seen)
        self._lanes, self._whole = seen.state, True
        self._hold()
        if self._save_every and self.step_number % self._save_every == 0:
            self.checkpoint()
        return float(result.loss)

    def log_validation(self, loss: float) -> None:
        """Logs a validation loss beside the last step."""
        self._append(type="val", step=self.step_number, val_loss=json_float(loss))

    def checkpoint(self) -> None:
        """Saves the state that the last step left, then thins older checkpoints if that was asked for.

        Raises:
            ExperimentError: weights or optimizer state were changed since that step, so they are no longer its state.
                (A learning rate set for the next step is no such change: the checkpoint has that of the last.)
            RunError: no step has been performed yet.
        """
        if self._journal is None:
            raise RunError(f"no checkpoint can be saved to {self.path} before its first step or after its end")
        state = self._as_left(snapshot.capture(self.experiment, self.step_number, self._cursor, self._rng))
        lanes = state.lanes(self._method)
        if unlike := [lane for lane, value in self._lanes.items() if lanes[lane] != value]:
            raise ExperimentError(
                f"no checkpoint of step {self.step_number} was saved to {self.path}: {', '.join(unlike)} changed after "
                "the step, so this is not its state; save it before changing it (recorder.checkpoint())"
            )
        self._save(state)

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
        self._save(state)
        self._hold()

    def _with_segment(self) -> Manifest:
        """The manifest with one more segment, which goes on from the present one."""
        known = self.manifest.segments
        left = known[self.segment]
        entry = msgspec.structs.replace(
            left, segment=len(known), start=self.step_number, parent=left.segment, t=time.time()
        )
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
        if self._resume is False:
            self.path.mkdir(parents=True, exist_ok=True)
            self.manifest = self._first_manifest()
            manifests.write(self.manifest, self.path)
            self._open_telemetry(start)
            self._lock()
            self._save(start)
        else:
            there = {entry.segment for entry in manifests.read(self.path).segments}
            if self._edited and self.segment in there:
                self.manifest = self._with_segment()
                self.segment = len(self.manifest.segments) - 1
            if self.segment not in there:
                manifests.write(self.manifest, self.path)
            self._open_telemetry(start)
            if self._edited:  # as `open_segment`
                self._save(start)
        self._box = BlackBox.for_experiment(self.experiment, self._box_limit)
        self._box.committed |= self._boxed_before
        self._box.finite = self._finite_before
        self._box.hold(start, self.segment)

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
            segments=[Segment(segment=0, start=self.step_number, parent=None, t=self._began, environment=environment)],
            parent=self._parent,
        )

    def _open_telemetry(self, state: State) -> None:
        self._journal = Journal(self.path / TELEMETRY, self._copy)
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
        state = snapshot.read(self.path / CHECKPOINTS, step, segment, self.manifest.run)
        self._refuse_other_state(state, run.state_evidence(step, segment))
        snapshot.restore(self.experiment, state)
        self.step_number, self._cursor = step, read_cursor(self.experiment.sampler)
        self._saved_at = (step, segment)
        self._rng, self._lanes = state.rng, state.lanes(self._method)
        self._keep_rates()
        environment = numeric_environment()
        newest = max(
            (line.step for line in run.telemetry.lines if line.type == "step" and line.segment == parent), default=0
        )  # type: ignore[type-var]
        newest = max(newest, run.manifest.segments[parent].start)  # type: ignore[type-var]
        moved = bool(differences(run.manifest.segments[parent].environment, environment))
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
            )
            self.manifest = msgspec.structs.replace(self.manifest, segments=[*self.manifest.segments, entry])
        self._boxed_before = {
            (before, s) for before, s in there if (line := run.line(before + 1, s)) is not None and line.spike is True
        }
        left = run.evidence(step, segment)
        self._finite_before = all(np.isfinite(bits_float(left[name])) for name in SCALARS if name in left)
        if self._detector is not None:
            run.manifest = self.manifest  # on disk only once a step is performed
            self._warm_up(run)

    def _lock(self) -> None:
        """Two recorders that went on with one run would mix their lines, and make its telemetry unreadable."""
        path = self.path / TELEMETRY
        if path.exists():
            try:
                self._unlock = weakref.finalize(self, os.close, lock(path))
            except BlockingIOError:
                raise RunError(
                    f"{self.path} is being recorded just now, by another process or another Recorder; wait for its end"
                ) from None

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

    def _warm_up(self, run: Run) -> None:
        """Detection goes on as if there had been no break, with what it would remember of the way to this state."""
        assert self._detector is not None and self._spikes is not None
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
        self._append(type="step", step=self.step_number, **fields, **edits, **seen.fields())

    def _append(self, **fields: Any) -> None:
        if self._journal is None:
            raise RunError(f"nothing can be logged to {self.path} before its first step or after its end")
        now = time.time()
        when: dict[str, Any] = {"t": round(now, 3), "elapsed_s": round(now - self._began, 3), "segment": self.segment}
        self._journal.put(Line(**when, **fields))

    def _hold(self) -> None:
        if self._box.on:
            state = snapshot.capture(self.experiment, self.step_number, self._cursor, self._rng)
            self._box.hold(state, self.segment)

    def _commit_before(self, seen: Observation) -> None:
        """Commits the state before the step just logged, if that is a spike. Training goes on if it can't be saved."""
        rule = None if self.reading is None else self.reading.rule
        found = self._box.due(float(seen.loss), float(seen.grad_norm), rule)
        if found is None or found[0].step == 0:
            return
        step, there = found[0].step, Run(self.path).checkpoints
        if (step, state_segment(self.manifest, there, step, found[1])) in there:  # maybe of another: after a resume
            return
        try:
            self._write(*found)
        except OSError as error:
            warnings.warn(f"state {found[0].step}, before a spike, was not saved to {self.path}: {error}", stacklevel=3)
        else:
            self._box.committed.add((found[0].step, found[1]))

    def _save(self, state: State) -> None:
        self._write(state, self.segment)
        self._saved_at = (state.step, self.segment)
        self._thin()

    def _write(self, state: State, segment: int) -> None:
        assert self._journal is not None
        self._journal.sync()  # a checkpoint never outlives the telemetry of the steps that led to it
        folder = self.path / CHECKPOINTS
        snapshot.write(state, folder, run=self.manifest.run, segment=segment, t=time.time(), method=self._method)

    def _thin(self) -> None:
        last, every = self._keep
        if last is None and every is None:
            return
        starts = {(e.start, segment) for e in self.manifest.segments for segment in (e.segment, e.parent)}
        # Only on the way to the present state: what another branch of the run has kept is its own.
        keys = [key for key in Run(self.path).checkpoints if self.manifest.lineage(self.segment, key[0]) == key[1]]
        recent = set(keys[-max(last or 1, 1) :])
        for step, segment in keys:
            held = (step, segment) in self._box.committed
            if held or (step, segment) in recent | starts or step == 0 or (every and step % every == 0):
                continue
            snapshot.delete(self.path / CHECKPOINTS, step, segment)


def _peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kB on Linux, bytes on macOS
    return round(peak / (1024 if sys.platform != "darwin" else 1024**2), 1)
