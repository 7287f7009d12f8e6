"""This process's end of the pipe to the one that works for it: asking, and ending it within a second. See `messages`.

One process serves a whole notebook, one request at a time (`worker.alone`), and is started by the first. Ended in the
middle of its work it leaves nothing: no temporary file, no half-written trace, no compiler, no zombie.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from .. import worker
from ..errors import ExperimentError, ReplayError
from . import messages

PATIENCE = 0.4  # seconds that what was ended has to tidy up: a compiler removes its files
SAID = 20_000  # bytes of what the work printed that are kept
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from workbench.work.serving import serve; serve(sys.argv[2])"
)
# What can move a bit, or change which libraries are loaded; see `environment`.
_MOVES_BITS = (
    *("MLX_", "GATED_", "OPENBLAS_", "OMP_", "MKL_", "BLIS_", "VECLIB_", "CUBLAS", "CUDA_", "NVIDIA_"),
    *("LD_", "DYLD_", "PATH", "WORKBENCH_DEVICE"),
)

Tell = Callable[[int, int, str], None]


class Ended(ReplayError):
    """The process that did the work has ended before it answered."""


class Child:
    """A process that waits for requests.

    Attributes:
        surroundings: see the function; when it was started.
        process: its number.
    """

    def __init__(self) -> None:
        self.surroundings = surroundings()
        self._folder = Path(tempfile.mkdtemp(prefix="workbench-"))
        self._said = tempfile.TemporaryFile()  # it has no name
        self._read = 0
        self._writes: tuple[Path, bool] | None = None
        self._ending, self._busy, self._ended = threading.Lock(), False, False
        # -P: no module of the working folder is taken for one of Python's before the path is set.
        command = [sys.executable, "-P", "-c", _START, json.dumps(sys.path), str(self._folder)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            start_new_session=True,  # Ctrl-C in a terminal, or an interrupted cell, is this process's to handle
        )
        self.process = self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it is there, and computes as one that is started now would."""
        return not self._ended and self._process.poll() is None and self.surroundings == surroundings()

    def ask(self, request: dict[str, Any], tell: Tell) -> Any:
        """Has it do something; returns the unpacked result.

        Args:
            request: see `messages`.
            tell: called with its progress; what that raises ends the process, and goes on up.

        Raises:
            Ended: it was ended, or ended by itself.
            WorkbenchError: as the work raised it.
            WorkError: any other error of the work.
        """
        self._busy = True
        try:
            answer = self._wait(request, tell)
        except BaseException:
            self.end()
            raise
        finally:
            self._busy = False
            if self._ended:
                self._close()
        if "error" in answer:
            raise messages.unpack_error(answer["error"])
        return messages.unpack(request["do"], answer["result"])

    def _wait(self, request: dict[str, Any], tell: Tell) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        as_here = {"variables": dict(os.environ), "path": sys.path, "folder": os.getcwd()}
        encoded = msgspec.json.encode(request | as_here, enc_hook=_plain)
        with contextlib.suppress(BrokenPipeError):  # the answer, which does not come, says so
            self._process.stdin.write(encoded + b"\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                break
            message = msgspec.json.decode(line)
            if "progress" in message:
                tell(*message["progress"])
            elif "writes" in message:
                self._writes = Path(message["writes"][0]), message["writes"][1]
            else:
                self._writes = None
                return message
        raise Ended(self._why())

    def _why(self) -> str:
        code = self._process.wait()
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"code {code}"
        more = "; if that was for want of memory, close other programs" if code == -signal.SIGKILL else ""
        said = self.said().strip().splitlines()
        last = f". It last said: {said[-1]}" if said else ""
        return f"the process that did the work ended with {how}, before it was done{more}{last}"

    def said(self) -> str:
        """What it has printed since this was last asked, the last part of it."""
        if self._said.closed:
            return ""
        size = os.fstat(self._said.fileno()).st_size
        start, self._read = max(self._read, size - SAID), size
        return os.pread(self._said.fileno(), size - start, start).decode("utf-8", "replace")

    def end(self) -> None:
        """Ends it and all that it has started, within a second. Harmless if it has ended. From any thread."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            # SIGTERM, whose default no step can put off, however long it takes; g++ removes its files on it.
            self._signal(signal.SIGTERM)
            self._process.wait()
            deadline = time.monotonic() + PATIENCE
            while self._signal(0) and time.monotonic() < deadline:
                time.sleep(0.01)
            self._signal(signal.SIGKILL)
            self._tidy()
            if not self._busy:
                self._close()

    def _signal(self, number: int) -> bool:
        """Whether there was any process left to send it to."""
        try:
            os.killpg(self.process, number)
        except (ProcessLookupError, PermissionError):
            return False
        return True

    def _tidy(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._writes is None:
            return
        folder, existed = self._writes
        for half in folder.glob(f".*.{self.process}.tmp*"):  # see `files.temporary_beside`
            half.unlink(missing_ok=True)
        if not existed:
            with contextlib.suppress(OSError):  # it is not there, or something is in it
                folder.rmdir()

    def _close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout, self._said):
            with contextlib.suppress(OSError):
                if stream is not None:
                    stream.close()


def _plain(value: Any) -> Any:
    """Paths and numpy's integers, as what JSON has."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    try:
        return operator.index(value)
    except TypeError:
        raise ExperimentError(
            f"{value!r} exists only in this process, and the work is done in another; expected text or numbers "
            "(an experiment may be given: the work is then done here)"
        ) from None


# ---- the one of this process

_present: Child | None = None
_starting = threading.Lock()


def present() -> Child:
    """The process that is there, or a new one; another one where a variable has changed that libraries read once."""
    global _present
    with _starting:
        if _present is None:
            atexit.register(end)
            worker.endings.append(end)
        elif not _present.usable:
            _present.end()
        if _present is None or not _present.usable:
            _present = Child()
        return _present


def end() -> None:
    """Ends the process, if there is one. The next request starts another."""
    if _present is not None:
        _present.end()


def surroundings() -> str:
    """A digest of the environment variables that can change what is computed here, now."""
    kept = sorted(item for item in os.environ.items() if item[0].startswith(_MOVES_BITS))
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
