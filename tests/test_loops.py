"""Loops of other people's, which become replayable by a few changed lines: each counted, each step replayed exactly."""

import difflib
import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest
from helpers import python

import workbench as wb
from workbench.errors import ExperimentError

LOOPS = Path(__file__).parent / "loops"
NAMES = ["compiled", "inline"]


def changed_lines(before, after):
    """Lines that were replaced, removed or added; empty ones don't count."""
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    return sum(
        max(sum(bool(line.strip()) for line in lines) for lines in (before[a:b], after[c:d]))
        for tag, a, b, c, d in matcher.get_opcodes()
        if tag != "equal"
    )


@pytest.fixture(scope="module", params=NAMES)
def recorded(request, tmp_path_factory):
    """The name of a loop, and the run that it recorded in a process of its own."""
    path = tmp_path_factory.mktemp(request.param) / "run"
    done = python(LOOPS / f"{request.param}_after.py", path)
    assert done.returncode == 0, done.stderr
    return request.param, path, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_at_most_five_lines_are_changed(name):
    before, after = ((LOOPS / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after"))
    assert 35 <= sum(bool(line.strip()) for line in before) <= 45
    assert not any("wb" in line for line in before) and 1 <= changed_lines(before, after) <= 5


def test_changed_lines_are_counted():
    text = ["a", "b", "c", "d"]
    assert [changed_lines(text, other) for other in (text, ["a", "x", "c", "d"], ["a", "d"], [*text, "", "e"])] == [
        0,
        1,
        2,
        1,
    ]


def test_every_step_replays_exactly_in_a_fresh_process(recorded):
    name, path, _ = recorded
    last = wb.open_run(path).telemetry.last_step()
    script = LOOPS / f"{name}_after.py"
    done = python(
        "-m", "workbench", "replay", path, "--step", f"1..{last}", "--factory", script, "--no-probe", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert last >= 12 and len(found) == last and all(trace["exact"] for trace in found)


def test_the_loop_prints_and_trains_what_it_did_without(recorded, tmp_path):
    name, path, printed = recorded
    done = python(LOOPS / f"{name}_before.py", tmp_path / "plain")
    assert done.returncode == 0, done.stderr
    assert done.stdout == printed and "loss" in printed
    one, other = mx.load(str(tmp_path / "plain.npz")), mx.load(f"{path}.npz")
    assert one.keys() == other.keys() and all(mx.array_equal(one[key], other[key]).item() for key in one)


def test_a_script_is_run_only_by_name(recorded):
    name, path, _ = recorded
    run = wb.open_run(path)
    with pytest.raises(ExperimentError, match=r"named no factory.*or --factory \S+_after\.py"):
        run.replay(2)
    assert run.manifest.rebuild["script"] == str(LOOPS / f"{name}_after.py")
    assert run.replay(2, factory=str(LOOPS / f"{name}_after.py"), fresh_process=False).exact


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "can't be run here: .*No such file"),
        ("x = (", "can't be run here: .*never closed"),
        ("print(1)", "ended without making a Recorder"),
        ("import sys\nsys.exit(3)", "before it made a Recorder: SystemExit: 3"),
        ("1 / 0", "before it made a Recorder: ZeroDivisionError"),
    ],
)
def test_a_script_that_gives_no_experiment_is_named(recorded, tmp_path, text, words):
    script = tmp_path / "script.py"
    if text is not None:
        script.write_text(text)
    with pytest.raises(ExperimentError, match=words):
        wb.open_run(recorded[1]).replay(2, factory=str(script))


def test_a_script_that_records_something_else_is_another_experiment(recorded, tmp_path):
    name, path, _ = recorded
    other = next(one for one in NAMES if one != name)
    shutil.copy(LOOPS / f"{other}_after.py", tmp_path / "other.py")
    with pytest.raises(ExperimentError, match="this is not the experiment"):
        wb.open_run(path).replay(2, factory=str(tmp_path / "other.py"))
    assert not (tmp_path / "run").exists()
