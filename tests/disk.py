"""Disks that fail, and disks that lose power: the operations of `os` on one folder, made to fail or written down."""

import errno
import os
import shutil
import signal
import threading
from pathlib import Path

_NAMES = ("open", "write", "pwrite", "ftruncate", "fsync", "replace", "link", "unlink", "mkdir")


class _Watched:
    """Stands in for functions of `os` while it is entered, where they concern a folder."""

    def __init__(self, folder):
        self._folder, self._lock = str(Path(folder).absolute()), threading.RLock()
        self._paths = {}  # of open descriptors
        self._real = {name: getattr(os, name) for name in (*_NAMES, "close")}

    def __enter__(self):
        for name in _NAMES:
            setattr(os, name, getattr(self, f"_{name}"))
        os.close = self._close
        return self

    def __exit__(self, *exception):
        for name, function in self._real.items():
            setattr(os, name, function)

    def _inside(self, path):
        return isinstance(path, (str, os.PathLike)) and os.path.abspath(os.fspath(path)).startswith(self._folder)

    def around(self, name, perform, *arguments):
        raise NotImplementedError

    def _open(self, path, flags, *more, **named):
        if not self._inside(path):
            return self._real["open"](path, flags, *more, **named)
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        perform = lambda: self._real["open"](path, flags, *more, **named)  # noqa: E731
        with self._lock:
            descriptor = self.around("open", perform, os.path.abspath(path), flags) if writes else perform()
            self._paths[descriptor] = os.path.abspath(path)
        return descriptor

    def _close(self, descriptor):
        with self._lock:
            self._paths.pop(descriptor, None)
            return self._real["close"](descriptor)

    def _on_descriptor(self, name, descriptor, *more):
        perform = lambda *changed: self._real[name](descriptor, *(changed or more))  # noqa: E731
        path = self._paths.get(descriptor)
        if path is None:
            return perform()
        if name == "fsync":  # not under the lock: it takes long
            self.around(name, perform, path)
            return None
        with self._lock:
            return self.around(name, perform, path, descriptor, *more)

    def _write(self, descriptor, content):
        return self._on_descriptor("write", descriptor, content)

    def _pwrite(self, descriptor, content, offset):
        return self._on_descriptor("pwrite", descriptor, content, offset)

    def _ftruncate(self, descriptor, size):
        return self._on_descriptor("ftruncate", descriptor, size)

    def _fsync(self, descriptor):
        return self._on_descriptor("fsync", descriptor)

    def _on_path(self, name, path, *more, **named):
        perform = lambda: self._real[name](path, *more, **named)  # noqa: E731
        if not self._inside(path):
            return perform()
        with self._lock:
            return self.around(name, perform, os.path.abspath(path), *more)

    def _replace(self, path, to):
        return self._on_path("replace", path, os.path.abspath(to))

    def _link(self, path, to):
        return self._on_path("link", path, os.path.abspath(to))

    def _unlink(self, path, **named):
        return self._on_path("unlink", path, **named)

    def _mkdir(self, path, *more, **named):
        return self._on_path("mkdir", path, *more, **named)


class Faults(_Watched):
    """Operations for which `strikes(number, name)` is true fail with an error, or kill the process.

    Args:
        struck: told the name of the operation and the path before it happens.
        part: a fatal one is not begun (below 0.3), done (above 0.7), or, of a write, done by half.
    """

    def __init__(self, folder, strikes, *, error=errno.ENOSPC, part=0.0, kill=False, struck=lambda name, path: None):
        super().__init__(folder)
        self._strikes, self._error, self._part, self._kill, self.number = strikes, error, part, kill, 0
        self._struck = struck

    def around(self, name, perform, path, *arguments):
        self.number += 1
        if not self._strikes(self.number, name):
            return perform()
        self._struck(name, path)
        if not self._kill:
            raise OSError(self._error, os.strerror(self._error), path)
        if name == "write" and 0.3 <= self._part <= 0.7:
            content = arguments[1]
            perform(content[: int(len(content) * (self._part - 0.3) / 0.4)])
        elif self._part > 0.3:
            perform()
        os.kill(os.getpid(), signal.SIGKILL)


class Disk(_Watched):
    """Writes down what is done to a folder, so that `power_loss` can say in which state a crash may leave it.

    Attributes:
        log: the operations, in order of their ends.
        before: what the folder held: bytes by relative path, None for a folder.
    """

    def __init__(self, folder):
        super().__init__(folder)
        self.log, self._files, self._inode = [], {}, 0
        root = Path(folder)
        self.root = str(root.absolute())
        self.before = {
            str(path.relative_to(root)): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")
        }

    def note(self, text):
        """Puts what the writer says at its place among the operations."""
        with self._lock:
            self.log.append(("said", text))

    def around(self, name, perform, path, *arguments):
        inside = os.path.relpath(path, self.root)
        result = perform()
        with self._lock:
            if name == "open":
                flags = arguments[0]
                new = inside not in self._files and inside not in self.before
                if new or (flags & os.O_TRUNC):
                    self._inode += 1
                    self._files[inside] = self._inode
                    self.log.append(("create", inside, self._inode))
            elif name == "write":
                self.log.append(("write", self._id(inside), bytes(arguments[1][:result])))
            elif name in ("pwrite", "ftruncate"):
                pass  # of the lock only, which says nothing after a crash
            elif name == "fsync":
                self.log.append(("sync folder", inside) if os.path.isdir(path) else ("sync", self._id(inside)))
            elif name == "replace":
                to = os.path.relpath(arguments[0], self.root)
                self._files[to] = self._files.pop(inside, inside)
                self.log.append(("rename", inside, to, self._files[to]))
            elif name == "link":
                to = os.path.relpath(arguments[0], self.root)
                self._files[to] = self._id(inside)
                self.log.append(("create", to, self._files[to], "a second name"))
            elif name == "unlink":
                self._files.pop(inside, None)
                self.log.append(("unlink", inside))
            elif name == "mkdir":
                self.log.append(("mkdir", inside))
        return result

    def _id(self, path):
        return self._files.get(path, path)  # a file that was there before has its path for a number


def power_loss(disk, point, draw, target):
    """Makes a folder as a loss of power after `point` operations may leave it; returns what had been said until then.

    Of what was not synced, any may be missing: of a file the end, with a part of a write or zeros in its place; of a
    folder any of its changes, whatever the order in which they were made. Nothing else is promised by POSIX.
    """
    durable = dict(disk.before)  # path: number of the file, content, or None for a folder
    names = {path: (None if content is None else path) for path, content in durable.items()}
    content = {path: value for path, value in durable.items() if value is not None}
    waiting, pending, said = {}, [], []  # writes by file; changes of folders
    for entry in disk.log[:point]:
        kind = entry[0]
        if kind == "said":
            said.append(entry[1].strip())
        elif kind == "create":
            content[entry[2]] = content[entry[2]] if len(entry) > 3 else b""
            pending.append((os.path.dirname(entry[1]), "set", entry[1], entry[2]))
        elif kind == "mkdir":
            pending.append((os.path.dirname(entry[1]), "set", entry[1], None))
        elif kind == "write":
            waiting.setdefault(entry[1], []).append(entry[2])
        elif kind == "sync":
            content[entry[1]] = content[entry[1]] + b"".join(waiting.pop(entry[1], []))
        elif kind == "rename":
            folder = os.path.dirname(entry[1])
            pending.append((folder, "move", entry[1], entry[2], entry[3]))
        elif kind == "unlink":
            pending.append((os.path.dirname(entry[1]), "drop", entry[1]))
        elif kind == "sync folder":
            folder = "" if entry[1] == "." else entry[1]
            for change in [one for one in pending if one[0] == folder]:
                _apply(names, change)
                pending.remove(change)
    kept = draw.choice([0.0, 0.3, 0.7, 1.0])
    for change in pending:
        if draw.random() < kept:
            _apply(names, change)
    for number, writes in waiting.items():
        whole = b"".join(writes)
        cut = draw.randrange(len(whole) + 1)
        content[number] += whole[:cut] + (bytes(len(whole) - cut) if draw.random() < 0.3 else b"")
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for path, number in sorted(names.items()):
        place = target / path
        if number is None:
            if place.parent.is_dir():
                place.mkdir()
    for path, number in names.items():
        if number is not None and (target / path).parent.is_dir():
            (target / path).write_bytes(content[number])
    return said


def _apply(names, change):
    _, kind, path, *more = change
    if kind == "set":
        names[path] = more[0]
    elif kind == "move":
        names.pop(path, None)
        names[more[0]] = more[1]
    else:
        names.pop(path, None)
