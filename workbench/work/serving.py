"""The process that works for a notebook: it takes one request after another and answers each; see `messages`.

It stays, so that MLX is imported once, and holds the scene of the step that was last experimented on: the next
experiment on it costs no roll-forward. What the work prints goes to standard error. When the notebook's end of the pipe
closes, for whatever reason, it ends with all that it started.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from ..run import Run
from . import messages

if TYPE_CHECKING:
    from ..interventions.scene import Scene

IDLE = 300.0  # seconds without a request after which the scene's memory is given back
TOLD_EACH = 0.05  # seconds between two messages of progress

Tell = Callable[[int, int, str], None]


def serve(folder: str) -> None:
    """Answers until standard input ends.

    Args:
        folder: for temporary files; the one who started this process removes it.
    """
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    tempfile.tempdir = folder
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    source = sys.stdin.buffer
    threading.Thread(target=_receive, args=(source, requests, folder), daemon=True).start()
    held = Held()
    while True:
        try:
            request = requests.get(timeout=IDLE)
        except queue.Empty:
            held.let_go()
            continue
        asked = msgspec.json.decode(request)
        _be_as(asked["variables"], asked["path"], asked["folder"])
        answer = _answer(held, asked, lambda message: _send(answers, message))
        sys.stdout.flush()
        sys.stderr.flush()
        _send(answers, answer)


def _receive(source: BinaryIO, requests: queue.SimpleQueue[bytes], folder: str) -> None:
    for line in source:
        requests.put(line)
    shutil.rmtree(folder, ignore_errors=True)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGTERM)  # compilers and fresh processes too
    os._exit(0)


def _be_as(variables: dict[str, str], path: list[str], folder: str) -> None:
    """A factory reads the variables, and is found, as in the notebook at this moment; so are relative file names."""
    os.chdir(folder)
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    sys.path[:] = path


def _send(answers: Any, message: Any) -> None:
    data = memoryview(msgspec.json.encode(message) + b"\n")
    while data:
        data = data[answers.write(data) :]


def _answer(held: Held, request: dict[str, Any], send: Callable[[Any], None]) -> dict[str, Any]:
    told = 0.0

    def tell(done: int, total: int, what: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= TOLD_EACH or done >= total:
            told = now
            send({"progress": [done, total, what]})

    try:
        return {"result": messages.pack(_work(held, request, tell, send))}
    except BaseException as error:  # of a user's factory, even SystemExit: the answer says so
        return {"error": messages.pack_error(error)}


def _work(held: Held, request: dict[str, Any], tell: Tell, send: Callable[[Any], None]) -> Any:
    task, options = request["do"], dict(request.get("options", {}))
    run = None if request.get("run") is None else held.open(Path(request["run"]))
    if task == messages.ENVIRONMENT:
        return _environment(run)
    if task == messages.DOCTOR:
        from .. import doctor

        if run is None:
            return doctor.examine(tell)
        return doctor.examine_run(run, factory=options.get("factory"), progress=tell)
    assert run is not None
    step, segment, given = request["step"], request["segment"], options.pop("trace_dir", None)
    trace_dir = None if given is None else Path(given)
    from ..traces import traces_folder

    folder = traces_folder(run, trace_dir)[0]
    send({"writes": [str(folder), folder.exists()]})
    common = {"segment": segment, "trace_dir": trace_dir, "progress": tell} | options
    if task == messages.WHATIF:
        return _experiments(held, run, step, common)
    return getattr(run, task)(step, **common)


def _environment(run: Run | None) -> dict[str, Any]:
    from ..environment import numeric_environment, on_device

    if run is None:
        return numeric_environment()
    with on_device(run.manifest.segments[-1].environment.get("backend", "cpu")):
        return numeric_environment()


# ---- what is held between requests


class Held:
    """The run that was last asked about, and the scene of its step that was last experimented on."""

    def __init__(self) -> None:
        self._run: Run | None = None
        self._place = Path()
        self._scene: Scene | None = None
        self._key: tuple[Any, ...] = ()

    def open(self, path: Path) -> Run:
        """The run of a folder; the one that is held if it is still that."""
        fresh, place = Run(path), path.resolve()
        if self._run is None or (self._place, self._run.manifest) != (place, fresh.manifest):
            self.let_go()
            self._run, self._place = fresh, place
        return self._run

    def scene(self, run: Run, step: int, context: int, options: dict[str, Any], progress: Tell) -> Scene:
        """The scene of a step with at least so much context; opened unless it is held."""
        from ..interventions.scene import Scene

        key = (run.manifest.run, step, *sorted((name, str(value)) for name, value in options.items()))
        held = self._scene
        if held is None or key != self._key or held.first > max(held.checkpoint, step - 1 - context):
            self._scene = None  # not two in memory at once
            self._scene = Scene.open(run, step, context=context, progress=progress, **options)
            self._key = key
        assert self._scene is not None
        return self._scene

    def let_go(self) -> None:
        self._scene, self._run, self._key = None, None, ()


def _experiments(held: Held, run: Run, step: int, options: dict[str, Any]) -> Any:
    """As `Run.whatif`, in the scene that is held."""
    from ..interventions import whatif
    from ..interventions.changes import parse_change

    changes, progress = options.pop("changes"), options.pop("progress")
    asked = [parse_change(change) for change in ([changes] if isinstance(changes, str) else changes)]
    earliest = min([change.value for change in asked if change.name == "state"], default=step - 1)
    how = {name: options.pop(name) for name in ("next_steps", "once", "trace_dir") if name in options}
    scene = held.scene(run, step, max(0, step - 1 - earliest), options, progress) if asked else None
    return whatif.experiments(run, step, asked, scene=scene, progress=progress, **how)
