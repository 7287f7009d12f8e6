"""XXH3-128 in the commit record: verified by every reading in place of SHA-256, which `verify` goes on checking."""

import hashlib
import json
import threading

import mlx.core as mx
import pytest
import runs
import xxhash
from helpers import assert_same_state, edit_json

import workbench as wb
from workbench import digests, files, read_ahead
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.checkpoints.commit import read_commit
from workbench.errors import CheckpointError
from workbench.snapshot import State


def state(step, value=0):
    """Of which `shared`, 20,000 bytes, is that of the step before, and `long` is written and hashed by threads."""
    arrays = {"shared": mx.full((5000,), 7), "own": mx.full((30,), step), "long": mx.arange(400_000) + step + value}
    mx.eval(arrays)
    return State(step, arrays, {"m": mx.arange(300_000) - step}, (1, step), {"step": step})


def saved(folder):
    for step in (1, 2):
        checkpoint_writer.write(state(step), folder, run="r", segment=0, t=0.0)
    return folder


def test_the_record_has_both_digests_of_every_file_and_shared_tensor(tmp_path):
    record = json.loads((saved(tmp_path) / "00000002.json").read_text())
    for name, entry in record["files"].items():
        content = (tmp_path / name).read_bytes()
        assert entry == {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
            "xxh3": xxhash.xxh3_128_hexdigest(content),
        }
    (place,) = record["taken"]["weights"].values()
    content = (tmp_path / place["file"]).read_bytes()[place["start"] : place["start"] + place["bytes"]]
    assert place["bytes"] == 20_000 and place["sha256"] == hashlib.sha256(content).hexdigest()
    assert place["xxh3"] == xxhash.xxh3_128_hexdigest(content)
    assert_same_state(checkpoint_reader.read(tmp_path, 2, 0, thorough=True), state(2))


def without(record):
    """As records were written before there was the second digest."""
    for entry in record["files"].values():
        del entry["xxh3"]
    for places in record.get("taken", {}).values():
        for place in places.values():
            del place["xxh3"]


def test_an_older_record_is_read_as_ever(tmp_path):
    edit_json(saved(tmp_path) / "00000002.json", without)
    assert read_commit(tmp_path, 2, 0).seal is not None
    for thorough in (False, True):
        assert_same_state(checkpoint_reader.read(tmp_path, 2, 0, thorough=thorough), state(2))
    read_ahead.begin_checkpoint(tmp_path, 2, 0)
    assert_same_state(checkpoint_reader.read(tmp_path, 2, 0), state(2))
    for name in ("00000002.safetensors", "00000002.rng", read_commit(tmp_path, 2, 0).taken["weights"]["shared"].file):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(CheckpointError, match=rf"{name} was changed: (its|the) SHA-256"):
            checkpoint_reader.read(tmp_path, 2, 0)
        (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", ["00000002.safetensors", "00000002.optimizer.safetensors", "00000002.cursor"])
def test_a_wrong_digest_in_the_record_is_named(tmp_path, name, ahead):
    right = xxhash.xxh3_128_hexdigest((saved(tmp_path) / name).read_bytes())
    edit_json(tmp_path / "00000002.json", lambda record: record["files"][name].update(xxh3="0" * 32))
    if ahead:
        read_ahead.begin_checkpoint(tmp_path, 2, 0)
    said = rf"the commit record of .*{name} is wrong: its XXH3-128 is {right}, expected {'0' * 32}; its SHA-256 agrees"
    with pytest.raises(CheckpointError, match=said):
        checkpoint_reader.read(tmp_path, 2, 0)


def test_a_wrong_digest_of_a_shared_tensor_is_named(tmp_path):
    saved(tmp_path)
    edit_json(tmp_path / "00000002.json", lambda record: record["taken"]["weights"]["shared"].update(xxh3="0" * 32))
    said = rf"shared-\w+.safetensors .*the XXH3-128 of shared in it is {'[0-9a-f]' * 32}, expected {'0' * 32}"
    with pytest.raises(CheckpointError, match=said):
        checkpoint_reader.read(tmp_path, 2, 0)


def test_a_changed_file_is_named_before_what_can_not_be_made_of_it(tmp_path):
    path = saved(tmp_path) / "00000002.safetensors"
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 16 + content[16:])
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match=f"{path.name} was changed: its SHA-256 is {found}"):
        checkpoint_reader.read(tmp_path, 2, 0)


def test_sha_256_is_left_to_verify(tmp_path):
    experiment = runs.build()
    with wb.Recorder(tmp_path / "run", *runs.parts(experiment), compile=False, save_every=2, spikes=None) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    run = wb.open_run(tmp_path / "run")
    before = {one.what: one.verdict for one in run.verify(replay=False).checks}
    assert before["00000004"] == "exact"
    folder, name = run.path / "checkpoints", "00000004.optimizer.safetensors"
    edit_json(folder / "00000004.json", lambda record: record["files"][name].update(sha256="0" * 64))
    checkpoint_reader.read(folder, 4, 0)
    with pytest.raises(CheckpointError, match=f"{name} was changed: its SHA-256 is .*, expected {'0' * 64}"):
        checkpoint_reader.read(folder, 4, 0, thorough=True)
    found = {one.what: one for one in wb.open_run(run.path).verify(replay=False).checks}
    assert found["00000004"].verdict == "mismatch" and "its SHA-256 is" in found["00000004"].detail
    assert found["00000002"].verdict == "exact"


# ------------------------------------------------------------------------------------------------------ beside a writer


def test_digests_taken_by_a_thread_are_those_of_the_bytes(tmp_path):
    content = bytes(range(256)) * 20_000
    for sizes in ((5, 100), (1 << 20, 7, 3 << 20), (len(content),)):
        parts, start = [], 0
        for size in sizes:
            parts.append(content[start : start + size])
            start += size
        written = files.write_flushed(tmp_path / "a", parts)
        whole = content[:start]
        assert written == (len(whole), hashlib.sha256(whole).hexdigest(), xxhash.xxh3_128_hexdigest(whole))
        assert (tmp_path / "a").read_bytes() == whole


def test_what_is_reserved_beyond_the_end_is_no_part_of_the_file(tmp_path):
    """A size that is wrong gives no zeros."""
    files.write_flushed(tmp_path / "a", files.Chunks(3 << 20, lambda: iter([b"x" * (2 << 20)])))
    assert (tmp_path / "a").read_bytes() == b"x" * (2 << 20)


def test_a_system_that_flushes_nothing_early_writes_the_same(tmp_path, monkeypatch):
    for number, call in enumerate((None, lambda *arguments: -1)):
        monkeypatch.setattr("workbench.early_flush.linux_call", lambda *asked, call=call: call)
        content, path = bytes(range(256)) * 20_000, tmp_path / str(number)
        files.write_flushed(path, [content[: 3 << 20], content[3 << 20 :]])
        assert path.read_bytes() == content


def test_every_file_is_flushed_before_any_counts_as_written(tmp_path, monkeypatch):
    real, flushed = files.os.fsync, []

    def noted(descriptor):
        real(descriptor)
        flushed.append(files.os.fstat(descriptor).st_ino)

    monkeypatch.setattr(files.os, "fsync", noted)
    sizes = {"small": 10, "large": 3 << 20, "empty": 0}
    files.write_together({tmp_path / name: [bytes(size)] for name, size in sizes.items()})
    assert sorted(flushed) == sorted((tmp_path / name).stat().st_ino for name in sizes)


@pytest.mark.parametrize("name", ["write", "fsync"])
def test_a_failure_leaves_no_thread(tmp_path, monkeypatch, name):
    real, calls = getattr(files.os, name), []

    def failing(*arguments):
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(files.os, name, failing)
    large = [bytes(1 << 20)] * 2
    with pytest.raises(OSError, match="No space"):
        files.write_together({tmp_path / one: large for one in "abcd"})
    assert not [one for one in threading.enumerate() if one.name == "workbench-beside"]
    if name == "fsync":
        assert set(calls) == {"workbench-beside"}


def test_without_a_thread_everything_is_done_here(tmp_path, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    content = bytes(3 << 20)
    found = files.write_together({tmp_path / one: [content] for one in "ab"})
    assert {one.sha256 for one in found.values()} == {hashlib.sha256(content).hexdigest()}
    assert digests.started(lambda: None) is None
