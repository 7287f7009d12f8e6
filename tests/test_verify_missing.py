"""`workbench verify`: what is gone is missed, although no digest is wrong; and no honest run is accused."""

import json
import shutil

import helpers
import mlx.core as mx
import numpy as np
import pytest
import runs
from helpers import experiment, next_up, parts

from workbench.record import Recorder
from workbench.recovery import Recovery
from workbench.run import open_run


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


def found(path, verdict, **options):
    """The checks with a verdict, by kind and name."""
    checks = open_run(path).verify(**options).checks
    return {f"{check.kind} {check.what}": check.detail for check in checks if check.verdict == verdict}


def cut(path, keep):
    """Keeps the lines for which `keep` is true, with digests that agree."""
    lines = (path / "telemetry.jsonl").read_text().splitlines(keepends=True)
    (path / "telemetry.jsonl").write_text("".join(line for line in lines if keep(json.loads(line))))
    helpers.reseal(path)


def drop(path, step, segment=0):
    """Removes a checkpoint, and what else says that there was one."""
    name = f"{step:08d}" + (f".s{segment}" if segment else "")
    for file in (path / "checkpoints").glob(f"{name}.*"):
        if segment or not file.name.split(".")[1].startswith("s") or file.name.split(".")[1] == "safetensors":
            file.unlink()
    helpers.reseal(path)


def own_loop(path, steps, job=None, change=lambda recorder: None, **options):
    """Records a loop of one's own, or goes on with it."""
    job = job or experiment()
    with Recorder(path, *parts(job), compile=False, **({"save_every": 3} | options)) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
            change(recorder)
    return path


# ------------------------------------------------------------------------------------------------ the telemetry's end


def test_telemetry_without_its_last_line_does_not_say_that_the_run_ended(run):
    cut(run, lambda line: line["type"] != "done")
    said = open_run(run).verify()
    assert said.exact and not said.whole and "is whole" not in said.sentence()
    (detail,) = found(run, "unverified").values()
    assert "did not end: its last line is of step 12" in detail and "can't be told" in detail
    printed = runs.here("verify", run)
    assert printed.code == 0 and "as far as that goes" in printed.out and "did not end" in printed.out


def test_telemetry_that_ends_before_the_newest_checkpoint_was_cut(run):
    cut(run, lambda line: line["type"] != "done" and line.get("step", 0) <= 9)
    assert found(run, "mismatch") == {
        "checkpoint 00000012": "the telemetry of segment 0 ends at step 9, before this checkpoint: its last lines are "
        "gone"
    }
    assert runs.here("verify", run).code == 1


def test_an_end_that_names_another_step_than_the_last_line(run):
    cut(run, lambda line: line["type"] != "step" or line["step"] < 12)
    assert "done at step 12, and the last step line is of step 11" in found(run, "mismatch")["telemetry end"]


# -------------------------------------------------------------------------------------------------- fields of the lines


@pytest.mark.parametrize("name", ["adam_v_norms", "per_layer_act_norms", "lr", "loss_bits", "step_per_s", "ma"])
def test_a_field_that_some_lines_lack(run, name):
    runs.edit_line(run, 5, **{name: ...})
    runs.edit_line(run, 7, **{name: ...})
    assert found(run, "mismatch") == {
        f"telemetry {name}": "it is missing from the line of steps 5, 7, and others have it"
    }


def test_a_field_that_no_line_has_is_said_to_be_out_of_a_replays_reach(run):
    for step in range(1, 13):
        runs.edit_line(run, step, adam_m_norms=..., adam_v_norms=...)
    assert found(run, "unverified") == {
        "telemetry fields": "no line has adam_m_norms, adam_v_norms: a replay can't compare it"
    }
    proven = [check for check in open_run(run).verify(replay=2).checks if check.kind == "step"]
    assert all(check.detail.endswith("; not recorded: adam_m_norms, adam_v_norms") for check in proven)


@pytest.mark.parametrize("name", ["grad_norm", "lr", "per_layer_act_norms", "batch_hash", "state"])
def test_a_field_that_was_taken_out_of_one_stretch_of_an_older_run(tmp_path, name):
    """Older runs have no seals, which would tell."""
    path = own_loop(tmp_path / "own", 5)
    own_loop(path, 8, resume=3)
    lines = [json.loads(line) for line in (path / "telemetry.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("seal", None), line.pop("manifest", None)
        if (line["type"], line["segment"]) == ("step", 1):
            line.pop(name), line.pop(f"{name}_bits", None)
    (path / "telemetry.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    helpers.edit_json(path / "run.json", lambda document: (document.pop("sealed"), document.pop("end")))
    told = {what: detail for what, detail in found(path, "unverified").items() if what == f"telemetry {name}"}
    (detail,) = told.values()
    assert "no line of steps 4 to 8 of segment 1 has it, and others have" in detail
    assert not open_run(path).verify().whole


@pytest.mark.parametrize("change", [lambda lr: next_up(lr), lambda lr: None, lambda lr: 2 * lr])
def test_an_edited_learning_rate_is_not_the_one_that_the_step_used(run, change):
    line = next(line for line in runs.lines(run) if line["type"] == "step" and line["step"] == 10)
    runs.edit_line(run, 10, lr=change(line["lr"]))
    details = found(run, "mismatch", replay=12)
    assert set(details) == {f"step {step}, segment 0" for step in (10, 11, 12)}
    assert all("the first difference is lr at step 10" in detail for detail in details.values())


@pytest.mark.parametrize("fields", [{"ma": 1.0}, {"spike": True}, {"spike_rule": "loss_z", "spike": True}])
def test_a_mark_that_does_not_follow_from_the_losses(run, fields):
    runs.edit_line(run, 9, **fields)
    assert "of step 9 do not follow" in found(run, "unverified")["telemetry spike marks"]


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_the_first_checkpoint_is_missed(run):
    drop(run, 0)
    assert set(found(run, "mismatch")) == {"checkpoint start of segment 0"}
    assert runs.here("verify", run).code == 1


def test_one_that_was_due_is_missed(run):
    drop(run, 8)
    drop(run, 4)
    (detail,) = found(run, "mismatch").values()
    assert "checkpoints 4, 8 are missing, and one was due every 4 steps; a later one is there" in detail


def test_the_last_one_is_missed_and_may_not_have_been_written(run):
    drop(run, 12)
    assert set(found(run, "unverified")) == {"checkpoint due in segment 0", "checkpoint final, 12"}


def test_the_one_that_a_resume_went_on_from_is_missed(tmp_path):
    run = runs.segmented(tmp_path)
    assert open_run(run).verify().whole
    drop(run, 8)
    assert "from which segment 1 went on, is missing" in found(run, "mismatch")["checkpoint start of segment 1"]


@pytest.mark.parametrize("what", ["dtype", "shape"])
def test_a_parameter_that_the_manifest_describes_otherwise(run, what):
    changed = {"dtype": "bfloat16", "shape": [2, 2]}[what]
    runs.edit_json(run / "run.json", lambda document: document["parameters"][0].update({what: changed}))
    details = found(run, "mismatch")
    assert len(details) == 4 and all(f"has the {what}" in detail for detail in details.values())


@pytest.mark.parametrize(("field", "words"), [("code", "the code that performed"), ("environment", "its machine")])
def test_premises_that_were_emptied_are_said_to_be_unknown(run, field, words):
    runs.edit_json(run / "run.json", lambda document: document["segments"][0].update({field: {}}))
    assert words in found(run, "unverified")["segment 0, premises"]
    assert not open_run(run).verify().whole


def test_what_it_does_not_prove_is_said(run):
    sampled = open_run(run).verify(replay=3)
    assert sampled.limits()[0].startswith(f"{9 - sampled.on_the_way} of 12 steps were not replayed")
    assert "Not proven: Nothing is signed" in runs.here("verify", run).out
    everything = open_run(run).verify(replay=12)
    assert not [one for one in everything.limits() if "were not replayed" in one]


# --------------------------------------------------------------------------------------------- honest runs are whole


def test_a_resume_with_other_settings_is_no_mismatch(tmp_path):
    path = own_loop(tmp_path / "own", 7, keep_last=2)
    own_loop(path, 16, save_every=4, resume=True)
    assert found(path, "mismatch") == {}


@pytest.mark.parametrize(
    "options",
    [
        {"keep_last": 2},
        {"keep_every": 6},
        {"keep_last": 1, "keep_every": 9},
        {"save_every": 0},
        {"spikes": None},
        {"black_box": 0},
    ],
    ids=str,
)
def test_thinned_runs_are_whole_and_a_lack_beyond_that_is_missed(tmp_path, options):
    path = own_loop(tmp_path / "own", 22, **options)
    assert open_run(path).verify().whole
    kept = [step for step, _ in open_run(path).checkpoints]
    for step in kept[1:-2] if "keep_last" in options else ():
        if step % 3 == 0 and options.get("keep_every") and step % options["keep_every"] == 0:
            copy = shutil.copytree(path, tmp_path / f"without-{step}")
            drop(copy, step)
            assert f"checkpoint {step} is missing" in found(copy, "mismatch")["checkpoint due in segment 0"]


def test_a_loop_that_was_cut_off_is_not_accused(tmp_path):
    job = experiment()
    with pytest.raises(KeyboardInterrupt), Recorder(tmp_path / "own", *parts(job), compile=False) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
        raise KeyboardInterrupt
    assert found(tmp_path / "own", "mismatch") == {}
    assert set(found(tmp_path / "own", "unverified")) == {"telemetry end"}


def test_a_segment_that_the_loop_opened_itself_is_whole(tmp_path):
    def change(recorder):
        if recorder.step_number == 5:
            state = recorder.experiment.optimizer.state
            state["layers"][0]["weight"]["m"] = state["layers"][0]["weight"]["m"] * 0
            recorder.open_segment()

    path = own_loop(tmp_path / "own", 11, change=change)
    assert open_run(path).verify(replay=11, experiment=experiment()).whole
    drop(path, 5, segment=1)
    assert {"segment 1, from step 5", "checkpoint start of segment 1"} <= {
        *found(path, "mismatch"),
        *found(path, "unverified"),
    }


class Wild(helpers.Points):
    """A batch a thousand times as large, once."""

    def __next__(self):
        number = self.number
        x, y = super().__next__()
        return (x * 1000, y * 1000) if number == 15 else (x, y)


@pytest.mark.parametrize("skip_batch", [False, True])
def test_a_run_that_was_rolled_back_is_whole(tmp_path, skip_batch):
    job = experiment()
    job.sampler = Wild()
    recovery = Recovery("on", window=5, back=4, skip_batch=skip_batch, limit=2)
    path = tmp_path / "own"
    with Recorder(path, *parts(job), compile=False, save_every=4, auto_rollback=recovery) as recorder:
        try:
            for batch in recorder.batches(20):
                recorder.step(batch)
        except Exception as error:  # too many in a row: the run was ended by its own rule
            assert "unstable" in str(error)
    opened = open_run(path)
    assert len(opened.rollbacks()) and len(opened.manifest.segments) > 1
    again = experiment()
    again.sampler = Wild()
    assert {check.what for check in opened.verify().checks if check.verdict == "mismatch"} == set()


def test_a_resumed_loop_with_a_loss_of_nan_is_whole(tmp_path):
    """Where lines have bits for what is not finite, only some lines have those of arrays."""

    class Poisoned(helpers.Points):
        def __next__(self):
            number = self.number
            x, y = super().__next__()
            return (x * np.float32("nan"), y) if number == 4 else (x, y)

    def make():
        job = experiment()
        job.sampler = Poisoned()
        return job

    path = own_loop(tmp_path / "own", 7, make())
    own_loop(path, 12, make(), resume=True)
    assert open_run(path).verify().whole
    assert mx.isnan(mx.array(float(open_run(path).steps["loss"].iloc[-1])))


def test_a_commit_record_that_is_nested_too_deeply_is_a_finding(run):
    path = run / "checkpoints" / "00000008.json"
    path.write_bytes(path.read_bytes().replace(b'"segment": 0', b'"segment": ' + b'{"a":' * 3000))
    details = found(run, "mismatch")
    assert set(details) == {"checkpoint 00000008"} and "00000008.json" in details["checkpoint 00000008"]
