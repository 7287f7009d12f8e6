"""The scene of a step: the run's own states and batches, verified, within a memory budget, and nothing disturbed."""

import mlx.core as mx
import pytest
import runs
from experiments import record_own, scene_of
from helpers import Points, assert_same_state, edit_line, experiment, flip_in_safetensors, repair_commit, tensor_bytes

from workbench import open_run
from workbench.checkpoints import checkpoint_reader
from workbench.errors import CheckpointError, EnvironmentMismatch, ReplayError
from workbench.experiment import batch_hash, random_key
from workbench.interventions.intervene import intervene
from workbench.interventions.scene import Scene
from workbench.record import Recorder


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


def committed(run, step):
    return checkpoint_reader.read(run.path / "checkpoints", step, 0)


# ----------------------------------------------------------------------------------------------------------- the states


def test_states_batches_and_losses_are_the_runs_own(path):
    run = open_run(path)
    before = runs.digest(path)
    scene = Scene.open(run, 9, next_steps=3)
    assert scene.exact and scene.first_difference is None and scene.notices == []
    assert (scene.first, scene.checkpoint, scene.rolled, scene.computed) == (0, 0, 8, 1)
    for step in (0, 4, 8):
        assert_same_state(scene.state(step), committed(run, step))
    for step in range(1, 10):
        moment = scene.moment(step)
        assert batch_hash(moment.batch) == run.evidence(step, 0)["batch_hash"]
        assert float(moment.loss) == run.steps.set_index("step")["loss"][step]
        assert moment.seen.evidence() == run.evidence(step, 0)
    assert [float(moment.loss) for moment in scene.after(3)] == run.steps["loss"].tolist()[9:12]
    assert scene.computed == 4 and runs.digest(path) == before


def test_the_roll_forward_begins_where_the_context_asks_for_it(path):
    run = open_run(path)
    found = {context: Scene.open(run, 9, context=context) for context in (0, 2, 4, 5)}
    assert {c: (s.checkpoint, s.first) for c, s in found.items()} == {0: (8, 8), 2: (4, 6), 4: (4, 4), 5: (0, 3)}
    assert Scene.open(run, 9, checkpoint=8).first == 8
    for scene in found.values():
        assert scene.exact
        assert_same_state(scene.state(8), committed(run, 8))
    with pytest.raises(ReplayError, match="state 5 is not in this scene, which has states 6 to 9"):
        found[2].state(5)
    with pytest.raises(ReplayError, match="step 5 is not in this scene, which has steps 7 to 9"):
        found[2].moment(5)
    with pytest.raises(ReplayError, match="context is -1"):
        Scene.open(run, 9, context=-1)


def test_the_first_and_the_last_step_of_a_run(path):
    run = open_run(path)
    first = Scene.open(run, 1, next_steps=2)
    assert first.exact and (first.first, first.rolled) == (0, 0)
    assert intervene(first, None).next_losses == first.baseline.next_losses
    last = Scene.open(run, 12, next_steps=2)
    assert last.exact and len(last.baseline.next_losses) == 2  # past the end of the run, on data that it never took
    assert intervene(last, None).next_losses == last.baseline.next_losses


def test_where_the_data_ends_there_are_fewer_steps_after(tmp_path):
    class Ending(Points):
        def __next__(self):
            if self.number == 8:
                raise StopIteration
            return super().__next__()

    def build():
        job = experiment()
        job.sampler = Ending()
        return job

    scene = scene_of(tmp_path, 6, build=build, opening={"next_steps": 5})
    assert len(scene.baseline.next_losses) == 2 == len(intervene(scene, "lr=0.5x").next_losses)


def test_states_that_do_not_fit_are_computed_again_to_the_same_bits(tmp_path):
    job = {"dropout": 0.3, "steps": 14}
    roomy = scene_of(tmp_path, 12, **job)
    tight = Scene.open(roomy.run, 12, experiment=experiment(dropout=0.3), memory_budget=1)
    assert sorted(roomy._states) == list(range(3, 13)) and sorted(tight._states) == [11, 12]
    count = tight.computed
    for step in (3, 7, 11, 12):
        assert_same_state(tight.state(step), roomy.state(step))
    assert tight.computed - count == 3 + 7
    for change in ("state=7", None):
        assert intervene(tight, change).next_losses == intervene(roomy, change).next_losses


def test_the_budget_counts_what_each_further_state_takes(tmp_path):
    """Weights of 49 numbers, two moments of each, the step's and the learning rate's scalars: 49 · 3 · 4 + 12 bytes."""
    scene = scene_of(tmp_path, 6, steps=7)
    states = 6 - scene.first + 1
    for budget, held in ((states * 600, states), (states * 600 - 1, 2)):
        again = Scene.open(scene.run, 6, experiment=experiment(), memory_budget=budget)
        assert len(again._states) == held


def test_a_loop_that_edits_its_state_between_steps_is_followed(tmp_path):
    job = experiment(dropout=0.3)

    def meddle(step):
        if step % 3 == 0:
            mx.random.normal((2,))
            job.optimizer.learning_rate = 1e-2 / step

    run = record_own(tmp_path / "own", job, before_step=meddle)
    for step, budget in ((12, None), (13, 1)):
        scene = Scene.open(run, step, experiment=experiment(dropout=0.3), memory_budget=budget, next_steps=3)
        assert scene.exact
        assert [float(m.loss) for m in scene.after(3)] == run.steps["loss"].tolist()[step : step + 3]
        assert intervene(scene, None).next_losses == scene.baseline.next_losses
    roomy = Scene.open(run, 13, experiment=experiment(dropout=0.3))
    for number in range(scene.first, 12):
        assert_same_state(scene.state(number), roomy.state(number))


# ---------------------------------------------------------------------------------------------------------- the batches


def test_the_batch_of_any_step_is_the_one_that_the_run_took(path):
    run = open_run(path)
    scene = Scene.open(run, 9, context=1, next_steps=1)
    scene.after(1)
    for step in range(1, 13):
        assert batch_hash(scene.batch(step)) == run.evidence(step, 0)["batch_hash"]
    assert scene.notices == []
    assert intervene(scene, None).next_losses == scene.baseline.next_losses  # the sampler is where it should be
    with pytest.raises(ReplayError, match="step 13 is not in the telemetry"):
        scene.batch(13)


# -------------------------------------------------------------------------------------------------------------- verdict


def test_a_run_that_departed_on_the_way_is_not_exact_and_says_where(path):
    edit_line(path, 7, lambda line: line.update(loss=1.0, loss_bits="0x3f800000"))
    scene = Scene.open(open_run(path), 9)
    difference = scene.first_difference
    assert not scene.exact and (difference.step, difference.where, difference.item) == (7, "roll-forward", "loss")
    edit_line(path, 9, lambda line: line.update(loss=1.0, loss_bits="0x3f800000"))
    scene = Scene.open(open_run(path), 9, context=0)
    assert (scene.first_difference.step, scene.first_difference.where) == (9, "step")


def test_a_checkpoint_of_another_state_is_seen(path):
    flip_in_safetensors(path / "checkpoints" / "00000008.safetensors", lambda name: "mlp" in name)
    with pytest.raises(CheckpointError, match="was changed.*Start from an earlier one"):
        Scene.open(open_run(path), 9, context=0)
    assert Scene.open(open_run(path), 9, context=3).exact  # from checkpoint 4
    repair_commit(path, "00000008")
    scene = Scene.open(open_run(path), 9, context=0)
    assert not scene.exact and scene.first_difference.where == "restored state"
    assert scene.first_difference.item == "state.weights"


def test_a_step_that_logged_nothing_is_unverified(path):
    for name in ("loss", "loss_bits", "state", "batch_hash"):
        runs.edit_line(path, 9, **{name: ...})
    scene = Scene.open(open_run(path), 9)
    assert not scene.exact and scene.first_difference is None


def test_steps_after_it_that_are_not_the_runs_are_named(path):
    edit_line(path, 11, lambda line: line.update(loss=1.0, loss_bits="0x3f800000"))
    scene = Scene.open(open_run(path), 9, next_steps=3)
    assert scene.exact and len(scene.baseline.next_losses) == 3
    assert scene.notices == ["the untouched step 11 is not the run's: loss differs"]


def test_another_environment_is_refused_or_named(path):
    runs.edit_json(path / "run.json", lambda m: m["segments"][0]["environment"].update(mlx="0.0.1"))
    with pytest.raises(EnvironmentMismatch, match="mlx"):
        Scene.open(open_run(path), 9)
    scene = Scene.open(open_run(path), 9, other_environment=True)
    assert any("mlx" in phrase for phrase in scene.unlike)


def test_a_step_in_two_segments(tmp_path):
    run = open_run(runs.segmented(tmp_path))
    scene = Scene.open(run, 13, next_steps=1)
    assert scene.exact and scene.segment == 1 and scene.first == 4
    assert [float(moment.loss) for moment in scene.after(1)] == [float(run.steps["loss"].iloc[-1])]
    assert batch_hash(scene.batch(2)) == run.evidence(2, 0)["batch_hash"]


def test_this_threads_random_numbers_go_on_as_if_nothing_had_been(path):
    key = random_key()
    scene = Scene.open(open_run(path), 9)
    scene.baseline, scene.batch(2), scene.state(5)
    intervene(scene, "lr=0.5x")
    assert random_key() == key


def test_progress_is_told_and_may_cancel(path):
    told = []

    def progress(done, total, what):
        told.append((done, total, what))
        if len(told) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        Scene.open(open_run(path), 9, progress=progress)
    assert told[0] == (0, 9, "step 1 of 9, rolling forward")


def test_the_own_loops_experiment_is_needed_or_its_factory(tmp_path):
    parts = runs.parts(runs.build())
    with Recorder(tmp_path / "mine", *parts, compile=False, factory="runs:build") as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    run = open_run(tmp_path / "mine")
    with pytest.raises(Exception, match="pass factory='runs:build'"):
        Scene.open(run, 4)
    scene = Scene.open(run, 4, factory="runs:build")
    assert scene.exact and tensor_bytes(scene.state(0).weights) == tensor_bytes(committed(run, 0).weights)
