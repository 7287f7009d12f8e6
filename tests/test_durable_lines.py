"""Lines of telemetry whose `fsync` fails: the kernel may drop them, and say of the next attempt that all is well."""

import errno
import os

import mlx.core as mx
import pytest
from msgspec import UNSET
from recordings import recorder

from workbench import open_run
from workbench.lines import writer as writers
from workbench.lines.line import Line
from workbench.lines.writer import Writer
from workbench.stored_batches import BatchStore


class Disk:
    """What of a file is safe. A failed `fsync` drops all that was not, and later ones know nothing of it."""

    def __init__(self, monkeypatch, path):
        self.path, self.safe, self.dirty, self.failing = path, bytearray(), {}, False
        self.calls = {name: getattr(os, name) for name in ("write", "pwrite", "fsync")}
        monkeypatch.setattr(os, "write", self.write)
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fsync", self.fsync)

    def _own(self, descriptor):
        return os.path.samestat(os.fstat(descriptor), os.stat(self.path))

    def write(self, descriptor, content):
        if self._own(descriptor):
            self.dirty[os.fstat(descriptor).st_size] = bytes(content)
        return self.calls["write"](descriptor, content)

    def pwrite(self, descriptor, content, start):
        assert self._own(descriptor)
        self.dirty[start] = bytes(content)
        return self.calls["pwrite"](descriptor, content, start)

    def fsync(self, descriptor):
        if not self._own(descriptor):
            return self.calls["fsync"](descriptor)
        dirty, self.dirty = self.dirty, {}
        if self.failing:
            raise OSError(errno.EIO, "Input/output error")
        for start, content in dirty.items():
            self.safe[len(self.safe) :] = bytes(max(0, start + len(content) - len(self.safe)))
            self.safe[start : start + len(content)] = content
        return None


@pytest.fixture
def lines(tmp_path, monkeypatch):
    path = tmp_path / "telemetry.jsonl"
    path.touch()
    writer = Writer(path)
    yield writer, Disk(monkeypatch, path)
    writer.close()


def add(writer, *steps):
    for step in steps:
        writer.append(Line(type="step", step=step))


def test_what_a_failed_attempt_may_have_lost_is_written_again(lines):
    writer, disk = lines
    add(writer, 1)
    writer.sync()
    add(writer, 2, 3)
    disk.failing = True
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output error"):
            writer.sync()
    add(writer, 4)
    before = disk.path.read_bytes()
    disk.failing = False
    writer.sync()
    assert bytes(disk.safe) == disk.path.read_bytes() == before
    add(writer, 5)
    writer.sync()
    assert bytes(disk.safe) == disk.path.read_bytes() != before


def test_what_is_held_no_more_is_never_said_to_be_durable(lines, monkeypatch):
    monkeypatch.setattr(writers, "KEPT", 100)
    writer, disk = lines
    add(writer, *range(1, 6))
    disk.failing = True
    with pytest.raises(OSError, match="Input/output error"):
        writer.sync()
    disk.failing = False
    for _ in range(2):
        with pytest.raises(OSError, match="what was written since byte 0 may be lost"):
            writer.sync()


def test_more_than_is_held_does_no_harm_where_nothing_fails(lines, monkeypatch):
    monkeypatch.setattr(writers, "KEPT", 100)
    writer, disk = lines
    add(writer, *range(1, 6))
    writer.sync()
    add(writer, 6)
    disk.failing = True
    with pytest.raises(OSError, match="Input/output error"):
        writer.sync()
    disk.failing = False
    writer.sync()
    assert bytes(disk.safe) == disk.path.read_bytes()


def test_a_run_whose_last_lines_are_not_known_to_be_on_the_disk_says_so(tmp_path, monkeypatch):
    with (
        pytest.warns(UserWarning, match="are not known to be on the disk .*Input/output error"),
        recorder(tmp_path / "run", save_every=0) as recording,
    ):
        for batch in recording.batches(2):
            recording.step(batch)
        recording.checkpoint()
        Disk(monkeypatch, tmp_path / "run" / "telemetry.jsonl").failing = True
    assert open_run(tmp_path / "run").manifest.end is UNSET


def test_a_stored_batch_is_written_again_too(tmp_path, monkeypatch):
    store = BatchStore(tmp_path)
    store.put("a" * 64, (mx.arange(4),))
    path = tmp_path / "batches" / f"{'a' * 64}.safetensors"
    disk, content, inode = Disk(monkeypatch, path), path.read_bytes(), path.stat().st_ino
    disk.failing = True
    with pytest.raises(OSError, match="Input/output error"):
        store.sync()
    disk.failing = False
    store.sync()
    assert path.read_bytes() == content and path.stat().st_ino != inode
