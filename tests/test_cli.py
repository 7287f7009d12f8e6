"""The command line as a user meets it: exit codes, one sentence for every mistake, and nothing damaged by one."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import runs
from rich.console import Console

from workbench import cli, open_run
from workbench.commands.printed_trace import as_logged, layer_table
from workbench.errors import WorkbenchError
from workbench.lines.line import ARRAYS
from workbench.trace import read as read_trace

COMMANDS = ("train", "replay", "runs", "spikes", "demo", "lab")


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


def run_in_background(*args):
    return subprocess.Popen(
        [sys.executable, "-m", "workbench", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"},
    )


def wait_for(process, holds):
    """Until something holds. A process that trains for ever is ended by whoever waited in vain: nobody else would."""
    deadline = time.monotonic() + 120
    while not holds():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(process.communicate())
        time.sleep(0.005)


# ---------------------------------------------------------------------------------------------------------------- help


def test_help_of_every_command():
    said = runs.here("--help")
    assert said.code == 0
    assert set(COMMANDS) <= set(cli.main.commands)
    for command in cli.main.commands:
        assert command in said.out
        for flag in ("--help", "-h"):
            helped = runs.here(command, flag)
            assert helped.code == 0 and helped.out.startswith("Usage: ") and helped.err == ""
            lines = [line for line in helped.out.splitlines() if line.startswith("  ")]
            assert lines[0].strip(), command  # the first line says what it does
    assert "130" in runs.here("train", "--help").out and "Exit code" in runs.here("replay", "--help").out


def test_every_option_of_train_has_a_help_text_or_a_default():
    silent = [option.name for option in cli.main.commands["train"].params if not option.help]
    assert silent == []


def test_version():
    said = runs.here("--version")
    assert said.code == 0 and "workbench" in said.out


def test_nothing_asked_shows_the_commands():
    said = runs.here()
    assert "Commands:" in said.out + said.err


def test_the_module_and_the_script_are_the_same_command():
    assert runs.workbench("--version").out == runs.here("--version").out


# ------------------------------------------------------------------------------------------------------------ mistakes


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--colour", ("--colour", "workbench --help")),
        ("paint", ("paint",)),
        ("replay", ("RUN", "workbench replay --help")),
        ("replay RUN", ("--step",)),
        ("replay RUN --step", ("--step",)),
        ("replay RUN --step x", ("'x'", "4210..4220")),
        ("replay RUN --step -1", ("'-1'",)),
        ("replay RUN --step 1.5", ("'1.5'",)),
        ("replay RUN --step ²", ("'²'",)),
        ("replay RUN --step ..", ("'..'",)),
        ("replay RUN --step 5..", ("'5..'",)),
        ("replay RUN --step 5...7", ("'5...7'",)),
        ("replay RUN --step 99999999999999999999999", ("'99999999999999999999999'",)),
        ("replay RUN --step 0", ("step 0", "steps 1 to 12")),
        ("replay RUN --step 13", ("step 13", "steps 1 to 12")),
        ("replay RUN --step 1..1000000000000000", ("steps 1 to 12",)),
        ("replay RUN --step 7..5", ("empty range",)),
        ("replay RUN --step 5 --segment 1", ("segment 1",)),
        ("replay RUN --step 5 --segment x", ("--segment", "'x'")),
        ("replay RUN --step 5 --colour red", ("--colour",)),
        ("replay nowhere --step 5", ("nowhere does not exist", "expected")),
        ("replay . --step 5", ("not a run folder",)),
        ("spikes nowhere", ("nowhere does not exist",)),
        ("spikes", ("RUN",)),
        ("runs nowhere", ("nowhere does not exist",)),
        ("lab nowhere", ("nowhere", "run.json")),
        ("demo --keep RUN", ("already holds a run",)),
        ("train", ("--corpus is missing",)),
        ("train --corpus CORPUS", ("--steps is missing",)),
        ("train --corpus CORPUS --steps 3", ("--out is missing", "--no-record")),
        ("train --corpus CORPUS --steps x", ("--steps", "'x'")),
        ("train --corpus CORPUS --steps 0 --out new", ("steps is 0",)),
        ("train --corpus nowhere.txt --steps 3 --out new", ("nowhere.txt cannot be read",)),
        ("train --corpus CORPUS --steps 3 --out RUN", ("already holds a run", "--resume")),
        ("train --corpus CORPUS --steps 3 --out CORPUS", ("is a file",)),
        ("train --corpus CORPUS --steps 3 --out new --preset vast", ("--preset", "vast", "tiny")),
        ("train --corpus CORPUS --steps 3 --out new --preset tiny --depth 1", ("--preset and --depth",)),
        ("train --corpus CORPUS --steps 3 --out new --depth 0", ("depth",)),
        ("train --corpus CORPUS --steps 3 --out new --beta1 1.5", ("beta1 is 1.5",)),
        ("train --corpus CORPUS --steps 3 --out new --grad-clip -1", ("clip is -1",)),
        ("train --corpus CORPUS --steps 3 --out new --fault garbage", ("malformed", "garbage@40")),
        ("train --corpus CORPUS --steps 3 --out new --fault garbage@4", ("after the last step",)),
        ("train --corpus CORPUS --steps 3 --out new --fault garbage@2:rows=99", ("rows=99",)),
        ("train --corpus CORPUS --steps 3 --out new --keep-last 0", ("keep_last is 0",)),
        ("train --corpus CORPUS --steps 3 --out new --log-jsonl .", ("copy_telemetry_to is ., a folder",)),
        ("train --corpus CORPUS --steps 3 --out new --log-jsonl new/telemetry.jsonl", ("run's own telemetry",)),
        ("train --corpus CORPUS --steps 3 --no-record --log-jsonl x", ("--log-jsonl", "--no-record")),
        ("train --resume", ("--resume needs --out",)),
        ("train --resume x --out RUN", ("--resume is 'x'",)),
        ("train --resume 5 --out RUN", ("no checkpoint of step 5", "[0, 4, 8, 12]")),
        ("train --resume --out nowhere", ("nowhere does not exist",)),
        ("train --resume --out RUN --seed 0", ("--seed is decided by the manifest",)),
        ("train --resume --out RUN --no-compile", ("--compile/--no-compile is decided by",)),
        ("train --replay-step 5", ("--replay-from",)),
        ("train --replay-from RUN", ("--replay-step",)),
        ("train --replay-step 99 --replay-from RUN", ("step 99",)),
        ("train --replay-step -1 --replay-from RUN", ("'-1'",)),
    ],
)
def test_a_mistake_is_one_sentence_and_code_2_and_damages_nothing(path, tmp_path, monkeypatch, args, words):
    monkeypatch.chdir(tmp_path)
    before = runs.digest(tmp_path)
    corpus = runs.corpus().read_bytes()
    filled = [str(path) if arg == "RUN" else str(runs.corpus()) if arg == "CORPUS" else arg for arg in args.split()]
    small = list(runs.FLAGS[:4]) if filled[0] == "train" and "--resume" not in filled and "new" in filled else []
    said = runs.here(*filled, *small)
    assert [word for word in words if word not in said.sentence] == [], said.sentence
    assert runs.digest(tmp_path) == before
    assert runs.corpus().read_bytes() == corpus
    assert said.out == ""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda p: (p / "run.json").write_text("{"), ("run.json is damaged",)),
        (lambda p: (p / "run.json").write_text('{"format_version": 9}'), ("format_version 9",)),
        (lambda p: (p / "telemetry.jsonl").unlink(), ("telemetry.jsonl can't be read",)),
        (lambda p: (p / "telemetry.jsonl").write_text("[]\n{}\n"), ("telemetry.jsonl, line 1",)),
        (lambda p: runs.edit_line(p, 6, loss="2.1"), ("telemetry.jsonl, line 8", "loss")),
        (lambda p: runs.edit_line(p, 6, loss=2.1), ("telemetry.jsonl, line 8", "2.1")),
        (lambda p: runs.edit_json(p / "run.json", lambda d: d.update(run="f" * 32)), ("belongs to run",)),
        (lambda p: (p / "checkpoints" / "00000004.json").write_text("{"), ("00000004.json is damaged",)),
        (lambda p: (p / "checkpoints" / "00000004.rng").unlink(), ("00000004.rng can't be read",)),
        (lambda p: (p / "checkpoints" / "00000004.cursor").write_text("{}"), ("00000004.cursor has 2 bytes",)),
        (lambda p: shutil.rmtree(p / "checkpoints"), ("no checkpoint", "step 6")),
        (lambda p: runs.edit_json(p / "run.json", lambda d: d["data"][0].update(bytes=1)), ("has changed",)),
        (lambda p: runs.edit_json(p / "run.json", lambda d: d["data"][0].update(path="/no/where")), ("is missing",)),
        (
            lambda p: runs.edit_json(p / "run.json", lambda d: d["segments"][0]["environment"].update(mlx="0.1")),
            ("mlx: recorded 0.1", "--other-environment"),
        ),
        (
            lambda p: runs.edit_json(p / "run.json", lambda d: d["optimizer"].update(eps=1.0)),
            ("not the experiment", "eps"),
        ),
        (lambda p: runs.edit_json(p / "run.json", lambda d: d.update(rebuild={"kind": "none"})), ("named no factory",)),
    ],
)
def test_a_damaged_run_is_a_sentence_and_stays_as_it_is(path, damage, words):
    damage(path)
    before = runs.digest(path)
    said = runs.here("replay", path, "--step", 6)
    assert [word for word in words if word not in said.sentence] == [], said.sentence
    assert runs.digest(path) == before


def test_an_error_of_the_system_is_a_sentence(path, monkeypatch):
    def denied(*arguments):
        raise PermissionError(13, "Permission denied", "/somewhere/file")

    monkeypatch.setattr("workbench.trace.write_atomic", denied)
    assert "/somewhere/file: Permission denied" in runs.here("replay", path, "--step", 6).sentence


def test_a_mistake_in_a_process_of_its_own():
    """The same, with the real entry point and the real exit."""
    for args in (("replay", "nowhere", "--step", "5"), ("replay", ".", "--step", "²"), ("--colour",), ("paint",)):
        said = runs.workbench(*args)
        assert said.sentence and said.out == "" and len(said.err.strip().splitlines()) == 1


def test_an_error_that_is_not_ours_is_not_hidden(path, monkeypatch):
    """Only errors raised on purpose become sentences: a bug must not pass for bad input."""
    monkeypatch.setattr("workbench.run.Run.spikes", lambda self, window: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runs.here("spikes", path)


def test_a_directory_for_traces_that_is_a_file(path, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "file" in runs.here("replay", path, "--step", 6, "--trace-dir", tmp_path / "file").sentence
    assert (tmp_path / "file").read_text() == "mine"


# -------------------------------------------------------------------------------------------------------------- replay


def test_replay_says_it_is_exact(path):
    said = runs.here("replay", path, "--step", 6)
    assert said.code == 0
    assert "Step 6 is exact: all 14 recorded items have the run's bits." in said.out
    for word in ("repeatable", "faithful", "sensitive", "probe pass certified: yes", "blocks.0.attention.query"):
        assert word in said.out
    assert f"trace: {path / 'traces' / '00000006.json'}" in said.out
    assert "1 step to roll forward from checkpoint 4" in said.err


def test_replay_of_a_step_that_differs_is_code_1(path):
    """Loss and bits edited together, by one bit: valid telemetry, and not what happened."""
    import numpy as np

    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 6)
    bits = int(line["loss_bits"], 16) ^ 1
    value = np.array(bits, np.uint32).view(np.float32)
    runs.edit_line(path, 6, loss=float(str(value)), loss_bits=f"0x{bits:08x}")
    said = runs.here("replay", path, "--step", 6, "--no-fresh-process")
    assert said.code == 1
    assert "Step 6 is not exact: the first difference is loss at step 6 (step)" in said.out
    assert "1 ULP apart" in said.out and said.err.count("workbench: ") == 0
    document = runs.here("replay", path, "--step", 6, "--no-fresh-process", "--json")
    assert document.code == 1
    found = runs.strict(document.out)
    assert found["exact"] is False and found["first_difference"]["item"] == "loss"
    assert {name for name, item in found["items"].items() if item["verdict"] == "mismatch"} == {"loss"}
    assert runs.here("replay", path, "--step", 7, "--no-fresh-process").code == 1  # the way there departs
    assert runs.here("replay", path, "--step", 9, "--no-fresh-process").code == 0  # from checkpoint 8 it does not


def test_replay_json_has_this_shape(path):
    said = runs.here("replay", path, "--step", 6, "--json")
    assert said.code == 0
    found = runs.strict(said.out)
    assert (found["step"], found["exact"], found["first_difference"], found["certified_probe"]) == (6, True, None, True)
    assert found["trace"] == str(path / "traces" / "00000006.json")
    assert {"batch_hash", "loss", "grad_norm", "state.weights", "state.rng", "state.cursor", "checkpoint"} <= found[
        "items"
    ].keys()
    for item in found["items"].values():
        assert item.keys() == {"recorded", "replayed", "verdict", "detail"}
    trace = runs.strict((path / "traces" / "00000006.json").read_bytes())
    assert found["informational"] is False
    assert {key: value for key, value in found.items() if key not in ("trace", "informational")} == trace
    silent = runs.here("replay", path, "--step", 6, "--json", "--no-probe")
    assert runs.strict(silent.out)["certified_probe"] is None


def test_a_quick_replay_performs_the_step_once_and_says_what_that_leaves_open(path):
    found = runs.strict(runs.here("replay", path, "--step", 6, "--json", "--quick").out)
    assert found["exact"] and found["certified_probe"] is None
    repeatable = found["gates"]["repeatable"]
    assert repeatable["verdict"] == "unverified" and repeatable["explanation"].startswith("not repeated, ")
    whole = runs.strict(runs.here("replay", path, "--step", 6, "--json").out)
    assert {name: item["replayed"] for name, item in found["items"].items()} == {
        name: item["replayed"] for name, item in whole["items"].items()
    }
    runs.edit_line(path, 6, batch_hash="0" * 64)
    assert runs.here("replay", path, "--step", 6, "--quick").code == 1
    assert runs.here("replay", path, "--step", 6, "--quick", "--context", 2).code == 2


def test_a_quick_replay_keeps_the_fuller_trace_that_found_the_same(path, tmp_path):
    whole = runs.here("replay", path, "--step", 6)
    file = path / "traces" / "00000006.json"
    kept = file.read_bytes()
    said = runs.here("replay", path, "--step", 6, "--quick")
    assert said.code == 0 and file.read_bytes() == kept
    assert "00000006.json is kept: a replay with the same bits" in said.out + said.err
    assert whole.code == 0 and open_run(path).trace(6).record.certified_probe is True
    runs.here("replay", path, "--step", 6, "--quick", "--trace-dir", tmp_path)
    assert read_trace(tmp_path / "00000006.json").record.certified_probe is None
    runs.edit_line(path, 6, batch_hash="0" * 64)  # what was found then holds no more
    assert runs.here("replay", path, "--step", 6, "--quick").code == 1
    assert read_trace(file).record.certified_probe is None and not read_trace(file).exact


def test_replay_of_a_range(path):
    said = runs.here("replay", path, "--step", "5..7")
    assert said.code == 0 and said.out.count("is exact: all 14 recorded items") == 3
    found = runs.strict(runs.here("replay", path, "--step", "7..8", "--json").out)
    assert [document["step"] for document in found] == [7, 8] and all(document["exact"] for document in found)
    found = runs.strict(runs.here("replay", path, "--step", "7..7", "--json").out)
    assert [document["step"] for document in found] == [7]  # a range gives a list, also of one
    runs.edit_line(path, 8, batch_hash="0" * 64)
    assert runs.here("replay", path, "--step", "7..8", "--no-fresh-process").code == 1


def test_train_replay_step_is_replay(path, tmp_path):
    shutil.copytree(path, tmp_path / "other")
    one = runs.here("replay", path, "--step", 6)
    other = runs.here("train", "--replay-step", 6, "--replay-from", tmp_path / "other")
    assert one.code == other.code == 0
    assert other.out.replace(str(tmp_path / "other"), str(path)) == one.out
    traces = [runs.strict((run / "traces" / "00000006.json").read_bytes()) for run in (path, tmp_path / "other")]
    assert [trace.pop("wall_s") > 0 for trace in traces] and traces[0] == traces[1]
    runs.edit_line(tmp_path / "other", 6, batch_hash="0" * 64)
    assert runs.here("train", "--replay-step", 6, "--replay-from", tmp_path / "other").code == 1


def test_replay_of_a_step_in_two_segments(tmp_path):
    path = runs.segmented(tmp_path)
    said = runs.here("replay", path, "--step", 10, "--no-fresh-process")
    assert said.code == 0 and "segments [0, 1] with the same bits; the last is used" in said.err
    runs.edit_line(path, 10, batch_hash="0" * 64)
    assert "choose one with --segment" in runs.here("replay", path, "--step", 10).sentence
    assert runs.here("replay", path, "--step", 10, "--segment", 0).code == 0
    assert runs.here("replay", path, "--step", 10, "--segment", 1, "--no-fresh-process").code == 1


def test_replay_in_another_environment_names_the_differences_first(path):
    runs.edit_json(path / "run.json", lambda d: d["segments"][0]["environment"].update(mlx="0.1.2"))
    said = runs.here("replay", path, "--step", 6, "--other-environment")
    assert said.code == 0 and "informational" in said.out
    assert "this machine differs from the run's: mlx: recorded 0.1.2" in said.err


@pytest.mark.parametrize("width", [80, 100, 140])
def test_names_and_numbers_of_layers_are_whole_on_any_terminal(path, width):
    trace = open_run(path).replay(6, fresh_process=False)
    console = Console(file=io.StringIO(), width=width)
    console.print(layer_table(trace, width))
    text = console.file.getvalue()
    rows = [line.split() for line in text.replace("│", " ").splitlines()]
    for layer in trace.record.layers:
        (row,) = [row for row in rows if row and row[0] == layer]
        assert [float(cell) >= 0 for cell in row[1:-1]] == [True] * (6 if width >= 110 else 3) and row[-1] == "yes"
    assert "…" not in text and max(map(len, text.splitlines())) <= width


def test_as_logged_compares_bits(path):
    """A NaN that was logged as NaN is as logged; another value is not; and what was not logged says so."""
    layers = open_run(path).manifest.layers
    trace = open_run(path).replay(6, fresh_process=False, with_probe=False)
    items = trace.record.items
    for item in (items[name] for name in ARRAYS):
        item.recorded, item.replayed = ["0x7fc00000"] * len(layers), ["0x7fc00000"] * len(layers)
    items["adam_v_norms"].recorded[1] = "0x7fc00001"
    assert [as_logged(trace, index) for index in range(3)] == ["yes", "no", "yes"]
    for item in items.values():
        item.recorded = None
    assert as_logged(trace, 0) == "not recorded"


def test_replay_without_a_terminal_prints_no_control_codes(path):
    said = runs.workbench("replay", path, "--step", 6)
    assert said.code == 0 and "\x1b" not in said.out + said.err


# ------------------------------------------------------------------------------------------------------ runs and spikes


def test_runs_lists_also_a_damaged_one(path, tmp_path):
    shutil.copytree(path, tmp_path / "broken")
    (tmp_path / "broken" / "run.json").write_text("{")
    said = runs.here("runs", tmp_path)
    assert said.code == 0
    broken, good = said.out.splitlines()[1:]
    assert broken.split()[0] == "broken" and "damaged" in broken and good.split()[:2] == ["run", "12"]
    assert all(line == line.rstrip() for line in said.out.splitlines()), "a long problem does not widen the other lines"
    assert {line.index(word) for line, word in ((broken, "broken"), (good, "run"))} == {0}


def test_runs_of_an_empty_folder_and_of_a_run(path, tmp_path):
    (tmp_path / "empty").mkdir()
    assert runs.here("runs", tmp_path / "empty").out == f"no runs in {tmp_path / 'empty'}\n"
    said = runs.here("runs", path)
    assert said.code == 2 and f"is itself a run; expected the folder that holds it: {path.resolve().parent}" in said.err


def test_spikes(path):
    assert runs.here("spikes", path).out == (
        "no spikes. Steps 1 to 4 were not judged: a rule needs the 4 losses before a step.\n"
    )
    assert runs.strict(runs.here("spikes", path, "--json").out) == []
    runs.edit_line(path, 9, loss=400.0, loss_bits="0x43c80000")
    runs.edit_line(path, 11, loss=None, loss_bits="0x7fc00000")
    said = runs.here("spikes", path)
    assert said.code == 0 and len(said.out.splitlines()) == 2
    assert said.err == "Steps 1 to 4 were not judged: a rule needs the 4 losses before a step.\n"
    assert said.out.startswith("step 9 (segment 0), loss_factor: loss 400 is ")
    first, second = runs.strict(runs.here("spikes", path, "--json").out)
    assert (first["step"], first["rule"], first["value"]) == (9, "loss_factor", 400.0)
    assert (second["step"], second["rule"], second["value"], second["threshold"]) == (11, "non_finite", None, None)


def test_steps_of_one_event_are_one_line_and_json_has_them_all(path):
    for step in (9, 10, 11):
        runs.edit_line(path, step, loss=None, loss_bits="0x7fc00000" if step > 9 else "0x7f800000")
    said = runs.here("spikes", path)
    assert said.out == "steps 9 to 11 (segment 0), non_finite: at step 9, loss is inf\n"
    assert [one["step"] for one in runs.strict(runs.here("spikes", path, "--json").out)] == [9, 10, 11]


def test_spikes_looks_back_on_as_many_steps_as_it_is_told(path):
    runs.edit_line(path, 9, loss=400.0, loss_bits="0x43c80000")
    assert "last 6 steps" in runs.here("spikes", path, "--window", 6).out
    said = runs.here("spikes", path, "--window", 9)
    assert said.out == "no spikes. Steps 1 to 9 were not judged: a rule needs the 9 losses before a step.\n"
    assert "last 6 values" in runs.here("spikes", path, "--rule", "loss_z", "--window", 6).out
    assert runs.here("spikes", path, "--window", 3).code == 2
    run = open_run(path)
    assert run.spikes(window=6)["step"].tolist() == [9] and run.spikes(window=9).empty


def test_spikes_and_autopsy_name_what_the_recorder_called_unstable(path, tmp_path):
    for step in (7, 9):
        runs.edit_line(path, step, unstable="gradient norm 3 is 4 times the median 0.75 of the last 50 steps")
    said = runs.here("spikes", path).out
    assert "No rule names steps 7, 9, which the recorder called unstable when it logged them: gradient norm 3" in said
    assert open_run(path).unstable()["step"].tolist() == [7, 9]
    found = open_run(path).autopsy(9, trace_dir=tmp_path)
    assert found.verdict == "no-spike" and "called it unstable when it logged it" in found.reason
    assert "gradient norm 3 is 4 times the median 0.75" in found.reason and "--examine" in found.reason
    runs.edit_line(path, 9, loss=400.0, loss_bits="0x43c80000")
    assert "No rule names step 7, which" in runs.here("spikes", path).out


def test_spikes_of_a_run_without_steps(path):
    telemetry = path / "telemetry.jsonl"
    telemetry.write_bytes(telemetry.read_bytes().splitlines(keepends=True)[0])
    assert runs.here("spikes", path).out == f"there are no steps in {path}\n"
    assert runs.here("spikes", path, "--rule", "all").out == f"there are no steps in {path}\n"
    said = runs.here("spikes", path, "--json")
    assert runs.strict(said.out) == [] and f"there are no steps in {path}" in said.err


@pytest.mark.parametrize("args", [("runs", "PARENT"), ("spikes", "RUN", "--json"), ("replay", "RUN", "--step", "5..6")])
def test_a_reader_that_goes_away_is_no_error(path, args):
    filled = [str({"RUN": path, "PARENT": path.parent}.get(arg, arg)) for arg in args]
    process = run_in_background(*filled)
    process.stdout.close()  # nobody reads: the first write fails
    with process.stderr:
        err = process.stderr.read()
    assert process.wait(60) == 128 + signal.SIGPIPE  # not 1, which would mean "not exact"
    assert "Traceback" not in err and "BrokenPipe" not in err and "Exception ignored" not in err, err


def test_training_whose_messages_nobody_reads_still_saves_its_run(tmp_path):
    """As after `2>&1 | head`: the pipe of the progress bar is closed."""
    process = run_in_background(
        "train", "--corpus", runs.corpus(), "--steps", 6, "--out", tmp_path / "run", *runs.FLAGS, "--val-every", 2
    )
    process.stderr.close()
    with process.stdout:
        out = process.stdout.read()
    assert process.wait(60) == 128 + signal.SIGPIPE and out == ""
    run = open_run(tmp_path / "run")
    assert run.last_step >= 1 and run.checkpoints[-1] == (run.last_step, 0)


# --------------------------------------------------------------------------------------------------------------- train


def test_train_tells_what_it_did(tmp_path):
    said = runs.here(
        *("train", "--corpus", runs.corpus(), "--steps", 3, "--out", tmp_path / "run", *runs.FLAGS),
        *("--val-every", 2, "--sample-every", 3, "--log-jsonl", tmp_path / "copy.jsonl"),
    )
    assert said.code == 0 and said.out == ""
    assert f"{tmp_path / 'run'}: 3 steps recorded, 0 spikes" in said.err
    assert "step 2: validation loss " in said.err and "step 3: " in said.err
    assert (tmp_path / "copy.jsonl").read_bytes() == (tmp_path / "run" / "telemetry.jsonl").read_bytes()


def test_train_without_a_record_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = runs.here(
        "train", "--corpus", runs.corpus(), "--steps", 3, "--no-record", *runs.FLAGS, "--print-fingerprint"
    )
    assert said.code == 0 and runs.strict(said.out)["step"] == 3
    assert list(tmp_path.iterdir()) == []


def test_print_fingerprint_is_one_json_object():
    found = runs.fingerprint()
    assert list(found) == ["step", "weights", "adam_m", "adam_v", "other", "rng", "cursor"]


def test_resume_alone_goes_on_to_the_steps_of_the_manifest(tmp_path):
    """Killed after step 8: the checkpoint of 12 and the lines after 8 were never written."""
    path = runs.recorded(tmp_path)
    for file in (path / "checkpoints").glob("00000012*"):
        file.unlink()
    content = (path / "telemetry.jsonl").read_bytes().splitlines(keepends=True)
    end = next(i for i, line in enumerate(content) if b'"step":9,' in line)
    (path / "telemetry.jsonl").write_bytes(b"".join(content[:end]))
    said = runs.here("train", "--out", path, "--resume", "--print-fingerprint")
    assert said.code == 0, said.err
    assert runs.strict(said.out) == runs.fingerprint()
    assert len(open_run(path).manifest.segments) == 1
    lines = [line for line in runs.lines(path) if line["type"] == "val"]
    original = [line for line in runs.lines(runs.recorded_read_only()) if line["type"] == "val"]
    assert [(line["step"], line["val_loss"]) for line in lines] == [
        (line["step"], line["val_loss"]) for line in original
    ]


def test_resume_of_a_finished_run_says_so_and_changes_nothing(path):
    before = runs.digest(path)
    said = runs.here("train", "--out", path, "--resume", "--print-fingerprint")
    assert said.code == 0 and "is at step 12 already" in said.err and "--steps" in said.err
    assert runs.strict(said.out) == runs.fingerprint()
    assert runs.digest(path) == before


def test_going_beyond_the_schedule_is_said(path):
    said = runs.here("train", "--out", path, "--resume", "--steps", 14)
    assert said.code == 0 and "The schedule ends at step 12" in said.err
    assert [line["lr"] for line in runs.lines(path) if line["type"] == "step"][-2:] == [0.0, 0.0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_finishes_the_step_and_resumes_to_the_same_bits(tmp_path, number, code):
    settings = ("--lr-schedule", "constant", "--warmup", 2, "--save-every", 50, *runs.FLAGS)
    out = tmp_path / "run"
    telemetry = out / "telemetry.jsonl"
    process = run_in_background("train", "--corpus", runs.corpus(), "--steps", 10**6, "--out", out, *settings)
    wait_for(process, lambda: telemetry.exists() and telemetry.read_bytes().count(b"\n") >= 8)
    process.send_signal(number)
    try:
        _, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == code, err
    step = open_run(out).last_step
    last = err.strip().splitlines()[-1]
    assert last == f"workbench: interrupted after step {step}; all is saved; go on with --out {out} --resume"
    assert "Traceback" not in err
    assert open_run(out).checkpoints[-1] == (step, 0) and runs.lines(out)[-1]["step"] == step
    assert [file.name for file in (out / "checkpoints").iterdir() if file.name.startswith(".")] == []
    resumed = runs.here("train", "--out", out, "--resume", "--steps", step + 3, "--print-fingerprint")
    straight = runs.here(
        *("train", "--corpus", runs.corpus(), "--steps", step + 3, "--no-record", "--print-fingerprint", *settings)
    )
    assert resumed.code == straight.code == 0
    assert runs.strict(resumed.out) == runs.strict(straight.out)
    assert runs.here("replay", out, "--step", step, "--no-fresh-process").code == 0


def test_a_run_that_still_trains_is_not_gone_on_with(tmp_path):
    out = tmp_path / "run"
    process = run_in_background("train", "--corpus", runs.corpus(), "--steps", 10**6, "--out", out, *runs.FLAGS)
    try:
        wait_for(process, lambda: (out / "checkpoints" / "00000000.json").exists())
        said = runs.here("train", "--out", out, "--resume")
        looked = runs.here("spikes", out)  # but looking is always possible
    finally:
        process.kill()
        process.communicate(timeout=60)
    assert "is being recorded just now" in said.sentence and looked.code == 0
    assert len(open_run(out).manifest.segments) == 1 and open_run(out).last_step >= 0
    assert runs.here("train", "--out", out, "--resume", "--steps", 3).code == 0  # a killed process lets it go


def test_a_killed_process_loses_at_most_the_steps_since_the_last_checkpoint(tmp_path):
    settings = ("--lr-schedule", "constant", "--warmup", 2, "--save-every", 5, *runs.FLAGS)
    out = tmp_path / "run"
    process = run_in_background("train", "--corpus", runs.corpus(), "--steps", 10**6, "--out", out, *settings)
    wait_for(process, lambda: (out / "checkpoints" / "00000010.json").exists())
    process.kill()
    process.communicate(timeout=60)
    before = (out / "telemetry.jsonl").read_bytes()
    resumed = runs.here("train", "--out", out, "--resume", "10", "--steps", 16, "--print-fingerprint")
    straight = runs.here(
        *("train", "--corpus", runs.corpus(), "--steps", 16, "--no-record", "--print-fingerprint", *settings)
    )
    assert resumed.code == 0 and runs.strict(resumed.out) == runs.strict(straight.out)
    assert (out / "telemetry.jsonl").read_bytes().startswith(before)
    assert runs.here("replay", out, "--step", 16, "--no-fresh-process").code == 0


# ------------------------------------------------------------------------------------------------ a loop of one's own


def test_a_run_of_ones_own_loop_needs_its_factory(tmp_path):
    from workbench import Recorder

    out = tmp_path / "own"
    with Recorder(out, *runs.parts(runs.build()), compile=False, factory="runs:build") as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    assert "--factory runs:build" in runs.here("replay", out, "--step", 2).sentence
    assert "not 'os:system'" in runs.here("replay", out, "--step", 2, "--factory", "os:system").sentence
    said = runs.here("replay", out, "--step", 2, "--factory", "runs:build", "--no-fresh-process")
    assert said.code == 0 and "Step 2 is exact" in said.out
    assert "was not recorded by `workbench train`" in runs.here("train", "--out", out, "--resume").sentence


def test_errors_have_one_root():
    from workbench import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) >= 8 and all(issubclass(kind, WorkbenchError) for kind in kinds)


def test_json_of_the_tests_is_read_strictly():
    with pytest.raises(ValueError, match="no JSON"):
        runs.strict(json.dumps({"value": float("nan")}))


def test_spikes_says_which_steps_no_rule_could_judge(tmp_path):
    """A jump among the first ones is not found, and that is not the same as none."""
    path = tmp_path / "metrics.jsonl"
    for place, found in ((49, "no spikes. Steps 1 to 50 were not judged"), (51, "step 51 (segment 0), ")):
        rows = [{"step": n, "loss": 2 + n % 3 / 100 + 2 * (n == place)} for n in range(1, 121)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert runs.here("spikes", path).out.startswith(found)
