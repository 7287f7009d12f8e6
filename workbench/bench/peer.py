"""Peers of the benchmark suite: each a process of an environment of its own, asked in lines of JSON.

`tests/peers/install.py` makes the environments, and writes which interpreter and script each has to `peers.json`. Knows
processes; nothing of what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import WorkbenchError
from ..untrusted import decode, read_file

INSTALL = "python tests/peers/install.py --to FOLDER"
KNOWN = ("torch", "loggers", "flor", "cockpit", "tables")


class Installed(msgspec.Struct):
    """An environment: its interpreter, the script that measures there, and the version of each package."""

    python: str
    script: str
    versions: dict[str, str]


class Peer:
    """A peer's process. It ends when the suite does."""

    def __init__(self, name: str, installed: Installed, arguments: Sequence[str], log: Path) -> None:
        self.name, self._log = name, log
        # The BLAS that is put before MLX's is none of theirs.
        variables = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        with open(log, "wb") as errors:
            self._process = subprocess.Popen(
                [installed.python, installed.script, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=variables,
            )

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """The answer to a request; {"error": reason} where the peer has none."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the empty answer says it
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            said = self._log.read_text(errors="replace").strip().splitlines() or ["it said nothing"]
            return {"error": f"it ended with code {self._process.wait()}: {said[-1][:200]}"}
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Peers:
    """The peers that a folder has installed.

    Args:
        folder: what `tests/peers/install.py` filled; None: none.
        scratch: for what they print.

    Raises:
        WorkbenchError: the folder holds no peers.
    """

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        self._scratch = scratch
        self._running: dict[str, Peer] = {}
        self.installed: dict[str, Installed] = {}
        if folder is not None:
            path = folder / "peers.json"
            try:
                self.installed = decode(read_file(path), dict[str, Installed])
            except (OSError, ValueError) as error:
                raise WorkbenchError(
                    f"{path} can't be read ({error}); expected the list of installed peers: {INSTALL}"
                ) from None
        self.missing = [name for name in KNOWN if not self._usable(name)]

    def _usable(self, name: str) -> bool:
        one = self.installed.get(name)
        return one is not None and Path(one.python).exists() and Path(one.script).exists()

    def get(self, name: str, *arguments: str) -> Peer | None:
        """The running process of a peer, started at the first call with these arguments; None if it is missing."""
        if name in self.missing:
            return None
        if name not in self._running:
            log = self._scratch / f"{name}.log"
            self._running[name] = Peer(name, self.installed[name], arguments, log)
        return self._running[name]

    def command(self, name: str, *arguments: str) -> list[str] | None:
        """A whole command in a peer's environment; None if it is not installed."""
        if name in self.missing:
            return None
        return [self.installed[name].python, self.installed[name].script, *arguments]

    def stop(self, name: str) -> None:
        """Ends a peer's process, and with it the memory that it holds."""
        if (running := self._running.pop(name, None)) is not None:
            running.close()

    def close(self) -> None:
        for name in list(self._running):
            self.stop(name)
