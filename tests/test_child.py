"""The process that works for a notebook: the same results as here, and nothing left when it is ended."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
import psutil
import pytest
import runs

from workbench.errors import EnvironmentMismatch, ExperimentError, ReplayError
from workbench.interventions import whatif
from workbench.record import Recorder
from workbench.run import Run
from workbench.trace import Trace
from workbench.work import child, messages
from workbench.work.child import Child, Ended


@pytest.fixture(scope="module")
def other():
    """One process for most tests."""
    process = Child()
    yield process
    process.end()


@pytest.fixture
def run(tmp_path) -> Path:
    return runs.recorded(tmp_path)


def quietly(done: int, total: int, what: str) -> None:
    pass


def ask(other: Child, do: str, run: Path | None = None, step: int = 6, **options):
    request = {"do": do, "run": None if run is None else str(run), "step": step, "segment": 0, "options": options}
    return other.ask(request, quietly)


def same_record(ours, theirs) -> bool:
    """But for the time that it took."""
    return msgspec.structs.replace(ours, wall_s=0.0) == msgspec.structs.replace(theirs, wall_s=0.0)


# ---- the same results


def test_a_replay_is_the_one_that_is_made_here(other, run):
    told = []
    request = {"do": "replay", "run": str(run), "step": 6, "segment": 0, "options": {}}
    theirs = other.ask(request, lambda *what: told.append(what))
    ours = Run(run).replay(6)
    assert isinstance(theirs, Trace) and theirs.exact and same_record(ours.record, theirs.record)
    assert theirs.path == ours.path and theirs.notices == ours.notices
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(ours.batch, theirs.batch, strict=True))
    assert told[0][2].startswith("step 5 of 6, rolling forward") and {total for _, total, _ in told} == {4}


def test_a_context_is_the_one_that_is_made_here(other, run):
    theirs, ours = ask(other, "context", run, 7), Run(run).context(7)
    assert theirs.steps == ours.steps and theirs.notices == ours.notices and theirs.flagged == ours.flagged
    pd.testing.assert_frame_equal(theirs.frame, ours.frame)


def test_a_verdict_is_the_one_that_is_made_here(other, run):
    theirs, ours = ask(other, "autopsy", run), Run(run).autopsy(6)
    assert msgspec.structs.replace(theirs, seconds=0.0) == msgspec.structs.replace(ours, seconds=0.0)


def test_experiments_in_a_held_scene_are_those_of_a_fresh_one(other, run):
    changes = [["lr=0.5x"], ["drop-row=1", "v=max"], ["lr=0.5x"], ["state=4"]]
    for change in changes:
        theirs, ours = ask(other, "whatif", run, changes=change, next_steps=2), Run(run).whatif(6, change, next_steps=2)
        pd.testing.assert_frame_equal(theirs, ours)
        assert theirs.attrs == ours.attrs


def test_a_held_scene_is_rolled_forward_once(other, run):
    def rolled(**options):
        told = []
        request = {"do": "whatif", "run": str(run), "step": 7, "segment": 0, "options": {"next_steps": 0} | options}
        other.ask(request, lambda done, total, what: told.append(what))
        return sum("rolling forward" in what for what in told)

    assert rolled(changes=["lr=0.5x"]) > 0 and rolled(changes=["clip=off"]) == 0
    assert rolled(changes=["state=4"]) > 0  # it needs an earlier state than the held scene has
    assert rolled(changes=["lr=0.5x"], other_environment=True) > 0  # another request


def test_environment_and_doctor(other, run):
    from workbench.environment import numeric_environment

    assert ask(other, "environment", run) == msgspec.json.decode(msgspec.json.encode(numeric_environment()))
    report = ask(other, "doctor", run)
    assert report.run == "run" and report.self_test.found == report.self_test.planted and report.sentence


def test_what_is_not_finite_crosses(run):
    record = Run(run).replay(6).record
    record.rows[0].nonfinite, record.token_loss[0][0] = 3, None
    odd = Trace(record, None, (np.array([[np.nan, np.inf]], np.float32), np.zeros((0, 2), np.int16)), ["a “notice”"])
    wire = msgspec.json.encode(messages.pack(odd))
    msgspec.json.decode(wire)
    back = messages.unpack("replay", msgspec.json.decode(wire))
    assert back.record == record and back.path is None and back.notices == odd.notices
    assert [array.tobytes() for array in back.batch] == [array.tobytes() for array in odd.batch]
    assert [(array.dtype, array.shape) for array in back.batch] == [(array.dtype, array.shape) for array in odd.batch]


# ---- errors, and what is printed


def test_errors_are_what_they_were(other, run):
    with pytest.raises(ReplayError, match="step 99 is not in the telemetry"):
        ask(other, "replay", run, 99)
    runs.edit_json(run / "run.json", lambda m: m["segments"][0]["environment"].update(mlx="0.0.1"))
    with pytest.raises(EnvironmentMismatch, match="mlx: recorded 0.0.1"):
        ask(other, "replay", run)
    with pytest.raises(messages.WorkError, match="nonsense") as raised:
        ask(other, "nonsense", run)
    assert raised.value.name == "AttributeError" and "Traceback" in raised.value.details
    assert ask(other, "replay", run, other_environment=True).step == 6  # it is still there


def test_what_exists_only_here_is_refused(run):
    fresh = Child()
    with pytest.raises(ExperimentError, match="exists only in this process"):
        ask(fresh, "replay", run, experiment=object())
    fresh.end()


def test_arguments_may_be_paths_and_numpys_numbers(other, run, tmp_path):
    trace = ask(other, "replay", run, np.int64(6), trace_dir=tmp_path / "elsewhere", checkpoint=np.int32(4))
    assert trace.path == tmp_path / "elsewhere" / "00000006.json" and not (run / "traces").exists()


def test_a_factory_may_print_and_exit(tmp_path, monkeypatch, capfd):
    experiment = runs.build()
    with Recorder(
        tmp_path / "mine", *runs.parts(experiment), compile=False, save_every=2, factory="talkative:build"
    ) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    (tmp_path / "talkative.py").write_text(
        "import os, sys, warnings, runs\ndef build():\n    print('hello')\n    os.system('echo from below')\n"
        "    warnings.warn('careful')\n    return runs.build()\ndef leave():\n    sys.exit('gone')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    fresh = Child()
    assert ask(fresh, "replay", tmp_path / "mine", 2, factory="talkative:build").exact
    said = fresh.said()
    assert "hello" in said and "from below" in said and "careful" in said and fresh.said() == ""
    runs.edit_json(tmp_path / "mine" / "run.json", lambda m: m["rebuild"].update(factory="talkative:leave"))
    with pytest.raises(Exception, match="gone"):
        ask(fresh, "replay", tmp_path / "mine", 2, factory="talkative:leave")
    assert capfd.readouterr() == ("", "")
    fresh.end()


# ---- the end


def alive(number: int) -> bool:
    """Not so one that has ended and was not waited for: in a container perhaps nobody does."""
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ended_in_the_middle_it_leaves_nothing(run, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # not everybody's
    os.mkdir(tempfile.gettempdir())
    fresh = Child()
    assert os.listdir(tempfile.gettempdir()) != []

    def end(done, total, what):
        fresh.end()

    with pytest.raises(Ended, match="signal 15"):
        fresh.ask({"do": "replay", "run": str(run), "step": 6, "segment": 0, "options": {}}, end)
    assert not alive(fresh.process) and not fresh.usable and os.listdir(tempfile.gettempdir()) == []
    assert not (run / "traces").exists()
    fresh.end()  # again, harmlessly


def test_half_a_trace_is_removed_and_nothing_else(run):
    (run / "traces").mkdir()
    whole = run / "traces" / "00000005.json"
    whole.write_text("a trace")
    fresh = Child()
    half, others = (run / "traces" / f".00000006.{number}.tmp.json" for number in (fresh.process, 1))
    half.write_text("{")
    others.write_text("{")

    def end(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # of the cell that waits
        fresh.ask({"do": "replay", "run": str(run), "step": 6, "segment": 0, "options": {}}, end)
    assert not half.exists() and others.exists() and whole.read_text() == "a trace" and not alive(fresh.process)


def test_what_it_has_started_ends_with_it(tmp_path, run):
    """A fresh process replays the step again; it is in the middle of that."""
    fresh, started = Child(), []

    def end(done, total, what):
        if what.endswith("in a fresh process"):
            processes = subprocess.run(["ps", "-Ao", "pid,pgid"], capture_output=True, text=True).stdout
            for line in processes.splitlines()[1:]:
                number, group = map(int, line.split())
                if group == fresh.process and number != group:
                    started.append(number)
            if started:
                fresh.end()

    request = {"do": "replay", "run": str(run), "step": 6, "segment": 0, "options": {"fresh_process": True}}
    with pytest.raises(Ended):
        fresh.ask(request, end)
    deadline = time.monotonic() + 20  # whoever adopts orphans has to notice
    while any(alive(number) for number in started) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert started and not any(alive(number) for number in started)


def test_it_ends_with_the_notebook(run):
    """Even where that is killed."""
    code = (
        "import os, sys, signal\nfrom workbench.work.child import present\nother = present()\n"
        f"other.ask({{'do': 'replay', 'run': {str(run)!r}, 'step': 6, 'segment': 0, 'options': {{}}}}, print)\n"
        "print(other.process, other._folder, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    number, folder = done.stdout.splitlines()[-1].split()
    deadline = time.monotonic() + 20
    while (alive(int(number)) or Path(folder).exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not alive(int(number)) and not Path(folder).exists()


def test_a_process_that_ends_by_itself_takes_it_along(run):
    code = (
        "from workbench.work.child import present\nother = present()\n"
        f"other.ask({{'do': 'environment', 'run': {str(run)!r}}}, print)\nprint(other.process, other._folder)"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    number, folder = done.stdout.split()
    assert not alive(int(number)) and not Path(folder).exists()


def test_variables_and_path_are_the_notebooks_at_that_moment(other, run, monkeypatch, tmp_path):
    source = "import os, runs\ndef build():\n    print(os.environ['DATA'])\n    return runs.build()"
    (tmp_path / "reading.py").write_text(source)
    with Recorder(tmp_path / "mine", *runs.parts(runs.build()), compile=False, factory="reading:build") as recorder:
        recorder.step(next(recorder.batches(1)))
    monkeypatch.syspath_prepend(tmp_path)
    for value in ("here", "there"):
        monkeypatch.setenv("DATA", value)
        other.said()
        assert ask(other, "replay", tmp_path / "mine", 1, factory="reading:build").exact
        assert other.said().split()[0] == value


def test_another_one_where_a_variable_was_changed(monkeypatch):
    first, before = child.present(), child.surroundings()
    assert child.present() is first
    monkeypatch.setenv("MLX_ENABLE_TF32", "0")
    second = child.present()
    assert second is not first and not alive(first.process) and child.surroundings() != before
    assert ask(second, "environment")["variables"]["MLX_ENABLE_TF32"] == "0"
    monkeypatch.undo()
    assert child.surroundings() == before
    child.end()


def test_a_scene_that_nobody_asks_about_is_let_go(run, monkeypatch):
    from workbench.work import serving

    held, opened = serving.Held(), Run(run)
    options = {"segment": 0, "factory": None}
    scene = held.scene(opened, 6, 0, options, quietly)
    assert held.scene(opened, 6, 0, options, quietly) is scene
    held.let_go()
    again = held.scene(opened, 6, 0, options, quietly)
    assert again is not scene and again.exact
    with pytest.raises(Exception, match="no change was given"):
        serving._experiments(held, opened, 6, {"changes": [], "progress": quietly, "segment": 0})
    assert whatif  # the module whose words they are
