"""Replaying a recorded run: what must agree before anything is computed, and what is left as it was."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest
import runs

from workbench import fresh_replay, kernel_cache, open_run, traces
from workbench.environment import numeric_environment
from workbench.errors import CheckpointError, DataError, EnvironmentMismatch, ReplayError, RunError
from workbench.fresh_replay import FreshProcess
from workbench.record import Recorder
from workbench.step import Stepper


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


def replay(path, step=6, **options):
    return open_run(path).replay(step, **({"with_probe": False} | options))


def refused(path, kind, *words, **options):
    """The replay is refused with a sentence, and nothing on disk has changed."""
    before = runs.digest(path)
    with pytest.raises(kind) as caught:
        replay(path, **options)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert runs.digest(path) == before
    return str(caught.value)


# --------------------------------------------------------------------------------------------------------------- exact


def test_every_step_of_a_run_replays_exactly_and_only_traces_are_added(path):
    before = runs.digest(path)
    traces = open_run(path).replay(range(1, 13), with_probe=False)
    assert [trace.step for trace in traces if trace.exact] == list(range(1, 13))
    after = runs.digest(path)
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == [f"traces/{step:08d}.json" for step in range(1, 13)]
    compared = {trace.step: trace.record.items["checkpoint"].verdict for trace in traces}
    assert {step for step, verdict in compared.items() if verdict == "exact"} == {4, 8, 12}


def test_another_process_recorded_it_so_none_need_be_started(path, monkeypatch):
    monkeypatch.setattr(FreshProcess, "start", lambda *a: pytest.fail("a process was started"))
    trace = replay(path)
    name, verdict, why = trace.badges()[0]
    assert (name, verdict) == ("repeatable", "exact") and "the recording process, another one, had them too" in why


def test_a_fresh_process_repeats_it(path):
    trace = replay(path, fresh_process=True)
    assert trace.exact and "and in a fresh process" in trace.badges()[0][2]
    assert [file.name for file in (path / "traces").iterdir()] == ["00000006.json"]  # the child's trace went elsewhere


def test_a_run_of_this_very_process_is_no_witness_so_a_fresh_one_is_started(tmp_path, monkeypatch):
    started = []
    real = FreshProcess.start

    def watched(self, first):
        started.append(first)
        real(self, first)

    assert runs.here("train", "--corpus", runs.corpus(), "--steps", 3, "--out", tmp_path / "run", *runs.FLAGS).code == 0
    monkeypatch.setattr(FreshProcess, "start", watched)
    traces = replay(tmp_path / "run", range(2, 4))
    assert started == [2] and ["and in a fresh process" in trace.badges()[0][2] for trace in traces] == [True, True]
    trace = replay(tmp_path / "run", 2, fresh_process=False)
    assert started == [2] and "another process was not tried" in trace.badges()[0][2]
    replay(tmp_path / "run", 2, repeat=False)
    assert started == [2]


def test_a_fresh_process_is_started_late_where_the_first_doubt_comes_late(path, monkeypatch):
    started = []
    real = FreshProcess.start
    monkeypatch.setattr(FreshProcess, "start", lambda self, first: started.append(first) or real(self, first))
    runs.edit_line(path, 6, grad_norm_bits="0x00000000", grad_norm=0.0)
    traces = replay(path, range(5, 8))
    assert started == [6] and [trace.exact for trace in traces] == [True, False, False]
    said = [trace.badges()[0][1:] for trace in traces]
    assert [verdict for verdict, _ in said] == ["exact"] * 3
    assert ["fresh process" in why for _, why in said] == [False, True, True]


def test_a_fresh_process_waits_for_the_first_step_here(path, monkeypatch):
    """Two processes that compile the same kernel write the same file, and either might read a half of it."""
    order = []
    go, perform = FreshProcess.go, Stepper.__call__
    monkeypatch.setattr(FreshProcess, "go", lambda self: order.append("go") or go(self))
    monkeypatch.setattr(Stepper, "__call__", lambda self, batch: order.append("step") or perform(self, batch))
    replay(path, 6, fresh_process=True)
    assert order[:2] == ["step", "go"]


def test_a_segment_that_this_process_went_on_with_is_no_witness_either(path, monkeypatch):
    assert runs.here("train", "--out", path, "--resume", "--steps", 14).code == 0
    assert len(open_run(path).manifest.segments) == 1
    monkeypatch.setattr(FreshProcess, "start", lambda self, step: pytest.fail(f"step {step}"))
    replay(path, 12)
    with pytest.raises(pytest.fail.Exception, match="step 13"):
        replay(path, 13)


def test_a_fresh_process_with_other_bits_is_a_mismatch(path, monkeypatch):
    """The gate can fail: the other process is made to say that one bit of the loss was different."""
    real = FreshProcess.evidence
    monkeypatch.setattr(
        FreshProcess, "evidence", lambda self, step, say: real(self, step, say) | {"loss": "0x00000000"}
    )
    trace = replay(path, fresh_process=True)
    assert trace.badges()[0][1:] == ("mismatch", "a fresh process gave other bits: loss")


def test_a_range_through_segments_is_repeated_by_fresh_processes(tmp_path):
    path = runs.segmented(tmp_path)
    traces = replay(path, range(8, 10), fresh_process=True)
    assert [(trace.step, trace.record.segment) for trace in traces] == [(8, 0), (9, 1)]
    assert all(trace.exact and "in a fresh process" in trace.badges()[0][2] for trace in traces)


@pytest.mark.parametrize("fails", ["raises", "killed"])
def test_a_fresh_process_that_fails_is_a_sentence(path, monkeypatch, fails):
    program = {
        "raises": "import sys; print('Traceback (most recent call last)', file=sys.stderr); sys.exit('workbench: no!')",
        "killed": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    }
    command = [sys.executable, "-c", program[fails]]
    monkeypatch.setattr(fresh_replay, "python_command", lambda *arguments: command)
    end = {"raises": "fresh process failed: no!", "killed": "said nothing, and ended with code -9"}
    message = refused(path, ReplayError, end[fails], fresh_process=True)
    assert "Traceback" not in message and "\n" not in message


def test_cancelling_ends_the_fresh_process_too(path, monkeypatch):
    started = []
    real = subprocess.Popen

    def watched(command, **options):
        started.append(real(command, **options))
        return started[-1]

    def progress(done, total, what):
        if "fresh process" in what and started:
            raise KeyboardInterrupt

    monkeypatch.setattr(fresh_replay.subprocess, "Popen", watched)
    before = runs.digest(path)
    with pytest.raises(KeyboardInterrupt):
        replay(path, fresh_process=True, progress=progress)
    assert len(started) == 1 and started[0].poll() is not None
    assert runs.digest(path) == before


def test_compiling_kernels_is_said_before_and_after(path, monkeypatch, tmp_path):
    """What is compiled is not, so that the test is short: a file appears where MLX puts them."""
    place = tmp_path / "kernels"
    monkeypatch.setattr(kernel_cache, "folder", lambda backend: place)

    def step(self, batch):
        place.mkdir(exist_ok=True)
        (place / f"lib{len(list(place.iterdir()))}.so").touch()
        return perform(self, batch)

    perform = Stepper.__call__
    monkeypatch.setattr(Stepper, "__call__", step)
    said = []
    replay(path, 6, progress=lambda done, total, what: said.append(what), fresh_process=False, repeat=False)
    assert "no compiled kernels" in said[0]
    shown = runs.here("replay", path, "--step", 5, "--quick").err
    assert "1 kernel was compiled meanwhile" in shown and "no compiled kernels" not in shown
    shutil.rmtree(place)
    shown = runs.here("replay", path, "--step", 6, "--quick").err
    assert "no compiled kernels" in shown and "2 kernels were compiled meanwhile" in shown


def test_the_verdict_is_red_when_the_record_is_not_this_runs(path):
    """The proof that a green verdict means something: one digit of one lane."""
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 6)
    state = line["state"] | {
        "adam_v": line["state"]["adam_v"][:-1] + ("0" if line["state"]["adam_v"][-1] != "0" else "1")
    }
    runs.edit_line(path, 6, state=state)
    trace = replay(path, fresh_process=False)
    assert not trace.exact and trace.record.first_difference.item == "state.adam_v"
    assert [name for name, item in trace.record.items.items() if item.verdict == "mismatch"] == ["state.adam_v"]


def test_a_step_that_logged_nothing_is_unverified(path):
    keep = {"type", "step", "segment"}
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 6)
    runs.edit_line(path, 6, **{key: ... for key in line if key not in keep})
    trace = replay(path, fresh_process=False)
    assert not trace.exact and trace.badges()[1][1] == "unverified" and "unverified" in trace.sentence()


# --------------------------------------------------------------------------------------------------------- environment


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda e: e.update(mlx="0.1.2"), f"mlx: recorded 0.1.2, here {numeric_environment()['mlx']}"),
        (lambda e: e["blas"].update(library="libother.so"), "blas.library: recorded libother.so, here "),
        (lambda e: e["variables"].update(MLX_STRANGE="1"), "variables.MLX_STRANGE: recorded 1, here nothing"),
        (lambda e: e.pop("numpy"), f"numpy: recorded nothing, here {numeric_environment()['numpy']}"),
    ],
)
def test_another_environment_is_refused_and_both_values_named(path, change, phrase):
    runs.edit_json(path / "run.json", lambda d: change(d["segments"][0]["environment"]))
    message = refused(path, EnvironmentMismatch, phrase, "--other-environment", "other_environment=True")
    assert path.name in message
    trace = replay(path, other_environment=True)
    assert trace.exact and "informational" in trace.sentence()  # nothing is really different here
    assert len(trace.record.environment_differences) == 1 and phrase in trace.record.environment_differences[0]
    assert json.loads(trace.path.read_text())["environment_differences"] == trace.record.environment_differences


def test_a_way_through_two_environments_names_both(tmp_path):
    path = runs.segmented(tmp_path)
    runs.edit_json(path / "run.json", lambda d: d["segments"][0]["environment"].update(mlx="0.1.2"))
    assert replay(path, 11).record.environment_differences == []  # from checkpoint 8 on, all of it is segment 1
    refused(path, EnvironmentMismatch, "mlx: recorded 0.1.2", step=range(7, 10))
    runs.edit_json(path / "run.json", lambda d: d["segments"][1]["environment"].update(mlx="0.3.4"))
    refused(path, EnvironmentMismatch, "mlx: recorded 0.1.2", "mlx: recorded 0.3.4", step=range(7, 10))


@pytest.mark.skipif(mx.is_available(mx.Device(mx.DeviceType.gpu)), reason="this machine has a GPU")
def test_a_device_that_this_machine_lacks(path):
    runs.edit_json(path / "run.json", lambda d: d["segments"][0]["environment"].update(backend="cuda"))
    refused(path, ReplayError, "recorded on cuda", other_environment=True)


def test_the_default_device_is_as_before(path):
    before = mx.default_device()
    replay(path)
    refused(path, ReplayError, "step 99", step=99)
    assert mx.default_device() == before


def test_another_fingerprint_method_is_no_evidence(path):
    runs.edit_json(path / "run.json", lambda d: d.update(fingerprint="sha1"))
    refused(path, RunError, "fingerprinted with sha1; this workbench has xxh3_128")


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.fixture
def own_corpus(tmp_path):
    """A run whose corpus may be moved and changed."""
    corpus = tmp_path / "data" / "mine.txt"
    corpus.parent.mkdir()
    shutil.copy(runs.corpus(), corpus)
    path = tmp_path / "runs" / "run"
    assert runs.here("train", "--corpus", corpus, "--steps", 2, "--out", path, *runs.FLAGS).code == 0
    return path, corpus


def test_a_changed_corpus_is_refused_with_both_digests(own_corpus):
    path, corpus = own_corpus
    content = bytearray(corpus.read_bytes())
    content[-1] ^= 1
    corpus.write_bytes(content)
    message = refused(path, DataError, str(corpus), "has changed", step=2)
    assert message.count("sha256") == 2


def test_a_missing_corpus_names_where_to_put_it(own_corpus):
    path, corpus = own_corpus
    corpus.unlink()
    place = path.resolve().parent / "mine.txt"
    refused(path, DataError, f"the data file {corpus} of {path} is missing", f"copy it to {place}", step=2)


def test_a_missing_corpus_that_was_beside_the_run_is_not_to_be_copied_to_where_it_was(own_corpus):
    path, corpus = own_corpus
    beside = path.resolve().parent / corpus.name
    corpus.unlink()
    runs.edit_json(path / "run.json", lambda m: m["data"][0].update(path=str(beside)))
    refused(path, DataError, f"the data file {beside} of {path} is missing", f"copy it to {path / corpus.name}", step=2)


@pytest.mark.parametrize("place", ["in the run", "beside it"])
def test_a_moved_corpus_is_found_by_its_name_and_digest(own_corpus, place):
    path, corpus = own_corpus
    target = (path if place == "in the run" else path.parent) / "mine.txt"
    shutil.move(corpus, target)
    assert replay(path, 2, fresh_process=False).exact
    target.write_bytes(b"another text, of the same name" * 100)
    refused(path, DataError, str(target), "has changed", step=2)


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture
def other(tmp_path):
    """Another run of the same shape."""
    corpus, out = runs.corpus(), tmp_path / "other"
    said = runs.here(
        *("train", "--corpus", corpus, "--steps", 12, "--out", out, "--save-every", 4, "--seed", 1, *runs.FLAGS)
    )
    assert said.code == 0
    return out


def test_a_checkpoint_of_another_run_is_refused(path, other):
    for file in (other / "checkpoints").glob("00000004*"):
        shutil.copy(file, path / "checkpoints" / file.name)
    mine, theirs = (json.loads((run / "run.json").read_text())["run"] for run in (path, other))
    refused(path, CheckpointError, f"belongs to run {theirs}, expected {mine}", "00000004")


def test_a_damaged_checkpoint_of_the_replayed_step_is_only_not_compared(path):
    file = path / "checkpoints" / "00000008.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    trace = replay(path, 8)
    assert trace.exact and trace.record.items["checkpoint"].verdict == "unverified"
    assert any("checkpoint 8 was not compared" in notice and "cut off" in notice for notice in trace.notices)
    refused(path, CheckpointError, "00000008.safetensors", "cut off", step=9)


def test_a_doctored_checkpoint_departs_at_the_restored_state(path):
    """Its commit record was made to agree, so only the run's own fingerprint can tell."""
    other = mx.load(str(path / "checkpoints" / "00000004.safetensors"))
    name = sorted(other)[0]
    other[name] = other[name] * 2
    mx.save_safetensors(str(path / "checkpoints" / "00000004.safetensors"), other)
    import hashlib

    content = (path / "checkpoints" / "00000004.safetensors").read_bytes()
    entry = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    runs.edit_json(path / "checkpoints" / "00000004.json", lambda d: d["files"].update({"00000004.safetensors": entry}))
    trace = replay(path, 6, fresh_process=False)
    difference = trace.record.first_difference
    assert (difference.step, difference.where, difference.item) == (4, "restored state", "state.weights")
    assert not trace.exact and "step 4" in trace.sentence()


# ----------------------------------------------------------------------------------------------------- where traces go


def test_a_read_only_run_has_its_traces_in_the_users_cache(path, tmp_path, monkeypatch):
    """Permissions mean nothing to root, so the answer of the system is given here."""
    monkeypatch.setattr(traces.os, "access", lambda place, mode: False)
    monkeypatch.setattr(traces.platformdirs, "user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    before = runs.digest(path)
    trace = replay(path)
    assert trace.exact and runs.digest(path) == before
    assert trace.path.is_relative_to(tmp_path / "cache") and trace.path.exists()
    assert open_run(path).manifest.run in str(trace.path)
    assert any("is read-only; the trace is in" in notice for notice in trace.notices)


def test_traces_go_where_they_are_told(path, tmp_path):
    before = runs.digest(path)
    trace = replay(path, trace_dir=str(tmp_path / "elsewhere"))
    assert trace.path == tmp_path / "elsewhere" / "00000006.json" and runs.digest(path) == before


def test_a_second_replay_replaces_the_trace_whole(path):
    first = replay(path).path.read_bytes()
    second = replay(path).path.read_bytes()
    assert runs.strict(first)["items"] == runs.strict(second)["items"]
    assert [file.name for file in (path / "traces").iterdir()] == ["00000006.json"]


def test_a_trace_that_can_not_be_written_damages_nothing(path, tmp_path):
    (tmp_path / "file").write_text("")
    before = runs.digest(path)
    with pytest.raises(ReplayError, match="nothing can be written to .*file .*; name another folder"):
        replay(path, trace_dir=tmp_path / "file")
    assert runs.digest(path) == before


# ------------------------------------------------------------------------------------------------------------ progress


def test_progress_is_told_and_can_cancel(path):
    told = []
    replay(path, 7, with_probe=True, progress=lambda done, total, what: told.append((done, total, what)))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert all(0 <= done <= total for done, total, _ in told) and len({total for _, total, _ in told}) == 1
    assert "rolling forward" in told[0][2] and any("probe" in what for _, _, what in told)

    class Stop(Exception):
        pass

    def cancel(done, total, what):
        raise Stop

    before = runs.digest(path)
    with pytest.raises(Stop):
        replay(path, progress=cancel)
    assert runs.digest(path) == before


# ------------------------------------------------------------------------------------------------- a loop of one's own


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run of a loop of one's own, which names its factory."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # for fresh processes
    experiment = runs.build()
    out = tmp_path / "own"
    with Recorder(
        out, *runs.parts(experiment), compile=False, save_every=2, factory="runs:build", arguments={"lr": 1e-2}
    ) as recorder:
        for batch in recorder.batches(5):
            recorder.step(batch)
    return out


def test_the_factory_rebuilds_it_also_in_a_fresh_process(own):
    trace = replay(own, 4, factory="runs:build")
    assert trace.exact and "and in a fresh process" in trace.badges()[0][2]


def test_a_factory_that_the_fresh_process_can_not_import(own, monkeypatch):
    monkeypatch.delenv("PYTHONPATH")
    message = refused(
        own, ReplayError, "fresh process failed", "'runs:build' can't be imported", step=4, factory="runs:build"
    )
    assert "\n" not in message
    assert replay(own, 4, factory="runs:build", fresh_process=False).exact


def test_the_experiment_can_be_passed_instead(own):
    trace = replay(own, 4, experiment=runs.build())
    assert trace.exact and "another process was not tried: this experiment exists only here" in trace.badges()[0][2]


def test_what_is_in_the_environment_variables_of_this_process_is_recorded(own):
    assert open_run(own).manifest.segments[0].environment["variables"] == {
        name: value for name, value in numeric_environment()["variables"].items() if name in os.environ
    }
