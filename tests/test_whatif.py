"""Experiments on a run: their files, their table, the command, and a run that stays as it was."""

from dataclasses import replace
from pathlib import Path

import jsonschema
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from experiments import record_own
from helpers import edit_line, experiment, parts

from workbench import Recorder, open_run
from workbench.bits import bits_float
from workbench.errors import ExperimentError, ReplayError, WorkbenchError
from workbench.interventions import whatif
from workbench.interventions.intervene import intervene
from workbench.interventions.scene import Scene
from workbench.trace import read

CHANGES = ["lr=0.5x", "drop-row=3", "batch=skip"]


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """Three experiments on step 6 of a copy of the shared run: the run, what it was before, and the table."""
    run = open_run(runs.recorded(tmp_path_factory.mktemp("whatif")))
    before = runs.digest(run.path)
    return run, before, run.whatif(6, CHANGES, next_steps=3)


def test_one_row_an_experiment_beside_the_untouched_step(done):
    run, _, frame = done
    assert frame.columns.tolist() == list(whatif.COLUMNS)
    assert frame["change"].tolist() == ["untouched", *CHANGES]
    logged = run.steps.set_index("step")["loss"]
    first = frame.iloc[0]
    assert first["loss"] == logged[6] and (frame["loss_untouched"] == logged[6]).all()
    assert first["next_mean"] == pytest.approx(logged.loc[7:9].mean()) and first["next_max"] == logged.loc[7:9].max()
    assert frame["steps"].tolist() == [4, 4, 4, 3] and frame["compiled"].tolist() == [True, False, True, True]
    assert np.isnan(frame["loss"][3]) and frame["worst"][3] == ""
    assert frame["update_norm"][1] == pytest.approx(first["update_norm"] / 2, rel=1e-3)
    assert frame.attrs["sentence"] == "The untouched replay of step 6 has the run's bits."


def test_the_numbers_are_those_of_the_interventions(done):
    run, _, frame = done
    scene = Scene.open(run, 6, next_steps=3)
    for row, change in zip(frame.to_dict("records"), [None, *CHANGES], strict=True):
        effect = intervene(scene, change)
        if effect.loss is not None:
            assert row["loss"] == effect.loss and row["grad_norm"] == effect.grad_norm
            assert row["update_norm"] == np.float32(effect.update_norm)
            assert (row["worst"], np.float32(row["worst_ratio"])) == (effect.worst[0], np.float32(effect.worst[1]))
        assert row["next_max"] == max(effect.next_losses)


def test_the_run_is_as_it_was_but_for_the_experiments_files(done):
    run, before, frame = done
    after = runs.digest(run.path)
    assert {name: after[name] for name in before} == before
    names = [f"traces/00000006.whatif-{change}.json" for change in CHANGES]
    assert sorted(after.keys() - before.keys()) == sorted(names)
    assert [str(run.path / name) for name in names] == frame.attrs["files"]
    assert run.replay(6, with_probe=False).exact  # and the step still has its bits


def test_a_file_is_an_intervention_by_its_own_schema_and_never_a_trace(done):
    run, _, frame = done

    for file, change in zip(frame.attrs["files"], CHANGES, strict=True):
        document = runs.strict(Path(file).read_text())
        jsonschema.validate(document, whatif.schema())
        assert document["provenance"] == "intervention" and document["change"] == change and document["exact"]
        with pytest.raises(WorkbenchError, match="is not a trace of version 1"):
            read(file)
        record = whatif.read(file)
        assert (record.run, record.step, record.segment) == (run.manifest.run, 6, 0)
        assert record.next_steps == [7, 8, 9] and len(record.changed.next_losses) == 3
        assert bits_float(record.untouched.loss_bits) == frame["loss"][0]
    assert whatif.table([whatif.read(file) for file in frame.attrs["files"]]).equals(frame)


def test_no_file_of_an_experiment_is_taken_for_a_trace_of_the_step(done):
    run, _, _ = done
    (run.path / "traces" / "00000006.json").unlink(missing_ok=True)
    assert run.batch_facts(6)["loss"].isna().all()


def test_a_damaged_file_is_refused(tmp_path, done):
    with pytest.raises(WorkbenchError, match="can't be read"):
        whatif.read(tmp_path / "none.json")
    path = tmp_path / "odd.json"
    content = Path(done[2].attrs["files"][0]).read_text()
    for damage in (content.replace('"whatif_version": 1', '"whatif_version": 2'), content[:-20], "[" * 10**5):
        path.write_text(damage)
        with pytest.raises(WorkbenchError, match="is not an experiment of version 1"):
            whatif.read(path)


def test_losses_that_are_not_finite_survive_the_file(tmp_path):
    run = record_own(tmp_path / "own", experiment(), 8)
    frame = run.whatif(6, "lr=1e30", experiment=experiment(), next_steps=2)
    record = whatif.read(frame.attrs["files"][0])
    assert record.changed.next_losses == [None, None] and not np.isfinite(
        bits_float(record.changed.next_losses_bits[0])
    )
    assert not np.isfinite(frame["next_mean"][1]) and frame["next_max"][0] < 10
    runs.strict(Path(frame.attrs["files"][0]).read_text())


def test_a_setting_for_once_has_a_file_and_a_name_of_its_own(path):
    frame = open_run(path).whatif(6, ["lr=0.5x", "reset=m"], once=True, next_steps=1)
    assert frame["change"].tolist() == ["untouched", "lr=0.5x (once)", "reset=m"]
    assert sorted(file.name for file in (path / "traces").iterdir()) == [
        "00000006.whatif-lr=0.5x-once.json",
        "00000006.whatif-reset=m.json",
    ]


def test_an_experiment_of_another_segment_has_its_number(tmp_path):
    run = open_run(runs.segmented(tmp_path))
    frame = run.whatif(13, "reset=v", next_steps=1)
    assert frame.attrs["files"][0].endswith("00000013.s1.whatif-reset=v.json")
    assert whatif.read(frame.attrs["files"][0]).segment == 1


def test_context_reaches_as_far_as_the_changes_need(path):
    frame = open_run(path).whatif(9, ["state=3", "reset=m"], next_steps=0)
    assert frame["next_mean"].isna().all() and frame["steps"].tolist() == [1, 1, 1]
    assert whatif.read(frame.attrs["files"][0]).checkpoint == 0
    frame = open_run(path).whatif(9, "reset=m", next_steps=0)
    assert whatif.read(frame.attrs["files"][0]).checkpoint == 8


def test_what_is_malformed_is_refused_before_anything_is_done(path):
    run, before = open_run(path), runs.digest(path)
    with pytest.raises(ExperimentError, match="momentum=0.9' is unknown"):
        run.whatif(6, ["lr=0.5x", "momentum=0.9"])
    with pytest.raises(WorkbenchError, match="no change was given"):
        run.whatif(6, [])
    with pytest.raises(WorkbenchError, match="-1 steps"):
        run.whatif(6, "lr=0.5x", next_steps=-1)
    with pytest.raises(ReplayError, match="step 99 is not in the telemetry"):
        run.whatif(99, "lr=0.5x")
    assert runs.digest(path) == before


def test_on_a_step_that_is_not_exact_it_says_so(path):
    edit_line(path, 6, lambda line: line.update(loss=1.0, loss_bits="0x3f800000"))
    frame = open_run(path).whatif(6, "reset=m", next_steps=0)
    assert "is not exact (first difference: loss at step 6)" in frame.attrs["sentence"]
    record = whatif.read(frame.attrs["files"][0])
    assert not record.exact and record.first_difference.item == "loss"
    for name in ("loss", "loss_bits", "state", "batch_hash"):
        runs.edit_line(path, 6, **{name: ...})
    assert "is unverified" in open_run(path).whatif(6, "reset=m", next_steps=0).attrs["sentence"]


def test_a_step_as_a_table_holds_it_will_do(path):
    step = open_run(path).steps["step"].iloc[5]
    assert type(step) is np.int64 and len(open_run(path).whatif(step, "reset=m", next_steps=0)) == 2
    assert set(open_run(path).batch_facts(step)["step"]) == {5, 6}


def test_progress_names_the_experiments(path):
    told = []
    open_run(path).whatif(6, ["reset=m", "reset=v"], next_steps=0, progress=lambda *args: told.append(args))
    assert told[-2:] == [(0, 2, "step 6 with reset=m"), (1, 2, "step 6 with reset=v")]


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_prints_the_table_and_the_notes(path):
    said = runs.here("whatif", path, "--step", 6, "--set", "lr=0.5x", "--set", "drop-row=1", "--next", 2)
    assert said.code == 0 and "The untouched replay of step 6 has the run's bits." in said.out
    for words in ("untouched", "lr=0.5x", "drop-row=1", "lr=0.5x: performed eagerly", "00000006.whatif-*.json"):
        assert words in said.out
    assert "mean of next 2 " in said.out and "highest of next 2 " in said.out


def test_the_command_in_json_is_the_records(path, tmp_path):
    said = runs.here(
        "whatif", path, "--step", 6, "--set", "reset=v", "--next", 1, "--json", "--trace-dir", tmp_path / "t"
    )
    document = runs.strict(said.out)
    (one,) = document["experiments"]
    file = one.pop("file")
    assert said.code == 0 and one == runs.strict(Path(file).read_text()) and file.startswith(str(tmp_path / "t"))
    assert not (path / "traces").exists() and document["sentence"].endswith("the run's bits.")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--set", "lr"), "change 'lr' is malformed"),
        (("--set", "drop-row=4"), "row 4 can't be dropped: the batch of step 6 has rows 0 to 3"),
        (("--set", "dtype=float32"), "would change nothing"),
        ((), "Missing option '--set'"),
        (("--set", "lr=0.5x", "--next", "-1"), "--next"),
    ],
)
def test_the_command_refuses_in_a_sentence(path, arguments, words):
    assert words in runs.here("whatif", path, "--step", 6, *arguments).sentence


# ----------------------------------------------------------------------- a step of one's own, and what can't be changed


def scheduled(path, *, own, member=None):
    """A run of a loop whose optimizer has a schedule, by a step of its own or the built-in one, which do the same; and
    how to build its experiment."""

    def build():
        optimizer = optim.AdamW(optim.cosine_decay(1e-2, 30), bias_correction=True)
        made = experiment(optimizer=optimizer)
        passes = nn.value_and_grad(made.model, made.loss_fn)

        def step(x, y):
            loss, gradients = passes(made.model, x, y)
            if member is not None:
                optimizer.learning_rate = mx.array(member, mx.float32)
            optimizer.update(made.model, gradients)
            return loss

        return replace(made, step_fn=step) if own else made

    made = build()
    with Recorder(path, *parts(made), step_fn=made.step_fn, compile=False, spikes=None, save_every=4) as recorder:
        for batch in recorder.batches(12):
            recorder.step(batch)
    return open_run(path), build


@pytest.mark.parametrize("change", ["lr=0.5x", "lr=3e-4"])
@pytest.mark.parametrize("once", [False, True])
def test_the_learning_rate_of_a_step_of_ones_own_is_changed_under_its_schedule(tmp_path, change, once):
    numbers = []
    for own in (True, False):
        run, build = scheduled(tmp_path / f"run-{own}", own=own)
        frame = run.whatif(6, change, experiment=build(), next_steps=4, once=once)
        numbers.append(frame.drop(columns="notes"))
        assert frame["update_norm"][1] != frame["update_norm"][0] and frame["next_max"][1] != frame["next_max"][0]
        assert run.replay(6, experiment=build(), with_probe=False).exact
    assert numbers[0].equals(numbers[1])


def test_a_schedule_is_back_after_an_experiment(tmp_path):
    run, build = scheduled(tmp_path / "run", own=True)
    made = build()
    first = run.whatif(6, "lr=0.5x", experiment=made, next_steps=2)
    assert "learning_rate" in made.optimizer._schedulers
    assert run.whatif(6, "lr=0.5x", experiment=made, next_steps=2).equals(first)


def test_a_step_that_sets_its_learning_rate_itself_is_not_changed_from_outside(tmp_path):
    """Without a schedule too: what looks like an experiment would be the untouched step."""
    run, build = scheduled(tmp_path / "run", own=True, member=2e-3)
    with pytest.raises(ExperimentError, match="step function sets the learning rate itself"):
        run.whatif(6, "lr=0.5x", experiment=build())


def test_a_change_that_can_not_be_made_stands_beside_those_that_can(tmp_path):
    run, build = scheduled(tmp_path / "run", own=True)
    frame = run.whatif(6, ["clip=1", "lr=0.5x", "drop-row=99"], experiment=build(), next_steps=2)
    assert frame["change"].tolist() == ["untouched", "clip=1.0", "lr=0.5x", "drop-row=99"]
    assert frame["steps"].tolist() == [3, 0, 3, 0]
    for row, words in ((1, "not performed: the run has a step function of its own"), (3, "row 99 can't be dropped")):
        assert words in frame["notes"][row] and np.isnan(frame["loss"][row]) and np.isnan(frame["next_mean"][row])
    assert np.isfinite(frame["loss"][2]) and len(frame.attrs["files"]) == 1
    with pytest.raises(ExperimentError, match=r"clip=1\.0: the run has .*; drop-row=99: row 99"):
        run.whatif(6, ["clip=1", "drop-row=99"], experiment=build())


def test_the_command_prints_the_reason_beside_the_others(path):
    said = runs.here("whatif", path, "--step", 6, "--next", 1, "--set", "drop-row=99", "--set", "lr=0.5x")
    assert said.code == 0 and "drop-row=99: not performed: row 99 can't be dropped" in said.out
    document = runs.strict(
        runs.here("whatif", path, "--step", 6, "--next", 1, "--set", "drop-row=99", "--set", "lr=0.5x", "--json").out
    )
    first, second = document["experiments"]
    assert "row 99 can't be dropped" in first["refused"] and first["file"] is None
    assert "refused" not in second and Path(second["file"]).is_file()
    jsonschema.validate(runs.strict(Path(second["file"]).read_text()), whatif.schema())
