"""The checkpoints of a run while it is recorded: each written off the training thread, older ones thinned after it.

What is handed over are references to a state's arrays, which nothing changes: a step that comes after makes new arrays,
for MLX gives the buffer of an array to another only when nobody holds it. On a CUDA device, where the host can read an
array only by moving it, they are copies in the host's memory. Knows states and a run's folder; nothing of loops.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from . import cuda
from .checkpoints import checkpoint_writer
from .errors import CheckpointError, WorkbenchError
from .fingerprint import BYTES
from .journal import Journal
from .manifest import NAME, Manifest
from .recorded.layout import CHECKPOINTS
from .run import Run
from .saving import Save, Saver
from .snapshot import State
from .tensor_file import HostArray

Key = tuple[int, int]  # step and segment

log = logging.getLogger("workbench")


@dataclass(frozen=True)
class Failure:
    """A checkpoint that could not be saved."""

    what: str
    key: Key
    error: Exception


class Checkpointer:
    """
    Args:
        path: the run's folder.
        journal: its telemetry, which is made durable before each checkpoint: none outlives the lines that led to it.
        method: of the fingerprints.
        keep: `keep_last` and `keep_every` of a Recorder.
        limit: how many may be unfinished at a time, each of which holds a state in memory; 0: each is waited for.
    """

    def __init__(
        self, path: Path, journal: Journal, method: str, keep: tuple[int | None, int | None], limit: int
    ) -> None:
        self._path, self._journal, self._method, self._keep = path, journal, method, keep
        self._begun = False  # the folder of the checkpoints was there
        self._saver = Saver(limit)

    def put(
        self, what: str, state: State, manifest: Manifest, segment: int, lanes: dict[str, str], held: Collection[Key]
    ) -> None:
        """Hands a state over to be saved as a checkpoint; waits only while as many as may be are unfinished.

        Args:
            what: it is, for messages.
            lanes: its fingerprints, as its step was logged: what is written must have them.
            held: checkpoints that thinning spares.
        """
        state = _on_host(state) if cuda.available() else state
        held = frozenset(held)

        def perform() -> None:
            self.write(state, manifest, segment, lanes, held)
            try:
                thin(self._path, manifest, segment, self._keep, held)
            except OSError as error:  # it is saved; and they are tried again after the next one
                log.warning("older checkpoints of %s can't be removed: %s", self._path, error)

        self._saver.put(Save((what, (state.step, segment)), perform))

    def write(
        self, state: State, manifest: Manifest, segment: int, lanes: dict[str, str], held: Collection[Key] = ()
    ) -> None:
        """Saves it in this thread; durable when it returns.

        Args:
            held: checkpoints that thinning spares.

        Raises:
            OSError: it, or the telemetry before it, can't be written.
            CheckpointError: the arrays are no longer those that were logged.
        """
        self._journal.sync()
        (self._path / NAME).stat()  # where a file system was unmounted, another folder may stand in the run's place
        if self._method == BYTES and not cuda.available() and (found := state.lanes(BYTES)) != lanes:
            changed = ", ".join(lane for lane in lanes if found.get(lane) != lanes[lane])
            raise CheckpointError(f"{changed} changed between the step and the saving of its state")
        folder = self._path / CHECKPOINTS
        checkpoint_writer.write(
            state,
            folder,
            run=manifest.run,
            segment=segment,
            t=time.time(),
            lanes=lanes,
            lasts=lambda step, one: _lasts(step, one, manifest, self._keep, held),
            make=not self._begun,
        )
        self._begun = True

    def wait(self) -> None:
        """Returns when all that was handed over is durable, or has failed."""
        self._saver.wait()

    @property
    def idle(self) -> bool:
        return self._saver.idle

    def failed(self) -> list[Failure]:
        """What could not be saved since this was last asked."""
        return [Failure(key[0], key[1], error) for key, error in self._saver.failed()]


def _on_host(state: State) -> State:
    """The same bits in the host's memory, by way of copies, so that the arrays themselves stay on the device."""
    true = mx.array(True)

    def copied(arrays: dict[str, mx.array]) -> dict[str, Any]:
        found = {path: mx.where(true, array, array) for path, array in arrays.items()}
        mx.eval(found)
        return {path: HostArray.of(array) for path, array in found.items()}

    return replace(state, weights=copied(state.weights), optimizer=copied(state.optimizer))


def committed(path: Path) -> list[Key]:
    """The checkpoints of the run in a folder; none if it has gone."""
    try:
        return Run(path).checkpoints
    except (OSError, WorkbenchError):
        return []


def thin(
    path: Path, manifest: Manifest, segment: int, keep: tuple[int | None, int | None], held: Collection[Key]
) -> None:
    """Removes the checkpoints that are neither among the last nor at a multiple, on the way to the present state: what
    another branch of the run has kept is its own."""
    last, every = keep
    if last is None and every is None:
        return
    keys = [key for key in committed(path) if manifest.lineage(segment, key[0]) == key[1]]
    recent = set(keys[-max(last or 1, 1) :])
    for step, one in keys:
        if (step, one) not in recent and not _lasts(step, one, manifest, keep, held):
            checkpoint_writer.delete(path / CHECKPOINTS, step, one)


def _lasts(
    step: int, segment: int, manifest: Manifest, keep: tuple[int | None, int | None], held: Collection[Key]
) -> bool:
    """Whether a checkpoint stays, however many come after it."""
    last, every = keep
    if (last is None and every is None) or step == 0 or (every and step % every == 0) or (step, segment) in held:
        return True
    return (step, segment) in {(e.start, one) for e in manifest.segments for one in (e.segment, e.parent)}
