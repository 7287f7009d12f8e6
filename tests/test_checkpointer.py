"""Checkpoints that are written while training goes on: late, and yet the state of their step; bounded; never torn."""

import dataclasses
import os
import threading
import time

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
import runs
from helpers import assert_same_state, tree
from recordings import checkpoint_bytes, record, recorder

from workbench import Recorder, checkpointer, open_run, snapshot
from workbench.checkpoints import checkpoint_reader, checkpoint_writer
from workbench.errors import RunError
from workbench.experiment import Experiment, StepOptions


class Held:
    """Keeps every write of a checkpoint after the first waiting, until it is let go."""

    def __init__(self, monkeypatch):
        self.go, self.begun, real = threading.Event(), [], checkpoint_writer.write

        def write(state, folder, **options):
            self.begun.append(state.step)
            assert state.step == 0 or self.go.wait(60)
            return real(state, folder, **options)

        monkeypatch.setattr(checkpoint_writer, "write", write)


def until(holds):
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def build(compile):
    mx.random.seed(1)
    model = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.2), nn.Linear(32, 1))
    optimizer = optim.AdamW(1e-2, bias_correction=True)
    return Experiment(model, optimizer, runs.squares, runs.Numbers(), StepOptions(compile=compile))


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("black_box", [0, 8])
def test_a_checkpoint_written_many_steps_later_is_the_state_of_its_step(tmp_path, monkeypatch, compile, black_box):
    """Compiled steps give the buffers of the old state to the new one where they can; not those that are held."""
    states = {}
    experiment = build(compile)
    with Recorder(tmp_path / "whole", *runs.parts(experiment), compile=compile, spikes=None) as recording:
        for batch in recording.batches(20):
            recording.step(batch)
            if recording.step_number in (5, 10):
                recording.checkpoint()
    for step in (5, 10, 20):
        states[step] = checkpoint_reader.read(tmp_path / "whole" / "checkpoints", step, 0)
    held, experiment = Held(monkeypatch), build(compile)
    settings = {"save_every": 5, "spikes": None, "black_box": black_box}
    with Recorder(tmp_path / "run", *runs.parts(experiment), compile=compile, **settings) as recording:
        for batch in recording.batches(20):
            recording.step(batch)
            if recording.step_number == 14:  # that of 5 is being written, and that of 10 waits
                until(lambda: len(held.begun) == 2)
                assert held.begun == [0, 5] and open_run(tmp_path / "run").checkpoints == [(0, 0)]
                held.go.set()
    assert open_run(tmp_path / "run").checkpoints == [(step, 0) for step in (0, 5, 10, 15, 20)]
    for step, state in states.items():
        assert_same_state(checkpoint_reader.read(tmp_path / "run" / "checkpoints", step, 0), state)


def test_copies_on_the_host_are_saved_as_the_arrays_themselves(tmp_path, monkeypatch):
    """As on a device whose arrays the host can't read where they are."""
    whole = record(tmp_path / "whole", 4)
    state = checkpoint_reader.read(whole.path / "checkpoints", 4, 0)
    odd = state.weights | {
        "nan": mx.array([float("nan"), -0.0], mx.bfloat16),
        "none": mx.zeros((0, 2)),
        "true": mx.array([True, False]),
        "step": mx.array(7, mx.uint64),
    }
    state = dataclasses.replace(state, weights=odd)
    for name, held in (("a", state), ("b", checkpointer._on_host(state))):
        checkpoint_writer.write(held, tmp_path / name, run="r", segment=0, t=0.0, lanes=state.lanes())
        assert_same_state(checkpoint_reader.read(tmp_path / name, 4, 0), state)
    assert tree(tmp_path / "a") == tree(tmp_path / "b")


def test_a_third_waits_for_the_first(tmp_path, monkeypatch):
    held, reached = Held(monkeypatch), []

    def loop():
        mx.set_default_device(mx.cpu)
        with recorder(tmp_path / "run", save_every=1) as recording:
            for batch in recording.batches(4):
                recording.step(batch)
                reached.append(recording.step_number)

    thread = threading.Thread(target=loop)
    thread.start()
    until(lambda: len(reached) == 2 and held.begun == [0, 1])
    thread.join(0.3)
    assert thread.is_alive() and reached == [1, 2]  # 1 is being written, 2 waits, and 3 has no place yet
    held.go.set()
    thread.join(60)
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("memory", [4, 8, 12, 100])
def test_fewer_are_held_where_memory_is_short(tmp_path, monkeypatch, memory):
    """A quarter of the memory for all states that are held: none, one for the black box, and one or two to be saved."""
    experiment = runs.build()
    experiment.prepare()
    from workbench import blackbox
    from workbench.memory import state_size

    monkeypatch.setattr(blackbox, "memory", lambda: memory * state_size(experiment) + 3)
    with recorder(tmp_path / "run", experiment) as recording:
        recording.step(next(experiment.sampler))
        assert recording._out.saves.checkpointer._saver.limit == {4: 0, 8: 1, 12: 2, 100: 2}[memory]
        for batch in recording.batches(8):
            recording.step(batch)
    assert open_run(tmp_path / "run").checkpoints == [(0, 0), (4, 0), (8, 0)]


def test_arrays_that_changed_after_they_were_handed_over_are_not_saved(tmp_path, monkeypatch):
    """As no MLX array does. The fingerprints of what is written must be those of the step's own line."""
    real = snapshot.capture

    def careless(*arguments):
        state = real(*arguments)
        if state.step != 4:
            return state
        path = min(state.weights)
        other = state.weights[path] + 1
        mx.eval(other)
        return dataclasses.replace(state, weights=state.weights | {path: other})

    monkeypatch.setattr(snapshot, "capture", careless)
    with pytest.warns(UserWarning, match="checkpoint 4 was not saved .*: weights changed between the step and"):
        run = record(tmp_path / "run", 6)
    assert run.checkpoints == [(0, 0), (6, 0)]


def test_one_that_is_asked_for_is_on_the_disk_when_the_call_returns(tmp_path, monkeypatch):
    with recorder(tmp_path / "run", save_every=0) as recording:
        recording.step(next(recording.experiment.sampler))
        assert recording.checkpoint() is True
        assert open_run(tmp_path / "run").checkpoints == [(0, 0), (1, 0)]
        before = tree(tmp_path / "run" / "checkpoints")
        assert recording.checkpoint() is True  # it is there already
        assert tree(tmp_path / "run" / "checkpoints") == before
        recording.step(next(recording.experiment.sampler))

        def full(*arguments):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="checkpoint 2 was not saved .*No space"):
            patch.setattr("workbench.checkpoints.checkpoint_writer.write_together", full)
            assert recording.checkpoint() is False
        assert recording.checkpoint() is True
    with pytest.raises(RunError, match="after its end"):
        recording.checkpoint()


def test_a_checkpoint_of_another_state_under_the_same_name_is_replaced_as_a_whole(tmp_path):
    run = record(tmp_path / "run", 4)
    folder, state = run.path / "checkpoints", checkpoint_reader.read(run.path / "checkpoints", 4, 0)
    other = snapshot.State(4, state.weights, state.optimizer, (1, 2), state.cursor)
    order = []

    def noted(name, function):
        return lambda path, *more: (order.append((name, str(path))), function(path, *more))[1]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("unlink", "replace"):
            patch.setattr(os, name, noted(name, getattr(os, name)))
        checkpoint_writer.write(other, folder, run=run.manifest.run, segment=0, t=0.0)
    assert order[0] == ("unlink", str(folder / "00000004.json"))
    assert_same_state(checkpoint_reader.read(folder, 4, 0), other)


def test_what_a_killed_process_left_half_written_is_swept_away_by_the_next(tmp_path):
    run = record(tmp_path / "run", 4)
    for place in (run.path / ".run.77.tmp.json", run.path / "checkpoints" / ".00000006.77.tmp.safetensors"):
        place.write_bytes(b"half")
    (run.path / "notes.tmp").write_text("mine")
    whole = record(tmp_path / "whole", 6)
    run = record(run.path, 6, resume=True)
    assert not [path for path in run.path.rglob(".*tmp*")] and (run.path / "notes.tmp").exists()
    assert checkpoint_bytes(run, 6) == checkpoint_bytes(whole, 6)


def test_a_run_whose_folder_has_gone_is_not_made_anew_elsewhere(tmp_path):
    """Unmounted: what stands at its place is another folder."""
    path = tmp_path / "run"
    with pytest.warns(UserWarning, match="was not saved to"):
        with recorder(path) as recording:
            for batch in recording.batches(9):
                recording.step(batch)
                if recording.step_number == 5:
                    recording._out.saves.checkpointer.wait()
                    path.rename(tmp_path / "gone")
                    path.mkdir()
        assert list(path.iterdir()) == []
    run = open_run(tmp_path / "gone")
    assert run.checkpoints == [(0, 0), (4, 0)] and run.last_step == 9


def test_thinning_that_fails_harms_no_checkpoint(tmp_path, monkeypatch, caplog):
    real, failing = checkpoint_writer.delete, [True]

    def delete(*arguments):
        if failing:
            failing.pop()
            raise OSError(30, "Read-only file system")
        real(*arguments)

    monkeypatch.setattr(checkpointer.checkpoint_writer, "delete", delete)
    run = record(tmp_path / "run", 12, save_every=4, keep_last=1)
    assert "older checkpoints of" in caplog.text and run.checkpoints == [(0, 0), (12, 0)]


def test_a_loop_without_a_with_statement_loses_nothing_that_was_due(tmp_path):
    from helpers import python

    code = f"""
import runs
from workbench import Recorder
recorder = Recorder({str(tmp_path / "run")!r}, *runs.parts(runs.build()), compile=False, save_every=4)
for batch in recorder.batches(4):
    recorder.step(batch)
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert open_run(tmp_path / "run").checkpoints == [(0, 0), (4, 0)]


def test_a_batch_that_can_not_be_stored_stops_no_training(tmp_path, monkeypatch):
    """Of a stream without a cursor, whose batches the recorder stores."""
    from workbench.stored_batches import BatchStore

    experiment, real = runs.build(), BatchStore.put
    job = experiment.model, experiment.optimizer, experiment.loss_fn
    with Recorder(tmp_path / "run", *job, compile=False, save_every=0, spikes=None) as recording:
        for number, batch in zip(range(1, 7), runs.Numbers(), strict=False):
            if number == 3:
                monkeypatch.setattr(BatchStore, "put", lambda *arguments: os.replace("/nowhere/a", "/nowhere/b"))
                with pytest.warns(UserWarning, match="the batch of step 3 was not stored, .*Training goes on"):
                    recording.step(batch)
                monkeypatch.setattr(BatchStore, "put", real)
            else:
                recording.step(batch)
    assert open_run(tmp_path / "run").last_step == 6
