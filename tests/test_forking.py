"""`workbench train --fork`: the parent's bits where nothing is changed, else the change and nothing but the change."""

import functools
import shutil

import msgspec
import numpy as np
import pytest
import runs

from workbench import fork, list_runs, open_run
from workbench.batches.batch import sampler_of
from workbench.checkpoints import checkpoint_reader
from workbench.errors import ExperimentError, ReplayError, RunError, WorkbenchError
from workbench.forking import FORKABLE, forked
from workbench.trainer.options import OPTIONS
from workbench.trainer.schedule import lr_at
from workbench.trainer.training import train_run

STEPS, AT = 10, 5
SETTINGS = runs.SMALL | {"save_every": 4, "dropout": 0.1, "spike_window": 4}


@functools.cache
def parent_path():
    """Ten steps with dropout and garbage at step 7; checkpoints 0, 4, 8 and 10."""
    return train_run(runs.scratch() / "parent", runs.corpus(), STEPS, faults=["garbage@7:rows=2"], **SETTINGS).path


@pytest.fixture
def parent():
    """The shared run; that nothing in it was touched is checked."""
    before = runs.digest(parent_path())
    yield open_run(parent_path())
    assert runs.digest(parent_path()) == before


def logged(run, segment=0):
    kept = ("batch_hash", "loss_bits", "grad_norm_bits", "lr", "state")
    return {
        line["step"]: {key: line[key] for key in kept}
        for line in runs.lines(run.path)
        if line["type"] == "step" and line["segment"] == segment
    }


def after(run, step):
    return {number: line for number, line in logged(run).items() if number > step}


def exact(run, steps):
    traces = run.replay(steps, with_probe=False, fresh_process=False)
    return [trace.exact for trace in (traces if isinstance(steps, range) else [traces])]


def hashes(run):
    return [line["batch_hash"] for line in logged(run).values()]


# ----------------------------------------------------------------------------------------------------- without a change


@pytest.mark.parametrize("step", [0, 4, AT, 9])
def test_a_fork_without_a_change_has_the_parents_bits(tmp_path, parent, step):
    """From a checkpoint, and rolled forward to (5, 9); compiled, with dropout, over a planted batch."""
    said = runs.here("train", "--fork", parent.path, "--from", step, "--out", tmp_path / "fork")
    assert said.code == 0, said.err
    made, last = open_run(tmp_path / "fork"), parent.last_step
    assert (f": steps {step + 1} to {last} recorded, " if step else f": {last} steps recorded, ") in said.err
    assert list_runs(tmp_path)["steps"].tolist() == [last - step]
    assert logged(made) == after(parent, step)
    assert made.manifest.rebuild == parent.manifest.rebuild and made.manifest.options == parent.manifest.options
    assert made.manifest.spikes == parent.manifest.spikes and made.manifest.save_every == parent.manifest.save_every
    found = made.manifest.parent
    assert (found.run, found.path, found.step, found.changes) == (parent.manifest.run, str(parent.path), step, [])
    if step < 7:
        assert exact(made, range(step + 1, 8)) == [True] * (7 - step)


def test_a_fork_stands_on_its_own(tmp_path):
    """The planted batch is a file of the parent's: the fork has a copy."""
    folder = shutil.copytree(parent_path(), tmp_path / "parent")
    made = fork(folder, AT, tmp_path / "fork")
    shutil.rmtree(folder)
    assert [entry.path for entry in made.manifest.data] == [str(runs.corpus()), "sources/1.bytes"]
    assert exact(made, 7) == [True] and made.checkpoints == [(5, 0), (8, 0), (10, 0)]
    assert not (made.path / "planted.json").exists()


def test_a_corpus_beside_the_parent_is_named_by_its_place(tmp_path):
    """As in a shipped run, whose manifest has the bare name."""
    folder = shutil.copytree(parent_path(), tmp_path / "runs" / "parent")
    shutil.copy(runs.corpus(), tmp_path / "runs" / "c.txt")
    runs.edit_json(folder / "run.json", lambda d: d["data"][0].update(path="c.txt"))
    made = fork(folder, AT, tmp_path / "elsewhere" / "fork", steps=7)
    assert made.manifest.data[0].path == str(tmp_path / "runs" / "c.txt") and exact(made, 7) == [True]


def test_a_fork_is_resumed_to_the_same_bits(tmp_path, parent):
    straight = fork(parent, AT, tmp_path / "straight", changes=["lr=0.5x", "reset=v"], skip_batch=[7])
    made = fork(parent, AT, tmp_path / "fork", changes=["lr=0.5x", "reset=v"], skip_batch=[7], steps=7)
    said = runs.here("train", "--out", made.path, "--resume", "--steps", STEPS)
    assert said.code == 0, said.err
    assert logged(open_run(made.path)) == logged(straight)


# -------------------------------------------------------------------------------------------------------------- changes


def test_a_batch_is_left_out_and_the_next_takes_its_place(tmp_path, parent):
    said = runs.here(
        *("train", "--fork", parent.path, "--from", 6, "--skip-batch", 7, "--out", tmp_path / "fork", "--steps", 9)
    )
    assert said.code == 0, said.err
    made = open_run(tmp_path / "fork")
    assert hashes(made) == hashes(parent)[7:10]
    assert made.manifest.parent.changes == ["--skip-batch 7"]
    assert exact(made, range(7, 10)) == [True] * 3
    assert [row.source for row in sampler_of(made).provenance(7)] == [0] * 4  # the planted rows went with their batch
    assert np.isfinite(made.steps["loss"]).all()


def test_batches_are_left_out_later_too_and_in_a_fork_of_a_fork(tmp_path, parent):
    first = fork(parent, 4, tmp_path / "first", skip_batch=[6, 7], steps=8)
    straight = train_run(tmp_path / "longer", runs.corpus(), 12, faults=["garbage@7:rows=2"], **SETTINGS)
    assert hashes(first) == [hashes(straight)[number - 1] for number in (5, 8, 9, 10)]
    second = fork(first, 6, tmp_path / "second", skip_batch=[7], steps=8)
    assert hashes(second) == [hashes(straight)[number - 1] for number in (10, 11)]
    assert exact(second, 8) == [True]


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ("lr=0.5x", lambda config, made: lr_at(config.schedule, 6) == lr_at(made.schedule, 6) * 2),
        ("lr=0.0003", lambda config, made: [lr_at(made.schedule, step) for step in (6, 9)] == [3e-4] * 2),
        ("clip=0.01", lambda config, made: made.clip == 0.01),
        ("clip=off", lambda config, made: made.clip is None),
        ("beta2=0.5", lambda config, made: made.adamw.beta2 == 0.5),
        ("eps=0.001", lambda config, made: made.adamw.eps == 1e-3),
        ("reset=m", lambda config, made: made == config),
        ("reset=m,v", lambda config, made: made == config),
        ("rng=7", lambda config, made: made == config),
        ("batch=3", lambda config, made: [(one.step, one.of) for one in made.repetitions] == [(6, 3)]),
        ("batch=skip", lambda config, made: made.skipped == (6,)),
        ("compile=off", lambda config, made: made.compile is False),
        ("deterministic=off", lambda config, made: made.deterministic is False),
    ],
)
def test_one_thing_is_changed_from_the_fork_on(tmp_path, parent, change, check):
    from workbench.trainer.recipe import config_from

    made = fork(parent, AT, tmp_path / "fork", changes=[change], steps=8)
    config, other = (config_from(run.manifest.rebuild["config"]) for run in (parent, made))
    assert check(msgspec.structs.replace(config, steps=8), other)
    assert made.manifest.parent.changes == [f"--set {change}"]
    assert exact(made, range(6, 9)) == [True] * 3
    moved = change not in ("compile=off", "deterministic=off")  # on a CPU these need not move a bit
    assert not moved or logged(made)[6] != logged(parent)[6]


def test_the_learning_rate_of_a_fork(tmp_path, parent):
    made = fork(parent, AT, tmp_path / "fork", changes=["lr=0.5x"])
    rates = {step: (line["lr"], logged(parent)[step]["lr"]) for step, line in logged(made).items()}
    assert all(np.float32(one) == np.float32(other) / 2 for one, other in rates.values())
    assert logged(made)[6]["loss_bits"] == logged(parent)[6]["loss_bits"]  # the rate acts after it


def test_another_batch_in_place_of_the_next(tmp_path, parent):
    made = fork(parent, AT, tmp_path / "fork", changes=["batch=3"], steps=7)
    assert hashes(made) == [hashes(parent)[2], hashes(parent)[6]]
    again = fork(made, AT, tmp_path / "again", changes=["batch=2"], steps=7)
    assert hashes(again) == [hashes(parent)[1], hashes(parent)[6]]


def test_another_dtype(tmp_path):
    half = train_run(tmp_path / "half", runs.corpus(), 4, **(SETTINGS | {"dtype": "bfloat16"}))
    made = fork(half, 4, tmp_path / "fork", changes=["dtype=float32"], steps=6)
    assert {parameter.dtype for parameter in made.manifest.parameters} == {"float32"}
    before, state = (checkpoint_reader.read(run.path / "checkpoints", 4, 0) for run in (half, made))
    for path, array in state.weights.items():
        assert np.array_equal(np.array(array), np.array(before.weights[path].astype(array.dtype)))
    assert exact(made, 6) == [True]


def test_moments_of_a_fork_start_at_zero(tmp_path, parent):
    made = fork(parent, AT, tmp_path / "fork", changes=["reset=v"], steps=6)
    start = checkpoint_reader.read(made.path / "checkpoints", AT, 0)
    assert not any(np.array(array).any() for path, array in start.optimizer.items() if path.endswith(".v"))
    assert any(np.array(array).any() for path, array in start.optimizer.items() if path.endswith(".m"))
    assert int(start.optimizer["step"].item()) == AT


def test_a_fork_from_each_side_of_a_seam(tmp_path):
    damaged = train_run(tmp_path / "run", runs.corpus(), 8, faults=["weight-scaled@6"], **SETTINGS)
    said = runs.here("train", "--fork", damaged.path, "--from", 5, "--out", tmp_path / "fork")
    assert "they differ; choose one: --from 5.s0, --from 5.s1" in said.sentence
    for segment, same in ((0, False), (1, True)):
        made = fork(damaged, f"5.s{segment}", tmp_path / f"fork{segment}")
        assert (logged(made)[6] == logged(damaged, 1)[6]) is same
        assert made.manifest.parent.segment == segment and exact(made, 6) == [True]


def test_the_batch_after_a_lost_cursor_is_left_out(tmp_path):
    damaged = train_run(tmp_path / "run", runs.corpus(), 8, faults=["lost-cursor@6"], **SETTINGS)
    assert [line["batch_hash"] for line in logged(damaged, 1).values()] == hashes(damaged)[:3]
    made = fork(damaged, "5.s1", tmp_path / "fork", skip_batch=[7])
    assert hashes(made) == [hashes(damaged)[0], hashes(damaged)[2], hashes(damaged)[3]]


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--from", 5), ("--fork needs --out",)),
        (("--out", "new"), ("--fork needs --from",)),
        (("--from", 11, "--out", "new"), ("no state 11", "0 to 10")),
        (("--from", "x", "--out", "new"), ("--from is 'x'", "200.s1")),
        (("--from", "-1", "--out", "new"), ("--from is '-1'",)),
        (("--from", "5.s7", "--out", "new"), ("segment 7 does not exist",)),
        (("--from", 5, "--out", "new", "--steps", 5), ("--steps is 5", "expected more")),
        (("--from", 10, "--out", "new"), ("--steps is 10", "expected more")),
        (("--from", 5, "--out", "new", "--skip-batch", 5), ("--skip-batch is 5", "starts with step 6")),
        (("--from", 5, "--out", "new", "--set", "lr=fast"), ("'fast'", "factor")),
        (("--from", 5, "--out", "new", "--set", "v=max"), ("v=max", "whatif")),
        (("--from", 5, "--out", "new", "--set", "clip=1", "--set", "clip=off"), ("clip is changed twice",)),
        (("--from", 5, "--out", "new", "--resume"), ("--fork and --resume",)),
        (("--from", 5, "--out", "new", "--max-lr", 1), ("--max-lr is decided by the manifest of", "in a fork")),
        (("--from", 5, "--out", "new", "--fault", "garbage@8"), ("--fault is decided by the manifest",)),
    ],
)
def test_what_can_not_be_forked_is_a_sentence_and_writes_nothing(tmp_path, parent, options, words):
    options = [tmp_path / "new" if option == "new" else option for option in options]
    said = runs.here("train", "--fork", parent.path, *options)
    assert [word for word in words if word not in said.sentence] == [], said.sentence
    assert list(tmp_path.iterdir()) == []


def test_the_options_of_a_fork_go_with_it(tmp_path):
    for option in (("--from", 5), ("--skip-batch", 5), ("--set", "lr=0.5x")):
        said = runs.here("train", "--corpus", runs.corpus(), "--steps", 3, "--out", tmp_path / "new", *option)
        assert f"{option[0]} goes with --fork" in said.sentence
        said = runs.here("train", "--out", parent_path(), "--resume", *option)
        assert "is decided by the manifest" in said.sentence
    assert list(tmp_path.iterdir()) == []


def test_every_option_of_a_fork_is_an_option_of_training():
    assert set(OPTIONS) >= FORKABLE
    with pytest.raises(ExperimentError, match="'max_lr' is no option of a fork; expected .*steps"):
        fork(parent_path(), 5, "nowhere", max_lr=1.0)


def test_out_that_is_the_parent_or_holds_something(parent, tmp_path):
    with pytest.raises(RunError, match="already holds a run"):
        fork(parent, AT, parent.path)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="is not empty; expected a new folder"):
        fork(parent, AT, tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        fork("nowhere", AT, "new")


def test_a_run_of_ones_own_loop_is_forked_by_that_loop(tmp_path):
    from workbench import Recorder

    with Recorder(tmp_path / "own", *runs.parts(runs.build()), compile=False) as recorder:
        recorder.step(next(recorder.experiment.sampler))
    with pytest.raises(ExperimentError, match=r"Recorder\(fork=fork_point"):
        fork(tmp_path / "own", 1, tmp_path / "new")


def test_a_parent_whose_way_is_not_exact_is_forked_from_checkpoints_only(tmp_path):
    copy = shutil.copytree(parent_path(), tmp_path / "parent")
    runs.edit_line(copy, 6, loss_bits="0x3f800000", loss=1.0)
    with pytest.raises(
        ReplayError, match="is not exact .loss differs at step 6.; fork from a checkpoint: .0, 4, 8, 10."
    ):
        fork(copy, 7, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()
    assert fork(copy, 8, tmp_path / "fork").last_step == STEPS


def test_a_parent_with_changed_data(tmp_path):
    copy = shutil.copytree(parent_path(), tmp_path / "parent")
    (copy / "sources" / "1.bytes").write_bytes(b"?" * (copy / "sources" / "1.bytes").stat().st_size)
    with pytest.raises(WorkbenchError, match="1.bytes has changed"):
        fork(copy, 8, tmp_path / "fork")
    assert not (tmp_path / "fork").exists()


def test_a_job_writes_nothing_into_the_parent(parent, tmp_path):
    job = forked({"fork": parent.path, "from_": "5", "out": tmp_path / "new"})
    assert job.config.steps == STEPS and job.recording["fork"].state.step == 5
