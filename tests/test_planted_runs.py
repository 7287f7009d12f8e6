"""Every planted fault in a tiny run: replayed as its kind promises, resumed to the same bits, with its label gone."""

import functools
import json
import shutil

import numpy as np
import pytest
import runs

from workbench import open_run
from workbench.faults import KINDS, parse
from workbench.trainer.training import Quiet, train_run

AT, STEPS = 4, 7
SETTINGS = runs.SMALL | {"save_every": 6, "no_spike_detect": True, "dropout": 0.1, "compile_": False}
PLACED = {name: f"{name}@{1 if kind.applied == 'option' else AT}" for name, kind in KINDS.items()}
STATE = [name for name, kind in KINDS.items() if kind.applied == "state"]
DESCRIBED = [name for name, kind in KINDS.items() if kind.applied in ("data", "schedule", "option")]
TRANSIENT = [name for name, kind in KINDS.items() if kind.applied == "transient"]


@functools.cache
def planted_read_only(fault):
    out = runs.scratch() / f"planted-{fault.replace(':', '-')}"
    return train_run(out, runs.corpus(), STEPS, faults=[fault] if fault else [], **SETTINGS).path


def planted(fault, folder):
    """A copy of the run, without its labels."""
    path = shutil.copytree(planted_read_only(fault), folder / "run")
    (path / "planted.json").unlink()
    return open_run(path)


def label(fault):
    (found,) = json.loads((planted_read_only(fault) / "planted.json").read_text())
    return found


def replayed(run, steps, **options):
    return run.replay(steps, with_probe=False, fresh_process=False, **options)


def logged(path):
    """What each step logged, without times."""
    kept = ("batch_hash", "loss_bits", "grad_norm_bits", "lr", "state")
    return [{key: line[key] for key in kept} for line in runs.lines(path) if line["type"] == "step"]


def differing(fault):
    """The first step that is not that of the run without the fault."""
    pairs = zip(logged(planted_read_only(fault)), logged(planted_read_only("")), strict=True)
    return next((step for step, (one, other) in enumerate(pairs, start=1) if one != other), None)


# -------------------------------------------------------------------------------------------------------------- replay


@pytest.mark.parametrize("name", [name for name in KINDS if KINDS[name].replay == "exact"])
def test_a_replay_is_exact_and_needs_no_label(tmp_path, name):
    run = planted(PLACED[name], tmp_path)
    first = max(parse(PLACED[name]).step, 2) - 1
    traces = replayed(run, range(first, STEPS + 1))  # over the seam too
    assert [trace.step for trace in traces if not trace.exact] == [], [trace.sentence() for trace in traces]


@pytest.mark.parametrize("name", list(KINDS))
def test_it_changes_the_run_from_its_step_on_and_not_before(name):
    assert differing(PLACED[name]) == parse(PLACED[name]).step


@pytest.mark.parametrize(("name", "item"), [("gradient-bit", "per_layer_grad_norms"), ("log-bit", "loss")])
def test_no_replay_reproduces_a_transient_fault(tmp_path, name, item):
    run = planted(PLACED[name], tmp_path)
    before, at, after = replayed(run, range(AT - 1, AT + 2))
    assert before.exact and not at.exact and not after.exact
    difference = at.record.first_difference
    assert (difference.step, difference.item, difference.where) == (AT, item, "step")
    gates = at.record.gates
    assert gates.repeatable.verdict == "exact" and gates.sensitive.verdict == "exact"
    states = {name: found.verdict for name, found in at.record.items.items() if name.startswith("state.")}
    if name == "log-bit":  # the state went on untouched: only the line is wrong
        assert set(states.values()) == {"exact"} and set(difference.consequences) == set()
    else:
        assert states["state.adam_m"] == "mismatch" and states["state.rng"] == states["state.cursor"] == "exact"
        assert at.record.items["loss"].verdict == "exact" == at.record.items["batch_hash"].verdict
        assert replayed(run, STEPS).exact  # from the checkpoint of step 6, which has the damage in it


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("name", list(KINDS))
def test_a_resume_goes_on_with_the_same_bits(tmp_path, name):
    run = planted(PLACED[name], tmp_path)
    said = runs.here("train", "--out", run.path, "--resume", "6", "--steps", STEPS)
    assert said.code == 0, said.err
    again = [line for line in runs.lines(run.path) if line["type"] == "step"][-1]
    assert again["segment"] > 0 and again["state"] == logged(planted_read_only(PLACED[name]))[-1]["state"]
    resumed = open_run(run.path)
    trace = replayed(resumed, STEPS, segment=again["segment"])
    assert trace.exact and resumed.edits(STEPS, again["segment"]) is None


@pytest.mark.parametrize(("name", "refused"), [("log-bit", True), ("lost-optimizer", True), ("garbage", False)])
def test_a_resume_does_not_pass_over_a_fault_that_was_not_planted_yet(tmp_path, name, refused):
    class Stop(Quiet):
        def on_step(self, step, loss, reading):
            if step == AT - 2:
                raise KeyboardInterrupt

    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train_run(out, runs.corpus(), STEPS, faults=[PLACED[name]], watcher=Stop(), **SETTINGS)
    before, said = runs.digest(out), runs.here("train", "--out", out, "--resume")
    if refused:
        assert f"before fault {name}@{AT} was planted, and a resume can't plant it" in said.sentence
        assert runs.digest(out) == before
        (out / "planted.json").unlink()
        said = runs.here("train", "--out", out, "--resume")
        assert logged(out) == logged(planted_read_only(""))
    else:  # part of the recipe
        assert logged(out) == logged(planted_read_only(PLACED[name]))
    assert said.code == 0, said.err


@pytest.mark.parametrize("name", ["weight-scaled", "lost-cursor"])
def test_a_resume_from_the_seam_takes_the_state_that_the_run_went_on_with(tmp_path, name):
    run = planted(PLACED[name], tmp_path)
    said = runs.here("train", "--out", run.path, "--resume", str(AT - 1), "--steps", STEPS)
    assert said.code == 0, said.err
    lines = [line for line in runs.lines(run.path) if line["type"] == "step" and line["segment"] == 2]
    assert [line["state"] for line in lines] == [line["state"] for line in logged(run.path)[AT - 1 : STEPS]]
    assert open_run(run.path).seam(2) == []  # the damage is that of segment 1
    assert all(trace.exact for trace in replayed(open_run(run.path), range(2, STEPS + 1), segment=2))


# --------------------------------------------------------------------------------------------------------------- seams


@pytest.mark.parametrize("name", STATE)
def test_an_edited_state_stands_as_a_segment_with_a_seam(name):
    run = open_run(planted_read_only(PLACED[name]))
    assert [(entry.start, entry.parent) for entry in run.manifest.segments] == [(0, None), (AT - 1, 0)]
    assert {(AT - 1, 0), (AT - 1, 1)} <= set(run.checkpoints)  # what was left, and what went on
    assert run.seam(1) == label(PLACED[name])["culprit"]["lanes"]
    (notice,) = [text for text in run.plan(AT).notices if "segment 1 went on from another state" in text]
    assert all(lane in notice for lane in run.seam(1))
    assert run.plan(AT).checkpoint == (AT - 1, 1) and run.plan(AT - 1).checkpoint == (0, 0)


@pytest.mark.parametrize("name", DESCRIBED + TRANSIENT)
def test_other_faults_open_no_segment(name):
    assert len(open_run(planted_read_only(PLACED[name])).manifest.segments) == 1


def test_a_flipped_bit_is_one_bit(tmp_path):
    from workbench.checkpoints import checkpoint_reader

    for name, part, path in (
        ("weight-bit", "weights", "blocks.0.mlp.up.weight"),
        ("m-bit", "optimizer", "blocks.0.mlp.up.weight.m"),
        ("v-bit", "optimizer", "blocks.0.mlp.up.weight.v"),
    ):
        fault = f"{name}@{AT}:path=blocks.0.mlp.up.weight,index=77,bit=12"
        folder = planted_read_only(fault) / "checkpoints"
        left, edited = (getattr(checkpoint_reader.read(folder, AT - 1, segment), part) for segment in (0, 1))
        differ = {key for key in left if np.array(left[key]).tobytes() != np.array(edited[key]).tobytes()}
        assert differ == {path}
        words = [np.array(state[path]).reshape(-1).view(np.uint32) for state in (left, edited)]
        assert (words[0] ^ words[1]).tolist() == [0] * 77 + [1 << 12] + [0] * (words[0].size - 78)
        assert label(fault)["expected_verdict"] == "no-spike"  # below the exponent


def test_faults_of_a_compiled_run_whose_batches_are_drawn_ahead(tmp_path):
    """Edits reach the containers that the compiled step has captured; a moved cursor drops what was drawn ahead."""
    faults = [f"lost-cursor@{AT}", f"m-bit@{AT}", f"gradient-bit@{STEPS - 1}"]
    settings = SETTINGS | {"compile_": True, "prefetch": 2, "save_every": 2}
    run = train_run(tmp_path / "run", runs.corpus(), STEPS, faults=faults, **settings)
    assert run.seam(1) == ["adam_m", "cursor"]
    traces = replayed(run, range(AT - 1, STEPS + 1))
    # The last step starts from the checkpoint that the damaged one before it left.
    assert [trace.exact for trace in traces] == [True, True, True, False, True]
    assert traces[1].record.batch_hash == logged(run.path)[0]["batch_hash"]


def test_a_bit_of_the_very_first_gradient(tmp_path):
    run = train_run(tmp_path / "run", runs.corpus(), 2, faults=["gradient-bit@1"], **SETTINGS)
    assert run.manifest.layers == open_run(planted_read_only("")).manifest.layers
    assert not replayed(run, 1).exact


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_of_sixteen_bit_numbers(tmp_path, dtype):
    faults = ["weight-bit@2", "gradient-bit@3"]
    run = train_run(tmp_path / "run", runs.corpus(), 3, faults=faults, **(SETTINGS | {"dtype": dtype}))
    labels = json.loads((run.path / "planted.json").read_text())
    assert [found["culprit"]["bit"] for found in labels] == [14, 14]  # the highest of the exponent
    assert [trace.exact for trace in replayed(run, range(1, 4))] == [True, True, False]


def test_several_edits_before_one_step_make_one_seam(tmp_path):
    faults = [f"v-scaled@{AT}:factor=0.5", f"weight-scaled@{AT}", f"garbage@{AT}:rows=1", f"log-bit@{AT + 1}"]
    run = train_run(tmp_path / "run", runs.corpus(), STEPS, faults=faults, **SETTINGS)
    assert run.seam(1) == ["weights", "adam_v"] and len(run.manifest.segments) == 2
    assert [trace.exact for trace in replayed(run, range(AT - 1, AT + 2))] == [True, True, False]
