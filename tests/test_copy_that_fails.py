"""The copy of the telemetry can't be written: nothing else waits for it, and nothing false is said of the run's own."""

import errno

import pytest
from test_record import recorder

from workbench import journal as journals
from workbench import open_run
from workbench.journal import Journal
from workbench.lines.line import Line
from workbench.lines.writer import Writer

FULL = OSError(errno.ENOSPC, "No space left on device")


class Failing(Writer):
    """A file on a disk that is full while `full` says so."""

    full = True

    def flush(self):
        if self.full:
            raise FULL
        super().flush()


@pytest.fixture
def copy(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.recording.telemetry_copy.Writer", Failing)
    return tmp_path / "copy.jsonl"


def test_the_run_is_whole_and_said_to_be(tmp_path, copy):
    """It was told that its own telemetry can't be written, and lacked the note of its end."""
    with pytest.warns(UserWarning, match="copy of telemetry") as caught:
        with recorder(tmp_path / "run", copy_telemetry_to=copy) as recording:
            for batch in recording.batches(4):
                recording.step(batch)
    first, last = (str(one.message) for one in caught)
    assert first.startswith("the copy of telemetry (copy_telemetry_to) can't be written at step 1: ")
    assert last.startswith("the last lines of the copy of telemetry (copy_telemetry_to) were not written")
    assert open_run(tmp_path / "run").verify().whole and copy.read_bytes() == b""


def test_a_failure_of_the_run_s_own_is_told_after_one_of_the_copy(tmp_path, copy, monkeypatch):
    """One flag for both kept the second from being told."""
    with pytest.warns(UserWarning) as caught:
        with recorder(tmp_path / "run", copy_telemetry_to=copy) as recording:
            for batch in recording.batches(4):
                with monkeypatch.context() as patched:
                    if recording.step_number == 2:
                        patched.setattr(Writer, "flush", Failing.flush)
                        patched.setattr(Writer, "full", True, raising=False)
                    recording.step(batch)
            monkeypatch.setattr(Failing, "full", False)
    said = [str(one.message) for one in caught]
    assert len(said) == 2 and said[1].startswith("telemetry of step 3 can't be written to ")
    assert copy.read_bytes() == (tmp_path / "run" / "telemetry.jsonl").read_bytes()


def test_a_copy_that_gave_up_ends_and_has_no_gap(tmp_path, monkeypatch):
    monkeypatch.setattr(journals, "LIMIT", 300)
    copy = Failing(tmp_path / "copy.jsonl")
    journal = Journal(tmp_path / "telemetry.jsonl", copy)
    for step in range(1, 30):
        copy.full = 3 <= step < 20
        journal.put(Line(type="step", t=0.0, elapsed_s=0.0, segment=0, step=step, loss=0.5, loss_bits="0x3f000000"))
    assert journal.copy_lost and not journal.lost
    journal.close()
    copied, whole = ((tmp_path / name).read_bytes() for name in ("copy.jsonl", "telemetry.jsonl"))
    assert whole.startswith(copied) and 2 < copied.count(b"\n") < 29 == whole.count(b"\n")
