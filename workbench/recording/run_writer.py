"""The folder of a run while it is recorded: its manifest, its telemetry and its checkpoints, and who may write to them.

Knows states and the folder's layout; nothing of loops, batches or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from .. import manifest as manifests
from ..blackbox import BlackBox
from ..checkpoints import checkpoint_writer
from ..errors import RunError
from ..experiment import Experiment
from ..files import make_folder
from ..files_read import ReadFile
from ..fingerprint import known_method, method_here
from ..hyperparameters import describe_optimizer
from ..lines.writer import Writer
from ..locking import Lock
from ..manifest import Manifest
from ..ranks.attendance import attended
from ..ranks.rank_setup import RankSetup
from ..recorded.layout import CHECKPOINTS, refuse_existing
from ..run import Run
from ..snapshot import State
from ..step import Stepper
from .logbook import Logbook
from .run_manifest import first_manifest, with_segment, with_values
from .saves import Saves
from .telemetry_copy import open_copy
from .terms import Terms


class RunWriter:
    """
    Args:
        path: the run's folder.
        terms: what the run is recorded with.
        black_box: how many states are committed because a spike comes after them.
        began: Unix time in seconds, of this recording.

    Attributes:
        manifest: of a new run only once it is created; of one that is gone on with, as it will then be.
        segment: the one that is being written.
        method: of the fingerprints.
        saves: its checkpoints.
        logbook: its telemetry; None: before the first step and after the end.
        ranks: who trains together, for the manifest; unset: this process alone.
        remarks: what the self-check of this process could not rule out, a sentence each.
        reads: files that the step was seen to read by itself.
        values: what the step reads beside its state, before the first step of this process; unset: not looked at.
        optimizer: description of the optimizer from before the first step of a new run; None: as it is after it.
    """

    def __init__(self, path: Path, terms: Terms, black_box: int, began: float) -> None:
        self.path, self._terms, self._black_box, self.began = path, terms, black_box, began
        self.manifest: Manifest
        self.ranks: RankSetup | UnsetType = UNSET
        self.remarks: list[str] = []
        self.reads: list[ReadFile] = []
        self.values: dict[str, str] | UnsetType = UNSET
        self.optimizer: dict[str, Any] | None = None
        self.segment, self.method = 0, method_here()
        self.saves = Saves(path)
        self.logbook: Logbook | None = None
        self._copy: Writer | None = None
        self._unlock: Callable[[], Any] = lambda: None
        self._done: int | None = None  # the step that the last line says the run was done at

    def lock(self) -> None:
        """Two recorders that went on with one run would mix their lines, and make its telemetry unreadable.

        Raises:
            RunError: another one does, or nothing can be written there.
        """
        try:
            self._unlock = Lock(self.path).release
        except OSError as error:
            raise RunError(
                f"nothing can be recorded in {self.path} ({error.strerror or error}); expected a folder that can be "
                "written to: copy the run to one, and go on there"
            ) from error

    def unlock(self) -> None:
        self._unlock()

    def reopen(self) -> Run:
        """Takes a run that there is, to go on with it.

        Raises:
            RunError: there is none, or another recorder has it, or this workbench lacks the method of its fingerprints.
        """
        run = attended(Run(self.path))
        self.lock()
        self.manifest, self.method = run.manifest, known_method(run.manifest.fingerprint, self.path)
        return run

    def open_copy(self, path: Path | None, *, new: bool) -> None:
        """Opens the file that receives each line too, once; see `telemetry_copy`."""
        if path is not None and self._copy is None:
            self._copy = open_copy(path, self.path, None if new else self.manifest.run)

    def create(self, experiment: Experiment, stepper: Stepper, start: State, rate_factor: float) -> None:
        """A new run, whose first step `stepper` has performed: manifest, the telemetry's first line, checkpoint 0.

        Args:
            start: the state from which that step started.
            rate_factor: what schedules of learning rates are multiplied by.

        Raises:
            RunError: the folder holds a run already.
        """
        self.saves.box = BlackBox.for_experiment(experiment, self._black_box)
        make_folder(self.path)
        self.lock()
        try:
            refuse_existing(self.path)  # before this process had it
            self.manifest = first_manifest(
                experiment,
                stepper,
                self._terms,
                began=self.began,
                start=start.step,
                rate_factor=rate_factor,
                fingerprint=self.method,
                optimizer=self.optimizer or describe_optimizer(experiment.optimizer),
                ranks=self.ranks,
                values=self.values,
            )
            manifests.write(self.manifest, self.path)
        except BaseException:
            self.unlock()  # there is no run: the loop, or another, may try again once there is room
            raise
        lanes = start.lanes(self.method)
        self._open_telemetry(experiment, start.step, lanes)
        self.saves.checkpointer.write(start, self.manifest, self.segment, lanes)
        self.saves.last = (start.step, self.segment)

    def go_on(self, experiment: Experiment, start: State, *, edited: bool) -> None:
        """With a run that there is, of whose segment to go on in `manifest` says already.

        Args:
            edited: `start` is another state than the one that was left.
        """
        self.saves.box = BlackBox.for_experiment(experiment, self._black_box)
        self.manifest = msgspec.structs.replace(self.manifest, end=UNSET)
        there = {entry.segment for entry in manifests.read(self.path).segments}
        if edited and self.segment in there:
            self.manifest = with_segment(self.manifest, self.segment, start.step)
            self.segment = len(self.manifest.segments) - 1
        if self.segment not in there:
            self.manifest = with_values(self.manifest, self.segment, self.values)
        for folder in (self.path, self.path / CHECKPOINTS):
            checkpoint_writer.sweep(folder)
        manifests.write(self.manifest, self.path)  # it is not at its end any more, and may be of an older workbench
        self._open_telemetry(experiment, start.step, start.lanes(self.method))

    def add_segment(self, start: int) -> None:
        """Goes on in a segment that starts from the state of this step."""
        manifest = with_segment(self.manifest, self.segment, start)
        manifests.write(manifest, self.path)  # before anything goes on in it: without it no line of it could be read
        self.enter(manifest)

    def enter(self, manifest: Manifest) -> None:
        """Goes on in the last segment of a manifest that is written already."""
        self.manifest, self.segment = manifest, len(manifest.segments) - 1

    def run(self) -> Run:
        """The run as its folder holds it now, with the manifest that it will have."""
        run = Run(self.path)
        run.manifest = self.manifest
        return run

    def append(self, **fields: Any) -> None:
        """Appends a line to the telemetry.

        Raises:
            RunError: it is not open.
        """
        if self.logbook is None:
            raise RunError(f"nothing can be logged to {self.path} before its first step or after its end")
        self.logbook.append(self.segment, **fields)
        self._done = fields["step"] if fields["type"] == "done" else None

    @property
    def logged(self) -> tuple[int, int] | None:
        """Segment and step of the last step line of this process; None: none, or nothing is open."""
        return None if self.logbook is None else self.logbook.journal.logged

    def about(self) -> dict[str, Any]:
        """What else a meta line says of the state that a segment goes on from."""
        return {}

    def append_meta(self, step: int, lanes: dict[str, str]) -> None:
        """Appends the line that says from which state a segment goes on."""
        assert self.logbook is not None
        self.logbook.append_meta(self.segment, step, self.manifest.run, lanes, **self.about())

    def troubles(self, step: int) -> Iterator[str]:
        """What could not be written since this was last asked, a sentence each. A full disk stops no training."""
        assert self.logbook is not None
        yield from self.saves.failures()
        yield from self.logbook.troubles(step)

    def close(self) -> str | None:
        """Ends the recording. If a second Ctrl-C cuts the waiting short, what is still being written ends by itself,
        and the run stays taken until the process has ended.

        Returns:
            A sentence on what could not be written, if there is any.
        """
        if self.logbook is not None:
            self.saves.checkpointer.wait()
        elif self._copy is not None:
            self._copy.close()
        logbook, self.logbook = self.logbook, None
        try:
            if logbook is None:
                return None
            synced = self._done is not None and logbook.sync()
            said = logbook.close()
            ended = self._end(logbook.seal) if said is None and synced else said
            return "; ".join(one for one in (ended, logbook.copy_left()) if one is not None) or None
        finally:
            self._unlock()

    def _end(self, seal: str | None) -> str | None:
        """Has the manifest remember how far the run got, once its last line is durable: a power failure must not leave
        the note without the line. Returns a sentence if it can't be written."""
        if self._done is None or seal is None:
            return None
        try:
            run = Run(self.path)
            if run.manifest.run == self.manifest.run:  # else another run has been begun in its place
                end = manifests.End(step=self._done, seal=seal, checkpoints=run.checkpoints)
                self.manifest = msgspec.structs.replace(run.manifest, end=end)
                manifests.write(self.manifest, self.path)
        except (OSError, RunError) as error:
            return f"that the run is done at step {self._done} can't be noted in {self.path}: {error}"
        return None

    def _open_telemetry(self, experiment: Experiment, step: int, lanes: dict[str, str]) -> None:
        logbook = Logbook(self.path, self._copy, self.began)
        back = self._terms.recovery.back if self._terms.recovery.mode == "on" else 0
        self.saves.open(experiment, logbook.journal, self.method, self._terms.keep, back)
        self.logbook = logbook
        said: dict[str, Any] = {"remarks": self.remarks} if self.remarks else {}
        said |= {"reads": self.reads} if self.reads else {}
        logbook.open_process(self.segment, step, self.manifest.run, lanes, **said, **self.about())
