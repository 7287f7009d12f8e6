"""Files that code of the user's must leave as they are while it is run for a replay: the run itself, and his others.

A script that is run up to its recorder does what it did when it recorded: it clears its output folder, and opens its
log anew. Here the first is refused, before anything is lost, and what it writes to a file that is there already goes to
a scratch copy (`scratch_files`), which it reads back. New files outside of the run are its own affair. Python tells of
each such deed beforehand (audit events, PEP 578); what a library in another language does by itself is not seen, but
for MLX's own saving. Knows files; nothing of MLX or of what is in a run.
"""

from __future__ import annotations

import contextlib
import linecache
import os
import shlex
import shutil
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .places import AS_GIVEN, identities, identity, inside, is_cache, real
from .users_code import line_of_the_user

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT | os.O_APPEND
# By event, which of its arguments are paths that are taken away or written over, and which is the dir_fd of each.
_TAKEN: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rmdir": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.truncate": ((0, None),),
    "shutil.rmtree": ((0, 1),),
    "shutil.move": ((0, None), (1, None)),
}
_LINKED = {"os.link": (0, 2)}  # a second name by which a file could be written to
_DONE = {
    "os.remove": "delete",
    "os.rmdir": "delete",
    "shutil.rmtree": "delete",
    "os.truncate": "cut off",
    "os.rename": "rename or replace",
    "shutil.move": "move or replace",
    "os.link": "link to",
}
_PROGRAMS = {"rm", "mv", "rmdir", "unlink", "truncate", "shred"}  # that take away what they are given
_guards: dict[int, Guard] = {}  # by thread
_scratch: set[str] = set()  # folders of scratch copies
_installed = False


class Refused(BaseException):
    """No `Exception`: neither `ignore_errors=True` nor a script's own `except` is to swallow it."""


class Guard:
    """What is not to be touched, and what was refused or diverted.

    Args:
        run: the run's folder; None: there is none to protect.
        script: what is run, in the words of a sentence: "the script clean.py".

    Attributes:
        notices: a sentence on each file whose writing went to a scratch copy.
        diverted: the scratch copies, by the place of the file.
        refused: a sentence on what was refused first.
    """

    def __init__(self, run: Path | None, script: str) -> None:
        self.run = None if run is None else os.path.realpath(run)
        self.script = script
        self.notices: list[str] = []
        self.diverted: dict[str, str] = {}
        self.refused = ""
        self._runs: set[str] = set() if self.run is None else {self.run}
        self._made: set[str] = set()  # files and folders that are of this very execution
        self._scratch = ""
        self._off = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Within, in this thread.

        Raises:
            Refused: from the very call that would have destroyed something.
        """
        global _installed
        from .scratch_files import diverting

        if not _installed:
            sys.addaudithook(_hook)
            _installed = True
        thread = threading.get_ident()
        before = _guards.get(thread)
        if before is not None and before is not self:  # a script of one run, in which another is rebuilt
            self._runs |= before._runs
        _guards[thread] = self
        try:
            with diverting(_guards):
                yield
        finally:
            if before is None:
                del _guards[thread]
            else:
                _guards[thread] = before

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Within, for what the guard does itself."""
        before, self._off = self._off, True
        try:
            yield
        finally:
            self._off = before

    def saw(self, event: str, args: tuple[Any, ...]) -> None:
        if self._off:
            return
        if event == "open":
            path, _, flags = args
            if isinstance(flags, int) and flags & _WRITING and (place := real(path)) is not None:
                self._opened(place, flags)
        elif event in _TAKEN:
            for number, of in _TAKEN[event]:
                given = args[number] if number < len(args) else None
                folder = args[of] if of is not None and of < len(args) else AS_GIVEN
                if (place := real(given, folder, followed=event == "os.truncate")) is not None:
                    self._taken(event, place, target=number == 1 and len(_TAKEN[event]) == 2)
        elif event in _LINKED:
            number, of = _LINKED[event]
            if (place := real(args[number], args[of])) is not None and self.within(place):
                self._refuse(_DONE[event], place)
        elif event == "os.mkdir":
            if (place := real(args[0], args[2])) is not None and not os.path.lexists(place):
                self._made.add(place)
        elif event in ("subprocess.Popen", "os.system"):
            self._started(args[1] if event == "subprocess.Popen" else args[0], args)

    # ---- judging

    def within(self, place: str) -> bool:
        """Whether a place is the run's folder or in it."""
        return any(inside(place, run) or identity(run) in identities(place) for run in self._runs)

    def part(self, place: str) -> str:
        """Of a place in a run's folder, the first part of its path there."""
        parts = (os.path.relpath(place, run).split(os.sep)[0] for run in self._runs if inside(place, run))
        return next(parts, "")

    def holds(self, place: str) -> bool:
        """Whether a folder holds the run."""
        known = identity(place)
        return any(run != place and (inside(run, place) or known in identities(run)) for run in self._runs)

    def is_of_others(self, place: str) -> bool:
        """Whether there was something before this execution that would be lost: no empty file, and no cache."""
        if self.made(place) or is_cache(place):
            return False
        if os.path.islink(place):  # what it leads to is not lost with it
            return False
        if os.path.isdir(place):
            return any(files for _, _, files in os.walk(place))
        return os.path.isfile(place) and os.path.getsize(place) > 0

    def made(self, place: str) -> bool:
        """Whether a place is of this very execution, or of the scratch copies of any, which may go at any time."""
        return any(inside(place, one) for one in (*self._made, *_scratch))

    def scratch_folder(self) -> str:
        """Of this guard's copies; it goes with the guard."""
        if not self._scratch:
            self._scratch = os.path.realpath(tempfile.mkdtemp(prefix="workbench-"))
            _scratch.add(self._scratch)
            weakref.finalize(self, _remove, self._scratch)
        return self._scratch

    def makes(self, place: str) -> None:
        """A file that is about to come into being."""
        self._made.add(place)

    # ---- what is seen

    def _opened(self, place: str, flags: int) -> None:
        if self.made(place) or not (os.path.isfile(place) or not os.path.lexists(place)):
            return  # its own, or a device, a pipe
        if self.within(place):
            self._refuse("write to", place)
        if not os.path.lexists(place):
            self._made.add(place)
        elif self.is_of_others(place) and flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            self._refuse("write to", place)

    def _taken(self, event: str, place: str, *, target: bool) -> None:
        if target and event == "shutil.move" and os.path.isdir(place):
            return  # into it; the renaming itself is told of next
        if self.within(place) or (event != "os.rmdir" and self.holds(place)):
            if os.path.lexists(place) or target:
                self._refuse(_DONE[event], place)
        elif target and not os.path.lexists(place):
            self._made.add(place)
        elif event != "os.rmdir" and self.is_of_others(place):
            self._refuse(_DONE[event], place)

    def _started(self, command: Any, args: Sequence[Any]) -> None:
        words = _words(command)
        folder = args[2] if len(args) > 2 and isinstance(args[2], (str, bytes, os.PathLike)) else "."
        if not any(os.path.basename(word) in _PROGRAMS for word in words):
            return
        for word in words:
            place = os.path.realpath(os.path.join(os.fsdecode(folder), word))
            if (self.within(place) and os.path.lexists(place)) or self.holds(place):
                self._refuse(f"run `{' '.join(words)}` on", place)

    def _refuse(self, what: str, place: str) -> None:
        raise self.refusal(what, place)

    def refusal(self, what: str, place: str) -> Refused:
        whole = self.within(place) or self.holds(place)
        found = self.shown(place)
        which = "the run that is replayed" if place in self._runs else "which is of the run that is replayed"
        if self.holds(place):
            which = "which holds the run that is replayed"
        said = f"{found}, {which}," if whole else f"{found}, which was there before,"
        later = "" if whole else "after the Recorder, or "
        self.refused = self.refused or (
            f"{self.script} would {what} {said}{self.where()}. It was refused, and nothing is lost. A replay runs it "
            f"up to its Recorder, and wb.rebuilding() is True meanwhile: put that line {later}under "
            "`if not wb.rebuilding():`"
        )
        return Refused(self.refused)

    def shown(self, place: str) -> str:
        """A path as one would write it from here."""
        return os.path.relpath(place) if inside(place, os.path.realpath(os.getcwd())) else place

    def where(self, *, text: bool = True) -> str:
        """The line of the user's that is being executed, and what it says, in a phrase; empty: there is none."""
        if (line := line_of_the_user()) is None:
            return ""
        said = linecache.getline(*line).strip() if text else ""  # which may open the file, to read it
        return f" on line {line[1]} of {os.path.basename(line[0])}{f' (`{said}`)' if said else ''}"


def _remove(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _scratch.discard(folder)


def active() -> bool:
    """Whether this thread runs code of the user's for a replay."""
    return threading.get_ident() in _guards


def _hook(event: str, args: tuple[Any, ...], guards: dict[int, Guard] = _guards) -> None:
    if guards and (guard := guards.get(threading.get_ident())) is not None:
        guard.saw(event, args)


def _words(command: Any) -> list[str]:
    if isinstance(command, (list, tuple)):
        words = [os.fsdecode(one) for one in command if isinstance(one, (str, bytes, os.PathLike))]
        return [part for word in words for part in (_words(word) if " " in word else [word])]
    if not isinstance(command, (str, bytes)):
        return []
    try:
        return shlex.split(os.fsdecode(command))
    except ValueError:
        return os.fsdecode(command).split()
