"""Where a fork of one's own loop starts: the very state, or a refusal; and the parent is never touched."""

import os
import shutil
import stat

import numpy as np
import pytest
import runs

from workbench import Recorder, fork_point, open_run, snapshot
from workbench.checkpoints import checkpoint_writer
from workbench.errors import CheckpointError, ExperimentError, ReplayError, WorkbenchError

SETTINGS = {"compile": False, "spikes": None, "save_every": 4}


def record(path, steps, experiment=None, **settings):
    with Recorder(path, *runs.parts(experiment or runs.build()), **(SETTINGS | settings)) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(path)


def logged(run, segment=0):
    kept = ("batch_hash", "loss_bits", "grad_norm_bits", "adam_v_norms", "state")
    return {
        line["step"]: {key: line[key] for key in kept}
        for line in runs.lines(run.path)
        if line["type"] == "step" and line["segment"] == segment
    }


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """Twelve steps; checkpoints 0, 4, 8 and 12."""
    return record(tmp_path_factory.mktemp("parent") / "run", 12, factory="runs:build")


@pytest.fixture
def read_only(parent):
    """The parent as nobody may write to it; and that nobody did is checked."""
    before = runs.digest(parent.path)
    places = [parent.path, *parent.path.rglob("*")]
    modes = [place.stat().st_mode for place in places]
    for place in places:
        place.chmod(stat.S_IRUSR | (stat.S_IXUSR if place.is_dir() else 0))
    yield parent
    for place, mode in zip(places, modes, strict=True):
        place.chmod(mode)
    assert runs.digest(parent.path) == before
    assert not os.path.exists(parent.path / "traces")


# ------------------------------------------------------------------------------------------------------- without change


@pytest.mark.parametrize("step", [0, 4, 6, 11])
def test_a_fork_without_a_change_has_the_parents_bits(tmp_path, read_only, step):
    """From a checkpoint (0, 4), and rolled forward to (6, 11)."""
    point = fork_point(read_only, step, factory="runs:build")
    fork = record(tmp_path / "fork", 12, fork=point)
    assert logged(fork) == {number: line for number, line in logged(read_only).items() if number > step}
    last = [(run.path / "checkpoints" / "00000012.optimizer.safetensors").read_bytes() for run in (fork, read_only)]
    assert last[0] == last[1]


def test_a_fork_says_where_it_came_from_and_starts_there(tmp_path, parent):
    fork = record(tmp_path / "fork", 12, fork=fork_point(parent.path, 4, changes=["lr=0.5x"]))
    found = fork.manifest.parent
    assert (found.run, found.path, found.step, found.segment) == (parent.manifest.run, str(parent.path), 4, 0)
    assert found.changes == ["--set lr=0.5x"]
    assert [(entry.start, entry.parent) for entry in fork.manifest.segments] == [(4, None)]
    assert fork.checkpoints == [(4, 0), (8, 0), (12, 0)]
    meta = runs.lines(fork.path)[0]
    assert (meta["type"], meta["step"], meta["segment"]) == ("meta", 4, 0)
    assert meta["state"] == logged(parent)[4]["state"]
    assert fork.steps["step"].tolist() == list(range(5, 13)) and fork.manifest.run != parent.manifest.run
    assert "forked from" in fork._repr_html_() and "step 4 of" in fork._repr_html_()


def test_a_fork_replays_exactly_and_needs_no_parent(tmp_path, parent):
    folder = shutil.copytree(parent.path, tmp_path / "parent")
    fork = record(tmp_path / "fork", 11, fork=fork_point(folder, 4))
    shutil.rmtree(folder)
    for step in (5, 7, 11):
        trace = fork.replay(step, experiment=runs.build(), with_probe=False)
        assert trace.exact, trace.sentence()
    with pytest.raises(ReplayError, match="step 4 is not in the telemetry of .*; it has steps 5 to 11"):
        fork.replay(4, experiment=runs.build())


def test_a_fork_is_resumed_and_forked_like_any_run(tmp_path, parent):
    straight = record(tmp_path / "straight", 12, fork=fork_point(parent, 4, changes=["reset=v"]))
    record(tmp_path / "fork", 7, fork=fork_point(parent, 4, changes=["reset=v"]))
    resumed = record(tmp_path / "fork", 12, resume=True)
    assert logged(resumed) == logged(straight) and len(resumed.manifest.segments) == 1
    back = record(tmp_path / "fork", 10, resume=4)
    assert logged(back, 1) == {step: line for step, line in logged(straight).items() if step <= 10}
    second = record(tmp_path / "second", 12, fork=fork_point(straight, 4))
    assert logged(second) == logged(straight) and second.manifest.parent.run == straight.manifest.run


def test_thinning_spares_the_first_state_of_a_fork(tmp_path, parent):
    fork = record(tmp_path / "fork", 12, fork=fork_point(parent, 4), save_every=1, keep_last=1)
    assert fork.checkpoints == [(4, 0), (12, 0)]


def test_the_random_state_is_the_parents_even_if_something_was_drawn_meanwhile(tmp_path):
    import mlx.core as mx
    from helpers import experiment

    def build():
        return experiment(dropout=0.3)

    def steps(path, count, **more):
        made = build()
        with Recorder(path, made.model, made.optimizer, made.loss_fn, made.sampler, **SETTINGS, **more) as recorder:
            mx.random.seed(99) if more else None
            for batch in recorder.batches(count):
                recorder.step(batch)
        return open_run(path)

    whole = steps(tmp_path / "whole", 6)
    fork = steps(tmp_path / "fork", 6, fork=fork_point(whole, 4))
    assert logged(fork) == {step: line for step, line in logged(whole).items() if step > 4}


# -------------------------------------------------------------------------------------------------------------- changes


def test_moments_are_reset_and_nothing_else(tmp_path, parent):
    plain, changed = (fork_point(parent, 4, changes=changes).state for changes in ([], ["reset=v"]))
    for path, array in plain.optimizer.items():
        same = np.array_equal(np.array(array), np.array(changed.optimizer[path]))
        assert same is not path.endswith(".v"), path
        assert not path.endswith(".v") or not np.array(changed.optimizer[path]).any()
    assert snapshot.first_difference(plain, changed).endswith(".v")
    both = fork_point(parent, 4, changes=["reset=m,v"]).state
    assert not any(np.array(array).any() for path, array in both.optimizer.items() if path[-2:] in (".m", ".v"))
    fork = record(tmp_path / "fork", 6, fork=fork_point(parent, 4, changes=["reset=m,v", "rng=7"]))
    assert fork.replay(6, experiment=runs.build(), with_probe=False).exact
    assert fork_point(parent, 4, changes=["rng=7"]).state.rng == (0, 7)


def test_the_next_batch_is_skipped(tmp_path, parent):
    fork = record(tmp_path / "fork", 11, fork=fork_point(parent, 4, changes=["batch=skip"]))
    hashes = [line["batch_hash"] for line in logged(fork).values()]
    assert hashes == [line["batch_hash"] for step, line in logged(parent).items() if step > 5]
    assert fork.replay(range(5, 9), experiment=runs.build(), with_probe=False)[-1].exact


def test_settings_are_the_loops_own(tmp_path, parent):
    """A loop that clips and has another epsilon from the fork on."""
    built = runs.build(clip=0.01, eps=1e-4)
    fork = record(tmp_path / "fork", 8, built, clip=0.01, fork=fork_point(parent, 4, changes=["clip=0.01", "eps=1e-4"]))
    assert fork.manifest.options["clip"] == 0.01 and fork.manifest.optimizer["eps"] == 1e-4
    assert fork.manifest.parent.changes == ["--set clip=0.01", "--set eps=0.0001"]
    assert logged(fork)[5]["loss_bits"] == logged(parent)[5]["loss_bits"]
    assert logged(fork)[5]["state"]["adam_m"] != logged(parent)[5]["state"]["adam_m"]
    assert fork.replay(8, experiment=runs.build(clip=0.01, eps=1e-4), with_probe=False).exact


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["drop-row=1"], ("drop-row=1 is of one step only", "whatif")),
        (["v=max"], ("v=max is of one step only",)),
        (["state=3"], ("state=3 is of one step only",)),
        (["batch=3"], ("batch=3", "your sampler")),
        (["lr=0.5x", "lr=0.1x"], ("lr is changed twice",)),
        (["moments=reset"], ("moments=reset", "unknown")),
        (["reset"], ("malformed",)),
    ],
)
def test_changes_that_no_run_can_go_on_with(parent, changes, words):
    with pytest.raises(ExperimentError) as caught:
        fork_point(parent, 4, changes=changes)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("step", [13, 99])
def test_a_step_that_the_run_does_not_have(parent, step):
    with pytest.raises(ReplayError, match=f"has no state {step}; it has states 0 to 12"):
        fork_point(parent, step)


def test_a_state_without_a_checkpoint_needs_the_experiment(tmp_path, parent):
    with pytest.raises(ExperimentError, match="only with your consent"):
        fork_point(parent, 6)
    with pytest.raises(ExperimentError, match="named no factory"):
        fork_point(record(tmp_path / "nameless", 6), 5)
    rolled = fork_point(parent, 6, experiment=runs.build()).state
    assert (
        rolled.step == 6
        and snapshot.first_difference(rolled, fork_point(parent, 6, factory="runs:build").state) is None
    )


def test_a_state_that_can_not_be_reached_exactly_is_refused(tmp_path, parent):
    copy = shutil.copytree(parent.path, tmp_path / "run")
    runs.edit_line(copy, 6, loss_bits="0x3f800000", loss=1.0)
    with pytest.raises(
        ReplayError, match=r"rolling forward to it from checkpoint 4 is not exact \(loss differs at step 6"
    ):
        fork_point(copy, 7, factory="runs:build")
    assert fork_point(copy, 8).state.step == 8
    with pytest.raises(ExperimentError, match="this is not the experiment"):
        fork_point(parent, 7, experiment=runs.build(eps=1.0))


def test_a_checkpoint_that_contradicts_the_telemetry_is_not_forked_from(tmp_path, parent):
    copy = shutil.copytree(parent.path, tmp_path / "run")
    line = logged(parent)[8]
    runs.edit_line(copy, 8, state=line["state"] | {"adam_m": "0" * 32})
    with pytest.raises(CheckpointError, match="checkpoint 8 of .* adam_m differ"):
        fork_point(copy, 8)


def test_a_state_that_stands_twice_has_to_be_chosen(tmp_path, parent):
    copy = shutil.copytree(parent.path, tmp_path / "run")
    with Recorder(copy, *runs.parts(runs.build()), **SETTINGS, resume=True) as recorder:
        recorder.step(next(recorder.experiment.sampler))
        recorder.experiment.model.layers[1].weight = recorder.experiment.model.layers[1].weight * 2
        recorder.open_segment()
        recorder.step(next(recorder.experiment.sampler))
    run = open_run(copy)
    with pytest.raises(
        ReplayError, match=r"state 13 of .* segments \[0, 1\], and they differ.*--from 13.s0, --from 13.s1"
    ):
        fork_point(run, 13)
    left, edited = (fork_point(run, 13, segment=segment, experiment=runs.build()) for segment in (0, 1))
    assert snapshot.first_difference(left.state, edited.state) == "weights layers.1.weight"
    assert (left.parent.segment, edited.parent.segment) == (0, 1)
    with pytest.raises(ReplayError, match="has no state 14 on the way to segment 0"):
        fork_point(run, 14, segment=0)
    fork = record(tmp_path / "fork", 14, fork=edited)
    assert logged(fork)[14] == logged(run, 1)[14]


def test_a_state_that_stands_twice_alike_is_taken(tmp_path, parent):
    copy = shutil.copytree(parent.path, tmp_path / "run")
    run = record(copy, 14, resume=8)  # as after a crash: 9 to 12 stand in both segments
    assert fork_point(run, 12).parent.segment == 1 == fork_point(run, 10, experiment=runs.build()).parent.segment


def test_without_lanes_two_states_are_not_taken_for_one(tmp_path, parent):
    copy = shutil.copytree(parent.path, tmp_path / "run")
    record(copy, 14, resume=8)
    runs.edit_line(copy, 10, state=...)  # of segment 1
    with pytest.raises(ReplayError, match="segments .0, 1., and the telemetry does not say whether they are the same"):
        fork_point(copy, 10)
    assert fork_point(copy, 10, segment=0, experiment=runs.build()).parent.segment == 0


def test_a_changed_state_that_is_gone_is_not_replaced_by_the_one_before_the_change(tmp_path):
    with Recorder(tmp_path / "run", *runs.parts(runs.build()), **SETTINGS) as recorder:
        for batch in recorder.batches(8):
            recorder.step(batch)
            if recorder.step_number == 6:
                recorder.experiment.model.layers[1].weight = recorder.experiment.model.layers[1].weight * 2
                recorder.open_segment()
    run = open_run(tmp_path / "run")
    assert fork_point(run, 6, segment=1).parent.segment == 1
    checkpoint_writer.delete(run.path / "checkpoints", 6, 1)
    assert "weights differs, and that segment has no checkpoint of it" in run.plan(7).notices[0]
    with pytest.raises(ReplayError, match="state 6 from which segment 1 .* has no checkpoint of it"):
        fork_point(run, 6, segment=1, experiment=runs.build())
    assert fork_point(run, 6, segment=0, experiment=runs.build()).parent.segment == 0


def test_a_fork_that_is_also_a_resume(parent):
    with pytest.raises(ExperimentError, match="resume and fork both say where to start"):
        Recorder(parent.path, *runs.parts(runs.build()), compile=False, resume=True, fork=fork_point(parent, 4))


def test_a_fork_over_the_parent_itself_is_refused(parent):
    before = runs.digest(parent.path)
    with pytest.raises(WorkbenchError, match="already holds a run"):
        Recorder(parent.path, *runs.parts(runs.build()), compile=False, fork=fork_point(parent, 4))
    assert runs.digest(parent.path) == before
