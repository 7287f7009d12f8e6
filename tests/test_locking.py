"""One recorder a run: the second is told who has it; what a dead process left is no obstacle; readers see nothing."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import runs
from helpers import python
from recordings import record, recorder

from workbench import open_run
from workbench.errors import RunError
from workbench.locking import NAME, Lock, Owner


@pytest.fixture
def without_locks(monkeypatch):
    """A file system that has none, as some network mounts."""

    def refuse(*arguments):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)


def leave(folder, **changed):
    """The file of a recorder that has ended without removing it."""
    owner = {"pid": os.getpid(), "host": Owner.here().host, "boot": Owner.here().boot, "began": Owner.here().began}
    (folder / NAME).write_text(json.dumps(owner | {"t": 1.0} | changed))


def a_dead_pid():
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


def test_the_second_is_told_pid_and_host_of_the_first(tmp_path):
    first = Lock(tmp_path)
    here = Owner.here()
    with pytest.raises(RunError, match=rf"just now, by process {os.getpid()} on {here.host} since \d{{4}}-"):
        Lock(tmp_path)
    first.release()
    assert os.listdir(tmp_path) == []
    second = Lock(tmp_path)
    assert second.stale is None
    second.release()
    second.release()  # no error


@pytest.mark.parametrize("there", [True, False])
def test_a_link_in_its_place_is_never_written_through(tmp_path, there):
    """As a run that someone sent may have it: what it leads to was overwritten with the owner's name."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    record(run, 2)
    if there:
        victim.write_text("years of work")
    (run / NAME).symlink_to(victim)
    with pytest.raises(RunError, match=rf"{NAME} is a link to .*victim; .* remove the link"):
        recorder(run, resume=True)
    assert (victim.read_text() if there else victim.exists()) == ("years of work" if there else False)
    (run / NAME).unlink()
    recorder(run, resume=True).close()


def test_a_run_that_could_not_be_begun_is_not_taken(tmp_path, monkeypatch):
    """Its own loop tries once more, in a notebook say, when there is room again; or another one does."""

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    recording, other = recorder(tmp_path / "run"), recorder(tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr("workbench.manifest.write", full)
        recording.step(next(recording.experiment.sampler))
    for batch in recording.batches(3):
        recording.step(batch)
    with pytest.raises(RunError, match="just now, by process|already holds a run"):
        other.step(next(other.experiment.sampler))
    recording.close()
    assert all(open_run(tmp_path / "run").replay(step, experiment=runs.build()).exact for step in (1, 3))


def test_another_process_is_refused_by_its_owner_s_name(tmp_path):
    code = f"""
import sys
from pathlib import Path
from workbench.locking import Lock
lock = Lock(Path({str(tmp_path)!r}))
print("locked", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(RunError, match=f"by process {other.pid} on "):
            Lock(tmp_path)
        other.send_signal(signal.SIGKILL)
        other.wait()
        lock = Lock(tmp_path)  # the kernel let go; the name that it left is recognised
        assert lock.stale is not None and lock.stale.pid == other.pid and lock.stale.gone() is True
        lock.release()


@pytest.mark.parametrize("changed", [{}, {"host": "elsewhere"}, {"pid": 1}, {"began": 1}])
def test_with_locks_a_file_that_nobody_holds_is_stale_whatever_it_names(tmp_path, changed):
    leave(tmp_path, **changed)
    lock = Lock(tmp_path)
    assert lock.stale is not None
    lock.release()


def test_without_locks_a_living_owner_is_obeyed(tmp_path, without_locks):
    lock = Lock(tmp_path)
    with pytest.raises(RunError, match=f"by process {os.getpid()} on "):
        Lock(tmp_path)
    lock.release()
    Lock(tmp_path).release()


@pytest.mark.parametrize("which", ["dead", "reused", "another start of the machine"])
def test_without_locks_an_owner_that_has_ended_is_recognised(tmp_path, without_locks, which):
    if Owner.here().began is None:
        pytest.skip("this system does not say when a process began")
    leave(
        tmp_path,
        **{"dead": {"pid": a_dead_pid()}, "reused": {"began": Owner.here().began - 1}}.get(which, {"boot": "another"}),
    )
    lock = Lock(tmp_path)
    assert lock.stale is not None
    lock.release()


def test_without_locks_another_machine_is_not_guessed_about(tmp_path, without_locks):
    leave(tmp_path, host="elsewhere", pid=a_dead_pid())
    with pytest.raises(RunError, match=f"on elsewhere since .* can't be seen from here.* remove .*{NAME}"):
        Lock(tmp_path)
    (tmp_path / NAME).unlink()
    Lock(tmp_path).release()


def test_a_forked_child_does_not_keep_it(tmp_path):
    lock = Lock(tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(reading, 1)
        os._exit(0)
    try:
        lock.release()
        Lock(tmp_path).release()  # although the child, which was there before, lives on
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_lock_that_was_removed_meanwhile_is_not_taken_for_the_one_at_its_place(tmp_path, monkeypatch):
    """Opened before its owner removes it, locked after: another may have made a new file by then."""
    first, real, done = Lock(tmp_path), fcntl.flock, []

    def late(descriptor, how):
        if not done:
            done.append(True)
            first.release()
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    second = Lock(tmp_path)
    monkeypatch.undo()
    with pytest.raises(RunError, match="just now"):
        Lock(tmp_path)
    second.release()


# ------------------------------------------------------------------------------------------------------------ with runs


def test_a_run_has_it_while_it_is_recorded_only(tmp_path):
    path = tmp_path / "run"
    with recorder(path) as recording:
        recording.step(next(recording.experiment.sampler))
        assert Owner.here().pid == json.loads((path / NAME).read_text())["pid"]
    assert not (path / NAME).exists()
    leave(path, pid=a_dead_pid())
    assert record(path, 3, resume=True).last_step == 3


def test_two_that_begin_in_the_same_folder_do_not_mix(tmp_path):
    path = tmp_path / "run"
    with recorder(path) as one, recorder(path) as other:
        one.step(next(one.experiment.sampler))
        with pytest.raises(RunError, match="already holds a run"):
            other.step(next(other.experiment.sampler))
        one.step(next(one.experiment.sampler))
    assert open_run(path).last_step == 2


READER = """
import sys, time
import workbench as wb
end = time.time() + float(sys.argv[2])
seen = 0
while time.time() < end:
    run = wb.open_run(sys.argv[1])
    steps = len(run.steps)
    assert steps >= seen, (steps, seen)
    seen = steps
    run.checkpoints, run.spikes()
print(seen)
"""


def test_readers_neither_block_nor_disturb_a_writer(tmp_path):
    path = tmp_path / "run"
    with recorder(path, save_every=2, keep_last=2) as recording:
        recording.step(next(recording.experiment.sampler))
        readers = [
            subprocess.Popen([sys.executable, "-W", "error", "-c", READER, path, "1.5"], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        began = time.time()
        for batch in recording.batches(4000):
            recording.step(batch)
            if all(reader.poll() is not None for reader in readers) or time.time() - began > 60:
                break
        last = recording.step_number
    assert [reader.communicate()[0].strip() != b"" and reader.returncode for reader in readers] == [0, 0]
    run = open_run(path)
    assert run.last_step == last and not run.telemetry.notices
    assert run.replay(last, experiment=runs.build(), with_probe=False).exact


def test_looking_needs_no_right_to_write(tmp_path):
    path = tmp_path / "run"
    record(path, 3)
    before = runs.digest(path)
    done = python("-c", READER, path, "0.1")
    assert done.returncode == 0, done.stderr
    assert runs.digest(path) == before
