"""The first hour with a loop of one's own: going on or beginning, what is done again, where a name comes from, and that
a long command is heard where there is no terminal."""

import logging
from pathlib import Path

import pytest
import runs

from workbench import Recorder, open_run
from workbench.commands import progress
from workbench.errors import ExperimentError
from workbench.manifest import DataFile
from workbench.recorded.planted import explained


def record(path, steps, stop=None, save_every=100, **settings):
    """Records; `stop`: no `with`, and an interrupt after that step, as of a script that calls close() at its end."""
    job = runs.build()
    recorder = Recorder(path, *runs.parts(job), compile=False, spikes=None, save_every=save_every, **settings)
    for batch in recorder.batches(steps):
        recorder.step(batch)
        if recorder.step_number == stop:
            recorder._out.close()  # as the end of the process does
            return
    recorder.close()


# ------------------------------------------------------------------------------------------------ beginning or going on


def test_auto_begins_a_run_and_goes_on_with_it(tmp_path, caplog):
    path = tmp_path / "run"
    path.mkdir()  # a folder alone is no run
    record(path, 3, resume="auto")
    record(path, 6, resume="auto")
    run = open_run(path)
    assert run.last_step == 6 and len(run.manifest.segments) == 1 and not caplog.records
    assert run.replay(5, experiment=runs.build(), with_probe=False).exact


def test_another_word_is_refused(tmp_path):
    with pytest.raises(ExperimentError, match="resume is 'always'; expected True, False, \"auto\""):
        record(tmp_path / "run", 3, resume="always")


@pytest.mark.parametrize(("save_every", "said"), [(100, "steps 1 to 7 are"), (6, "step 7 is"), (7, None)])
def test_a_resume_says_which_steps_are_performed_again(tmp_path, caplog, save_every, said):
    record(tmp_path / "run", 12, stop=7, save_every=save_every)
    with caplog.at_level(logging.WARNING, "workbench"):
        record(tmp_path / "run", 12, resume="auto", save_every=save_every)
    found = [one.getMessage() for one in caplog.records if "performed again" in one.getMessage()]
    assert [f"its last one: {said} performed again, in a new segment" in one for one in found] == [True] * bool(said)
    assert all(f"save_every steps ({save_every} here)" in one for one in found)


def test_a_checkpoint_that_was_asked_for_needs_no_word(tmp_path, caplog):
    record(tmp_path / "run", 6, save_every=2)
    record(tmp_path / "run", 7, resume=2, save_every=2)
    assert not caplog.records


# ------------------------------------------------------------------------------------------------------- other programs


def test_a_source_that_a_fault_planted_is_explained():
    manifest = open_run(runs.recorded_read_only()).manifest
    manifest.data = [*manifest.data, DataFile("sources/1.bytes", 4, "0" * 64)]
    assert explained(manifest, ["corpus.txt", None, float("nan")]) is None
    assert explained(manifest, ["corpus.txt", "1.bytes"]).startswith("1.bytes: no file of yours, but what --fault ")
    manifest.data = [DataFile("/home/me/1.bytes", 4, "0" * 64)]
    assert explained(manifest, ["1.bytes"]) is None


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(progress, "EACH", 0.0)
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)


def test_without_a_terminal_a_long_command_says_how_far_it_is(hurried, capsys):
    with progress.doing("restoring") as report:
        report(3, 10, "step 3 of 10, rolling forward")
        report(0, 0, "thinking")
    assert capsys.readouterr().err.splitlines() == ["step 3 of 10, rolling forward (3 of 10)", "thinking"]


def test_what_is_soon_done_says_nothing(capsys, monkeypatch):
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    with progress.doing("restoring") as report:
        report(3, 10, "step 3")
    assert capsys.readouterr().err == ""


def test_nor_does_one_for_a_script_or_in_a_notebook(hurried, monkeypatch):
    path = runs.recorded_read_only()
    said = runs.here("verify", path)
    assert said.code == 0 and "telemetry" in said.err
    for arguments in (("--json",), ()):
        if not arguments:
            monkeypatch.setenv("JPY_PARENT_PID", "1")
        assert "telemetry (" not in runs.here("verify", path, *arguments).err


def test_training_says_so_too(hurried, capsys):
    with progress.TrainingProgress(4) as watcher:
        watcher.on_step(1, 2.5, None)
    assert "loss 2.5000, " in capsys.readouterr().err


@pytest.mark.parametrize("step", [3, 4])  # 4 has a checkpoint, which is one item more
def test_replay_sweep_and_verify_compare_as_many_items(tmp_path, step):
    run = open_run(runs.recorded(tmp_path))
    compared = sum(item.verdict == "exact" for item in run.replay(step, with_probe=False).record.items.values())
    assert run.replay_many([step], workers=0)["compared"].tolist() == [compared]
    (check,) = [one for one in run.verify(replay=12).checks if one.kind == "step" and one.what == f"{step}, segment 0"]
    assert check.detail.startswith(f"all {compared} recorded items")


def test_a_report_replays_first_what_was_not_replayed_if_the_code_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(runs.__file__).parent))  # for the process that performs it once more
    record(tmp_path / "run", 6)
    out = tmp_path / "step.html"
    assert runs.here("report", tmp_path / "run", "--step", 5, "--out", out).code == 0
    assert "Not replayed" in out.read_text()
    said = runs.here("report", tmp_path / "run", "--step", 5, "--out", out, "--factory", "runs:build")
    assert said.code == 0 and "Not replayed" not in out.read_text() and "faithful" in out.read_text()
    trace = open_run(tmp_path / "run").trace(5).path
    before = trace.stat().st_mtime_ns
    assert runs.here("report", tmp_path / "run", "--step", 5, "--out", out, "--factory", "runs:build").code == 0
    assert trace.stat().st_mtime_ns == before
