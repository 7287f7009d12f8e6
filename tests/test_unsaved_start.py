"""A segment starts from a state that the loop changed, and that could not be saved: no step after it is said to be
irreproducible. It is saved when there is room before the next step; else its first line says that nothing holds it."""

import errno

import pytest
import runs
from recordings import record, recorder

from workbench import checkpointer, open_run
from workbench.errors import ChangedByHand


@pytest.fixture
def disk(monkeypatch):
    """`disk["full"]`: no checkpoint can be written."""
    room, write = {"full": False}, checkpointer.checkpoint_writer.write

    def unless_full(*arguments, **options):
        if room["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*arguments, **options)

    monkeypatch.setattr(checkpointer.checkpoint_writer, "write", unless_full)
    return room


def halve(recording):
    layer = recording.experiment.model.layers[0]
    layer.weight = layer.weight * 0.5


def changed_at_4(path, disk, *, until):
    """Eight steps, with a segment that the loop opens after step 4; the disk is full until step `until` is done."""
    with recorder(path, save_every=0) as recording:
        for batch in recording.batches(8):
            recording.step(batch)
            if recording.step_number == 4:
                halve(recording)
                disk["full"] = True
                with pytest.warns(UserWarning, match="checkpoint 4 was not saved"):
                    recording.open_segment()
            if recording.step_number == until:
                disk["full"] = False
    return open_run(path)


def test_it_is_saved_before_the_next_step_when_there_is_room_again(tmp_path, disk):
    run = changed_at_4(tmp_path / "run", disk, until=4)
    assert run.checkpoints == [(0, 0), (4, 1), (8, 1)] and run.verify().whole
    for step in (5, 8):
        assert run.replay(step, experiment=runs.build(), with_probe=False).exact


@pytest.mark.filterwarnings("ignore:checkpoint 4 was not saved")
def test_else_the_steps_are_refused_by_name_and_not_called_inexact(tmp_path, disk):
    with pytest.warns(UserWarning, match=r"segment 1 starts from, after step 4, is in no checkpoint .* from step 5 to"):
        run = changed_at_4(tmp_path / "run", disk, until=5)
    assert run.checkpoints == [(0, 0), (8, 1)]
    assert run.replay(4, experiment=runs.build(), with_probe=False).exact
    for step in (5, 8):
        with pytest.raises(ChangedByHand, match=r"before step 5 the loop changed layers\.0\.weight"):
            run.replay(step, experiment=runs.build(), with_probe=False)
    found = run.verify()
    (segment,) = [check for check in found.checks if check.what == "1, from step 4"]
    assert segment.verdict == "unverified" and "no checkpoint holds that" in segment.detail and found.exact


@pytest.mark.filterwarnings("ignore:checkpoint 4 was not saved")
def test_likewise_where_a_run_is_gone_on_with(tmp_path, disk):
    record(tmp_path / "run", 4, save_every=0)
    with recorder(tmp_path / "run", save_every=0, resume=True) as recording:
        halve(recording)
        disk["full"] = True
        for batch in recording.batches(7):
            if recording.step_number == 4:
                with pytest.warns(UserWarning, match="segment 1 starts from, after step 4, is in no checkpoint"):
                    recording.step(batch)
                disk["full"] = False
            else:
                recording.step(batch)
    run = open_run(tmp_path / "run")
    assert run.checkpoints == [(0, 0), (4, 0), (7, 1)] and run.verify().exact
    with pytest.raises(ChangedByHand, match="before step 5 the loop changed the state"):
        run.replay(6, experiment=runs.build(), with_probe=False)
