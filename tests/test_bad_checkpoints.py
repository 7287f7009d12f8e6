"""A range in which a checkpoint is damaged, or thinned meanwhile: the steps behind it are replayed from an earlier one,
and that is said. And a fresh process that is asked for an earlier step than it was started for."""

import errno
import os
from pathlib import Path

import pytest
import runs

from workbench import open_run
from workbench.errors import ChangedByHand, CheckpointError
from workbench.replaying import fallback, legs, preparation
from workbench.run import Run

QUICK = {"with_probe": False, "repeat": False, "fresh_process": False}


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)  # 12 steps, a checkpoint every 4


def damage(run, step):
    file = run / "checkpoints" / f"{step:08d}.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def starts(traces):
    return {trace.step: trace.record.checkpoint for trace in traces}


def test_a_range_goes_on_past_a_damaged_checkpoint_and_names_it(run):
    damage(run, 8)
    traces = open_run(run).replay(range(6, 11), **QUICK)
    assert starts(traces) == {6: 4, 7: 4, 8: 4, 9: 4, 10: 4} and all(trace.exact for trace in traces)
    assert {trace.step: trace.record.rolled for trace in traces} == {6: 1, 7: 2, 8: 3, 9: 4, 10: 5}
    for trace in traces:
        said = [one for one in trace.notices if "00000008.safetensors" in one and "SHA-256" in one or "digest" in one]
        assert len(said) == (trace.step >= 8), trace.notices
    (behind,) = [one for one in traces[-1].notices if one.startswith("steps 9 to 10 were replayed from an earlier ")]
    assert "than 8: it can't be used: " in behind and "Start from an earlier one" not in behind
    said = runs.here("replay", run, "--step", "6..10", "--quick")
    assert said.code == 0 and said.out.count("replayed from an earlier checkpoint than 8") == 2
    assert len(list((run / "traces").iterdir())) == 5


def test_two_damaged_ones_are_both_named(run):
    damage(run, 4)
    damage(run, 8)
    traces = open_run(run).replay(range(3, 10), **QUICK)
    assert set(starts(traces).values()) == {0} and all(trace.exact for trace in traces)
    said = [one for one in traces[-1].notices if "step 9 was replayed from an earlier checkpoint than" in one]
    assert ["than 8: " in said[0], "than 4: " in said[1]] == [True, True]


def test_neighbours_are_had_past_a_damaged_checkpoint(run):
    damage(run, 8)
    context = open_run(run).context(10, 4)
    assert [trace.step for trace in context.traces] == [6, 7, 8, 9, 10] and context.trace.exact
    assert any("earlier checkpoint than 8: it can't be used" in one for one in context.trace.notices)


def test_a_fresh_process_goes_the_same_way(run):
    damage(run, 8)
    traces = open_run(run).replay(range(8, 11), with_probe=False, fresh_process=True)
    assert all(trace.exact and "and in a fresh process" in trace.badges()[0][2] for trace in traces)


def test_what_the_first_steps_are_replayed_from_is_refused_as_for_a_single_step(run):
    """Nothing is lost by that, and the sentence says what to do."""
    damage(run, 8)
    for steps in (9, range(9, 13), range(9, 10)):
        with pytest.raises(CheckpointError, match=r"00000008\.safetensors .*Start from an earlier one: --checkpoint"):
            open_run(run).replay(steps, **QUICK)


def test_none_before_it_is_an_error_that_names_it(run):
    for step in (0, 4):
        for file in (run / "checkpoints").glob(f"{step:08d}*"):
            if file.name.split(".")[1] == "json":
                file.unlink()
    damage(run, 8)
    with pytest.raises(CheckpointError, match=r"00000008\.safetensors"):
        open_run(run).replay(range(9, 13), **QUICK)


def test_a_change_by_hand_on_the_longer_way_leaves_the_checkpoints_error(run, monkeypatch):
    """As if the loop had changed the weights after step 5 or 6, and only checkpoint 8 held that."""
    damage(run, 8)

    def refuses(opened, plan):
        if plan.checkpoint[0] == 4 and plan.steps[-1] > 8:
            raise ChangedByHand("the loop changed layers.0.weight", 6)

    monkeypatch.setattr(preparation, "refuse_changed_by_hand", refuses)
    with pytest.raises(CheckpointError, match=r"00000008\.safetensors"):
        open_run(run).replay(range(8, 11), **QUICK)


def thin_late(monkeypatch, run, step):
    """When a replay is about to read the checkpoint, the recorder thins it."""
    real = fallback.prepared

    def thins(opened, plan, **options):
        if plan.checkpoint[0] == step:
            for file in (run / "checkpoints").glob(f"{step:08d}*"):
                file.unlink()
        return real(opened, plan, **options)

    monkeypatch.setattr(fallback, "prepared", thins)


@pytest.mark.parametrize("steps", [10, range(9, 12), range(6, 11)])
def test_a_checkpoint_that_is_thinned_while_it_is_about_to_be_read(run, monkeypatch, steps):
    thin_late(monkeypatch, run, 8)
    traces = Run(run).replay(steps, **QUICK)
    last = traces[-1] if isinstance(traces, list) else traces
    assert last.exact and last.record.checkpoint == 4
    assert any("replayed from an earlier checkpoint than 8: it is gone since" in one for one in last.notices)


def test_a_sample_is_proven_although_a_checkpoint_is_thinned_meanwhile(run, monkeypatch):
    thin_late(monkeypatch, run, 8)
    found = Run(run).verify(replay=12)
    steps = [check for check in found.checks if check.kind == "step"]
    assert len(steps) == 12 and {check.verdict for check in steps} == {"exact"}
    assert any("earlier checkpoint than 8: it is gone since" in one for one in found.notices)


def thinned_far(run):
    """As if the run had been saved at each step, of which thinning left the first checkpoint and the last ones."""
    for file in (run / "checkpoints").glob("00000004*"):
        file.unlink()
    runs.edit_json(run / "run.json", lambda document: document.update(save_every=1))


def test_hours_of_rolling_forward_are_not_begun_unasked(run, monkeypatch):
    thinned_far(run)
    thin_late(monkeypatch, run, 8)
    told = r"checkpoint 8 of run is gone since this replay began.*, 0, is 8 steps further back\. .*--checkpoint 0"
    with pytest.raises(CheckpointError, match=told):
        Run(run).replay(10, **QUICK)
    assert Run(run).replay(10, checkpoint=0, **QUICK).exact


def test_no_more_than_was_to_be_rolled_anyway(run, monkeypatch):
    thinned_far(run)
    thin_late(monkeypatch, run, 8)
    traces = Run(run).replay(range(7, 10), **QUICK)
    assert starts(traces) == {7: 0, 8: 0, 9: 0} and all(trace.exact for trace in traces)


def test_a_sample_whose_checkpoint_was_thinned_is_nothing_against_the_run(run, monkeypatch):
    thinned_far(run)
    thin_late(monkeypatch, run, 8)
    steps = {check.what: check for check in Run(run).verify(replay=12).checks if check.kind == "step"}
    unproven = {what for what, check in steps.items() if check.verdict != "exact"}
    assert unproven == {f"{step}, segment 0" for step in range(9, 13)}
    assert {steps[what].verdict for what in unproven} == {"unverified"}


def test_the_one_that_was_asked_for_is_not_replaced(run, monkeypatch):
    thin_late(monkeypatch, run, 8)
    with pytest.raises(CheckpointError, match="no checkpoint of step 8"):
        Run(run).replay(10, checkpoint=8, **QUICK)


def test_legs_begin_at_or_before_their_steps_although_the_first_checkpoint_is_thinned_meanwhile(run):
    opened = Run(run)
    plan = opened.plan(range(6, 11))
    for step in (0, 4):
        (run / "checkpoints" / f"{step:08d}.json").unlink()
    assert [(list(leg.steps), leg.checkpoint[0]) for leg in legs.legs_of(opened, plan)] == [
        ([6, 7, 8], 4),
        ([9, 10], 8),
    ]


def test_a_fresh_process_is_started_anew_for_an_earlier_step_than_it_was_started_for(run):
    """This process resumes what another one recorded, so that its own steps are in doubt from the first; then a step of
    the other turns out to differ, and is in doubt, too."""
    assert runs.here("train", "--out", run, "--resume", "--steps", 15).code == 0
    state = next(line["state"] for line in runs.lines(run) if line["type"] == "step" and line["step"] == 11)
    digit = "1" if state["weights"][-1] == "0" else "0"
    runs.edit_line(run, 11, state=state | {"weights": state["weights"][:-1] + digit})
    traces = open_run(run).replay(range(11, 15), with_probe=False)
    assert [trace.record.gates.faithful.verdict for trace in traces] == ["mismatch", "mismatch", "exact", "exact"]
    assert all("and in a fresh process" in trace.badges()[0][2] for trace in traces)


def test_a_folder_that_can_not_be_read_is_not_one_without_checkpoints(run, monkeypatch):
    """Another user's, say: `Path.glob` finds nothing in it, and says nothing."""
    opened, listed = open_run(run), os.listdir

    def forbidden(path="."):
        if Path(path) == run / "checkpoints":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", forbidden)
    for ask in (lambda: opened.checkpoints, lambda: opened.replay(9, **QUICK), opened.verify):
        with pytest.raises(CheckpointError, match=r"checkpoints can't be read \(Permission denied\), so which"):
            ask()
