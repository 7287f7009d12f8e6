"""What the command line prints: on a terminal of any encoding, and as JSON that loses no digit."""

import json
import os
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import runs
from click.testing import CliRunner
from safetensors.numpy import save_file

from workbench import list_runs, open_checkpoint, open_run
from workbench.cli import main
from workbench.printed import called, printing
from workbench.recorded.checkpoint_sizes import checkpoint_sizes, size_frame

ENCODINGS = ("ascii", "latin-1", "cp437", "utf-8")


def invoked(encoding, *args):
    """The output of a command that writes in an encoding, undecoded."""
    found = CliRunner(charset=encoding).invoke(main, [*map(str, args)], prog_name="workbench", catch_exceptions=False)
    assert found.exit_code == 0, found.stderr_bytes
    return found.stdout_bytes


@pytest.fixture
def tensors(tmp_path):
    """A file of tensors with names and numbers that are easily lost."""
    path = tmp_path / "ü😀.safetensors"
    small = np.float32(1.2345679e-07)
    save_file({"w\U0001f600é": np.array([small]), "nan": np.array([np.nan, 1], np.float32)}, path)
    return path


# ------------------------------------------------------------------------------------------------------------ encodings


def commands(group, *before):
    for name, command in group.commands.items():
        yield (*before, name)
        if hasattr(command, "commands"):
            yield from commands(command, *before, name)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_help_is_printed_in_any_encoding(encoding):
    for names in [(), *commands(main)]:
        assert b"Usage: workbench" in invoked(encoding, *names, "--help"), names


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_answers_are_printed_in_any_encoding(encoding, tmp_path, tensors):
    run = runs.as_ranks(runs.recorded(tmp_path), "één", "two😀")
    printed = invoked(encoding, "ranks", run, "--step", 6).decode(encoding)
    assert ("é" in printed or r"\xe9" in printed) and ("😀" in printed or r"\U0001f600" in printed)
    whole = runs.recorded_read_only()
    for args in (("batch", whole, "--step", 6), ("checkpoint", tensors), ("verify", whole)):
        assert invoked(encoding, *args).decode(encoding)
    assert "1.2345678" in invoked(encoding, "checkpoint", tensors, "--json").decode(encoding)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_is_json_in_any_encoding(encoding, tensors):
    rows = runs.strict(invoked(encoding, "checkpoint", tensors, "--json").decode(encoding))
    assert [row["tensor"] for row in rows] == list(open_checkpoint(tensors).frame()["tensor"])
    assert "w😀é" in [row["tensor"] for row in rows]


def test_an_encoding_that_lacks_a_character_ends_no_process(tensors):
    """The same with the real streams."""
    for encoding in ("ascii", "latin-1"):
        variables = os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "COLUMNS": "200"}
        command = [sys.executable, "-m", "workbench", "checkpoint", tensors]
        done = subprocess.run(command, capture_output=True, env=variables, timeout=120)
        assert done.returncode == 0 and done.stderr == b"" and r"w\U0001f600" in done.stdout.decode(encoding)


def test_a_warning_of_a_library_is_printable(recwarn):
    given = "a\x1b[2J", UserWarning, "file.py", 7
    before = warnings.formatwarning(*given)
    with printing():
        assert "a␛[2J" in warnings.formatwarning(*given)
    assert warnings.formatwarning(*given) == before and "\x1b" in before


def test_commands_to_go_on_with_can_be_pasted(monkeypatch):
    found = None, SimpleNamespace(sentence=str), SimpleNamespace(step=72, rule="r", explanation="e"), Path("a b")
    monkeypatch.setattr("workbench.demo.run_demo", lambda keep, watcher: found)
    monkeypatch.setattr("workbench.commands.demo.print_trace", lambda *given, **more: None)
    said = runs.here("demo").out
    for command in ("autopsy 'a b' --step 72", "replay 'a b' --step 72 --context 8", "lab 'a b'"):
        assert f"  workbench {command}\n" in said


# ---------------------------------------------------------------------------------------------------------- every digit


def same_numbers(rows, frame):
    """Whether numbers of JSON are those of a table, bit for bit; what is missing there is null here."""
    for name in frame.columns:
        for row, value in zip(rows, frame[name], strict=True):
            if isinstance(value, float) and not np.isfinite(value):
                assert row[name] is None
            elif isinstance(value, float):
                assert struct.pack("d", row[name]) == struct.pack("d", value), name
            else:
                assert row[name] == value


def test_json_of_checkpoints_has_every_digit(tmp_path, tensors):
    frame = open_checkpoint(tensors).frame()
    assert (frame["l2"] < 1e-6).any() and frame["rms"].notna().all()
    same_numbers(runs.strict(runs.here("checkpoint", tensors, "--json").out), frame)
    run = runs.recorded_read_only()
    rows = runs.strict(runs.here("checkpoint", run, "--json").out)
    same_numbers(rows, size_frame(checkpoint_sizes(open_run(run))))


def test_json_of_the_runs_of_a_folder(tmp_path):
    runs.recorded(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text("{")
    rows = runs.strict(runs.here("runs", tmp_path, "--json").out)
    assert [(row["run"], row["steps"]) for row in rows] == [("damaged", 0), ("run", runs.STEPS)]
    assert rows[0]["last_loss"] is None and "is damaged" in rows[0]["problem"]
    same_numbers(rows, list_runs(tmp_path))
    (tmp_path / "none").mkdir()
    assert json.loads(runs.here("runs", tmp_path / "none", "--json").out) == []


# --------------------------------------------------------------------------------------------- before anything is done


@pytest.mark.parametrize(
    "args",
    [("report", "RUN", "--step", 6, "--out"), ("bench", "suite", "--json"), ("bench", "suite", "--figure")],
)
def test_a_file_that_can_t_be_written_is_found_before_anything_is_done(tmp_path, monkeypatch, args):
    def done(*given, **more):
        raise AssertionError("it was begun")

    monkeypatch.setattr("workbench.bench.suite.benchmark_suite", done)
    monkeypatch.setattr("workbench.step_report.report_html", done)
    given = [runs.recorded_read_only() if arg == "RUN" else arg for arg in args]
    said = runs.here(*given, tmp_path / "none" / "x").sentence
    assert f"{tmp_path / 'none' / 'x'} can't be written: there is no folder {tmp_path / 'none'}" in said
    assert "tmp." not in said and "is a directory" in runs.here(*given, tmp_path).sentence


def test_no_bar_stands_above_an_error_of_training(tmp_path):
    out = tmp_path / "run"
    short = tmp_path / "short.txt"
    short.write_text("abc")
    said = runs.here("train", "--corpus", short, "--steps", 3, "--out", out, *runs.FLAGS)
    assert said.sentence and len(said.err.strip().splitlines()) == 1 and "step 0" not in said.err
    said = runs.here("train", "--corpus", runs.corpus(), "--steps", 2, "--out", out, *runs.FLAGS)
    assert said.code == 0 and "step 2/2" in said.err and "loss " in said.err and "nan" not in said.err


def test_a_command_to_type_begins_as_this_one_was_called(tmp_path, monkeypatch):
    script = tmp_path / "my venv" / "workbench"
    script.parent.mkdir()
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(script), "demo"])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert called() == f"'{script}'"
    monkeypatch.setenv("PATH", str(script.parent))
    assert called() == "workbench"
    monkeypatch.setattr(sys, "argv", ["/x/workbench/__main__.py"])
    assert called() == f"{sys.executable} -m workbench"
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest"])
    assert called() == "workbench"


def test_ctrl_c_while_the_command_line_is_loaded_ends_it_with_a_line(monkeypatch):
    code = """
import builtins, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
load = builtins.__import__
def interrupted(name, *rest, **more):
    if "cli" in (name, *(rest[2] or ())):
        os.kill(os.getpid(), signal.SIGINT)
    return load(name, *rest, **more)
from workbench.__main__ import main
builtins.__import__ = interrupted
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "workbench: interrupted\n")
