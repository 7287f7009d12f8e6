"""A disk that is full: told once, by name, and answered where there is room."""

import errno
import os
import warnings

import pytest
import runs
from recordings import record, recorder

from workbench import Recorder, files, traces
from workbench.errors import ReplayError, RunError
from workbench.stored_batches import BatchStore

FULL = OSError(errno.ENOSPC, "No space left on device")


def full(*arguments, **more):
    raise OSError(*FULL.args)


def stored(path, monkeypatch, failing, steps=9):
    """Records batches that can't be drawn again, some of which can't be stored. Returns what was said."""
    experiment, real = runs.build(), BatchStore.put
    job = experiment.model, experiment.optimizer, experiment.loss_fn
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with Recorder(path, *job, compile=False, save_every=0, spikes=None) as recording:
            for number, batch in zip(range(1, steps + 1), runs.Numbers(), strict=False):
                monkeypatch.setattr(BatchStore, "put", full if number in failing else real)
                recording.step(batch)
    return [str(one.message) for one in said]


@pytest.mark.parametrize(
    ("failing", "counted"),
    [([3, 4, 5], ["3 batches of steps 3 to 5"]), ([7, 8, 9], ["3 batches of steps 7 to 9"]), ([3], [])],
)
def test_batches_that_can_not_be_stored_are_told_once_and_counted(tmp_path, monkeypatch, failing, counted):
    said = stored(tmp_path / "run", monkeypatch, failing)
    assert said[0].startswith(f"the batch of step {failing[0]} was not stored, so that step can't be replayed: ")
    assert len(said) == 1 + len(counted) and all(map(str.startswith, said[1:], counted))


def test_each_stretch_is_told(tmp_path, monkeypatch):
    said = stored(tmp_path / "run", monkeypatch, [2, 3, 6, 7])
    assert [sentence.split(" were")[0].split(" was")[0] for sentence in said] == [
        "the batch of step 2",
        "2 batches of steps 2 to 3",
        "the batch of step 6",
        "2 batches of steps 6 to 7",
    ]


def test_a_resume_is_one_sentence_and_the_run_as_it_was(tmp_path, monkeypatch):
    run = record(tmp_path / "run", 6)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(files, "write_flushed", full)
        one = recorder(run.path, resume=True)
        with pytest.raises(RunError, match=r"can be written to .*run \(No space left on device\), so that step 7"):
            one.step(next(iter(one.batches())))
        one.close()
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before
    assert record(run.path, 8, resume=True).last_step == 8


def test_an_error_of_a_write_names_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "write_flushed", full)
    with pytest.raises(OSError, match="No space left on device: .*wanted"):
        files.write_atomic(tmp_path / "wanted", b"content")


def test_traces_go_to_the_cache_where_the_run_has_no_room(tmp_path, monkeypatch):
    run, cache, real = record(tmp_path / "run", 4), tmp_path / "cache", os.open
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(cache))

    def opened(path, flags, *more, **others):
        if flags & os.O_CREAT and str(path).startswith(str(run.path)):
            full()
        return real(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", opened)
    (trace,) = run.replay([3], experiment=runs.build())
    assert trace.exact and trace.path.is_relative_to(cache) and traces.find(run, trace.path.name) == trace.path
    assert any(f"there is no room in {run.path} (No space left on device)" in said for said in trace.notices)
    with pytest.raises(ReplayError, match="nothing can be written to .*run/elsewhere .*name another folder"):
        run.replay([3], experiment=runs.build(), trace_dir=run.path / "elsewhere")
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(run.path / "cache"))
    with pytest.raises(ReplayError, match="nothing can be written to .*run/traces .*No space left"):
        run.replay([3], experiment=runs.build())
