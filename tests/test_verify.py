"""`workbench verify`: what is whole is said to be whole, and each kind of damage is found where it is."""

import json
import shutil

import helpers
import numpy as np
import pytest
import runs
from helpers import mse

from workbench.errors import RunError
from workbench.proving import sample
from workbench.record import Recorder
from workbench.run import open_run


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


def verdicts(found, kind):
    frame = found.frame
    return dict(frame[frame["kind"] == kind][["what", "verdict"]].itertuples(index=False, name=None))


def wrong(path, **options):
    """The only check that is a mismatch: (kind, what, detail)."""
    found = open_run(path).verify(**options)
    (one,) = [check for check in found.checks if check.verdict == "mismatch"]
    assert not found.exact and one.detail in found.sentence()
    return one.kind, one.what, one.detail


def test_a_whole_run(run):
    before = runs.digest(run)
    found = open_run(run).verify()
    assert found.whole and found.sentence() == "run is whole: 12 checks are exact. No step was replayed."
    assert verdicts(found, "checkpoint") == dict.fromkeys(["00000000", "00000004", "00000008", "00000012"], "exact")
    assert verdicts(found, "telemetry") == dict.fromkeys(
        ["segment 0", "seals", "end", "fields", "spike marks"], "exact"
    )
    assert verdicts(found, "manifest") == {"run.json": "exact"}
    assert verdicts(found, "segment") == {"0, from step 0": "exact"}
    assert verdicts(found, "data") == {str(runs.corpus()): "exact"}
    assert runs.digest(run) == before and found.steps == 12


def test_a_sample_is_proven_by_replay(run):
    before = runs.digest(run)
    found = open_run(run).verify(replay=5, seed=3)
    steps = verdicts(found, "step")
    assert len(steps) == 5 and set(steps.values()) == {"exact"} and found.exact
    assert "5 of 5 replayed steps have the run's bits" in found.sentence()
    assert runs.digest(run) == before  # no trace is written
    again = open_run(run).verify(replay=5, seed=3)
    assert verdicts(again, "step") == steps
    everything = open_run(run).verify(replay=100)
    assert len(verdicts(everything, "step")) == 12 and everything.on_the_way == 0


def test_the_sample_is_spread_over_all_segments(tmp_path):
    opened = open_run(runs.segmented(tmp_path))
    assert (
        sample(opened, 1000, 0)
        == sample(opened, 18, 1)
        == [(0, n) for n in range(1, 13)] + [(1, n) for n in range(9, 15)]
    )
    for seed in range(20):
        drawn = sample(opened, 6, seed)
        assert len(set(drawn)) == 6 and [segment for segment, _ in drawn] == [0, 0, 0, 0, 1, 1]
    assert len({tuple(sample(opened, 6, seed)) for seed in range(20)}) > 10


def test_a_resumed_run_is_whole(tmp_path):
    found = open_run(runs.segmented(tmp_path)).verify(replay=6)
    assert found.exact and verdicts(found, "segment") == {"0, from step 0": "exact", "1, from step 8": "exact"}


@pytest.mark.parametrize("suffix", ["safetensors", "optimizer.safetensors", "rng", "cursor", "json"])
def test_a_flipped_bit_in_a_checkpoint(run, suffix):
    path = run / "checkpoints" / f"00000008.{suffix}"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    kind, what, detail = wrong(run)
    assert (kind, what) == ("checkpoint", "00000008") and path.name in detail


def test_a_checkpoint_whose_digests_were_made_to_fit_is_not_the_state_that_was_logged(run):
    helpers.flip_in_safetensors(run / "checkpoints" / "00000008.safetensors", lambda name: True)
    helpers.repair_commit(run, "00000008")
    kind, what, detail = wrong(run)
    assert (kind, what) == ("checkpoint", "00000008") and "weights" in detail


def test_a_line_that_is_gone(run):
    lines = (run / "telemetry.jsonl").read_bytes().splitlines(keepends=True)
    (run / "telemetry.jsonl").write_bytes(
        b"".join(line for line in lines if b'"step":7,' not in line or b'"step"' not in line)
    )
    helpers.reseal(run)
    kind, what, detail = wrong(run)
    assert (kind, what, detail) == ("telemetry", "segment 0", "the lines of steps 7 are missing")


@pytest.mark.parametrize("number", [300_000_000, 9 * 10**18])
def test_a_line_that_names_a_step_far_away_takes_no_memory(run, number):
    helpers.edit_line(run, 12, lambda line: line.update(step=number))
    found = [check.detail for check in open_run(run).verify().checks if check.what == "segment 0"]
    assert f"the lines of steps 12, 13, 14, 15, 16 and {number - 17} more are missing" in found


def test_a_line_of_a_segment_that_the_manifest_lacks(run):
    runs.edit_line(run, 12, segment=5)
    assert wrong(run)[2] == "it has lines of segment 5, which the manifest lacks"


def test_damaged_telemetry_is_said_once_and_the_digests_are_checked_all_the_same(run):
    path = run / "telemetry.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"loss":', b'"loss"', 1))
    found = open_run(run).verify()
    assert wrong(run)[:2] == ("telemetry", "telemetry.jsonl")
    assert set(verdicts(found, "checkpoint").values()) == {"unverified"}
    proven = open_run(run).verify(replay=1).checks[-1]
    assert (proven.kind, proven.verdict) == ("step", "mismatch") and "could not be replayed" in proven.detail


def test_a_reason_that_is_a_sentence_of_its_own_ends_in_one_full_stop(run):
    telemetry = run / "telemetry.jsonl"
    lines = telemetry.read_bytes().splitlines(keepends=True)
    telemetry.write_bytes(b"".join([*lines, lines[-2]]))  # a step stands twice
    found = open_run(run).verify()
    (one,) = [check for check in found.checks if check.verdict == "mismatch"]
    assert one.detail.endswith("keep the lines of one.")
    assert found.sentence().endswith("keep the lines of one.") and one.detail in found.sentence()


def test_a_changed_corpus_and_a_missing_one(run, tmp_path):
    copy = tmp_path / "corpus.txt"
    copy.write_bytes(runs.corpus().read_bytes()[:-1])
    runs.edit_json(run / "run.json", lambda document: document["data"][0].update(path=str(copy)))
    assert wrong(run)[:2] == ("data", str(copy))
    copy.unlink()
    found = open_run(run).verify()
    assert found.exact and verdicts(found, "data") == {str(copy): "unverified"} and "1 could not be" in found.sentence()


def test_a_segment_that_went_on_from_another_state(tmp_path):
    run = runs.segmented(tmp_path)
    lines = (run / "telemetry.jsonl").read_text().splitlines()
    for number, line in enumerate(lines):
        if (document := json.loads(line))["type"] == "meta" and document["segment"] == 1:
            document["state"]["adam_v"] = "0" * 32
            lines[number] = json.dumps(document)
    (run / "telemetry.jsonl").write_text("\n".join(lines) + "\n")
    helpers.reseal(run)
    kind, what, detail = wrong(run)
    assert (kind, what) == ("segment", "1, from step 8") and "adam_v differs from what was left" in detail


def test_a_damaged_trace_and_one_of_another_run(run):
    open_run(run).replay(6, with_probe=False, fresh_process=False)
    assert verdicts(open_run(run).verify(), "trace") == {"00000006.json": "exact"}
    path = run / "traces" / "00000006.json"
    runs.edit_json(path, lambda document: document.update(run="another"))
    assert wrong(run) == ("trace", "00000006.json", "it is of run another")
    path.write_text("{")
    assert wrong(run)[:2] == ("trace", "00000006.json")


def test_what_a_crash_leaves_is_a_notice(run):
    (run / "checkpoints" / "00000012.json").unlink()
    helpers.reseal(run)
    found = open_run(run).verify()
    assert found.exact and not found.whole and "00000012.cursor" in found.notices[0]


def test_a_step_that_is_not_what_was_logged(run):
    runs.edit_line(run, 6, batch_hash="0" * 64)
    found = open_run(run).verify(replay=12)
    differing = [check for check in found.checks if check.verdict == "mismatch"]
    assert [check.what for check in differing] == [f"{step}, segment 0" for step in (6, 7, 8)]  # from checkpoint 4
    assert all("batch_hash at step 6" in check.detail for check in differing) and not found.exact


def test_steps_on_another_machine_are_informational_and_not_exact(run):
    def change(document):
        document["segments"][0]["environment"]["mlx"] = "0.1"

    runs.edit_json(run / "run.json", change)
    found = open_run(run).verify(replay=2, other_environment=True)
    assert set(verdicts(found, "step").values()) == {"unverified"} and not found.exact
    assert "not proven" in found.sentence()
    assert open_run(run).verify().exact
    assert "mlx: recorded 0.1" in not_sampled(run, 2)
    assert not_sampled(run, 2, workers=1) == not_sampled(run, 2)


def test_a_loop_of_ones_own(tmp_path):
    job = runs.build()
    with Recorder(tmp_path / "own", *runs.parts(job), compile=False, save_every=3) as recorder:
        for batch in recorder.batches(7):
            recorder.step(batch)
    assert open_run(tmp_path / "own").verify(replay=3, experiment=runs.build()).exact
    assert "loop of your own" in not_sampled(tmp_path / "own", 1)


def not_sampled(path, count, **options):
    """Why no step of a run was proven. All that a look at its files says is said all the same, by the command too."""
    found, looked = open_run(path).verify(replay=count, **options), open_run(path).verify().checks
    *rest, proven = found.checks
    assert rest == looked and (proven.what, proven.verdict) == (f"{count} to sample", "unverified")
    assert not found.exact and "is not proven" in found.sentence() and proven.detail in found.sentence()
    said = runs.here("verify", path, "--replay", count)
    assert said.code == 1 and found.sentence() in said.out.replace("\n", " ") and "exact" in said.out
    return proven.detail


def test_a_part_that_can_not_be_performed_here_leaves_the_other_proven(tmp_path):
    """The second segment was recorded on another machine."""
    path = runs.segmented(tmp_path)
    runs.edit_json(path / "run.json", lambda document: document["segments"][1]["environment"].update(mlx="0.1"))
    steps = verdicts(open_run(path).verify(replay=100), "step")
    assert {what.partition(", ")[2]: one for what, one in steps.items()} == {
        "segment 0": "exact",
        "segment 1": "unverified",
    }
    assert len(steps) == 18


# ---------------------------------------------------------------------------------------- steps that can't be replayed


def test_a_damaged_checkpoint_keeps_its_steps_from_being_proven_and_the_others_are(run):
    path = run / "checkpoints" / "00000004.rng"
    path.write_bytes(path.read_bytes()[:-2])
    found = open_run(run).verify(replay=12)
    steps = verdicts(found, "step")
    wrong = {f"{step}, segment 0" for step in range(5, 9)}
    assert {what for what, one in steps.items() if one == "mismatch"} == wrong and len(steps) == 12
    details = {check.what: check.detail for check in found.checks if check.kind == "step"}
    assert all("could not be replayed" in details[what] and "00000004.rng" in details[what] for what in wrong)
    assert found.on_the_way == 0 and not found.exact
    said = runs.here("verify", run, "--replay", 12)
    assert said.code == 1 and "could not be replayed" in said.out


def test_a_run_without_checkpoints_proves_nothing(run):
    shutil.rmtree(run / "checkpoints")
    proven = open_run(run).verify(replay=2).checks[-1]
    assert (proven.what, proven.verdict) == ("2 to sample", "unverified")
    assert "none has a checkpoint before it" in proven.detail


def test_a_corpus_that_is_gone_is_nothing_against_the_run(run, tmp_path):
    runs.edit_json(run / "run.json", lambda document: document["data"][0].update(path=str(tmp_path / "gone.txt")))
    found = open_run(run).verify(replay=2)
    assert set(verdicts(found, "step").values()) == {"unverified"} and not found.exact
    assert "is not what it says" not in found.sentence()


# --------------------------------------------------------------------------------------------------- stored batches


@pytest.fixture(scope="module")
def storing(tmp_path_factory):
    """A run of eight steps that kept its batches; the last two steps had the same one."""
    path, job = tmp_path_factory.mktemp("storing") / "own", helpers.experiment()
    random = np.random.default_rng(2)
    batches = [random.standard_normal((6, 4)).astype(np.float32) for _ in range(7)]
    with Recorder(path, job.model, job.optimizer, mse, compile=False, save_every=4, spikes=None) as recorder:
        for x in [*batches, batches[-1]]:
            recorder.step((x, x.sum(axis=1, keepdims=True)))
    return path


@pytest.fixture
def stored(storing, tmp_path):
    return shutil.copytree(storing, tmp_path / "own")


def file_of(path, step):
    return path / "batches" / f"{open_run(path).line(step, 0).batch_hash}.safetensors"


def test_all_stored_batches_are_there_with_their_hashes(stored):
    found = open_run(stored).verify(replay=2, experiment=helpers.experiment())
    assert found.exact
    (check,) = [check for check in found.checks if check.kind == "batch"]
    assert (check.verdict, check.detail) == ("exact", "7 stored batches of 8 steps have the logged hashes")


def test_a_flipped_byte_and_a_missing_file_are_named_and_keep_steps_from_being_proven(stored):
    damaged, gone = file_of(stored, 6), file_of(stored, 7)
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    gone.unlink()
    found = open_run(stored).verify(replay=8, experiment=helpers.experiment())
    missing, changed = [check for check in found.checks if check.kind == "batch"]
    assert missing.verdict == changed.verdict == "mismatch"
    assert missing.detail.startswith(f"1 of 7 stored batches is missing: {gone.name[:12]}….safetensors (step 7 and 1 ")
    assert changed.detail.endswith(f"{damaged.name[:12]}….safetensors (step 6)")
    steps = verdicts(found, "step")
    assert [steps[f"{step}, segment 0"] for step in range(1, 9)] == ["exact"] * 5 + ["mismatch"] * 3
    assert "own is not what it says: batch batches/: 1 of 7 stored batches is missing" in found.sentence()


def test_when_all_are_gone_three_are_named_and_counted(stored):
    shutil.rmtree(stored / "batches")
    (check,) = [check for check in open_run(stored).verify().checks if check.kind == "batch"]
    assert check.detail.startswith("7 of 7 stored batches are missing: ") and " and 4 more; " in check.detail
    said = runs.here("verify", stored)
    assert said.code == 1 and "7 of 7 stored batches are missing" in said.out


# ---------------------------------------------------------------------------------------------------- the command line


def test_the_command_and_its_exit_codes(run):
    said = runs.here("verify", run, "--replay", 2)
    assert said.code == 0 and "run is whole" in said.out and "checkpoint" in said.out
    said = runs.here("verify", run, "--json")
    document = runs.strict(said.out)
    assert said.code == 0 and document["exact"] is True and len(document["checks"]) == 12
    assert document["whole"] is True and len(document["limits"]) == 3
    path = run / "checkpoints" / "00000004.rng"
    path.write_bytes(path.read_bytes()[:-2])
    said = runs.here("verify", run)
    assert said.code == 1 and "is not what it says" in said.out and "00000004.rng" in said.out
    assert runs.strict(runs.here("verify", run, "--json").out)["exact"] is False
    shutil.rmtree(run)
    assert "does not exist" in runs.here("verify", run).sentence
    with pytest.raises(RunError):
        open_run(run)
