"""What stands in a recorded run's lines: spikes, validation, bits; and their copy elsewhere."""

import math

import numpy as np
import pytest
import runs
from recordings import record, recorder, steps_of

from workbench import open_run
from workbench.errors import CheckpointError, ExperimentError, RunError

pytest_plugins = ["recording_fixtures"]


def test_detection_goes_on_over_a_resume_as_if_there_were_no_break(tmp_path):
    """Batches blown up at 6 and 10: the window (4) is full before each only if it outlives the resume at 7."""

    class Blown(runs.Numbers):
        def __next__(self):
            x, y = super().__next__()
            return x, y + np.float32(1e3 if self.position in (6, 10) else 0)

    def build():
        experiment = runs.build()
        experiment.sampler = Blown()
        return experiment

    straight = record(tmp_path / "straight", 12, build())
    broken = tmp_path / "broken"
    record(broken, 7, build())
    broken = record(broken, 12, build(), resume=True)
    assert [line["spike_rule"] for line in steps_of(straight).values()].count("loss_factor") == 2
    assert steps_of(broken) == steps_of(straight)
    assert [line["ma"] for line in steps_of(straight).values()][0] is None
    logged = [step for step, line in steps_of(broken).items() if line["spike"]]
    assert broken.spikes()["step"].tolist() == logged  # the reader and the trainer agree
    back = record(tmp_path / "broken", 12, build(), resume=8)
    assert {step: line["ma"] for step, line in steps_of(back, 1).items()} == {
        step: steps_of(straight)[step]["ma"] for step in (9, 10, 11, 12)
    }


def test_detection_can_be_switched_off(tmp_path):
    run = record(tmp_path / "run", 2, spikes=None)
    assert run.manifest.spikes is None
    assert all("spike" not in line and "ma" not in line for line in steps_of(run).values())


def test_validation_lines_stand_beside_their_step(tmp_path):
    with recorder(tmp_path / "run") as recording:
        for batch in recording.batches(3):
            recording.step(batch)
            if recording.step_number == 2:
                recording.log_validation(0.5)
        recording.log_validation(math.nan)
    run = open_run(tmp_path / "run")
    found = [(line["step"], line["val_loss"]) for line in runs.lines(run.path) if line["type"] == "val"]
    assert found == [(2, 0.5), (3, None)]
    assert run.steps["val_loss"].tolist()[1] == 0.5
    last = runs.lines(run.path)[-1]
    assert (last["type"], last["step"], last["segment"]) == ("done", 3, 0)


def test_a_nan_loss_is_recorded_with_its_bits_and_replays(tmp_path):
    class Holey(runs.Numbers):
        def __next__(self):
            x, y = super().__next__()
            return x, y * np.float32(np.nan if self.position == 4 else 1)

    def build():
        experiment = runs.build()
        experiment.sampler = Holey()
        return experiment

    run = record(tmp_path / "run", 5, build())
    line = steps_of(run)[4]
    assert line["loss"] is None and np.isnan(np.array(int(line["loss_bits"], 16), np.uint32).view(np.float32))
    assert line["spike_rule"] == "non_finite" and None in line["per_layer_grad_norms"]
    assert math.isnan(run.steps["loss"][3]) and run.steps["loss_recorded"][3]
    assert run.spikes()["step"].tolist()[0] == 4
    trace = run.replay(4, experiment=build())
    assert trace.exact and math.isnan(trace.loss)
    runs.strict(trace.path.read_bytes())


def test_a_copy_of_the_telemetry(tmp_path, whole):
    copy = tmp_path / "logs" / "copy.jsonl"
    run = record(tmp_path / "run", 3, copy_telemetry_to=copy)
    assert copy.read_bytes() == (run.path / "telemetry.jsonl").read_bytes()
    run = record(tmp_path / "run", 4, copy_telemetry_to=copy, resume=True)
    assert copy.read_bytes() == (run.path / "telemetry.jsonl").read_bytes()


def test_the_copy_can_not_be_the_original_or_a_folder(tmp_path):
    """Every line would stand twice; and a run whose recording could not begin is none."""
    path = tmp_path / "run"
    (tmp_path / "file").touch()
    wrong = (path / "telemetry.jsonl", RunError), (tmp_path, ExperimentError), (tmp_path / "file" / "copy", RunError)
    for copy, error in wrong:
        with pytest.raises(error, match=str(copy)), recorder(path, copy_telemetry_to=copy) as recording:
            recording.step(next(recording.experiment.sampler))
        assert not (path / "run.json").exists()
    assert record(path, 1).last_step == 1


def test_a_checkpoint_that_contradicts_the_telemetry_is_not_resumed_from(tmp_path):
    """Its digests are right: only what the run logged at that step says that it is another state."""
    path = tmp_path / "run"
    record(path, 6)
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 6)
    runs.edit_line(path, 6, state=line["state"] | {"adam_m": "0" * 32})
    with pytest.raises(CheckpointError, match=r"checkpoint 6 of .* state.adam_m differ"):
        recorder(path, resume=True)
    assert record(path, 8, resume=4).last_step == 8


def test_thinning_goes_on_after_a_resume(tmp_path):
    """The policy stands in the manifest, so that nothing has to be said again."""
    done = runs.here("train", "--corpus", runs.corpus(), "--steps", 6, "--out", tmp_path / "run", *runs.FLAGS,
                     "--save-every", 2, "--keep-last", 1)  # fmt: skip
    assert done.code == 0, done.err
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 6]
    done = runs.here("train", "--out", tmp_path / "run", "--resume", "--steps", 12)
    assert done.code == 0, done.err
    assert [step for step, _ in open_run(tmp_path / "run").checkpoints] == [0, 12]


def test_norms_made_in_another_way_are_not_compared(tmp_path):
    run = record(tmp_path / "run", 3)
    runs.edit_json(run.path / "run.json", lambda manifest: manifest.update(norms="some older order"))
    trace = open_run(run.path).replay(2, experiment=runs.build(), with_probe=False)
    assert trace.exact and any("some older order" in notice for notice in trace.notices)
    assert trace.record.items["adam_v_norms"].verdict == "unverified"
    assert trace.record.items["state.adam_v"].verdict == "exact"
