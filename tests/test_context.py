"""`workbench replay --context` and `Run.context`: one roll-forward, tables, JSON, and what is refused."""

import json

import pytest
import runs

from workbench import open_run
from workbench.errors import ReplayError


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return runs.recorded(tmp_path_factory.mktemp("context"))


def test_the_command_prints_the_trace_and_the_tables(path):
    said = runs.here("replay", path, "--step", 11, "--context", 8)
    assert said.code == 0 and "Step 11 is exact" in said.out
    assert "numbers stand beyond 6 robust deviations" in " ".join(said.out.split())
    assert [file.name for file in (path / "traces").iterdir()] == ["00000011.json"]


def test_json_has_scores_and_onset_beside_the_trace(path):
    document = runs.strict(runs.here("replay", path, "--step", 11, "--context", 8, "--json").out)
    found = document["context"]
    assert document["step"] == 11 and found["steps"] == list(range(3, 12)) and found["notices"] == []
    assert set(found["scores"][0]) == {"layer", "path", "kind", "statistic", "value", "median", "z"}
    sizes = [abs(row["z"]) for row in found["scores"]]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 50
    assert all(abs(row["z"]) > 6 and 3 <= row["step"] <= 11 for row in found["onset"])
    assert document["updates"] and document["attention"] and document["logits"]["vocabulary"] == 256
    assert document["targets"] == 64 and document["first_nonfinite"] is None
    assert json.loads((path / "traces" / "00000011.json").read_text())["updates"] == document["updates"]


def test_fewer_neighbours_are_said(path):
    said = runs.here("replay", path, "--step", 3, "--context", 8)
    assert "step 3 has 2 steps before it on this way, not 8: these were used" in said.out
    assert "Step 3 can't be compared" in said.out


def test_the_way_leads_through_segments(tmp_path):
    found = open_run(runs.segmented(tmp_path)).context(10, before=4)
    assert [(trace.step, trace.record.segment) for trace in found.traces] == [(6, 0), (7, 0), (8, 0), (9, 1), (10, 1)]
    assert all(trace.exact for trace in found.traces)


def test_thinned_checkpoints_leave_fewer_neighbours(tmp_path):
    path = runs.recorded(tmp_path)
    for file in [*(path / "checkpoints").glob("00000000*"), *(path / "checkpoints").glob("00000004*")]:
        file.unlink()
    found = open_run(path).context(11)
    assert found.steps == [9, 10, 11] and found.notices[0] == (
        "step 11 has 2 steps before it on this way, not 8: these were used"
    )


def test_what_was_not_logged_is_not_called_another_step(tmp_path):
    path = runs.recorded(tmp_path)
    runs.edit_line(path, 9, state=...)
    runs.edit_line(path, 10, grad_norm=1.0, grad_norm_bits="0x3f800000")
    found = open_run(path).context(10, before=2)
    assert found.notices[-2:] == [
        "not replayed exactly, so not what the run computed: steps [10]",
        "the run logged too little to say whether this is what it computed: steps [9]",
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--step", "3..5", "--context", 2), "single --step"),
        (("--step", 5, "--context", 2, "--no-probe"), "the probe pass"),
        (("--step", 5, "--context", 0), "--context"),
        (("--step", 99, "--context", 2), "step 99 is not in the telemetry"),
    ],
)
def test_bad_input_is_a_sentence(path, options, words):
    assert words in runs.here("replay", path, *options).err
    assert runs.workbench("replay", path, *options).code == 2


def test_python_refuses_the_same(path):
    run = open_run(path)
    with pytest.raises(ReplayError, match="no single step"):
        run.context(range(3, 5))
    with pytest.raises(ReplayError, match="0 steps before step 5 are no neighbours"):
        run.context(5, before=0)
    with pytest.raises(ReplayError, match="has no checkpoint 9 before step"):
        run.context(8, checkpoint=9)
