"""One step of a run performed in a new process, which shares nothing with this one but files.

The new process is told the fingerprint of each tensor of the step as it was performed here; of its own tensors only the
first that differs comes back, so that a large model costs no more than its state on disk.
`python -m workbench.divergence.fresh_process JOB` is the new process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np

from ..checkpoints import checkpoint_reader, checkpoint_writer
from ..environment import on_device
from ..errors import ReplayError, WorkbenchError
from ..fingerprint import fingerprint
from ..interpreter import python_command
from ..rebuild import rebuild
from ..run import Run
from ..snapshot import State
from .difference import TensorDifference
from .tensors import Key, Tensors, difference, raw
from .ways import Way

ANSWER, FIRST = "answer.json", "first.npy"


class Job(msgspec.Struct, kw_only=True):
    """What the new process is asked to do.

    Attributes:
        run: the run's folder.
        factory: as for a replay.
        backend: device to perform the step on, as in a manifest.
        folder: holds the state before the step as a checkpoint; the answer goes there too.
        before: step of that state, in which is done what the loop changed in it before the next.
        expected: kind, path and fingerprint of each tensor, in order of execution.
    """

    run: str
    factory: str | None
    backend: str
    folder: str
    before: int
    expected: list[tuple[str, str, str]]


class Answer(msgspec.Struct, kw_only=True):
    """What it found: tensors in which it differs, and of the first of them the dtype (None: it has no such tensor)."""

    differing: int
    first: Key | None = None
    dtype: str | None = None


def perform(
    run: Run,
    before: State,
    reference: Tensors,
    *,
    backend: str,
    factory: str | None,
    variables: Mapping[str, str],
) -> tuple[TensorDifference | None, int]:
    """Performs the step after `before` in a new process, and compares it with the tensors of `reference`.

    Args:
        variables: of its environment, beside this process's own.

    Returns:
        The first tensor that differs, and how many do.

    Raises:
        ReplayError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        checkpoint_writer.write(before, Path(folder), run=run.manifest.run, segment=0, t=0.0)
        job = Job(
            run=str(run.path),
            factory=factory,
            backend=backend,
            folder=folder,
            before=before.step,
            expected=[(*key, fingerprint({"": array})) for key, array in reference.items()],
        )
        (Path(folder) / "job.json").write_bytes(msgspec.json.encode(job))
        done = subprocess.run(
            python_command("workbench.divergence.fresh_process", str(Path(folder) / "job.json")),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or [f"it said nothing, and ended with code {done.returncode}"]
            raise ReplayError(f"the step in a fresh process failed: {said[-1]}")
        answer = msgspec.json.decode((Path(folder) / ANSWER).read_bytes(), type=Answer)
        if answer.first is None:
            return None, 0
        mine = raw(reference[answer.first]) if answer.first in reference else None
        theirs = None
        if answer.dtype is not None:
            theirs = answer.dtype, np.load(Path(folder) / FIRST, allow_pickle=False)
        return difference(answer.first, mine, theirs), answer.differing


def answer(job: Job) -> Answer:
    """Does the job in this process; leaves the first differing tensor in the folder."""
    run, folder = Run(Path(job.run)), Path(job.folder)
    with on_device(job.backend):
        experiment = rebuild(run.manifest, run.path, job.factory)
        way = Way(experiment, run.manifest.layers, backend=job.backend)
        found = way.perform(checkpoint_reader.read(folder, job.before, 0, run.manifest.run))
        expected = {(kind, path): digest for kind, path, digest in job.expected}
        digests = {key: fingerprint({"": array}) for key, array in found.items()}
        unlike = [key for key in dict.fromkeys((*expected, *found)) if expected.get(key) != digests.get(key)]
        if not unlike:
            return Answer(differing=0)
        first, dtype = unlike[0], None
        if first in found:
            dtype, elements = raw(found[first])
            np.save(folder / FIRST, elements, allow_pickle=False)
        return Answer(differing=len(unlike), first=first, dtype=dtype)


if __name__ == "__main__":
    try:
        with contextlib.redirect_stdout(sys.stderr):  # a user's code may print
            asked = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Job)
            (Path(asked.folder) / ANSWER).write_bytes(msgspec.json.encode(answer(asked)))
    except WorkbenchError as problem:
        sys.exit(str(problem))
