"""A run in a folder that can't be written: traces go to the user's cache folder, are found there, and say so."""

import json
import os
import shutil
from pathlib import Path

import pytest
import runs
from helpers import tree

import workbench as wb
from workbench import traces
from workbench.errors import ReplayError
from workbench.panel import Panel


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The run; only its folder is read-only. (To a test that runs as root the file system itself refuses nothing.)"""
    folder, real = runs.recorded(tmp_path), os.access
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def access(path, mode):
        return real(path, mode) and not (mode & os.W_OK and Path(path).is_relative_to(folder))

    monkeypatch.setattr(os, "access", access)
    return wb.open_run(folder)


def test_what_is_found_out_goes_to_the_cache_and_is_found_there(run, tmp_path):
    before = tree(run.path)
    trace = run.replay(6)
    cache = traces.traces_folder(run, None)[0]
    assert trace.exact and trace.path == cache / "00000006.json"
    assert any(f"{run.path} is read-only; the trace is in {cache}" in notice for notice in trace.notices)
    run.whatif(6, "lr=0.5x", next_steps=1)
    verdict = run.autopsy(6)
    assert tree(run.path) == before
    again = wb.open_run(run.path)
    assert again.trace(6).record == trace.record and again.verdict(6).verdict == verdict.verdict
    assert again.batch_facts(6)["loss"].notna().any()  # those of the trace
    panel = Panel(run=str(run.path))
    panel.step.value = 6
    assert panel.trace.record == trace.record and "Step 6 is exact" in panel.badges.value
    panel.view.value = "Cause"
    assert panel.last_error is None and "lr=0.5x" in panel.experiments.value
    said = runs.here("replay", run.path, "--step", 7)
    assert said.code == 0 and str(cache / "00000007.json") in said.out


def test_a_trace_in_the_run_counts_where_the_cache_has_none(run, tmp_path):
    shutil.move(run.replay(6).path, tmp_path / "trace.json")
    (run.path / "traces").mkdir()
    shutil.move(tmp_path / "trace.json", run.path / "traces" / "00000006.json")
    assert run.trace(6).path == run.path / "traces" / "00000006.json"
    assert run.replay(6).path.is_relative_to(tmp_path / "cache")
    assert run.trace(6).path.is_relative_to(tmp_path / "cache")  # the newer one


@pytest.mark.parametrize("identity", ["../../../elsewhere", "/absolute", "..", "a/b", "x" * 300, ""])
def test_a_run_from_elsewhere_names_no_place_outside_the_cache(run, tmp_path, identity):
    run.manifest.run = identity
    folder = traces.traces_folder(run, None)[0]
    assert folder.resolve().parent == (tmp_path / "cache" / "spike-workbench" / "traces").resolve()
    assert len(folder.name) == 64


def test_a_cache_that_can_not_be_written_either_is_a_sentence(run, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    said = "nothing can be written to .*; name another folder with --trace-dir"
    for ask in (lambda: run.replay(6), lambda: run.autopsy(6), lambda: run.whatif(6, "lr=0.5x", next_steps=1)):
        with pytest.raises(ReplayError, match=said):
            ask()
    trace = run.replay(6, trace_dir=tmp_path / "mine")
    assert trace.exact and json.loads((tmp_path / "mine" / "00000006.json").read_text())["step"] == 6
