"""A run that is being recorded while it is asked: lines come between two looks at its telemetry, segments begin and
checkpoints go. And a run whose telemetry is edited while it is open."""

import json
import shutil

import pytest
import runs

from workbench import open_run, telemetry, verifying
from workbench.errors import ReplayError, TelemetryError
from workbench.proving import sample
from workbench.recorded.first_sign import first_sign
from workbench.recorded.recorded_run import RecordedRun
from workbench.run import Run


@pytest.fixture
def run(tmp_path):
    return runs.recorded(tmp_path)


@pytest.fixture
def growing(run, monkeypatch):
    """A run whose recorder writes a line each time that its telemetry was looked at."""
    file = run / "telemetry.jsonl"
    file.write_bytes(b"".join(line for line in file.read_bytes().splitlines(True) if b'"type":"done"' not in line))
    runs.edit_json(run / "run.json", lambda document: (document.pop("sealed"), document.pop("end")))
    last = max((line for line in runs.lines(run) if line["type"] == "step"), key=lambda line: line["step"])
    real, line = RecordedRun.telemetry.fget, {name: last[name] for name in last if name != "seal"}

    def grows(self):
        found = real(self)
        line["step"] += 1
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
        return found

    monkeypatch.setattr(RecordedRun, "telemetry", property(grows))
    return Run(run)


def test_a_run_that_grows_at_each_look_can_be_verified(growing):
    found = growing.verify()
    (continuity,) = [check for check in found.checks if check.what == "segment 0"]
    assert continuity.verdict == "exact" and found.steps > 12


def test_a_sample_of_it_can_be_drawn(growing):
    assert len(sample(growing, 3, 0)) == 3


def test_its_first_sign_can_be_looked_for(growing):
    assert first_sign(growing, 0, 10) is None


def test_a_segment_that_begins_while_it_is_verified_is_no_lack_of_the_manifest(run, tmp_path, monkeypatch):
    """The lines are read after the manifest: what a resume wrote between the two is in both by then."""
    later, real = runs.segmented(tmp_path / "later"), verifying.stretches

    def resumed(path):
        shutil.copytree(later, run, dirs_exist_ok=True)
        return real(path)

    monkeypatch.setattr(verifying, "stretches", resumed)
    found = Run(run).verify()
    assert found.steps > 12 and [check for check in found.checks if check.verdict == "mismatch"] == []


# --------------------------------------------------------------------------------------------- edited while it is open


def long_file(folder, steps=4000):
    """Telemetry of which more than 64 KiB lie on either side of its middle."""
    lines = [{"type": "step", "step": step, "loss": 1.25, "lr": 0.5} for step in range(1, steps + 1)]
    path = folder / "telemetry.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert path.stat().st_size > 3 << 16
    return path


def overwrite(path, old, new):
    """In place, to the same length."""
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    with path.open("r+b") as file:
        file.seek(content.index(old))
        file.write(new)


def test_an_edit_in_the_middle_is_read(tmp_path):
    path = long_file(tmp_path)
    before = telemetry.read(path)
    overwrite(path, b'"step": 1500, "loss": 1.25', b'"step": 1500, "loss": 9.25')
    assert telemetry.read(path, since=before).column("loss")[1499] == 9.25
    with path.open("a") as file:
        file.write('{"type": "step", "step": 4001, "loss": 2.0}\n')
    grown = telemetry.read(path, since=before)
    assert grown.column("loss")[1499] == 9.25 and grown.last_step() == 4001


def test_damage_in_the_middle_is_an_error(tmp_path):
    path = long_file(tmp_path)
    before = telemetry.read(path)
    overwrite(path, b'"step": 1500, ', b"\0" * 14)
    with pytest.raises(TelemetryError, match="line 1500"):
        telemetry.read(path, since=before)


def padded(run):
    """The shared run with more than 64 KiB of validations before and after its steps' lines."""
    file, content = run / "telemetry.jsonl", runs.lines(run)
    val = json.dumps({"type": "val", "segment": 0, "step": 1, "val_loss": 1.5}) + "\n"
    first, *rest = [json.dumps({name: line[name] for name in line if name != "seal"}) + "\n" for line in content]
    file.write_text(first + val * 1200 + "".join(rest[:-1]) + val * 1200 + rest[-1])
    runs.edit_json(run / "run.json", lambda document: (document.pop("sealed", None), document.pop("end", None)))
    return Run(run)


def test_an_open_run_sees_an_edit_of_its_telemetry(run):
    opened = padded(run)
    average = opened.steps.set_index("step")["ma"]
    old = f'"ma": {average[6]}'
    overwrite(run / "telemetry.jsonl", old.encode(), (old[:-1] + str((int(old[-1]) + 1) % 10)).encode())
    assert opened.steps.set_index("step")["ma"].compare(average).index.tolist() == [6]
    marks = [check for check in opened.verify().checks if check.what == "spike marks"]
    assert [check.verdict for check in marks] == ["unverified"] and "step 6 do" in marks[0].detail


def test_an_open_run_with_damaged_telemetry_is_verified_to_be_damaged(run):
    opened = padded(run)
    assert opened.verify().exact
    first = (run / "telemetry.jsonl").read_bytes().splitlines()[1201]
    overwrite(run / "telemetry.jsonl", first[:60], b"\0" * 60)
    (wrong,) = [check for check in opened.verify().checks if check.verdict == "mismatch"]
    assert (wrong.kind, wrong.what) == ("telemetry", "telemetry.jsonl") and "line 1202" in wrong.detail


def test_telemetry_that_is_damaged_while_it_is_verified_is_a_finding(run, monkeypatch):
    real = verifying.stretches

    def damages(path):
        path.write_bytes(path.read_bytes().replace(b'"type":"step"', b'"type":"stop"', 1))
        return real(path)

    monkeypatch.setattr(verifying, "stretches", damages)
    found = open_run(run).verify()
    told = [check.detail for check in found.checks if check.verdict == "mismatch"]
    assert any("it was changed while it was looked at" in one for one in told)


def test_less_than_no_step_can_not_be_proven(run):
    with pytest.raises(ReplayError, match="-1 steps can't be proven; expected replay to be 0"):
        open_run(run).verify(replay=-1)
