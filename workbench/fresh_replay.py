"""The steps of a replay performed once more in a new process, which shares nothing with this one but the files.

It starts early, so that it has read its checkpoint by the time it is needed; but it waits with its first step until one
was performed here: then MLX has its compiled kernels on the disk, and no two processes write the same one, of which
either might read a half. `python -m workbench.fresh_replay ASKED` is such a process.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .errors import ReplayError, WorkbenchError
from .interpreter import python_command

TICK = 0.2  # seconds between two signs that it is being waited for


class Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Which steps, and how: as `Run.replay` calls it."""

    run: str
    first: int
    last: int
    segment: int
    checkpoint: int | None
    factory: str | None
    other_environment: bool


class _Answer(msgspec.Struct):
    step: int
    evidence: dict[str, Any]


class FreshProcess:
    """Within a `with`, a process that can be started, and that ends with the `with`.

    Args:
        asked: all steps that it may be wanted for.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked, self._first = asked, asked.first
        self._child: subprocess.Popen[bytes] | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._unread = b""

    def start(self, first: int) -> None:
        """Has it prepare for the steps from `first` on; it performs none before `go`."""
        self._end()
        self._first, self._answers, self._unread = first, {}, b""
        self._errors = tempfile.TemporaryFile()
        asked = msgspec.json.encode(msgspec.structs.replace(self._asked, first=first)).decode()
        command = python_command("workbench.fresh_replay", asked)
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, bufsize=0
        )

    def go(self) -> None:
        """Kernels are compiled: it may perform its steps."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it failed, as `evidence` will say
                self._child.stdin.write(b"go")
            self._child.stdin.close()
            self._child.stdin = None

    def evidence(self, step: int, say: Callable[[str], None]) -> dict[str, Any]:
        """What it measured at a step, as bits; it is started if it was not, and anew if that was for later steps.

        Args:
            say: told five times a second what is waited for; an exception that it raises goes on up.

        Raises:
            ReplayError: it failed.
        """
        if self._child is None or step < self._first:
            self.start(step)
        self.go()
        while step not in self._answers:
            say(f"step {step}, in a fresh process")
            self._receive()
        return self._answers.pop(step)

    def _receive(self) -> None:
        child: Any = self._child
        if not select.select([child.stdout], [], [], TICK)[0]:
            return
        content = os.read(child.stdout.fileno(), 1 << 20)
        if not content:
            self._failed(child.wait())
        *lines, self._unread = (self._unread + content).split(b"\n")
        for line in lines:
            answer = msgspec.json.decode(line, type=_Answer)
            self._answers[answer.step] = answer.evidence

    def _failed(self, code: int) -> None:
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        last = said[-1].removeprefix("workbench: ") if said else f"it said nothing, and ended with code {code}"
        raise ReplayError(f"the replay in a fresh process failed: {last}")

    def __enter__(self) -> FreshProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            with self._child:  # waits, and closes its pipes
                self._errors.close()
            self._child = None


def main(text: str) -> None:
    """Performs the steps when standard input says so, and prints a line of JSON for each. A user's own code may print
    and read, too: that goes to standard error, and finds nothing."""
    given, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    asked = msgspec.json.decode(text, type=Asked)
    from . import read_ahead
    from .recorded.layout import CHECKPOINTS
    from .run import Run

    def wait() -> None:
        if not given.read():
            sys.exit("the process that asked for it has ended")

    try:
        run, steps = Run(Path(asked.run)), range(asked.first, asked.last + 1)
        plan = run.plan(steps, asked.segment, checkpoint=asked.checkpoint)
        read_ahead.begin_checkpoint(run.path / CHECKPOINTS, *plan.checkpoint)
        from .session import performed  # imports MLX

        for step, evidence in performed(
            run,
            steps,
            segment=asked.segment,
            checkpoint=asked.checkpoint,
            factory=asked.factory,
            other_environment=asked.other_environment,
            begin=wait,
        ):
            answers.write(msgspec.json.encode(_Answer(step, evidence)) + b"\n")
    except WorkbenchError as error:
        sys.exit(f"workbench: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
