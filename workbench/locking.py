"""One recorder a run: the second is refused, and told which process has it.

The lock is the kernel's (`flock`) on a file in the run's folder, so that no crash can leave it behind; the file names
its owner. Where the file system has no locks, the name alone decides, and what can't be known is not guessed. Readers
never look at it. Knows files and processes; nothing of runs.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

import msgspec

from .errors import RunError
from .files import pretty_json

NAME = "recorder.lock"  # in the run's folder, while it is recorded


class Owner(msgspec.Struct, frozen=True):
    """Who records.

    Attributes:
        boot: which start of the machine this was; None where the system does not say.
        began: start of the process, in the system's own units; tells it from a later one with the same pid.
        t: when it took the lock, seconds since 1970.
    """

    pid: int
    host: str
    boot: str | None = None
    began: int | None = None
    t: float = 0.0

    @classmethod
    def here(cls) -> Owner:
        return cls(os.getpid(), socket.gethostname(), _boot(), _began(os.getpid()), round(time.time(), 3))

    def gone(self) -> bool | None:
        """Whether the process has ended; None if that can't be seen from this machine."""
        here = Owner.here()
        if self.host != here.host:
            return None
        if self.boot != here.boot:
            return True
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass  # it lives, and is another user's
        return self.began != _began(self.pid)

    def sentence(self) -> str:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.t)) if self.t else "an unknown time"
        return f"by process {self.pid} on {self.host} since {when}"


def _boot() -> str | None:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def _began(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat, in clock ticks after the start of the machine (proc(5)); None without it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


class Lock:
    """A run taken for this Recorder alone, until `release` or the end of the process.

    Args:
        folder: the run's.

    Attributes:
        stale: the owner of a lock that was found left behind, whose process has ended; None if there was none.

    Raises:
        RunError: another Recorder has it, of this process or another; or, on a file system without locks, the file
            names a process that can't be seen from here; or a link stands in the file's place.
        OSError: the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self.stale: Owner | None = None
        descriptor = self._taken()
        # A child that is forked must not keep the lock when this process has ended.
        self._close = weakref.finalize(self, _close_here, descriptor, os.getpid())
        _FORKED.add(self)

    def _taken(self) -> int:
        while True:
            descriptor = self._opened()
            try:
                locked = self._flock(descriptor)
                if not self._is_there(descriptor):
                    os.close(descriptor)  # its owner removed it meanwhile, and let go
                    continue
                before = _read(descriptor)
                if before is not None and not locked and before.gone() is not True:
                    raise self._refusal(before, unseen=before.gone() is None)
                self.stale = before
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, pretty_json(Owner.here()), 0)
                return descriptor
            except BaseException:
                os.close(descriptor)
                raise

    def _opened(self) -> int:
        """Never through a link: the folder may be one that someone sent, and what is opened here is written over."""
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        except OSError as error:
            if not self._path.is_symlink():
                raise
            raise RunError(
                f"{self._path} is a link to {os.readlink(self._path)}; expected a file that a recorder makes itself, "
                "and removes again. Nothing was written to it; remove the link"
            ) from error

    def _flock(self, descriptor: int) -> bool:
        """Whether the file system has locks."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._refusal(_read(descriptor)) from None
        except OSError:
            return False
        return True

    def _is_there(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    def _refusal(self, owner: Owner | None, unseen: bool = False) -> RunError:
        who = "by another process or another Recorder" if owner is None else owner.sentence()
        if unseen:
            return RunError(
                f"{self._path.parent} may be being recorded just now, {who}: its file system has no locks, and that "
                f"machine can't be seen from here. If that process has ended, remove {self._path}."
            )
        return RunError(f"{self._path.parent} is being recorded just now, {who}; wait for its end")

    def release(self) -> None:
        """Lets go, and removes the file; while it is locked nobody else can have taken it."""
        if self._close.alive:
            try:
                os.unlink(self._path)
            except OSError:
                pass  # the folder is gone or read-only; without its lock the file says nothing
            self._close()


def _read(descriptor: int) -> Owner | None:
    try:
        return msgspec.json.decode(os.pread(descriptor, 4096, 0), type=Owner)
    except (msgspec.MsgspecError, OSError):
        return None  # empty: between its making and its filling


_FORKED: weakref.WeakSet[Lock] = weakref.WeakSet()


def _close_here(descriptor: int, pid: int) -> None:
    if os.getpid() == pid:
        os.close(descriptor)


def _close_in_child() -> None:
    for lock in list(_FORKED):
        found = lock._close.detach()
        if found is not None:
            os.close(found[2][0])


os.register_at_fork(after_in_child=_close_in_child)
