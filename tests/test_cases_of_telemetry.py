"""Situations that users of other tools met with telemetry files, an experiment each: group T of the cases."""

import html
import json
import math
import os
import tracemalloc

import numpy as np
import pytest
import runs
from helpers import edit_line, experiment, parts

import workbench as wb
from workbench.errors import ReplayError, RunError, TelemetryError
from workbench.telemetry import read

NAN = "0x7fc00000"


def step(number, **fields):
    return json.dumps({"type": "step", "step": number, "loss": 2.0} | fields)


@pytest.fixture
def write(tmp_path):
    def write_lines(*lines, name="telemetry.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    return write_lines


def both(path):
    """Reads a file as a run's telemetry, and as another program's log; what each says of it."""
    for reader in (read, lambda path: wb.open_run(path, format="jsonl"), wb.open_run):
        with pytest.raises(TelemetryError) as caught:
            reader(path)
        yield str(caught.value)


# T1: NaN, -Infinity, 1e999, "NaN", null: kinds kept apart; our own output parses with a strict parser.


class Broken(runs.Numbers):
    """The targets of step 4 hold a NaN, those of step 6 an infinity."""

    def __next__(self):
        x, y = super().__next__()
        return x, y * np.float32({4: np.nan, 6: np.inf}.get(self.position, 1))


def broken():
    job = runs.build()
    job.sampler = Broken()
    return job


@pytest.fixture(scope="module")
def nan_run(tmp_path_factory):
    """NaN from step 4 on: with the weights that its update left."""
    with wb.Recorder(tmp_path_factory.mktemp("t1") / "run", *parts(broken()), compile=False, save_every=3) as recorder:
        for batch in recorder.batches(7):
            recorder.step(batch)
    return wb.open_run(recorder.path)


def test_t1_whatever_a_run_with_nan_writes_is_strict_json_and_says_nan(nan_run, tmp_path):
    trace = nan_run.replay(4, experiment=broken(), trace_dir=tmp_path)
    assert trace.exact and trace.record.loss is None and trace.record.loss_bits == NAN
    nan_run.whatif(4, "lr=0.5x", experiment=broken(), trace_dir=tmp_path, next_steps=1)
    written = [*nan_run.path.rglob("*.json"), *tmp_path.rglob("*.json")]
    assert len([path for path in written if path.parent == tmp_path]) == 2
    for path in written:
        runs.strict(path.read_text())
    line = runs.lines(nan_run.path)[4]
    assert (line["step"], line["loss"], line["loss_bits"]) == (4, None, NAN)
    assert math.isnan(nan_run.steps["loss"][3]) and nan_run.steps["loss_recorded"].all()


@pytest.mark.parametrize("command", [["spikes"], ["compare"]])
def test_t1_what_the_commands_print_of_it_is_strict_json(nan_run, command):
    twice = [nan_run.path] * (2 if command == ["compare"] else 1)
    said = runs.here(*command, *twice, "--json")
    assert said.code == 0
    runs.strict(said.out)
    if command == ["spikes"]:
        assert "non_finite" in said.out


def test_t1_an_integer_beyond_any_double_is_infinite_as_1e999_is(write):
    lines = [f'{{"step": {n}, "loss": {loss}}}' for n, loss in ((1, 2), (2, "1" + "0" * 400), (3, "-1" + "0" * 400))]
    for end in ([], ['{"step": 4, "loss": null}']):
        run = wb.open_run(write(*lines, *end))
        assert run.steps["loss"].tolist()[:3] == [2.0, math.inf, -math.inf]
    with pytest.raises(TelemetryError, match=r"line 2: .*out of range"):  # the run's own never has it
        read(write(step(1), f'{{"type": "step", "step": 2, "loss": 1{"0" * 400}}}'))


# T2: a torn last line, the same plus a blank line; [], null, a bad middle line.


@pytest.mark.parametrize("end", ["", "\n", "\n\n"])
def test_t2_the_panel_and_the_commands_tell_of_a_torn_last_line(tmp_path, end):
    run = runs.recorded(tmp_path)
    with open(run / "telemetry.jsonl", "a") as file:
        file.write('{"step": 5, "lo' + end)
    said = runs.here("spikes", run)
    assert said.code == 0 and "unfinished" in said.err
    panel = wb.Panel(run=str(run))
    assert panel.last_error is None and "unfinished" in panel.facts.value


@pytest.mark.parametrize("line", ["[]", "null", '{"step": 5, "lo'])
def test_t2_a_bad_middle_line_is_an_error_of_every_command_with_its_number(tmp_path, line):
    run = runs.recorded(tmp_path)
    lines = (run / "telemetry.jsonl").read_text().splitlines()
    (run / "telemetry.jsonl").write_text("\n".join([*lines[:5], line, *lines[5:]]) + "\n")
    for command in (["spikes", run], ["batch", run, "--step", 3], ["replay", run, "--step", 3], ["compare", run, run]):
        assert "telemetry.jsonl, line 6: " in runs.here(*command).sentence


# T3: "2.1", 5.0, "5", [2.1], missing step: a typed message per line, no traceback.


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"type": "step", "step": 2, "loss": "2.1"}', "str"),
        ('{"type": "step", "step": 2, "loss": [2.1]}', "array"),
        ('{"type": "step", "step": 5.0, "loss": 2.1}', "float"),
        ('{"type": "step", "step": "5", "loss": 2.1}', "str"),
        ('{"type": "step", "loss": 2.1}', "no step"),
    ],
)
def test_t3_a_wrong_type_is_a_sentence_of_the_command_line(tmp_path, line, said):
    run = runs.recorded(tmp_path)
    lines = (run / "telemetry.jsonl").read_text().splitlines()
    (run / "telemetry.jsonl").write_text("\n".join([*lines[:3], line, *lines[3:]]) + "\n")
    sentence = runs.here("spikes", run).sentence
    assert "line 4: " in sentence and said in sentence


# T4: duplicate and backward steps after a resume: segments kept apart, the user picks, nothing dropped silently.


def test_t4_a_step_that_two_segments_tell_differently_is_the_users_choice(tmp_path):
    run = runs.segmented(tmp_path)  # steps 9 to 12 stand twice, with the same bits
    assert "the last is used" in " ".join(wb.open_run(run).segment_of(9)[1])
    path = run / "telemetry.jsonl"
    lines = runs.lines(run)
    for line in lines:
        if line["type"] == "step" and line["step"] == 9 and line["segment"] == 1:
            line.update(loss=3.0, loss_bits="0x40400000")
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    opened = wb.open_run(run)
    assert len(opened.steps) == 18 and opened.steps.query("step == 9")["segment"].tolist() == [0, 1]
    with pytest.raises(ReplayError, match=r"step 9 stands in segments \[0, 1\] .* their records differ; choose one"):
        opened.segment_of(9)
    assert "choose one with --segment" in runs.here("replay", run, "--step", 9).sentence
    assert runs.here("batch", run, "--step", 9, "--segment", 0).code == 0


# T5: two writers interleaved: counted and reported.

GLUED = step(2) + step(3)
MIXED = '{"type": "step", "step": 2, "loss": 2.0, "step": 3, "loss": 2.5}'  # it parses, and mixes two records
CUT = '{"type": "step", "step": 2, "lo' + step(3)


@pytest.mark.parametrize("bad", [GLUED, MIXED, CUT])
@pytest.mark.parametrize("others", [0, 1, 7])
def test_t5_lines_of_two_writers_are_counted(write, bad, others):
    path = write(step(1), bad, *(line for place in range(others) for line in (step(10 + place), bad)), step(99))
    for said in both(path):
        assert said.startswith(f"{path}, line 2: ")
        assert ("two processes may have written" in said) == bool(others)
        assert ("Beside it line 4 can't be read" in said) == (others == 1)
        assert ("Beside it 7 lines behind it (4, 6, 8, 10, 12 and 2 more) can't be read" in said) == (others == 7)
    for command in ("spikes", "runs"):
        said = runs.here(command, path if command == "spikes" else path.parent)
        assert "Traceback" not in said.out + said.err


def test_t5_an_object_within_an_entry_is_its_own_affair(write):
    path = write(
        '{"step": 1, "loss": 2.0, "eval": {"step": 7, "loss": 9.0}}', '{"step": 2, "name": "step", "loss": 1.5}'
    )
    assert wb.open_run(path).steps[["step", "loss"]].values.tolist() == [[1, 2.0], [2, 1.5]]


# T6: a log of 10-step means is not step N's loss.


def test_t6_a_mean_is_not_compared_with_a_step_and_a_window_is_offered(tmp_path):
    """A printed log beside the recorded run of the same training: the mean of a window agrees, and none is a step."""
    run = wb.open_run(runs.recorded_read_only())
    losses = run.steps["loss"].to_numpy(np.float64)
    log = tmp_path / "train.log"
    log.write_text(
        f"Iter 10: Train loss {losses[:10].mean():.3f}, Learning Rate 1.000e-05, It/sec 0.521, Tokens/sec 1\n"
    )
    told = wb.open_run(log)
    assert "loss" not in told.line(10, 0).evidence()
    assert "the mean of steps 1 to 10, and not this step's own" in html.unescape(
        wb.Panel(run=str(log)).step_facts.value
    )
    found = told.logged(10)
    assert (found.first, found.last) == (1, 10) and found.agrees(dict(enumerate(losses[:10].tolist(), start=1)))
    assert not found.agrees(dict(enumerate((losses[:10] + 0.01).tolist(), start=1)))


# T7: UTF-16, a byte-order mark, CRLF; a 2 GB file.


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-8-sig"])
def test_t7_another_encoding_is_named_on_the_command_line(tmp_path, encoding):
    run = runs.recorded(tmp_path)
    path = run / "telemetry.jsonl"
    path.write_bytes(path.read_text().encode(encoding))
    sentence = runs.here("spikes", run).sentence
    assert ("UTF-16" if "16" in encoding else "byte-order mark") in sentence


def test_t7_crlf_changes_nothing(tmp_path):
    run = runs.recorded(tmp_path)
    before = wb.open_run(run).steps
    path = run / "telemetry.jsonl"
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert wb.open_run(run).steps.equals(before)
    log = tmp_path / "log.jsonl"
    log.write_bytes(b'{"step": 1, "loss": 2.0}\r\n{"step": 2, "loss": 1.5}\r\n')
    assert wb.open_run(log).steps["loss"].tolist() == [2.0, 1.5]


@pytest.mark.parametrize("own", [True, False])
def test_t7_a_file_is_read_in_parts(tmp_path, own, monkeypatch):
    """The memory that reading takes is that of its columns and of a few blocks, whatever the length of its lines."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, rows = tmp_path / "telemetry.jsonl", 6000
    note = "x" * 8000
    with open(path, "w") as file:
        for number in range(1, rows + 1):
            file.write(
                step(number, note=note) + "\n" if own else f'{{"iter": {number}, "loss": 2.0, "note": "{note}"}}\n'
            )
    assert path.stat().st_size > 48e6
    if not own:
        wb.open_run(path)  # modules that it loads
    tracemalloc.start()
    try:
        found = read(path) if own else wb.open_run(path).steps
        assert tracemalloc.get_traced_memory()[1] < 16e6
    finally:
        tracemalloc.stop()
    assert len(found) == rows


@pytest.mark.parametrize("start", [b"", b'{"type": "step", "step": 1, "note": "'])
def test_t7_two_gigabytes_without_a_line_end_are_refused(tmp_path, start, monkeypatch):
    """As a disk leaves a file whose blocks never came; it takes no room here, for it has holes."""
    monkeypatch.setattr("workbench.lines.scan.LINE", 1 << 22)
    monkeypatch.setattr("workbench.lines.strict.LINE", 1 << 22)
    monkeypatch.setattr("workbench.foreign.objects.LINE", 1 << 22)
    path = tmp_path / "telemetry.jsonl"
    path.write_bytes(start)
    os.truncate(path, 2 << 30)
    tracemalloc.start()
    try:
        for reader in (read, lambda path: wb.open_run(path, format="jsonl"), wb.open_run):
            with pytest.raises(TelemetryError, match="line 1: more than 4194304 bytes long|no log that is known here"):
                reader(path)
        assert tracemalloc.get_traced_memory()[1] < 32e6
    finally:
        tracemalloc.stop()


# A validation before the first step is one of state 0.


def validated(path, losses, **recording):
    job = experiment()
    with wb.Recorder(path, *parts(job), compile=False, save_every=3, **recording) as recorder:
        for loss in losses:
            recorder.log_validation(loss)
        for batch in recorder.batches(recorder.step_number + 2):
            recorder.step(batch)
    return wb.open_run(path)


def test_a_validation_before_the_first_step_is_recorded_and_read(tmp_path):
    run = validated(tmp_path / "run", [2.5], copy_telemetry_to=tmp_path / "copy.jsonl")
    kinds = [(line["type"], line["step"]) for line in runs.lines(run.path)]
    assert kinds == [("meta", 0), ("val", 0), ("step", 1), ("step", 2), ("done", 2)]
    assert run.validations().values.tolist() == [[0, 0, 2.5]] and run.steps["val_loss"].isna().all()
    assert read(run.path / "telemetry.jsonl").lines[1].val_loss == 2.5
    assert run.replay(1, experiment=experiment(), trace_dir=tmp_path / "traces").exact and run.verify().exact
    assert "validation loss before the first step 2.5" in wb.Panel(run=str(run.path)).facts.value
    log = wb.open_run(tmp_path / "copy.jsonl")
    assert log.validations().values.tolist() == [[0, 0, 2.5]] and log.steps["step"].tolist() == [0, 1, 2]
    run = validated(run.path, [1.5], resume=True)  # of state 2, from which it goes on
    assert run.validations().values.tolist() == [[0, 0, 2.5], [0, 2, 1.5]]
    assert run.steps["val_loss"].tolist()[1] == 1.5


def test_a_validation_that_is_not_finite_is_one_too(tmp_path):
    run = validated(tmp_path / "run", [math.nan, 2.0])
    assert run.validations()["step"].tolist() == [0, 0] and math.isnan(run.validations()["val_loss"][0])


def test_a_validation_that_no_step_followed_is_not_lost_in_silence(tmp_path):
    job = experiment()
    recorder = wb.Recorder(tmp_path / "run", *parts(job), compile=False)
    recorder.log_validation(2.5)
    with pytest.warns(UserWarning, match=r"validation losses \[2\.5\] are not in .*run: no step was performed"):
        recorder.close()
    with pytest.raises(RunError, match="before its first step or after its end"):
        recorder.log_validation(2.5)
    assert not (tmp_path / "run").exists()


def test_a_loop_that_begins_again_logs_its_first_validation_once(tmp_path):
    """Its script is run again: it evaluates the restored weights, and means those of its beginning."""

    def run(steps, **recording):
        job = experiment()
        points = [next(job.sampler) for _ in range(steps)]
        with wb.Recorder(
            tmp_path / "run", job.model, job.optimizer, job.loss_fn, compile=False, save_every=3, **recording
        ) as recorder:
            recorder.log_validation(2.5)
            for batch in points:
                recorder.step(batch)
        return wb.open_run(tmp_path / "run")

    run(4)
    found = run(6, resume=True)
    assert found.last_step == 6 and found.validations().values.tolist() == [[0, 0, 2.5]]


@pytest.mark.parametrize("number", [-1, None])
def test_no_validation_is_before_state_0(tmp_path, number):
    run = validated(tmp_path / "run", [2.5])
    edit_line(run.path, 0, lambda line: line.update(step=number), kind="val")
    with pytest.raises(TelemetryError, match="line 2: "):
        read(run.path / "telemetry.jsonl")
