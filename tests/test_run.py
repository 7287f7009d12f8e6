"""A run's folder, read: steps found, plans made, and everything that is not there named."""

import dataclasses
import math
import os
import shutil

import msgspec
import numpy as np
import pytest
import runs

from workbench import open_run
from workbench.errors import ReplayError, RunError, TelemetryError
from workbench.recorded.listing import list_runs
from workbench.run import Run


@pytest.fixture
def recorded():
    return open_run(runs.recorded_read_only())


@pytest.fixture
def segmented(tmp_path):
    return runs.segmented(tmp_path)


# ---------------------------------------------------------------------------------------------------------------- open


def test_open_names_what_is_wrong(tmp_path):
    with pytest.raises(RunError, match="nowhere does not exist"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(RunError, match="is not a run folder"):
        open_run(tmp_path)


def test_open_reads_exactly_that_folder(tmp_path):
    """The parent of a run is no run: nothing is guessed."""
    runs.recorded(tmp_path)
    with pytest.raises(RunError, match="is not a run folder"):
        open_run(tmp_path)
    assert open_run(str(tmp_path / "run")).last_step == runs.STEPS


def test_opening_and_looking_changes_nothing(tmp_path):
    path = runs.recorded(tmp_path)
    before = runs.digest(path)
    run = open_run(path)
    run.steps, run.spikes(), run.checkpoints, run.norms(5), run.plan(6), run._repr_html_(), repr(run)
    assert runs.digest(path) == before


def test_what_a_notebook_shows(recorded):
    text = recorded._repr_html_()
    for fact in ("12", "spikes", "none", "mlx", "compile True"):
        assert fact in text
    assert repr(recorded) == f"Run({str(recorded.path)!r}, steps=12)"


def test_a_name_is_escaped_for_html(tmp_path):
    path = tmp_path / "<b>bold"
    shutil.copytree(runs.recorded_read_only(), path)
    assert "<b>bold" not in open_run(path)._repr_html_()


# ---------------------------------------------------------------------------------------------------------------- list


def test_list_runs_lists_a_damaged_one_with_its_problem(tmp_path):
    good = runs.recorded(tmp_path)
    for name in ("broken-manifest", "broken-telemetry", "no-telemetry", "odd-time"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "broken-manifest" / "run.json").write_text("{")
    with open(tmp_path / "broken-telemetry" / "telemetry.jsonl", "a") as file:
        file.write("[]\n{}\n")
    (tmp_path / "no-telemetry" / "telemetry.jsonl").unlink()
    runs.edit_json(tmp_path / "odd-time" / "run.json", lambda d: d.update(created=1e30))
    (tmp_path / "no run").mkdir()
    frame = list_runs(tmp_path).set_index("run")
    assert list(frame.index) == ["broken-manifest", "broken-telemetry", "no-telemetry", "odd-time", "run"]
    assert frame.loc["run", "problem"] == "" and frame.loc["run", "steps"] == runs.STEPS
    assert math.isfinite(frame.loc["run", "last_loss"]) and frame.loc["run", "spikes"] == 0
    assert frame.loc["odd-time", "problem"] == ""
    for name, word in (("broken-manifest", "run.json"), ("broken-telemetry", "line 17"), ("no-telemetry", "telemetry")):
        assert word in frame.loc[name, "problem"] and frame.loc[name, "steps"] == 0


def test_list_runs_of_a_folder_without_runs_and_of_none(tmp_path):
    assert list_runs(tmp_path).empty
    with pytest.raises(RunError, match="does not exist; expected a folder that holds runs"):
        list_runs(tmp_path / "nowhere")


# ----------------------------------------------------------------------------------------------------------- telemetry


def test_telemetry_is_read_again_when_it_grows(tmp_path):
    path = runs.recorded(tmp_path)
    content = (path / "telemetry.jsonl").read_bytes()
    lines = content.splitlines(keepends=True)
    (path / "telemetry.jsonl").write_bytes(b"".join(lines[:6]))
    run = open_run(path)
    early, early_steps = run.last_step, len(run.steps)
    (path / "telemetry.jsonl").write_bytes(content)
    assert (early, early_steps) == (5, 5) and run.last_step == 12 and len(run.steps) == 12
    assert run.telemetry is run.telemetry  # and not otherwise


def test_steps_can_be_changed_without_changing_the_run(recorded):
    steps = recorded.steps
    steps["loss"] = 0.0
    assert (recorded.steps["loss"] > 1).all()


def test_a_torn_line_is_a_notice(tmp_path):
    path = runs.recorded(tmp_path)
    with open(path / "telemetry.jsonl", "ab") as file:
        file.write(b'{"type":"step","st')
    run = open_run(path)
    assert run.last_step == 12 and "unfinished" in run.telemetry.notices[0]


def test_telemetry_of_another_run_is_refused(tmp_path):
    path = runs.recorded(tmp_path)
    other = msgspec.json.decode((path / "run.json").read_bytes())["run"]
    runs.edit_json(path / "run.json", lambda d: d.update(run="f" * 32))
    run = open_run(path)
    with pytest.raises(TelemetryError) as caught:
        run.last_step  # noqa: B018 - a property
    assert other in str(caught.value) and "f" * 32 in str(caught.value) and "Put back" in str(caught.value)


def test_missing_telemetry_is_a_sentence(tmp_path):
    path = runs.recorded(tmp_path)
    (path / "telemetry.jsonl").unlink()
    with pytest.raises(TelemetryError, match="can't be read .*expected the run's telemetry"):
        open_run(path).spikes()


# -------------------------------------------------------------------------------------------------------------- spikes


def test_spikes_are_those_that_the_trainer_logged(tmp_path):
    """A planted jump of the logged loss; the reader must find it by the settings of the manifest (window 4)."""
    path = runs.recorded(tmp_path)
    runs.edit_line(path, 9, loss=400.0, loss_bits="0x43c80000")
    runs.edit_line(path, 11, loss=None, loss_bits="0x7fc00000")
    spikes = open_run(path).spikes()
    assert spikes["step"].tolist() == [9, 11] and spikes["rule"].tolist() == ["loss_factor", "non_finite"]
    assert spikes["value"][0] == 400.0 and math.isnan(spikes["value"][1])
    runs.edit_json(path / "run.json", lambda d: d.update(spikes={"factor": 3.0, "window": 50, "z": 6.0}))
    assert open_run(path).spikes()["step"].tolist() == [11]  # the window of 50 is never full
    runs.edit_json(path / "run.json", lambda d: d.update(spikes=None))
    assert open_run(path).spikes()["step"].tolist() == [11]


def test_a_segment_is_judged_by_the_steps_that_led_to_it(tmp_path):
    path = runs.segmented(tmp_path)
    runs.edit_line(path, 10, loss=400.0, loss_bits="0x43c80000")  # in segment 1, which has but one step before it
    spikes = open_run(path).spikes()
    assert spikes[["segment", "step", "rule"]].values.tolist() == [[1, 10, "loss_factor"]]


# --------------------------------------------------------------------------------------------------------------- norms


def test_norms_are_the_logged_ones(recorded):
    frame = recorded.norms(5, around=1)
    assert list(frame.columns) == ["step", "layer", "kind", "recorded"]
    assert sorted(set(frame["step"])) == [4, 5, 6]
    assert set(frame["kind"]) == {"activation", "gradient", "adam_m", "adam_v"}
    line = next(line for line in runs.lines(recorded.path) if line.get("step") == 5)
    own = frame[(frame["step"] == 5) & (frame["kind"] == "gradient")]
    assert own["layer"].tolist() == recorded.manifest.layers
    assert own["recorded"].tolist() == np.float32(line["per_layer_grad_norms"]).astype(float).tolist()


def test_norms_at_the_ends_and_of_a_step_without_them(tmp_path):
    path = runs.recorded(tmp_path)
    runs.edit_line(path, 12, per_layer_grad_norms=..., adam_m_norms=...)
    run = open_run(path)
    assert sorted(set(run.norms(1)["step"])) == [1, 2, 3, 4]
    frame = run.norms(12)
    assert sorted(set(frame["step"])) == [9, 10, 11, 12]
    assert set(frame[frame["step"] == 12]["kind"]) == {"activation", "adam_v"}
    with pytest.raises(ReplayError, match="step 13 is not in the telemetry"):
        run.norms(13)


def test_norms_keep_inf_and_nan_apart(tmp_path):
    path = runs.recorded(tmp_path)
    layers = len(open_run(path).manifest.layers)
    bits = ["0x7f800000", "0x7fc00000"] + ["0x3f800000"] * (layers - 2)
    numbers = [None, None] + [1.0] * (layers - 2)
    runs.edit_line(path, 5, per_layer_grad_norms=numbers, per_layer_grad_norms_bits=bits)
    frame = open_run(path).norms(5, around=0)
    found = frame[frame["kind"] == "gradient"]["recorded"].tolist()
    assert found[0] == math.inf and math.isnan(found[1]) and found[2:] == [1.0] * (layers - 2)


# ------------------------------------------------------------------------------------------------------------ segments


def test_a_step_of_one_segment(segmented):
    run = open_run(segmented)
    assert run.segment_of(5) == (0, []) and run.segment_of(14) == (1, [])


def test_a_step_that_stands_twice_with_the_same_bits(segmented):
    run = open_run(segmented)
    segment, (notice,) = run.segment_of(10)
    assert segment == 1 and "segments [0, 1] with the same bits; the last is used" in notice
    assert run.segment_of(10, 0) == (0, []) and run.plan(10).notices == [notice]


@pytest.mark.parametrize("field", ["batch_hash", "loss", "state", "adam_v_norms"])
def test_a_step_that_stands_twice_with_other_bits_must_be_chosen(segmented, field):
    line = [line for line in runs.lines(segmented) if line.get("step") == 10 and line["type"] == "step"][-1]
    assert line["segment"] == 1
    changed = {
        "batch_hash": {"batch_hash": "0" * 64},
        "loss": {"loss": 1.0, "loss_bits": "0x3f800000"},
        "state": {"state": line["state"] | {"rng": "0" * 32}},
        "adam_v_norms": {"adam_v_norms": [*line["adam_v_norms"][:-1], 1.0]},
    }
    runs.edit_line(segmented, 10, **changed[field])
    run = open_run(segmented)
    for ask in (run.segment_of, run.plan, run.norms, run.replay):
        with pytest.raises(ReplayError, match=r"step 10 stands in segments \[0, 1\] .* choose one with --segment"):
            ask(10)
    assert run.plan(10, segment=0).checkpoint == (8, 0) and run.segment_of(9)[0] == 1


def test_a_segment_without_the_step(segmented):
    run = open_run(segmented)
    for step, segment, having in ((14, 0, r"\[1\]"), (3, 1, r"\[0\]"), (10, 7, r"\[0, 1\]")):
        with pytest.raises(ReplayError, match=f"step {step} is not in segment {segment} of .*; it stands in {having}"):
            run.plan(step, segment)


# ---------------------------------------------------------------------------------------------------------------- plan


def test_plan_takes_the_nearest_checkpoint_before_the_step(recorded):
    plans = {step: recorded.plan(step) for step in range(1, 13)}
    assert {step: plan.checkpoint[0] for step, plan in plans.items()} == {
        step: (step - 1) // 4 * 4 for step in range(1, 13)
    }
    assert {step: plan.rolled for step, plan in plans.items()} == {step: (step - 1) % 4 for step in range(1, 13)}


def test_plan_is_a_sentence_with_an_estimate(recorded, tmp_path):
    assert recorded.plan(6).sentence() == "1 step to roll forward from checkpoint 4, about 1 s"
    assert recorded.plan(8).sentence().startswith("3 steps to roll forward from checkpoint 4")
    several = recorded.plan(range(6, 9))
    assert several.sentence() == (
        "1 step to roll forward from checkpoint 4, and 3 to replay, each performed 3 times, about 1 s at the speed of "
        "the training, and what is measured on top"
    )
    assert several.seconds == pytest.approx(10 * recorded.plan(6, passes=0).seconds)
    assert recorded.plan(range(6, 9), passes=1).seconds == pytest.approx(4 * recorded.plan(6, passes=0).seconds)
    path = runs.recorded(tmp_path)
    for step in range(1, 13):
        runs.edit_line(path, step, step_per_s=0.01)
    slow = open_run(path).plan(8)
    assert slow.seconds == pytest.approx((3 + 3) / 0.01)  # three on the way, and the step three times
    assert slow.sentence().endswith("about 10 min")
    for step in range(1, 13):
        runs.edit_line(path, step, step_per_s=...)
    assert open_run(path).plan(8).sentence() == "3 steps to roll forward from checkpoint 4"


@pytest.mark.parametrize(("seconds", "text"), [(0.2, "1 s"), (89, "89 s"), (600, "10 min"), (9000, "2.5 h")])
def test_durations(recorded, seconds, text):
    assert dataclasses.replace(recorded.plan(6), seconds=seconds).sentence().endswith(f"about {text}")


@pytest.mark.parametrize("step", [0, -1, 13, 10**9])
def test_a_step_out_of_range_is_named_with_the_range(recorded, step):
    for ask in (recorded.plan, recorded.replay):
        with pytest.raises(ReplayError, match=f"step {step} is not in the telemetry of .*; it has steps 1 to 12"):
            ask(step)


@pytest.mark.parametrize("steps", [range(5, 5), range(5, 4), []])
def test_an_empty_range(recorded, steps):
    with pytest.raises(ReplayError, match="empty range"):
        recorded.plan(steps)


def test_an_empty_range_is_named_as_it_was_asked_for(recorded):
    with pytest.raises(ReplayError, match=r"^7\.\.5 is an empty range of steps; expected first\.\.last"):
        recorded.plan(range(7, 6))


@pytest.mark.parametrize("steps", [[5, 6], range(5, 7), range(5, 5), []])
def test_what_is_asked_of_one_step_refuses_several_and_none(recorded, steps):
    for ask in (recorded.batch_facts, lambda several: recorded.whatif(several, "lr=0.5x")):
        with pytest.raises(ReplayError, match="is no single step; expected one"):
            ask(steps)


@pytest.mark.parametrize("steps", [2.0, "5", None, [2.5], {}])
def test_what_is_no_step(recorded, steps):
    for ask in (recorded.plan, recorded.replay):
        with pytest.raises(ReplayError, match="is no step; expected a whole number"):
            ask(steps)


def test_numpy_integers_are_steps(recorded):
    """As they come out of a DataFrame: run.replay(run.spikes()["step"].iloc[0])."""
    plan = recorded.plan(np.int64(6))
    assert plan == recorded.plan(6) and type(plan.steps[0]) is int


def test_a_huge_range_is_refused_without_being_listed(recorded):
    with pytest.raises(ReplayError, match="is not in the telemetry"):
        recorded.plan(range(1, 10**15))


def test_no_checkpoint_before_the_step(tmp_path):
    path = runs.recorded(tmp_path)
    for number in (0, 4, 8):
        (path / "checkpoints" / f"{number:08d}.json").unlink()
    with pytest.raises(ReplayError, match=r"no checkpoint of .* comes before step 12; the run's checkpoints: 12$"):
        open_run(path).plan(12)


def test_a_range_may_lead_through_segments(segmented):
    run = open_run(segmented)
    plan = run.plan(range(7, 12))
    assert (plan.segment, plan.checkpoint, plan.rolled) == (1, (4, 0), 2)
    assert run.plan(11).checkpoint == (8, 0) and run.plan(13).checkpoint == (12, 1)
    assert run.plan(11, segment=0).segment == 0


def test_a_nearer_checkpoint_of_another_branch_is_not_taken(segmented):
    """State 12 of segment 0 is not on the way to step 13, even where its bits would be the same."""
    (segmented / "checkpoints" / "00000012.s1.json").unlink()
    run = open_run(segmented)
    assert (12, 0) in run.checkpoints and run.plan(13).checkpoint == (8, 0) and run.plan(13).rolled == 4


def test_a_range_that_does_not_lie_on_one_way(tmp_path):
    """Segment 1 left the way at 8, so 9 … 12 of segment 0 and 13 of segment 1 are not one stretch."""
    run = open_run(runs.segmented(tmp_path))
    with pytest.raises(ReplayError, match="step 14 is not in segment 0"):
        run.plan(range(10, 15), segment=0)


# --------------------------------------------------------------------------------------------------------- checkpoints


def test_checkpoints_without_a_commit_record_do_not_exist(tmp_path):
    path = runs.recorded(tmp_path)
    folder = path / "checkpoints"
    (folder / "00000008.json").unlink()
    (folder / ".00000012.123.tmp.json").write_text("{}")
    for name in ("notes.json", "x.s1.json", "00000004.sx.json", "².json"):
        (folder / name).write_text("{}")
    for name in ("4.json", "00000004.s0.json", "00000004.s01.json", "000000004.json", "٩.json", f"{'9' * 99}.json"):
        shutil.copy(folder / "00000004.json", folder / name)
    run = open_run(path)
    assert run.checkpoints == [(0, 0), (4, 0), (12, 0)]
    assert run.plan(10).checkpoint == (4, 0) and run.plan(10).rolled == 5
    assert [name for name in run.verify().notices if "4.json" in name and "00000004.s0.json" in name]


def test_a_checkpoint_that_is_not_there_is_answered_with_all_that_are(recorded):
    with pytest.raises(ReplayError, match="has no checkpoint 5 before step 6; it has 0, 4 before it, and from"):
        recorded.plan(6, checkpoint=5)
    with pytest.raises(ReplayError, match="and from there on 8, 12$"):
        recorded.resumption(5)


def test_checkpoints_of_segments_are_named_with_them(segmented):
    with pytest.raises(ReplayError, match="0, 4, 8 before it, and from there on 12 of segment 1, 14 of segment 1"):
        open_run(segmented).plan(9, segment=1, checkpoint=3)


def test_checkpoints_of_segments_are_told_apart(segmented):
    assert open_run(segmented).checkpoints == [(0, 0), (4, 0), (8, 0), (12, 0), (12, 1), (14, 1)]


def test_a_run_whose_checkpoints_are_gone(tmp_path):
    path = runs.recorded(tmp_path)
    shutil.rmtree(path / "checkpoints")
    run = open_run(path)
    assert run.checkpoints == [] and run.last_step == 12
    with pytest.raises(ReplayError, match="no checkpoint"):
        run.plan(3)


def test_a_run_that_recorded_no_step_yet(tmp_path):
    path = runs.recorded(tmp_path)
    first = (path / "telemetry.jsonl").read_bytes().splitlines(keepends=True)[0]
    (path / "telemetry.jsonl").write_bytes(first)
    run = open_run(path)
    assert run.last_step == 0 and run.steps.empty and run.spikes().empty
    assert "none" in run._repr_html_()
    with pytest.raises(ReplayError, match="it has no steps yet"):
        run.plan(1)


def test_a_link_to_a_run_is_that_run(tmp_path):
    os.symlink(runs.recorded_read_only(), tmp_path / "link")
    assert Run(tmp_path / "link").last_step == 12


def test_spikes_are_the_callers_own_and_follow_the_telemetry(tmp_path):
    path = runs.recorded(tmp_path)
    opened = Run(path)
    first = opened.spikes()
    first.loc[0, "step"] = 99
    assert 99 not in opened.spikes()["step"].tolist() and len(opened.spikes()) == len(Run(path).spikes())
    runs.edit_line(path, 12, loss=None, loss_bits="0x7fc00000")
    assert opened.spikes()["rule"].tolist()[-1] == "non_finite"
