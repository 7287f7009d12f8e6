"""A checkpoint beside the same run as it went on past it (case R12): restored state and steps, judged apart."""

import json

import helpers
import mlx.optimizers as optim
import pytest
import runs
from helpers import Points, mlp, mse

import workbench as wb
from workbench.errors import ReplayError
from workbench.experiment import Experiment, StepOptions


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


def verdicts(found):
    return found.restored_state, found.trajectory


def test_a_checkpoint_that_leads_back_onto_the_runs_way(path):
    before = runs.digest(path)
    found = wb.open_run(path).resumption(4)
    assert verdicts(found) == ("exact", "exact")
    assert (found.checkpoint, found.asked, list(found.steps)) == (4, 12, [5, 6, 7, 8, 9, 10, 11, 12])
    assert found.table["what"].tolist() == ["restored state", *["trajectory"] * 8]
    assert found.table["step"].tolist() == [4, *range(5, 13)] and set(found.table["verdict"]) == {"exact"}
    assert found.steps[8]["checkpoint"].verdict == "exact"  # the run's own next checkpoint, byte for byte
    assert len(found.sentences()) == 2 and runs.digest(path) == before


def test_a_run_that_was_resumed_is_compared_with_its_way_without_a_break(tmp_path):
    run = wb.open_run(runs.segmented(tmp_path))
    found = [run.resumption(8, segment=segment) for segment in (0, 1)]
    assert [verdicts(one) for one in found] == [("exact", "exact")] * 2
    assert [(one.segment, one.asked, len(one.steps)) for one in found] == [(0, 12, 4), (1, 14, 6)]


@pytest.mark.parametrize("suffix", [".safetensors", ".optimizer.safetensors"])
def test_a_state_that_was_saved_wrongly(path, suffix):
    file = path / "checkpoints" / f"00000004{suffix}"
    helpers.flip_in_safetensors(file, lambda name: "up.weight" in name, 20)
    helpers.repair_commit(path, "00000004")
    found = wb.open_run(path).resumption(4, steps=3)
    assert verdicts(found) == ("mismatch", "mismatch")
    assert found.state_difference.where == "restored state" and found.trajectory_difference.step == 5
    assert list(found.steps) == [5]  # what comes after a departure is its consequence
    assert not any("no checkpoint of this run holds" in one for one in found.sentences())


class Hidden:
    """A loss that depends on how often it was computed: state that no checkpoint holds."""

    def __init__(self):
        self.calls = 0

    def __call__(self, model, x, y):
        self.calls += 1
        return mse(model, x, y) * (1 + self.calls)


@pytest.mark.filterwarnings("ignore:loss_fn.calls is 2 now")  # which says just that
def test_steps_that_depend_on_more_than_the_state(tmp_path):
    def job():
        return Experiment(mlp(), optim.AdamW(1e-2), Hidden(), Points(), StepOptions(compile=False))

    one = job()
    parts = (one.model, one.optimizer, one.loss_fn, one.sampler)
    with wb.Recorder(tmp_path / "run", *parts, compile=False, save_every=2, self_check=False) as recorder:
        for batch in recorder.batches(6):
            recorder.step(batch)
    found = wb.open_run(tmp_path / "run").resumption(4, experiment=job())
    assert verdicts(found) == ("exact", "mismatch")
    assert (found.trajectory_difference.step, found.trajectory_difference.item) == (5, "loss")
    assert "depend on something that no checkpoint of this run holds" in found.sentences()[2]
    assert found.table["verdict"].tolist() == ["exact", "mismatch"]


def test_a_later_line_that_is_not_what_the_step_gives(path):
    runs.edit_line(path, 6, loss_bits="0x40000000", loss=2.0)
    found = wb.open_run(path).resumption(4)
    assert verdicts(found) == ("exact", "mismatch") and list(found.steps) == [5, 6]
    assert found.trajectory_difference.step == 6 and "first at step 6 in loss" in found.sentences()[1]


def test_what_was_not_logged_is_unverified(path):
    helpers.edit_line(path, 5, lambda line: [line.pop(name) for name in ("loss", "loss_bits")])
    found = wb.open_run(path).resumption(4, steps=1)
    assert verdicts(found) == ("exact", "unverified")


def test_a_mistake_is_a_sentence(path):
    run = wb.open_run(path)
    with pytest.raises(ReplayError, match="has no step after checkpoint 12 to compare with, and ends at step 12"):
        run.resumption(12)
    with pytest.raises(ReplayError, match="has no checkpoint 5 before step 6"):
        run.resumption(5)
    with pytest.raises(ReplayError, match="expected 1 or more steps"):
        run.resumption(4, steps=0)


def test_command_line(path):
    said = runs.here("resumption", path, "--from", "4", "--steps", "2")
    assert said.code == 0 and "Restored state 4: exact" in said.out
    assert "Trajectory, steps 5 to 6 of the run as it went on: exact (2 steps performed)." in " ".join(said.out.split())
    document = json.loads(runs.here("resumption", path, "--from", "4", "--json").out)
    assert (document["restored_state"], document["trajectory"]) == ("exact", "exact") and len(document["steps"]) == 8
    assert runs.here("resumption", path, "--from", "5").code == 2
