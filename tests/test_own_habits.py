"""What people's own loops do between steps, to their models, and to their run folders: exact all the same, or named."""

import json
import threading
import warnings

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from helpers import Points

import workbench as wb
from workbench.errors import CheckpointError, ExperimentError, RunError


def build(dropout=0.2):
    mx.random.seed(5)
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(dropout), nn.Tanh(), nn.Linear(6, 1))
    return model, optim.AdamW(1e-2), lambda model, x, y: nn.losses.mse_loss(model(x), y), Points()


def record(path, steps=8, between=lambda step, recorder: None, parts=None, **options):
    with wb.Recorder(path, *(parts or build()), save_every=4, **options) as recorder:
        for batch in recorder.batches(steps):
            between(recorder.step_number, recorder)
            recorder.step(batch)
    return wb.open_run(path)


def exact(run, steps=range(1, 9), parts=None, **options):
    experiment = wb.Experiment(*(parts or build()), wb.StepOptions(**options))
    traces = run.replay(steps, experiment=experiment, with_probe=False)
    return [trace.step for trace in traces if not trace.exact]


def test_a_replay_in_the_middle_of_training_does_not_change_the_training(tmp_path):
    second = wb.Experiment(*build())

    def look(step, recorder):
        if step == 5:
            assert wb.open_run(recorder.path).replay(3, experiment=second).exact

    looked = record(tmp_path / "looked", between=look)
    straight = record(tmp_path / "straight")
    assert [line.state for line in looked.telemetry.lines] == [line.state for line in straight.telemetry.lines]


def test_random_numbers_drawn_between_steps_are_replayed(tmp_path):
    """Text sampled with the global random state, say: the step after it has another dropout mask."""

    def sample(step, recorder):
        if step in (3, 5):
            mx.eval(mx.random.uniform(shape=(3,)))

    run = record(tmp_path / "run", between=sample)
    assert exact(run) == []
    assert [line.step for line in run.telemetry.lines if line.type == "step" and line.before] == [4, 6]
    plain = record(tmp_path / "plain")
    assert run.line(4, 0).loss != plain.line(4, 0).loss and not any(line.before for line in plain.telemetry.lines)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_learning_rate_that_the_loop_sets_is_replayed(tmp_path, compiled):
    def plateau(step, recorder):
        if step == 5:
            recorder.experiment.optimizer.learning_rate = 1e-3

    run = record(tmp_path / "run", between=plateau, compile=compiled)
    assert exact(run, compile=compiled) == []
    assert [run.line(step, 0).lr for step in (5, 6, 7)] == [0.01, 0.001, 0.001]


def test_drawing_after_the_last_step_does_not_spoil_its_checkpoint(tmp_path):
    with wb.Recorder(tmp_path / "run", *build(), save_every=0) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
        mx.eval(mx.random.uniform(shape=(3,)))
    assert exact(wb.open_run(tmp_path / "run"), range(1, 6)) == []
    record(tmp_path / "run", resume=True)
    straight = record(tmp_path / "straight")
    assert wb.open_run(tmp_path / "run").line(8, 0).state == straight.line(8, 0).state


def test_weights_changed_after_a_step_are_not_saved_as_its_state(tmp_path):
    path = tmp_path / "run"
    with warnings.catch_warnings(record=True) as said, wb.Recorder(path, *build(), save_every=4) as recorder:
        warnings.simplefilter("always")
        for batch in recorder.batches(5):
            recorder.step(batch)
        recorder.experiment.model.layers[0].weight = mx.zeros((6, 4))
        with pytest.raises(
            ExperimentError, match="no checkpoint of step 5 was saved .* weights changed after the step"
        ):
            recorder.checkpoint()
    assert len(said) == 1 and "no checkpoint of step 5" in str(said[0].message)
    assert wb.open_run(path).checkpoints == [(0, 0), (4, 0)]


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_the_random_state_is_that_of_the_thread_that_trains(tmp_path):
    """It is a thread's own in MLX: saved by one and restored by another, it must still be the training's."""
    straight = record(tmp_path / "straight")
    with wb.Recorder(tmp_path / "run", *build(), save_every=0) as recorder:
        in_thread(lambda: [recorder.step(batch) for batch in recorder.batches(5)])
    with wb.Recorder(tmp_path / "run", *build(), save_every=0, resume=True) as recorder:
        in_thread(lambda: [recorder.step(batch) for batch in recorder.batches(8)])
    run = wb.open_run(tmp_path / "run")
    # Its first step starts from that thread's own random state, so the runs differ; each must be exact in itself.
    assert exact(run) == [] and exact(straight) == []


def test_layers_named_states_are_layers(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.states, self.step_ = [nn.Linear(4, 3)], nn.Linear(3, 1)

        def __call__(self, x):
            return self.step_(self.states[0](x))

    def parts():
        mx.random.seed(1)
        return Model(), optim.Adam(1e-2), lambda model, x, y: nn.losses.mse_loss(model(x), y), Points()

    run = record(tmp_path / "run", parts=parts())
    assert exact(run, parts=parts()) == []
    assert None not in run.line(3, 0).adam_v_norms


def test_weights_loaded_after_the_recorder_was_made_are_state_0(tmp_path):
    parts = build()
    weight = mx.array(np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)).T  # not row-major
    with wb.Recorder(tmp_path / "run", *parts, save_every=4) as recorder:
        parts[0].layers[0].weight = weight
        for batch in recorder.batches(8):
            recorder.step(batch)
    assert exact(wb.open_run(tmp_path / "run")) == []


@pytest.mark.parametrize("batch", [{"x": 1}, None, "text", [None]])
def test_what_is_no_batch_is_named(tmp_path, batch):
    with wb.Recorder(tmp_path / "run", *build()) as recorder, pytest.raises(ExperimentError, match="the batch holds a"):
        recorder.step(batch)


def test_an_optimizer_state_that_can_not_be_restored_is_refused_at_once(tmp_path):
    class Tupled(optim.SGD):
        def init_single(self, parameter, state):
            state["pair"] = (mx.zeros_like(parameter), mx.zeros_like(parameter))

    class Counting(optim.SGD):
        def init_single(self, parameter, state):
            state["count"] = 3

    model, _, loss_fn, points = build()
    for optimizer, words in ((Tupled(0.1), "it stands in a tuple"), (Counting(0.1), "count as int; expected an MLX")):
        with pytest.raises(ExperimentError, match=words):
            wb.Recorder(tmp_path / "run", model, optimizer, loss_fn, points)


def test_a_copy_of_the_telemetry_overwrites_nothing(tmp_path):
    other = record(tmp_path / "other", 2)
    precious = tmp_path / "corpus.txt"
    precious.write_text("To be, or not to be\n")
    for place in (other.path / "telemetry.jsonl", precious):
        before = place.read_bytes()
        with pytest.raises(RunError, match="is not empty and not a copy of this run's telemetry"):
            record(tmp_path / "run", 2, copy_telemetry_to=place)
        assert place.read_bytes() == before and not (tmp_path / "run").exists()


def test_a_damaged_start_can_be_passed_over(tmp_path):
    run = record(tmp_path / "run")
    (run.path / "checkpoints" / "00000004.safetensors").write_bytes(b"short")
    experiment = wb.Experiment(*build())
    with pytest.raises(CheckpointError, match=r"has 5 bytes, expected .* Start from an earlier one: --checkpoint STEP"):
        run.replay(6, experiment=experiment)
    trace = run.replay(6, experiment=experiment, checkpoint=0)
    assert trace.exact and trace.record.checkpoint == 0 and trace.record.rolled == 5
    trace = run.replay(4, experiment=experiment)
    assert trace.record.items["checkpoint"].verdict == "unverified"
    assert trace.record.items["checkpoint"].detail == "it is damaged" and "was not compared" in trace.notices[0]
    with pytest.raises(wb.WorkbenchError, match="has no checkpoint 3 before step 6"):
        run.replay(6, experiment=experiment, checkpoint=3)


def test_steps_that_could_not_be_checked_on_the_way_are_named(tmp_path):
    run = record(tmp_path / "run")
    path = run.path / "telemetry.jsonl"
    lines = [line for line in path.read_text().splitlines(True) if json.loads(line).get("step") != 6]
    path.write_text("".join(lines))
    trace = wb.open_run(run.path).replay(8, experiment=wb.Experiment(*build()))
    assert trace.notices == ["not checked on the way, as the telemetry lacks their lines: steps [6]"]


def test_layers_that_own_other_parameters_than_recorded_are_refused(tmp_path):
    run = record(tmp_path / "run")

    def swap(manifest):
        first, second = manifest["layers"]
        owned = manifest["owned"]
        owned[first], owned[second] = owned[second], owned[first]

    runs.edit_json(run.path / "run.json", swap)
    with pytest.raises(ExperimentError, match="layers own other parameters than recorded"):
        wb.open_run(run.path).replay(3, experiment=wb.Experiment(*build()))


def test_nothing_is_green_when_the_checker_is_blind(tmp_path, monkeypatch):
    run = record(tmp_path / "run")
    monkeypatch.setattr("workbench.gates.missed_flips", lambda evidence: ["loss"])
    trace = run.replay(3, experiment=wb.Experiment(*build()))
    assert not trace.exact and "unverified" in trace.sentence()
    assert [verdict for _, verdict, _ in trace.badges()] == ["unverified", "unverified", "mismatch"]


def test_a_folder_that_holds_something_else_is_no_place_for_a_run(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notes.txt").write_text("mine")
    said = runs.here("train", "--corpus", runs.corpus(), "--steps", 2, "--out", tmp_path / "data", *runs.FLAGS)
    assert said.code == 2 and "is not empty" in said.err
    assert [file.name for file in (tmp_path / "data").iterdir()] == ["notes.txt"]
