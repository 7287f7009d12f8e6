"""From a replay to a cause: each verdict on a spike of known cause, and "unknown" where nothing can be known."""

import shutil

import autopsies
import jsonschema
import numpy as np
import pytest
import runs
from autopsies import AT, own_read_only, planted, planted_read_only
from helpers import edit_json, edit_line

from workbench import open_run
from workbench import verdict as verdicts
from workbench.cause.inquiry import LIMIT
from workbench.errors import EnvironmentMismatch, ReplayError

PLANTED = {
    "garbage@{AT}:rows=2": ("data", AT),
    "targets-ignored@{AT}": ("data", AT),
    "lr@{AT}:factor=2000": ("schedule", AT + 1),
    "weight-scaled@{AT}:path=embedding.weight": ("resume", AT),
    "v-bit@{AT}:path=blocks.0.mlp.up.weight,index=5": ("resume", AT + 1),
    "gradient-bit@{AT}:path=blocks.0.mlp.up.weight": ("transient-fault", AT),
    "log-bit@{AT}": ("transient-fault", AT),
}
OWN = {
    "curved": ("curvature", 40, 27),
    "stale": ("optimizer", 46, 41),
    "unbounded": ("optimizer", 46, 40),
    "no_epsilon": ("optimizer", 4, 2),
    "attending": ("attention-logits", 36, 31),
    "attending_early": ("attention-logits", 36, 31),
    "mistaught": ("data", 50, 45),
    "undecided": ("unknown", 36, 30),
}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Verdicts, made once each and written outside of the run."""
    folder, made = tmp_path_factory.mktemp("verdicts"), {}

    def ask(name):
        if name not in made:
            if name in PLANTED:
                made[name] = planted_read_only(name).autopsy(PLANTED[name][1], trace_dir=folder / str(len(made)))
            else:
                _, steps, step = OWN[name]
                make = getattr(autopsies, name)
                run = own_read_only(make, steps)
                made[name] = run.autopsy(step, experiment=make(), trace_dir=folder / str(len(made)))
        return made[name]

    return ask


# ------------------------------------------------------------------------------------------------------------- causes


@pytest.mark.parametrize("name", [*PLANTED, *OWN])
def test_the_cause_is_found(said, name):
    found = said(name)
    assert found.verdict == (PLANTED | OWN)[name][0], found.sentence()
    assert found.reason and found.would_refute and found.step_times <= LIMIT
    assert found.exact == (found.verdict not in ("transient-fault", "unknown"))
    assert not [one for one in found.refuted if one.cause == found.verdict]


@pytest.mark.parametrize("name", [*PLANTED, *OWN])
def test_each_verdict_rests_on_evidence_for_it(said, name):
    found = said(name)
    supporting = [one for one in found.evidence if one.supports == found.verdict]
    assert supporting and all(one.sentence.endswith(".") for one in found.evidence)
    assert all(one.sentence[0].isupper() for one in found.evidence)


@pytest.mark.parametrize("name", [*PLANTED, *OWN])
def test_the_json_is_strict_and_by_its_schema(said, name):
    document = runs.strict(said(name).to_json())
    jsonschema.validate(document, verdicts.schema())


def test_rows_are_named_with_their_place(said):
    culprit = said("garbage@{AT}:rows=2").culprit
    rows = [(row["row"], row["source"], row["offset"]) for row in culprit["rows"]]
    assert culprit["step"] == AT and rows == [(1, "1.bytes", 0), (2, "1.bytes", 17)]
    assert all(row["loss"] > 4 for row in culprit["rows"])
    whole = said("targets-ignored@{AT}").culprit["rows"]
    assert [row["row"] for row in whole] == [0, 1, 2, 3] and "loss" not in whole[0]
    late = said("mistaught").culprit  # the batch whose update did it, not the one at which it showed
    assert late["step"] == 40 and [row["row"] for row in late["rows"]] == [2]


def test_the_learning_rate_is_named_with_its_step(said):
    culprit = said("lr@{AT}:factor=2000").culprit
    lr = planted_read_only("lr@{AT}:factor=2000").steps.set_index("step")["lr"]
    assert culprit["step"] == AT and culprit["lr"] == lr[AT]
    assert culprit["usual_lr"] == pytest.approx(lr.loc[AT - 8 : AT - 1].median(), rel=1e-5)


def test_what_is_damaged_in_the_state_is_named(said):
    scaled = said("weight-scaled@{AT}:path=embedding.weight").culprit
    known = {"step": AT, "segment": 1, "lanes": ["weights"], "parameter": "embedding.weight", "layer": "embedding"}
    assert scaled | known == scaled and scaled["factor"] == pytest.approx(20)
    flipped = said("v-bit@{AT}:path=blocks.0.mlp.up.weight,index=5").culprit
    known = {"step": AT, "lanes": ["adam_v"], "parameter": "blocks.0.mlp.up.weight", "index": 5, "bit": 31}
    assert flipped | known == flipped


def test_a_transient_fault_is_named_by_what_differs_first(said):
    gradient = said("gradient-bit@{AT}:path=blocks.0.mlp.up.weight")
    known = {"step": AT, "item": "per_layer_grad_norms", "layer": "blocks.0.mlp.up"}
    assert gradient.culprit | known == gradient.culprit and gradient.culprit["parameter"] == "blocks.0.mlp.up.weight"
    assert "the step itself went wrong" in " ".join(one.sentence for one in gradient.evidence)
    log = said("log-bit@{AT}")
    assert log.culprit == {"step": AT, "item": "loss", "bit": 24}
    assert "only its log line is wrong" in " ".join(one.sentence for one in log.evidence)


def test_parameters_and_options_are_named(said):
    assert said("stale").culprit == {"step": 40, "layer": "", "parameter": "w"}
    assert said("unbounded").culprit == {"step": 39, "layer": "", "parameter": "w", "option": "beta2"}
    assert said("no_epsilon").culprit == {"step": 1, "layer": "", "parameter": "w", "option": "eps"}
    for name in ("attending", "attending_early"):
        assert said(name).culprit == {"step": 31, "layer": "attention", "head": 0}
    assert said("curved").culprit == {"step": 26}


def test_small_logits_are_judged_by_the_runs_own_steps(said):
    """None is above 30; what speaks is how they grew, and that the step is usual with those of state N-9."""
    found = {one.name: one.numbers for one in said("attending_early").evidence}
    assert 2.25 * found["attention logits"]["then"] < found["attention logits"]["now"] < 30
    scaled, alone = found["scaled queries"]["scaled"], found["scaled queries"]["batch alone"]
    assert scaled == pytest.approx(alone, rel=1e-3)


def test_half_precision_is_told_from_the_optimizer_by_float32(tmp_path):
    run = planted_read_only("eps@1:value=1e-8", dtype="float16", steps=4)
    found = run.autopsy(2, trace_dir=tmp_path)
    assert found.verdict == "precision" and found.culprit["option"] == "eps" and found.culprit["step"] == 1
    assert found.culprit["parameter"] in run.manifest.owned[found.culprit["layer"]]
    assert found.remedy is not None or np.isnan(found.remedies[0].numbers["loss_untouched"])


# --------------------------------------------------------------------------------------------------------- no cause


def test_a_healthy_step_has_no_spike(tmp_path):
    run = planted_read_only()
    for step in (AT, AT + 3):
        found = run.autopsy(step, trace_dir=tmp_path)
        assert (found.verdict, found.culprit, found.remedies) == ("no-spike", {}, []) and found.exact
    early = run.autopsy(2, trace_dir=tmp_path)
    assert early.verdict == "unknown" and "no rule could judge it" in early.reason and early.remedies == []
    asked = run.autopsy(AT, trace_dir=tmp_path, examine=True)
    assert asked.verdict == "no-spike" and "usual scatter" in asked.reason


def test_a_step_that_no_rule_could_judge_is_looked_into(tmp_path):
    """Within the window's first steps, and where too few losses are logged."""
    run = planted_read_only("lr@12:factor=2000", steps=20)
    found = run.autopsy(13, trace_dir=tmp_path)
    assert found.verdict == "schedule" and found.culprit["step"] == 12 and found.flagged is None
    losses = run.steps.set_index("step")["loss"]
    assert f"the loss of step 13 is {losses[13]:.4g}" in found.evidence[0].sentence.lower()
    assert f"{losses[11]:.4g}, {losses[12]:.4g}" in found.evidence[0].sentence
    assert "no rule could judge it" in found.evidence[0].sentence


def test_a_step_below_the_rules_thresholds_is_looked_into_when_that_is_asked_for(tmp_path):
    """A loss that falls fast hides a bad batch from the rules."""
    run = planted_read_only("garbage@{AT}:rows=1", max_lr=1e-3)
    assert AT not in run.spikes()["step"].tolist() and run.autopsy(AT, trace_dir=tmp_path).verdict == "no-spike"
    found = run.autopsy(AT, trace_dir=tmp_path, examine=True)
    assert found.verdict == "data" and found.culprit["rows"][0]["row"] == 1 and found.flagged is None
    assert "(no rule names it)" in found.evidence[0].sentence


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (1, ("With row 1 exchanged for that of", ": it carries it.")),
        (2, ("With rows 1, 2 exchanged for those of", "they")),
    ],
)
def test_rows_that_are_exchanged_are_one_or_several(rows, words, tmp_path):
    found = planted_read_only(f"garbage@{{AT}}:rows={rows}").autopsy(AT, trace_dir=tmp_path)
    (sentence,) = [one.sentence for one in found.evidence if one.name == "rows exchanged"]
    assert all(word in sentence for word in words)


def test_outliers_of_a_step_without_a_spike_are_listed(tmp_path):
    run = planted_read_only("garbage@{AT}:rows=1", max_lr=1e-4)
    assert not len(run.spikes())
    found = run.autopsy(AT, trace_dir=tmp_path)
    assert found.verdict == "no-spike"
    assert [one.numbers["row"] for one in found.outliers if one.name == "row"] == [1]
    frozen = planted_read_only("frozen@1:layer=blocks.0.mlp", steps=8).autopsy(6, trace_dir=tmp_path)
    assert any(one.name == "not trained" and "blocks.0.mlp.up.weight" in one.sentence for one in frozen.outliers)
    again = planted_read_only("repeated-batch@{AT}").autopsy(AT, trace_dir=tmp_path)
    assert f"Batch {AT} is that of step {AT - 1} again." in [one.sentence for one in again.outliers]


def test_a_log_that_no_rule_flags_is_an_outlier_and_no_spike(tmp_path):
    run = planted(tmp_path)
    edit_line(run.path, AT, lambda line: line.update(loss=2.5, loss_bits="0x40200000"))
    found = open_run(run.path).autopsy(AT)
    assert found.verdict == "no-spike" and not found.exact
    assert any(one.name == "not reproduced" and "loss" in one.sentence for one in found.outliers)


def test_another_environment_has_no_cause_but_a_reason(tmp_path):
    run = planted(tmp_path, "log-bit@{AT}")
    edit_json(run.path / "run.json", lambda manifest: manifest["segments"][0]["environment"].update(mlx="0.1"))
    with pytest.raises(EnvironmentMismatch):
        open_run(run.path).autopsy(AT)
    found = open_run(run.path).autopsy(AT, other_environment=True)
    assert found.verdict == "unknown" and found.environment_differences
    assert [one.cause for one in found.refuted] == ["transient-fault"] and "informational" in found.sentence()


def test_a_state_that_was_not_logged_can_not_be_called_a_witness(tmp_path):
    run = planted(tmp_path, "log-bit@{AT}")
    edit_line(run.path, AT - 1, lambda line: line.pop("state"))
    found = open_run(run.path).autopsy(AT)
    assert found.verdict == "unknown" and "not verified" in found.refuted[0].sentence
    edit_line(run.path, AT, lambda line: line.pop("batch_hash"))
    assert open_run(run.path).autopsy(AT).verdict == "unknown"


def test_a_step_that_does_not_repeat_itself_is_unknown(said):
    found = said("undecided")
    assert "not exact" in found.footer() and "Not reproduced" in found.reason
    assert "other bits" in found.refuted[0].sentence


def test_a_departure_on_the_way_is_a_fault_of_that_step(tmp_path):
    """A spike after a transient fault that went unseen: the replay from before it departs there."""
    run = planted(tmp_path, "gradient-bit@{AT}:path=blocks.0.mlp.up.weight")
    for step in (AT, AT + 3):
        bits, value = ("0x3f800000", 1.0) if step == AT else ("0x42480000", 50.0)
        name = "grad_norm" if step == AT else "loss"
        edit_line(run.path, step, lambda line: line.update({name: value, f"{name}_bits": bits}))  # noqa: B023
    found = open_run(run.path).autopsy(AT + 3)
    assert found.verdict == "transient-fault" and found.culprit["step"] == AT
    assert found.culprit["layer"] == "blocks.0.mlp.up"


def test_a_seam_that_did_no_harm_is_refuted(tmp_path):
    """Garbage one step after the moments were lost."""
    run = planted_read_only(f"moments-zeroed@{AT - 1}:of=m", "garbage@{AT}:rows=2")
    found = run.autopsy(AT, trace_dir=tmp_path)
    assert found.verdict == "data" and [row["row"] for row in found.culprit["rows"]] == [1, 2]
    assert any(one.cause == "resume" and "the rise stays" in one.sentence for one in found.refuted)


# ------------------------------------------------------------------------------------------------ the step asked about


def test_a_step_within_a_spike_is_diagnosed_where_it_began(tmp_path):
    run = planted_read_only("lr@{AT}:factor=2000")
    found = run.autopsy(AT + 3, trace_dir=tmp_path)
    assert (found.step, found.began, found.verdict, found.culprit["step"]) == (AT + 3, AT + 1, "schedule", AT)
    assert any("began at step" in notice for notice in found.notices)


def test_a_step_that_is_not_there_or_several_are_refused():
    run = planted_read_only()
    with pytest.raises(ReplayError, match="is not in the telemetry"):
        run.autopsy(9999)
    with pytest.raises(ReplayError, match="expected one"):
        run.autopsy(range(3, 5))


# ---------------------------------------------------------------------------------------------------------- remedies


def test_the_remedy_of_each_cause_helps_and_can_be_copied(said):
    for name in PLANTED:
        found = said(name)
        assert found.remedy is not None, (name, found.remedy_table)
        assert found.remedy.command.startswith("workbench train --fork ")
    assert f"--skip-batch {AT}" in said("garbage@{AT}:rows=2").remedy.command
    left = said("weight-scaled@{AT}:path=embedding.weight").remedy
    assert f"--from {AT - 1}.s0 " in left.command


def test_a_loop_of_your_own_can_be_rebuilt_by_its_factory(said, tmp_path):
    found = own_read_only(autopsies.stale, 46).autopsy(41, factory="autopsies:stale", trace_dir=tmp_path)
    kept = ("verdict", "culprit", "evidence", "refuted", "remedies", "outliers")
    assert [getattr(found, name) for name in kept] == [getattr(said("stale"), name) for name in kept]


def test_what_exists_only_here_is_not_repeated_elsewhere(tmp_path):
    path = shutil.copytree(own_read_only(autopsies.stale, 46).path, tmp_path / "run")
    edit_line(path, 30, lambda line: line.update(loss=8.0, loss_bits="0x41000000"))
    found = open_run(path).autopsy(30, experiment=autopsies.stale())
    assert found.verdict == "transient-fault" and found.culprit == {"step": 30, "item": "loss"}
    assert [one.what for one in found.unchecked] == ["repetition in a fresh process"]


def test_a_copied_command_makes_the_fork_that_it_promises(said, tmp_path):
    found = said("weight-scaled@{AT}:path=embedding.weight")
    words = found.remedy.command.split()
    words[words.index("--out") + 1] = str(tmp_path / "fork")
    forked = runs.here(*words[1:], "--steps", str(AT + 2))
    assert forked.code == 0, forked.err
    loss = open_run(tmp_path / "fork").steps.set_index("step")["loss"][AT]
    assert np.float32(loss) == np.float32(found.remedy.numbers["loss"])  # the very bits that were promised


def test_numbers_of_a_remedy_are_those_of_an_intervention(said, tmp_path):
    found = said("garbage@{AT}:rows=2")
    skip, *_, slower = found.remedies
    frame = planted_read_only("garbage@{AT}:rows=2").whatif(
        AT, ["batch=skip", "lr=0.1x"], next_steps=5, trace_dir=tmp_path
    )
    assert skip.numbers["loss"] is None and skip.numbers["next_mean"] == pytest.approx(frame["next_mean"][1])
    assert slower.change == "lr=0.1x" and slower.numbers["next_max"] == pytest.approx(frame["next_max"][2])
    assert slower.numbers["next_max_untouched"] == pytest.approx(frame["next_max"][0])


def test_a_loop_of_your_own_gets_the_lines_for_its_recorder(said):
    command = said("stale").remedy.command
    assert "wb.fork_point(" in command and "wb.Recorder(" in command and "39, changes=['lr=0.1x']" in command


# ------------------------------------------------------------------------------------------------- nothing left behind


def test_the_run_is_as_it_was_but_for_the_verdicts_file(tmp_path):
    run = planted(tmp_path, "lr@{AT}:factor=2000")
    before = runs.digest(run.path)
    found = run.autopsy(AT + 1)
    after = runs.digest(run.path)
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == [f"traces/{AT + 1:08d}.autopsy.json"]
    assert verdicts.read(run.path / "traces" / f"{AT + 1:08d}.autopsy.json") == found
    assert run.replay(AT + 1, with_probe=False, fresh_process=False).exact


def test_this_threads_random_state_and_the_experiment_go_on(tmp_path):
    from workbench.experiment import random_key

    key = random_key()
    make = autopsies.stale
    job = make()
    own_read_only(make, 46).autopsy(41, experiment=job, trace_dir=tmp_path)
    assert random_key() == key
    again = own_read_only(make, 46).replay(41, experiment=job, trace_dir=tmp_path, fresh_process=False)
    assert again.exact  # the very object can be used again


def test_no_label_is_ever_read(tmp_path):
    run = planted(tmp_path, "garbage@{AT}:rows=2")
    (run.path / "planted.json").write_text("this is no JSON")
    assert run.autopsy(AT).verdict == "data"


# ------------------------------------------------------------------------------------------------------------ command


def test_the_command_says_it_and_exits_with_0(tmp_path):
    run = planted(tmp_path, "garbage@{AT}:rows=2")
    shown = runs.here("autopsy", run.path, "--step", AT)
    assert shown.code == 0 and f"Step {AT}: data." in shown.out and "rows 1, 2" in shown.out
    fork = f"workbench train --fork {run.path} --from {AT - 1} --skip-batch {AT} --out {run.path}-from-{AT - 1}"
    assert fork in shown.out
    answer = runs.here("autopsy", run.path, "--step", AT, "--json")
    document = runs.strict(answer.out)
    assert answer.code == 0 and document["verdict"] == "data" and document["culprit"]["step"] == AT
    healthy = runs.here("autopsy", run.path, "--step", AT - 2)
    assert healthy.code == 0 and "no-spike" in healthy.out


def test_bad_input_is_a_sentence(tmp_path):
    assert "not a run folder" in runs.here("autopsy", tmp_path, "--step", 3).sentence
    run = planted(tmp_path)
    assert "is not in the telemetry" in runs.here("autopsy", run.path, "--step", 99).sentence
    assert "--step" in runs.here("autopsy", run.path).sentence


# ------------------------------------------------------------------------------------------------- sparse checkpoints


LATE, SPARSE = 84, {"save_every": 0, "steps": 90}


def test_a_batch_is_found_out_from_the_state_that_the_black_box_held(tmp_path):
    run = planted_read_only(f"garbage@{LATE}:rows=2", **SPARSE)
    assert (LATE - 1, 0) in run.checkpoints
    found = run.autopsy(LATE, trace_dir=tmp_path)
    assert (found.verdict, found.checkpoint, found.rolled) == ("data", LATE - 1, 0)
    assert [row["row"] for row in found.culprit["rows"]] == [1, 2]
    assert "an earlier state" in [one.what for one in found.unchecked]


def test_an_update_is_looked_for_from_an_earlier_state(tmp_path):
    run = planted_read_only(f"lr@{LATE}:factor=2000", **SPARSE)
    found = run.autopsy(LATE + 1, trace_dir=tmp_path)
    assert (found.verdict, found.checkpoint, found.culprit["step"]) == ("schedule", 0, LATE)
    given = run.autopsy(LATE + 1, checkpoint=LATE, trace_dir=tmp_path)
    assert (given.verdict, given.checkpoint) == ("unknown", LATE)


def test_a_verdict_is_read_back_by_its_run(tmp_path):
    run = planted(tmp_path, "garbage@{AT}:rows=2")
    assert run.verdict(AT) is None
    found = run.autopsy(AT)
    assert run.verdict(AT) == found and open_run(run.path).verdict(AT) == found
    with pytest.raises(ReplayError):
        run.verdict(999)


def test_progress_is_told_and_can_cancel(tmp_path):
    run, seen = planted_read_only("garbage@{AT}:rows=2"), []

    def tell(done, total, what):
        seen.append(what)
        if "state or batch" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.autopsy(AT, progress=tell, trace_dir=tmp_path)
    assert "rolling forward" in seen[0] and not list(tmp_path.iterdir())


def test_a_checker_that_can_not_fail_makes_no_verdict(tmp_path, monkeypatch):
    from workbench.cause import inquiry
    from workbench.trace import Gate

    blind = Gate(verdict="mismatch", explanation="it did not see a planted change")
    monkeypatch.setattr(inquiry, "sensitive", lambda *given: blind)
    found = planted_read_only("garbage@{AT}:rows=2").autopsy(AT, trace_dir=tmp_path)
    assert found.verdict == "unknown" and not found.exact and "missed a planted" in found.reason
