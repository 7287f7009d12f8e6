"""workbench.detection.shared_spikes, and `workbench spikes`: the same spike in several runs is noticed."""

import json

import numpy as np
import pandas as pd
import pytest
import runs

import workbench as wb
from workbench.errors import WorkbenchError


def log(folder, name, spikes, count=400, every=1, seed=0):
    """A CSV of losses with spikes at some steps."""
    losses = 2.4 + 0.05 * np.random.default_rng(seed).standard_normal(count)
    for step in spikes:
        losses[step - 1] = 6.0
    steps = np.arange(1, count + 1)
    pd.DataFrame({"step": steps, "loss": losses})[::every].to_csv(folder / name, index=False)
    return folder / name


def test_the_same_spike_in_both_seeds_is_noticed(tmp_path):
    one = log(tmp_path, "one.csv", [150, 300], seed=1)
    two = log(tmp_path, "two.csv", [151, 350], seed=2)
    found = wb.compare_spikes([one, two])
    assert found.names == ["one.csv", "two.csv"] and found.frame["step"].tolist() == [150, 300, 350]
    assert found.frame["runs"].tolist() == [2, 1, 1] and found.frame["covered"].tolist() == [2, 2, 2]
    (both,) = found.shared.to_dict("records")
    assert (both["one.csv"], both["two.csv"], both["one.csv:first"]) == (150, 151, 150)
    assert pd.isna(found.frame["two.csv"][1]) and pd.isna(found.frame["one.csv"][2])
    assert found.pairs == 1 and found.expected == pytest.approx(2 * 2 * 5 / 400)
    assert found.sentence == (
        "In one.csv and two.csv rules fired at 3 steps in all; the same spike is seen in more than one run: "
        "steps 150 and 151 in one.csv and two.csv (loss_z, six_sigma). 1 pair of runs shared one, where chance alone "
        "would have given 0.05."
    )
    assert found.sentence in found._repr_html_() and repr(found).endswith("events=3, shared=1)")


def test_near_decides_what_is_the_same(tmp_path):
    one, two = log(tmp_path, "one.csv", [150]), log(tmp_path, "two.csv", [151])
    apart = wb.compare_spikes([one, two], near=0)
    assert apart.shared.empty and apart.sentence == (
        "In one.csv and two.csv rules fired at 2 steps in all, and nowhere in more than one run at the same step."
    )
    assert len(wb.compare_spikes([one, two], near=1).shared) == 1


def test_a_run_is_counted_once_an_event_and_three_make_three_pairs(tmp_path):
    paths = [log(tmp_path, f"{name}.csv", [200], seed=name) for name in (1, 2, 3)]
    found = wb.compare_spikes(paths, rules=["loss_z"])
    assert found.frame[["step", "runs"]].to_numpy().tolist() == [[200, 3]] and found.pairs == 3


def test_quiet_runs_and_a_shorter_one(tmp_path):
    found = wb.compare_spikes([log(tmp_path, "a.csv", []), log(tmp_path, "b.csv", [], count=120)])
    assert found.frame.empty and found.sentence == "No rule fired in any of a.csv and b.csv."
    assert "b.csv ends at step 120: nothing is known of it after that." in found.notices
    later = wb.compare_spikes([log(tmp_path, "a.csv", [300]), log(tmp_path, "b.csv", [], count=120)])
    assert later.frame["covered"].tolist() == [1]


def test_names_are_made_different(tmp_path):
    (tmp_path / "x").mkdir()
    found = wb.compare_spikes([log(tmp_path, "a.csv", []), log(tmp_path / "x", "a.csv", [])])
    assert found.names == ["a.csv", "a.csv (2)"]


def test_means_over_steps_widen_what_counts_as_the_same(tmp_path):
    printed = tmp_path / "train.log"
    rate = "Learning Rate 1.000e-05, It/sec 0.5, Tokens/sec 100.0, Trained Tokens 1234, Peak mem 3.1 GB"
    losses = [2.4 + 0.01 * (step % 3) + 3 * (step == 36) for step in range(1, 41)]
    lines = [f"Iter {10 * place}: Train loss {loss:.3f}, {rate}" for place, loss in enumerate(losses, 1)]
    printed.write_text("\n".join(lines) + "\n")
    short = wb.DetectionSettings(window=20)
    found = wb.compare_spikes([printed, log(tmp_path, "steps.csv", [355])], ["loss_z"], short)
    assert found.near == 9 and found.shared["step"].tolist() == [355]
    assert "train.log logs means over up to 10 steps, so steps at most 9 apart count as the same." in found.notices


def test_what_can_not_be_compared_is_an_error(tmp_path):
    path = log(tmp_path, "a.csv", [])
    with pytest.raises(WorkbenchError, match="1 run is given; expected two or more"):
        wb.compare_spikes([path])
    with pytest.raises(WorkbenchError, match="near is -1"):
        wb.compare_spikes([path, path], near=-1)


# ---- the command


def test_the_command_takes_several_runs(tmp_path):
    one, two = log(tmp_path, "one.csv", [150], seed=1), log(tmp_path, "two.csv", [150], seed=2)
    said = runs.here("spikes", one, two)
    assert said.code == 0 and "the same spike is seen in more than one run: step 150" in said.out
    (line,) = [line for line in said.err.splitlines() if "silent" in line]
    assert "drift is silent in all runs" in line
    document = runs.strict(runs.here("spikes", one, two, "--json", "--near", "0").out)
    assert document["near"] == 0 and document["pairs"] == 1
    (event,) = document["events"]
    assert (event["step"], event["one.csv"], event["two.csv"], event["runs"]) == (150, 150, 150, 2)


def test_rules_with_too_few_values_are_named_in_one_line(tmp_path):
    long = tmp_path / "long.csv"
    long.write_text("step,loss\n" + "".join(f"{step},{2 + step % 7 / 10}\n" for step in range(1, 700)))
    found = wb.compare_spikes([log(tmp_path, "a.csv", []), long, log(tmp_path, "b.csv", [], seed=3)], ["drift"])
    assert [one for one in found.notices if "silent" in one] == ["Too few values: drift is silent in a.csv and b.csv."]
    assert found.found["long.csv"].attrs["silent"] == [] and found.found["a.csv"].attrs["silent"] == ["drift"]


def test_the_command_says_as_what_it_read_a_log_and_takes_the_names_from_the_user(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"global_step": n, "loss": 2.0, "train/ce": 2.0 + n % 3 / 100 + 9 * (n == 90)} for n in range(1, 121)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    said = runs.here("spikes", path, "--rule", "loss_z")
    assert said.out.startswith("no spikes. ")
    assert f"{path}: Recognised as JSON lines: step = 'global_step', loss = 'loss'" in said.err
    named = ("--format", "jsonl", "--columns", "loss=train/ce,step=global_step")
    said = runs.here("spikes", path, "--rule", "loss_z", *named)
    assert said.out.startswith("step 90 ") and "Read as JSON lines: step = 'global_step', loss = 'train/ce'" in said.err
    assert runs.strict(runs.here("spikes", path, "--rule", "loss_z", *named, "--json").out)[0]["step"] == 90
    assert "step 90 in" in runs.here("spikes", path, path, *named).out
    assert runs.here("spikes", path, "--columns", "loss").code == 2
    assert "has no 'ce'" in runs.here("spikes", path, "--columns", "loss=ce").sentence
    assert "format is 'xml'" in runs.here("spikes", path, "--format", "xml").sentence
    run = runs.recorded_read_only()
    assert "go with logs of other programs" in runs.here("spikes", run, "--format", "csv").sentence


def test_the_command_asks_other_rules_of_one_run(tmp_path):
    path = log(tmp_path, "one.csv", [150])
    said = runs.here("spikes", path, "--rule", "loss_z")
    assert said.code == 0 and said.out.startswith("step 150 (segment 0), loss_z: loss 6 is ")
    (row,) = runs.strict(runs.here("spikes", path, "--rule", "loss_z", "--json").out)
    assert (row["step"], row["rule"], row["onset"]) == (150, "loss_z", 150)
    assert runs.here("spikes", path, "--rule", "drift").out.startswith("no spikes. The first steps were not judged")
    assert "'odd' is no list of rules" in runs.here("spikes", path, "--rule", "odd").sentence
    assert "--near goes with several runs" in runs.here("spikes", path, "--near", "1").sentence


def test_a_single_run_is_judged_as_its_recorder_did():
    path = runs.recorded_read_only()
    expected = wb.open_run(path).spikes()
    assert len(runs.strict(runs.here("spikes", path, "--json").out)) == len(expected)
