"""The record of an autopsy: strict JSON by its own schema, tables, sentences, and pages that nothing breaks out of."""

import io

import jsonschema
import msgspec
import numpy as np
import pytest
import runs
from rich.console import Console
from rich.table import Table

from workbench.cause.verdict_tables import verdict_parts
from workbench.errors import WorkbenchError
from workbench.verdict import (
    CAUSES,
    Evidence,
    Numbers,
    Outlier,
    Refuted,
    Remedy,
    Unchecked,
    Verdict,
    read,
    schema,
    write,
)

EVIL = "<script>alert(1)</script>"


def verdict(**changed):
    numbers = {"loss": 2.7, "loss_untouched": np.nan, "grad_norm": None, "grad_norm_untouched": np.inf}
    numbers |= {"next_mean": 2.6, "next_mean_untouched": 2.6, "next_max": 2.8, "next_max_untouched": np.nan}
    known = {
        **{"run": "ab12", "name": "shakespeare", "step": 4220, "segment": 1, "began": 4218, "flagged": "loss_z"},
        **{"exact": True, "first_difference": None, "verdict": "data", "reason": f"Row 3 {EVIL}."},
        **{"culprit": {"step": 4218, "rows": [{"row": 3}]}, "would_refute": f"nothing {EVIL}"},
        "evidence": [
            Evidence(name="two by two", sentence=f"a {EVIL}", supports="data", numbers=Numbers.of({"spike": np.nan})),
            Evidence(name="words", sentence="no number", supports="unknown"),
        ],
        "refuted": [Refuted(cause="schedule", sentence=f"b {EVIL}")],
        "unchecked": [Unchecked(what=f"c {EVIL}", why="no time")],
        "outliers": [Outlier(name="row", sentence=f"d {EVIL}")],
        "remedies": [
            Remedy(change="lr=0.1x", state=4217, numbers=Numbers.of(numbers), steps=[4219], helps=False),
            Remedy(
                change=f"batch=skip {EVIL}",
                state=4217,
                numbers=Numbers.of(numbers),
                steps=[4219],
                helps=True,
                command="workbench train --fork [bold]x",
                note="a note",
            ),
        ],
        **{"seconds": 1.5, "step_times": 33.0, "checkpoint": 4200, "rolled": 17, "environment": {"mlx": "0.32.4"}},
        **{"environment_differences": [], "notices": [f"e {EVIL}"]},
    }
    return Verdict(**(known | changed))


def test_the_json_is_strict_and_by_its_schema():
    document = runs.strict(verdict().to_json())
    jsonschema.validate(document, schema())
    keys = {"verdict", "culprit", "evidence", "refuted", "unchecked", "seconds", "step", "remedies", "step_times"}
    assert keys <= document.keys()
    spike = document["evidence"][0]["numbers"]
    assert spike == {"values": {"spike": None}, "bits": {"spike": "0x7fc00000"}}


@pytest.mark.parametrize("field", ["verdict", "step", "evidence"])
def test_the_schema_refuses_what_is_no_verdict(field):
    document = runs.strict(verdict().to_json()) | {field: {"something": "else"}}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, schema())


def test_every_cause_can_be_said_and_nothing_else():
    for cause in CAUSES:
        assert msgspec.json.decode(verdict(verdict=cause).to_json(), type=Verdict).verdict == cause
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(verdict(verdict="the weather").to_json(), type=Verdict)


def test_numbers_keep_kinds_apart():
    numbers = Numbers.of({"one": 1, "nan": np.nan, "high": np.inf, "none": None, "float": np.float32(0.5)})
    assert numbers["one"] == 1 and numbers["float"] == 0.5 and numbers["high"] == np.inf
    assert np.isnan(numbers["nan"]) and numbers["none"] is None and numbers.values["nan"] is None
    with pytest.raises(KeyError):
        numbers["other"]


def test_a_file_is_read_back_as_it_was(tmp_path):
    path = write(verdict(), tmp_path / "traces")
    assert path.name == "00004220.s1.autopsy.json" and read(path) == verdict()
    assert write(verdict(segment=0), tmp_path).name == "00004220.autopsy.json"


def test_a_damaged_file_is_refused(tmp_path):
    path = write(verdict(), tmp_path)
    for damage in (b"{}", path.read_bytes()[:-20], b"[" * 10**5):
        path.write_bytes(damage)
        with pytest.raises(WorkbenchError, match="is not an autopsy of version 1"):
            read(path)
    with pytest.raises(WorkbenchError, match="can't be read"):
        read(tmp_path / "none.json")


def test_the_tables():
    found = verdict()
    frame = found.evidence_table
    assert frame["evidence"].tolist() == ["two by two", "words"] and frame["number"].tolist() == ["spike", ""]
    table = found.remedy_table
    assert table["change"].tolist() == ["lr=0.1x", f"batch=skip {EVIL}"] and table["helps"].tolist() == [False, True]
    assert table["loss"].tolist() == [2.7, 2.7] and np.isinf(table["grad_norm_untouched"]).all()
    assert table["grad_norm"].isna().all() and len(verdict(remedies=[]).remedy_table) == 0
    assert found.remedy.change.startswith("batch=skip")
    assert verdict(remedies=found.remedies[:1]).remedy is None


def test_no_text_of_a_run_becomes_a_page():
    page = verdict()._repr_html_()
    assert EVIL not in page and page.count("&lt;script&gt;") >= 7


def test_the_sentence_and_the_repr():
    assert verdict().sentence() == f"Step 4220: data. Row 3 {EVIL}."
    unlike = verdict(environment_differences=["mlx: recorded 1, here 2"])
    assert "informational" in unlike.sentence()
    assert repr(verdict()).startswith("Verdict(step=4220, verdict='data'")
    assert "not exact" not in verdict().footer() and "unverified" in verdict(exact=False).footer()


def shown(found):
    console = Console(width=200, file=io.StringIO())
    for part in verdict_parts(found):
        console.print(part, soft_wrap=True, markup=False)
    return console.file.getvalue()


def test_of_which_step_it_is_stands_directly_under_the_headline():
    notice = "step 4220 stands in the spike that began at step 4218: that one is looked at"
    found = verdict(notices=[notice, "another"])
    head, below, *rest = shown(found).splitlines()
    assert head.startswith("Step 4220: data.") and "a spike that began at step 4,218" in below
    assert not any("stands in" in line for line in rest) and any("another" in line for line in rest)
    page = found._repr_html_()
    assert page.count("stands in a spike that began") == 1 and notice not in page
    assert "stands in" not in shown(verdict(step=4218))


def test_where_nothing_that_was_tried_helps_the_answer_ends_with_what_to_do():
    useless = verdict().remedies[:1]
    for said in (shown(verdict(remedies=useless)), verdict(remedies=useless)._repr_html_()):
        assert "Nothing that was tried helps (lr=0.1x). Fork from state 4217" in said
    assert "with another beta2" in shown(verdict(remedies=useless, culprit={"step": 4218, "option": "beta2"}))
    assert "No way out was tried. Fork from state 4217" in shown(verdict(remedies=[]))
    for other in (verdict(), verdict(verdict="no-spike", remedies=[]), verdict(exact=False, remedies=[])):
        assert "Fork from state" not in shown(other)


def test_the_terminal_shows_all_of_it_and_a_command_unbroken():
    console = Console(width=60, file=io.StringIO())
    for part in verdict_parts(verdict()):
        console.print(part, soft_wrap=isinstance(part, str), markup=False)
    said = console.file.getvalue()
    for word in ("evidence", "refuted", "not checked", "stands out", "notice", "a note", "Tried"):
        assert word in said
    assert "workbench train --fork [bold]x" in said
    table = next(part for part in verdict_parts(verdict()) if isinstance(part, Table))
    for width in (60, 80, 120):
        console = Console(width=width, file=io.StringIO())
        console.print(table)
        lines = console.file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        for name in ("untouched", *(one.change.split()[0] for one in verdict().remedies)):
            assert any(name in line for line in lines), (width, name)
