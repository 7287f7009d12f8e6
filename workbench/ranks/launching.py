"""Replaying a data-parallel run from a process that no launcher started: MLX's launcher is started for it, with as many
ranks as recorded the run, where all of them ran on this host. Else a sentence names the command to use.

Knows the launcher's command line (`mlx.launch`, mlx 0.32.4) and the workbench's own; performs no step.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from .. import trace
from ..errors import ReplayError, WorkbenchError
from ..files import write_atomic
from ..interpreter import python_command
from ..manifest import Manifest
from ..run import Run
from ..trace import Trace
from .attendance import LAUNCHER, setup_of, shown
from .rank_setup import RankSetup
from .world import world

TICK = 0.2  # seconds between two signs that it is being waited for
_SAID = "workbench: "  # what an error on the command line begins with


def needed(manifest: Manifest) -> bool:
    """Whether a run was recorded by several ranks, and this process was started alone."""
    return setup_of(manifest) is not None and world().size == 1


def launch_command(setup: RankSetup) -> list[str]:
    """The launcher, up to the command that it starts in each rank.

    Raises:
        ReplayError: the ranks were on other hosts, or there is no launcher here.
    """
    here = socket.gethostname()
    if others := sorted(set(setup.hosts) - {here}):
        raise ReplayError(
            f"its ranks ran on {', '.join(others)}, and this is {here}: start all {setup.size} of them yourself, "
            f"{shown(setup)} -- workbench replay …"
        )
    beside = Path(sys.executable).parent / LAUNCHER
    program = str(beside) if beside.exists() else shutil.which(LAUNCHER)
    if program is None:
        raise ReplayError(
            f"{LAUNCHER} is not on the PATH, nor beside {sys.executable}: it comes with MLX, and starts the "
            f"{setup.size} ranks of this run: {shown(setup)} -- workbench replay …"
        )
    count, each = setup.size, setup.connections
    command = [program, "-n", str(count), "--backend", setup.backend, "--starting-port", str(free_ports(count * each))]
    command += ["--nccl-port", str(free_ports(1)), "--connections-per-ip", str(each)]
    return [*command, "--"]


def free_ports(count: int) -> int:
    """The first of so many ports in a row that nobody listens on just now."""
    for first in range(20000 + (hash(Path.cwd()) + id(object())) % 20000, 60000, count):
        taken: list[socket.socket] = []
        try:
            for port in range(first, first + count):
                one = socket.socket()
                taken.append(one)
                one.bind(("127.0.0.1", port))
            return first
        except OSError:
            continue
        finally:
            for one in taken:
                one.close()
    raise ReplayError(f"no {count} ports in a row are free on this host, by which the ranks could meet")


def replay_launched(
    run: Run,
    steps: int | range,
    *,
    segment: int | None,
    experiment: Any,
    factory: str | None,
    other_environment: bool,
    with_probe: bool,
    fresh_process: bool | None,
    trace_dir: Path | None,
    checkpoint: int | None,
    progress: Callable[[int, int, str], None],
    repeat: bool = True,
    whole: Callable[[int], bool] | None = None,
) -> list[Trace]:
    """As `Run.replay`, by all ranks, each in a process of its own on this host.

    Raises:
        ReplayError: it can't be started from here, or failed.
    """
    setup = setup_of(run.manifest)
    assert setup is not None
    if whole is not None:
        raise ReplayError(
            f"{run.path} was recorded by {setup.size} ranks together, and a step beside its neighbours is replayed by "
            f"all of them: {shown(setup)} -- workbench replay … --context 8"
        )
    if experiment is not None:
        raise ReplayError(
            f"{run.path} was recorded by {setup.size} ranks together, and this experiment exists in this process only; "
            f"start your program by {shown(setup)}, or name what builds it (factory=…), so that each rank can"
        )
    del fresh_process  # every rank is one
    launcher, ranged = launch_command(setup), isinstance(steps, range)
    asked = _Asked(
        asker=os.getpid(),
        run=str(run.path),
        first=steps[0] if isinstance(steps, range) else int(steps),
        last=steps[-1] if isinstance(steps, range) else None,
        options={
            "segment": segment,
            "factory": factory,
            "other_environment": other_environment,
            "with_probe": with_probe,
            "repeat": repeat,
            "checkpoint": checkpoint,
            "trace_dir": None if trace_dir is None else str(trace_dir.absolute()),
        },
    )
    with tempfile.TemporaryDirectory(prefix="workbench-") as folder:
        answer = Path(folder) / "traces.json"
        command = python_command("workbench.ranks.launching", msgspec.json.encode(asked).decode(), str(answer))
        said = watched([*launcher, *command], lambda: progress(0, 1, f"{setup.size} ranks, started by {LAUNCHER}"))
        paths = msgspec.json.decode(answer.read_bytes(), type=list[str]) if answer.exists() else []
    if len(paths) != (len(steps) if ranged else 1):  # type: ignore[arg-type]
        raise ReplayError(f"the replay by {setup.size} ranks failed: {_reason(said)}")
    found = [trace.read(Path(path)) for path in paths]
    for one in found:
        one.notices.append(f"replayed by {setup.size} ranks on this host, started as by {shown(setup)}")
    return found


class _Asked(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A replay, as `Run.replay` is asked for it."""

    asker: int  # its process
    run: str
    first: int
    last: int | None
    options: dict[str, Any]


def watched(command: Sequence[str], tick: Callable[[], None]) -> str:
    """Runs the launcher, whose exit code says nothing, and returns what was said on standard error.

    Args:
        tick: called five times a second; what it raises ends the launcher, and goes on up.
    """
    with tempfile.TemporaryFile() as errors:
        # An open pipe as its input: of one that has ended it would ask without a pause, and take a processor. A session
        # of its own: ended by a signal, the launcher would leave its ranks behind. But not where this process leads
        # one, as that which works for a panel does: who ends it ends its group, and the ranks must be in that.
        leads = os.getsid(0) == os.getpid()
        streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": errors}
        child = subprocess.Popen(command, start_new_session=not leads, **streams)
        try:
            while child.poll() is None:
                tick()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(TICK)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL) if leads else os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            raise
        finally:
            assert child.stdin is not None
            child.stdin.close()
        errors.seek(0)
        return errors.read().decode(errors="replace")


def _end_with(asker: int, launcher: int) -> None:
    """Ends this rank as soon as nobody waits for it: who asked was killed, or the launcher was."""
    while os.getppid() == launcher:
        try:
            os.kill(asker, 0)
        except ProcessLookupError:
            break
        time.sleep(TICK)
    os._exit(1)


def _reason(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    own = [line.partition(_SAID)[2] for line in lines if _SAID in line]
    return own[0] if own else lines[-1] if lines else f"{LAUNCHER} said nothing"


def main(text: str, answer: str) -> None:
    """What each rank does: the replay; rank 0 then names its traces."""
    asked = msgspec.json.decode(text, type=_Asked)
    threading.Thread(target=_end_with, args=(asked.asker, os.getppid()), daemon=True).start()
    steps = asked.first if asked.last is None else range(asked.first, asked.last + 1)
    try:
        found = Run(Path(asked.run)).replay(steps, **asked.options)
    except WorkbenchError as error:
        sys.exit(f"{_SAID}rank {world().rank}: {error}")
    if world().rank == 0:
        traces = found if isinstance(found, list) else [found]
        write_atomic(Path(answer), msgspec.json.encode([str(one.path) for one in traces]))


if __name__ == "__main__":
    main(*sys.argv[1:])
