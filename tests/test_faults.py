"""Planted spikes: exactly where they were asked for, and invisible to replay."""

import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import runs

from workbench import faults, open_run
from workbench.errors import DataError, ExperimentError, WorkbenchError
from workbench.faults import KINDS, Fault, parse, table
from workbench.trainer.corpus import Corpus
from workbench.trainer.training import train_run

AT, STEPS = 30, 33


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("garbage@40", Fault("garbage", 40, {})),
        ("garbage@1:rows=2", Fault("garbage", 1, {"rows": "2"})),
        ("beta2@1", Fault("beta2", 1, {})),
        ("lr@7:factor=1e3,until=end", Fault("lr", 7, {"factor": "1e3", "until": "end"})),
    ],
)
def test_parse(text, fault):
    assert parse(text) == fault


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("garbage", ("malformed", "NAME@STEP")),
        ("garbage@", ("malformed",)),
        ("garbage@x", ("malformed",)),
        ("garbage@-1", ("malformed",)),
        ("garbage@4:", ("malformed",)),
        ("garbage@4 ", ("malformed",)),
        ("", ("malformed",)),
        ("earthquake@4", ("'earthquake' is unknown", "garbage")),
        ("garbage@4:colour=red", ("no key 'colour'", "rows")),
        ("garbage@0", ("step 0", "counted from 1")),
        ("no-clip@4:rows=1", ("no key 'rows'", "expected none")),
        ("no-clip@4", ("step 4", "whole run", "no-clip@1")),
        ("v-scaled@1", ("step 1", "2 or more")),
    ],
)
def test_malformed_faults_are_named(text, words):
    with pytest.raises(ExperimentError) as caught:
        parse(text)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)


def test_the_table_is_the_one_in_the_documentation():
    lines = [line for line in faults.__doc__.splitlines() if line.startswith("    ")]
    start = next(number for number, line in enumerate(lines) if line.split()[:2] == ["fault", "keys"])
    written = [" ".join(line.split()) for line in lines[start + 1 : start + 1 + len(KINDS)]]
    columns = ["fault", "keys", "applied", "replay", "verdict"]
    assert written == [" ".join(" ".join(row).split()) for row in table()[columns].itertuples(index=False)]


def test_the_command_prints_the_table():
    said = runs.here("faults")
    lines = said.out.splitlines()
    assert said.code == 0 and [line.split()[0] for line in lines if line[0] != " "] == ["fault", *KINDS]
    assert max(map(len, lines)) <= 100
    assert runs.strict(runs.here("faults", "--json").out) == table().to_dict("records")


# ------------------------------------------------------------------------------------------------------------ in a run


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The same run with and without a fault at step 30, by when it has learnt enough for garbage to stand out."""
    folder = tmp_path_factory.mktemp("faults")
    settings = runs.SMALL | {"save_every": 14, "spike_window": 10, "max_lr": 1e-2, "device": "cpu"}
    train_run(folder / "clean", runs.corpus(), STEPS, **settings)
    train_run(folder / "planted", runs.corpus(), STEPS, faults=[f"garbage@{AT}:rows=3"], **settings)
    return folder / "clean", folder / "planted"


@pytest.fixture
def planted(pair, tmp_path):
    return shutil.copytree(pair[1], tmp_path / "planted")


def hashes(path):
    return [line["batch_hash"] for line in runs.lines(path) if line["type"] == "step"]


def test_only_the_batch_of_that_step_is_changed(pair):
    clean, planted = (hashes(path) for path in pair)
    assert [step for step in range(1, STEPS + 1) if clean[step - 1] != planted[step - 1]] == [AT]
    losses = [open_run(path).steps["loss"].tolist() for path in pair]
    assert losses[0][: AT - 1] == losses[1][: AT - 1] and losses[1][AT - 1] > 1.2 * losses[0][AT - 1]


def test_it_is_detected_and_replays_exactly(planted):
    run = open_run(planted)
    assert run.spikes()["step"].tolist()[0] == AT
    trace = run.replay(AT, fresh_process=False)
    assert trace.exact
    clean = Corpus.open(runs.corpus()).tokens.tobytes()
    rows = [bytes(np.asarray(row, dtype=np.uint8)) for row in trace.batch[0]]
    assert [row in clean for row in rows] == [False, False, False, True]
    assert set(trace.rows["row"][:3]) == {0, 1, 2}  # they carry the loss


@pytest.mark.parametrize("labels", ["gone", "corrupt"])
def test_replay_does_not_need_the_labels(planted, labels):
    if labels == "gone":
        (planted / "planted.json").unlink()
    else:
        (planted / "planted.json").write_text("{")
    assert open_run(planted).replay(AT, fresh_process=False, with_probe=False).exact


def test_replay_never_opens_the_labels(planted):
    """Every open of a process that replays is audited. That the sources are seen proves that the audit sees."""
    code = (
        "import sys\nopened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from workbench import open_run\n"
        "trace = open_run(sys.argv[1]).replay(int(sys.argv[2]))\n"
        "assert trace.exact, trace.sentence()\n"
        "print('\\n'.join(opened))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(planted), str(AT)],
        capture_output=True,
        text=True,
        env=dict(os.environ),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    names = {os.path.basename(line) for line in done.stdout.splitlines()}
    assert {"1.bytes", "telemetry.jsonl", "run.json"} <= names
    assert "planted.json" not in names


def test_a_changed_source_is_refused(planted):
    source = planted / "sources" / "1.bytes"
    source.write_bytes(source.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="1.bytes has changed"):
        open_run(planted).replay(AT)


def test_a_resumed_run_keeps_its_faults(planted):
    said = runs.here("train", "--out", planted, "--resume", "28", "--steps", "31")
    assert said.code == 0, said.err
    again = [line["batch_hash"] for line in runs.lines(planted) if line["type"] == "step" and line["segment"] == 1]
    assert again == hashes(planted)[28:31]


@pytest.mark.parametrize(
    ("faults", "words"),
    [
        (["garbage@10"], ("garbage@10", "after the last step, 9")),
        (["garbage@99999999999999999999"], ("after the last step",)),
        (["garbage@4", "garbage@4"], ("row 0 of step 4 a second time",)),
        (["garbage@4:rows=9"], ("rows=9", "1 to 4")),
        (["nonsense"], ("malformed",)),
    ],
)
def test_faults_that_can_not_be_planted_start_no_run(tmp_path, faults, words):
    with pytest.raises(WorkbenchError) as caught:
        train_run(tmp_path / "run", runs.corpus(), 9, faults=faults, **runs.SMALL)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run" / "run.json").exists()
