"""Logs of other programs: recognised by their content, read without being converted, and never taken for more."""

import csv
import importlib
import json
import math

import numpy as np
import pytest
import runs
from click.testing import CliRunner

import workbench as wb
from workbench.cli import main
from workbench.errors import ReplayError, RunError, TelemetryError
from workbench.foreign.logged_run import Logged

SENTENCES = """Loading pretrained model
Starting training..., iters: 25
Iter 1: Val loss 2.900, Val took 1.213s
Iter 10: Train loss 2.345, Learning Rate 1.000e-05, It/sec 0.521, Tokens/sec 100.1, Trained Tokens 1234, Peak mem 3.1 GB
Iter 20: Val loss 2.500, Val took 1.213s
Iter 20: Train loss nan, Learning Rate 2.000e-05, It/sec 0.500, Tokens/sec 99.0, Trained Tokens 2468, Peak mem 3.1 GB
Iter 20: Saved adapter weights to adapters/adapters.safetensors and adapters/0000020_adapters.safetensors.
Iter 25: Train loss 2.100, Learning Rate 2.000e-05, It/sec 1.000, Tokens/sec 99.0, Trained Tokens 3085, Peak mem 3.1 GB
Saved final weights to adapters/adapters.safetensors.
"""
TABLE = """  iter   train_loss     tok/s     tokens
     1    val 2.900    1.21s
    10    2.345 ▼      100      1.2k
    20    val 2.500    1.21s
    20      nan ▲    1,099      2.5k
  save  0000020_adapters.safetensors
    25    2.100 ▲       99      3.1k
train ■■■■■■■■■■ 100% ·    25/25
"""


@pytest.fixture
def log(tmp_path):
    """Writes a log under a name that says nothing, and returns its path."""

    def write(content, name="log.txt"):
        path = tmp_path / name
        if isinstance(content, list):
            content = "".join(json.dumps(line) + "\n" for line in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def rows(run, *names):
    """Rows of the steps, None for NaN."""
    found = run.steps[list(names)].to_dict("list")
    return [
        tuple(None if isinstance(value, float) and math.isnan(value) else value for value in row)
        for row in zip(*found.values(), strict=True)
    ]


def told(run):
    return " ".join(run.telemetry.notices)


# -------------------------------------------------------------------------------------------------- mlx-lm: T6, windows


@pytest.mark.parametrize("text", [SENTENCES, TABLE, TABLE.replace("2.345", "\x1b[1;32m2.345").replace("▼", "▼\x1b[0m")])
def test_what_mlx_lm_prints_are_means_over_a_window(log, text):
    run = wb.open_run(log(text))
    assert run.format == "mlx-lm" and "Recognised as what mlx_lm.lora printed" in told(run)
    assert rows(run, "step", "first_step", "loss", "loss_recorded", "val_loss") == [
        (10, 1, 2.345, True, None),
        (19, 19, None, False, 2.5),  # it validates before step 20, so that is the state of step 19
        (20, 11, None, True, None),  # printed as nan
        (25, 21, 2.1, True, None),
    ]
    assert "Validation before the first step: loss 2.9." in told(run)
    assert run.spikes()[["step", "rule"]].values.tolist() == [[20, "non_finite"]]


def test_sentences_have_learning_rate_and_speed(log):
    run = wb.open_run(log(SENTENCES))
    assert rows(run, "step", "lr", "step_per_s")[0] == (10, 1e-5, 0.521)


def test_a_mean_is_no_steps_loss_and_a_window_is_offered(log):
    """Equality with one step is refused; the mean of a replayed window is compared, as far as it was printed."""
    run = wb.open_run(log(SENTENCES))
    line = run.line(10, 0)
    assert run.evidence(10, 0) == line.evidence() == {"lr": "0x3727c5ac"}  # which is one step's: 1e-05
    found = run.logged(10)
    assert found == Logged(1, 10, 2.345, 3)
    losses = {step: 2.345 + (step - 5.5) / 100 for step in range(1, 11)}
    assert found.agrees(losses) and not found.agrees(losses | {10: 2.5})
    assert found.agrees(losses | {1: losses[1] + 0.0049}) and not found.agrees(losses | {1: losses[1] + 0.0051})
    with pytest.raises(ReplayError, match=r"steps \[4\] of 1 to 10 have no loss"):
        found.agrees({step: loss for step, loss in losses.items() if step != 4})
    with pytest.raises(ReplayError, match="no loss at step 19"):
        run.logged(19)
    assert run.logged(20).agrees(dict.fromkeys(range(11, 21), math.nan))


def test_a_log_of_single_steps_has_their_losses(log):
    run = wb.open_run(log([{"step": step, "loss": 2.0 + step} for step in (1, 2)]))
    assert run.line(2, 0).evidence() == {"loss": "0x40800000"} and run.logged(2) == Logged(2, 2, 4.0, None)


def test_a_second_process_of_mlx_lm_is_a_segment(log):
    run = wb.open_run(log(SENTENCES + SENTENCES))
    assert [(segment, step) for segment, step in rows(run, "segment", "step")] == [
        (segment, step) for segment in (0, 1) for step in (10, 19, 20, 25)
    ]
    assert run.steps["first_step"].tolist() == [1, 19, 11, 21] * 2


def test_a_torn_report_is_tolerated_only_at_the_end(log):
    whole = SENTENCES.splitlines()[3].replace("Iter 10", "Iter 30")
    assert len(wb.open_run(log(SENTENCES + whole)).steps) == 5  # only its line end is missing
    for length in range(len("Iter 30: Train loss"), len(whole)):  # a number that is cut off may be a number still
        run = wb.open_run(log(SENTENCES + whole[:length]))
        assert len(run.steps) == 4 and "line 10: unfinished" in told(run)
    with pytest.raises(TelemetryError, match="line 1: 'Iter 9: Train loss none' is no report"):
        wb.open_run(log("Iter 9: Train loss none\n" + SENTENCES))


# ------------------------------------------------------------------------------------------------------- trainer_state


def trainer_state(**more):
    history = [
        {"epoch": 0.1, "loss": 2.5, "learning_rate": 1e-4, "grad_norm": math.nan, "step": 5},
        {"epoch": 0.2, "loss": 2.25, "grad_norm": 1.5, "step": 10},
        {"eval_loss": 2.2, "eval_runtime": 1.0, "step": 10},
        {"eval_loss": 2.0, "step": 12},
        {"note": 1},
        {"train_runtime": 5, "train_loss": 2.3, "step": 12},
    ]
    return json.dumps({"global_step": 12, "log_history": history} | more, indent=2)


def test_trainer_state_has_eval_rows_and_rows_without_a_step(log, tmp_path):
    log(trainer_state(logging_steps=5), "trainer_state.json")
    run = wb.open_run(tmp_path)  # the folder of a checkpoint, with this one log in it
    assert run.format == "trainer_state"
    assert rows(run, "step", "first_step", "loss", "grad_norm", "grad_norm_recorded", "val_loss") == [
        (5, 1, 2.5, None, True, None),
        (10, 6, 2.25, 1.5, True, 2.2),
        (12, 12, None, None, False, 2.0),
    ]
    assert "1 entries of log_history have no step" in told(run) and "summary of the training" in told(run)


def test_trainer_state_that_logged_each_step_has_no_windows(log):
    run = wb.open_run(log(trainer_state(logging_steps=1)))
    assert run.steps["first_step"].tolist() == [5, 10, 12]


# -------------------------------------------------------------------------------------------------------- posttrainllm


POSTTRAIN = [
    {"type": "meta", "seed": "18446744073709551615", "config": {"steps": 5}},
    *({"type": "step", "step": n, "loss": None if n == 3 else 2.0, "lr": 1e-3, "grad_norm": 1.0} for n in range(1, 6)),
    {"type": "val", "step": 5, "val_loss": 1.5},
    {"type": "done", "elapsed_s": 3.0},
]


def test_the_posttrainllm_trainer_writes_null_for_what_is_not_finite(log):
    run = wb.open_run(log(POSTTRAIN))
    assert run.format == "posttrainllm"
    assert rows(run, "step", "loss", "loss_recorded", "val_loss")[2:] == [
        (3, None, True, None),
        (4, 2.0, True, None),
        (5, 2.0, True, 1.5),
    ]
    assert run.spikes()[["step", "rule"]].values.tolist() == [[3, "non_finite"]]
    assert "1 steps have null for loss" in told(run)


def test_the_log_that_it_put_aside_is_named_and_read_if_wished(log):
    log([{"type": "step", "step": step, "loss": 9.0} for step in (1, 2)], "log.txt.prev")
    path = log(POSTTRAIN)
    run = wb.open_run(path)
    assert run.last_step == 5 and "log.txt.prev stands beside it" in told(run)
    both = wb.open_run(path, previous=True)
    assert [segment for (segment,) in rows(both, "segment")] == [0, 0, 1, 1, 1, 1, 1]
    with pytest.raises(TelemetryError, match="previous=True goes with"):
        wb.open_run(log([{"step": 1, "loss": 2.0}]), previous=True)


# -------------------------------------------------------------------------------------------- other JSON lines: T1-T4


def test_a_mapping_is_proposed_shown_and_can_be_set(log):
    lines = [{"iter": step, "train/loss": 3.0 / step, "Learning-Rate": 1e-3, "mine": 7.0} for step in (1, 2)]
    run = wb.open_run(log(lines))
    assert run.mapping == {"step": "iter", "loss": "train/loss", "lr": "Learning-Rate"}
    assert "step = 'iter', loss = 'train/loss', lr = 'Learning-Rate'" in told(run)
    other = wb.open_run(log(lines), columns={"loss": "mine", "lr": None})
    assert other.mapping == {"step": "iter", "loss": "mine"} and other.steps["loss"].tolist() == [7.0, 7.0]
    counted = wb.open_run(log([{"loss": 3.0}, {"loss": 2.0}]), columns={"step": None})
    assert counted.steps["step"].tolist() == [1, 2] and "numbers of the entries" in told(counted)


@pytest.mark.parametrize(
    ("line", "columns", "words"),
    [
        ({"step": 1, "a": 2.0}, None, ("no key for the loss", "'a'", "columns={'loss'")),
        ({"loss": 1.0}, None, ("no key for the step", "columns={'step': None}")),
        ({"step": 1, "loss": 2.0}, {"loss": "x"}, ("has no 'x'", "'loss'")),
        ({"step": 1, "loss": 2.0}, {"los": "loss"}, ("'los'", "expected some of")),
        ({"step": 1, "loss": 2.0}, {"loss": "loss", "lr": "loss"}, ("two names",)),
        ({"step": 1, "train/loss": 2.0, "train_loss": 3.0}, None, ("several things that could be loss",)),
        ({"step": 1, "loss": "2.1"}, None, ("entry 1", "'2.1' (str)", "'loss'", "expected a number")),
        ({"step": 1, "loss": [2.1]}, None, ("(list)",)),
        ({"step": 1, "loss": True}, None, ("(bool)",)),
        ({"step": "5", "loss": 2.0}, None, ("'5'", "expected a whole number")),
        ({"step": 1.5, "loss": 2.0}, None, ("1.5",)),
        ({"step": 2**63, "loss": 2.0}, None, ("64 bits",)),
    ],
)
def test_what_can_not_be_read_is_named(log, line, columns, words):
    with pytest.raises(TelemetryError) as caught:
        wb.open_run(log([line]), columns=columns)
    assert [word for word in words if word not in str(caught.value)] == []


def test_null_missing_and_each_word_for_not_finite_are_kept_apart(log):
    text = '{"step":1,"loss":NaN}\n{"step":2,"loss":-Infinity}\n{"step":3,"loss":"NaN"}\n{"step":4,"loss":null}\n'
    run = wb.open_run(log(text + '{"step":5,"lr":0.5}\n{"step":6,"loss":1e999}\n'))
    assert run.steps["step"].tolist() == [1, 2, 3, 5, 6]
    assert run.steps["loss_recorded"].tolist() == [True, True, True, False, True]
    assert run.steps["loss"].tolist()[1] == -math.inf and run.steps["loss"].tolist()[4] == math.inf
    assert "1 entry has null for 'loss'" in told(run)
    assert "1 entry has a step and none of these values; it is no row." in told(run)


def test_a_torn_last_line_is_tolerated_and_a_damaged_one_is_named(log):
    whole = [{"step": step, "loss": 2.0} for step in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in whole)
    for end in ("", "\n", "\n\n", "\n" * (1 << 20)):
        run = wb.open_run(log(text + '{"step": 5, "lo' + end))
        assert run.last_step == 2 and "line 3: unfinished" in told(run)
    for bad in ("[]", "null", '{"step": 5, "lo', '{"step":3}{"step":4}'):
        with pytest.raises(TelemetryError, match="line 3: .* is no JSON object"):
            wb.open_run(log(text + bad + "\n" + json.dumps({"step": 9, "loss": 1.0}) + "\n"))


def test_steps_that_go_back_are_segments_and_nothing_is_dropped(log):
    steps = [1, 2, 3, 2, 3, 4, 4]
    run = wb.open_run(log([{"step": step, "loss": float(place)} for place, step in enumerate(steps)]))
    assert rows(run, "segment", "step", "loss") == [
        *((0, 1, 0.0), (0, 2, 1.0), (0, 3, 2.0)),
        *((1, 2, 3.0), (1, 3, 4.0), (1, 4, 5.0)),
        (2, 4, 6.0),
    ]
    with pytest.raises(ReplayError, match=r"segments \[0, 1\]"):
        run.segment_of(2)


def test_several_entries_of_a_step_are_one_row(log):
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "lr": 0.5}, {"step": 1, "val_loss": 3.0}, {"step": 2, "loss": 1.0}]
    run = wb.open_run(log(lines))
    assert rows(run, "segment", "step", "loss", "lr", "val_loss") == [(0, 1, 2.0, 0.5, 3.0), (0, 2, 1.0, None, None)]


def test_many_lines_read_as_each_line_says(log):
    """Blocks of lines at once, against json.loads line by line."""
    rng = np.random.default_rng(3)
    lines = [
        {"step": step}
        | ({"loss": float(rng.lognormal())} if step % 7 else {})
        | ({"grad_norm": step} if step % 3 else {})
        for step in range(1, 5000)
    ]
    path = log(lines)
    steps = wb.open_run(path).steps.set_index("step")
    for line in map(json.loads, path.read_text().splitlines()):
        if len(line) == 1:
            assert line["step"] not in steps.index
            continue
        row = steps.loc[line["step"]]
        assert (row["loss"] == line["loss"]) if "loss" in line else not row["loss_recorded"]
        assert (row["grad_norm"] == line["grad_norm"]) if "grad_norm" in line else not row["grad_norm_recorded"]


# ----------------------------------------------------------------------------------------------------------------- CSV


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_csv(log, sign):
    text = "step,train_loss,lr\n1,2.5,0.1\n2,nan,0.1\n3,,0.1\n,9,9\n4,0.30000000000000004,1e-5\n".replace(",", sign)
    run = wb.open_run(log(text))
    assert run.format == "csv"
    assert rows(run, "step", "loss", "loss_recorded", "lr") == [
        *((1, 2.5, True, 0.1), (2, None, True, 0.1), (3, None, False, 0.1)),
        (4, 0.1 + 0.2, True, 1e-5),
    ]
    assert "1 row has no 'step'; it is left out." in told(run)


def test_a_field_of_csv_that_is_no_number_is_named(log):
    with pytest.raises(TelemetryError, match="line 3: column 'loss' has 'oops'"):
        wb.open_run(log("step,loss\n1,2.5\n2,oops\n"))


def test_a_chart_that_wandb_exported(log, tmp_path):
    path = tmp_path / "export"
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["Step", *(f"calm-sun-1 - train/loss{end}" for end in ("", "__MIN", "__MAX"))])
        writer.writerows([[1, 2.5, 2.25, 2.75], [2, 2.0, 2.0, 2.0]])
    run = wb.open_run(path)
    assert run.mapping == {"step": "Step", "loss": "calm-sun-1 - train/loss"} and run.steps["loss"].tolist() == [
        2.5,
        2.0,
    ]
    assert "export of W&B" in told(run)
    two = log('"Step","a - train/loss","b - train/loss"\n"1","2.5","3.5"\n')
    with pytest.raises(TelemetryError, match="several things that could be loss: 'a - train/loss', 'b - train/loss'"):
        wb.open_run(two)
    assert wb.open_run(two, columns={"loss": "b - train/loss"}).steps["loss"].tolist() == [3.5]


# -------------------------------------------------------------------------------------------- with their own libraries


def test_an_offline_run_of_wandb(log):
    """The file is made here record by record: LevelDB's log format, with the messages of the wandb library."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    import zlib

    content = b":W&B\xe1\xbe\x00"

    def put(message):
        nonlocal content
        place = 0
        while True:
            room = 32768 - len(content) % 32768
            if room < 7:
                content += b"\0" * room
                continue
            part = message[place : place + room - 7]
            first, last = place == 0, place + len(part) == len(message)
            kind = bytes([1 if first and last else 2 if first else 4 if last else 3])
            content += zlib.crc32(kind + part).to_bytes(4, "little") + len(part).to_bytes(2, "little") + kind + part
            place += len(part)
            if last:
                return

    for step in range(1, 400):
        record = protocol.Record()
        record.history.step.num = step
        values = {"train/loss": "NaN" if step == 3 else f"{2.0 / step!r}", "note": json.dumps("x" * 200)}
        for key, value in values.items():
            item = record.history.item.add()
            item.nested_key.append(key)
            item.value_json = value
        put(record.SerializeToString())
    run = wb.open_run(log(content))
    assert run.format == "wandb" and len(content) > 2 * 32768
    losses = run.steps["loss"].tolist()
    assert math.isnan(losses[2]) and losses[:2] + losses[3:] == [2.0 / step for step in range(1, 400) if step != 3]
    assert run.steps["loss_recorded"].all()
    torn = wb.open_run(log(content[:-5]))
    assert torn.last_step == 398 and "ends within a record" in told(torn)
    with pytest.raises(TelemetryError, match="damaged at byte"):
        wb.open_run(log(content[:100] + b"\xff" + content[101:]))


@pytest.mark.filterwarnings("ignore")
def test_event_files_of_tensorboard(tmp_path):
    writers = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    writer = writers.EventFileWriter(str(tmp_path))
    for step in (1, 2, 3):
        values = [Summary.Value(tag="train/loss", simple_value=2.0 / step), Summary.Value(tag="lr", simple_value=0.5)]
        writer.add_event(Event(step=step, wall_time=1.0, summary=Summary(value=values)))
    writer.close()
    (file,) = tmp_path.iterdir()
    for path in (tmp_path, file):
        run = wb.open_run(path)
        assert run.format == "tensorboard" and run.mapping == {"step": "step", "loss": "train/loss", "lr": "lr"}
        assert rows(run, "step", "loss", "lr") == [(s, float(np.float32(2.0 / s)), 0.5) for s in (1, 2, 3)]


@pytest.mark.parametrize(
    ("start", "library"), [(b":W&B\xe1\xbe\x00", "wandb"), (b"\0" * 12 + b"\x1abrain.Event:2", "tensorboard")]
)
def test_a_library_that_is_not_installed_is_named(log, monkeypatch, start, library):
    real = importlib.import_module

    def missing(name, *package):
        if name.startswith(("wandb", "tensorboard")):
            raise ImportError(name)
        return real(name, *package)

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(TelemetryError, match=rf"the {library} library reads it: .*spike-workbench\[logs\]"):
        wb.open_run(log(start + b"\0" * 40))


# --------------------------------------------------------------------------------------------------------- recognition


def test_what_is_no_log_is_refused_with_what_was_expected(log, tmp_path):
    for content in (b"", b"hello\nworld\n", b"\x89PNG\r\n\x1a\n", b"5\n6\n", b"[1, 2]\n"):
        with pytest.raises(TelemetryError, match="is no log that is known here|is empty"):
            wb.open_run(log(content))
    with pytest.raises(RunError, match="no run.json in it"):
        wb.open_run(tmp_path)
    with pytest.raises(RunError, match="does not exist"):
        wb.open_run(tmp_path / "nothing")
    log(trainer_state(), "trainer_state.json"), log(POSTTRAIN, "telemetry.jsonl")
    with pytest.raises(RunError, match="has several logs: trainer_state.json, telemetry.jsonl; name one"):
        wb.open_run(tmp_path)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_another_encoding_is_named(log, encoding):
    with pytest.raises(TelemetryError, match="UTF-8 with a byte-order mark|UTF-16"):
        wb.open_run(log('{"step": 1, "loss": 2.0}\n'.encode(encoding)))


@pytest.mark.parametrize("sign", [",", ";"])
def test_csv_with_a_byte_order_mark_is_read_as_spreadsheets_write_it(log, sign):
    text = f"step{sign}loss\r\n1{sign}2.5\r\n2{sign}1.5\r\n"
    run = wb.open_run(log(text.encode("utf-8-sig")))
    assert run.format == "csv" and rows(run, "step", "loss") == [(1, 2.5), (2, 1.5)]
    assert run.mapping == {"step": "step", "loss": "loss"}


def test_a_log_without_a_loss_is_not_said_to_have_no_spikes(log):
    path = log([{"step": step, "train/ce": 2.0 - step / 1e3, "val/loss": 2.0} for step in range(1, 201)])
    for more in ((), ("--rule", "all")):
        said = runs.here("spikes", path, *more)
        assert said.code == 2 and "No loss was judged: no key of " in said.err and not said.out
        assert "--columns loss=KEY" in said.err and "(its keys: 'step', 'train/ce', 'val/loss')" in said.err
    said = runs.here("spikes", path, "--json")
    assert said.code == 2 and not said.out and "No loss was judged" in said.err
    assert runs.here("spikes", path, "--columns", "loss=train/ce").out.startswith("no spikes. Steps 1 to 50 were not")


def test_the_gradient_norms_of_a_log_without_a_loss_are_judged(log):
    path = log(
        [{"step": step, "ce": 2.0, "grad_norm": 9.0 if step == 80 else 1.0 + step / 1e3} for step in range(1, 99)]
    )
    said = runs.here("spikes", path)
    assert said.code == 2 and "No loss was judged: no key of " in said.err and not said.out
    assert "Its gradient norms are judged with --rule grad_norm_median." in said.err
    said = runs.here("spikes", path, "--rule", "grad_norm_median")
    assert said.code == 0 and said.out.startswith("step 80 (segment 0), grad_norm_median")


def test_columns_are_gathered_and_named_once(log):
    path = log([{"n": step, "ce": 1.0 if step < 80 else 9.0} for step in range(1, 101)])
    for given in (("--columns", "loss=ce,step=n"), ("--columns", "loss=ce", "--columns", "step=n")):
        assert runs.here("spikes", path, *given).out.startswith("step 80 (segment 0), ")
    said = runs.here("spikes", path, "--columns", "loss=ce,step=n", "--columns", "loss=n")
    assert said.code == 2 and "'loss' is named twice; expected each name once" in said.err


def test_what_mlx_lm_did_not_print_is_not_read_as_if_it_had(log):
    with pytest.raises(TelemetryError, match="has no line as mlx-lm prints them, such as 'Iter 10: Train loss"):
        wb.open_run(log("step 1 loss=4.0\nstep 2 loss=3.9\n"), format="mlx-lm")


def test_a_log_that_is_not_known_is_told_how_to_set_its_format(log):
    said = runs.here("spikes", log("step 1 loss=4.0\nstep 2 loss=3.9\n"))
    assert said.code == 2 and "--format F" in said.err and "one of posttrainllm, trainer_state, mlx-lm" in said.err


def test_a_format_can_be_set_and_is_held_to(log):
    path = log([{"type": "step", "step": step, "loss": 2.0} for step in (1, 2)])
    assert wb.open_run(path).format == "posttrainllm"
    run = wb.open_run(path, format="jsonl")
    assert run.format == "jsonl" and told(run).startswith("Read as JSON lines")
    for kind in ("csv", "trainer_state", "nonsense"):
        with pytest.raises(TelemetryError):
            wb.open_run(path, format=kind)


# ----------------------------------------------------------------------------------- telemetry only: what is not there


def spiking():
    rng = np.random.default_rng(0)
    losses = 2.0 + 0.01 * rng.standard_normal(120)
    losses[99] = 9.0
    return [{"step": step, "loss": float(loss)} for step, loss in enumerate(losses, start=1)]


def test_spikes_and_segments_of_a_log_are_those_of_a_run(log):
    run = wb.open_run(log(spiking()))
    assert run.spikes()[["step", "rule"]].values.tolist() == [[100, "loss_factor"]]
    assert run.spikes().equals(wb.find_spikes(run.steps))


def test_all_that_needs_more_says_in_a_sentence_what_is_missing(log):
    run = wb.open_run(log(spiking()))
    asked = [lambda: run.replay(100), lambda: run.context(100), lambda: run.diverge(100), lambda: run.plan(100)]
    asked += [lambda: run.autopsy(100), lambda: run.whatif(100, "lr=0.5x"), lambda: run.batch_facts(100)]
    for ask in asked:
        with pytest.raises(
            ReplayError, match="only a log .* no checkpoints, no batches and no fingerprints, so that no step"
        ):
            ask()
    assert run.norms(100).empty and run.verdict(100) is None and run.checkpoints == []
    assert "only a log" in run._repr_html_() and repr(run).startswith("LoggedRun(")


def test_commands_on_a_log(log):
    path = log(spiking())
    shown = CliRunner().invoke(main, ["spikes", str(path)])
    assert shown.exit_code == 0 and "100" in shown.output
    at = ["--step", "100"]
    commands = [["replay", str(path), *at], ["autopsy", str(path), *at], ["diverge", str(path), *at]]
    commands += [["batch", str(path), *at], ["whatif", str(path), *at, "--set", "lr=0.5x"], ["verify", str(path)]]
    for command in [*commands, ["compare", str(path), str(path)]]:
        refused = CliRunner().invoke(main, command)
        assert refused.exit_code == 2 and "is only a log" in refused.output and "Traceback" not in refused.output


def test_the_panel_opens_a_log_and_each_view_says_what_can_not_be_verified(log):
    panel = wb.Panel(run=log(spiking()))
    assert panel.last_error is None and panel.step.value == 100
    assert "Recognised as JSON lines" in panel.facts.value and "is only a log" in panel.facts.value
    for view in ("Batch", "Cause", "Environment"):
        panel.view.value = view
        assert "is only a log" in "".join(widget.value for widget in panel.parts[view])
    assert panel.trying.layout.display == panel.measure_button.layout.display == "none", "they could only fail"
    assert panel.replay_button.disabled and panel.cause_button.disabled and not panel.machine_button.disabled
    assert "No replay" in panel.estimate.value and "only a log" not in panel.estimate.value, "it is said above"
    panel.view.value = "Timeline"
    assert panel.still() and panel.last_error is None
    with pytest.raises(ReplayError, match="only a log"):
        panel.replay(100)


def test_a_log_that_grows_is_read_again(log):
    path = log(spiking()[:50])
    run = wb.open_run(path)
    assert run.last_step == 50
    with open(path, "a") as file:
        file.write("".join(json.dumps(line) + "\n" for line in spiking()[50:]))
    assert run.last_step == 120 and len(run.steps) == 120


def test_a_decimal_comma_is_named(log):
    with pytest.raises(
        TelemetryError, match="line 3: column 'loss' has '1,25'; expected a number with a decimal point"
    ):
        wb.open_run(log("step;loss\n1;2\n2;1,25\n"))
    with pytest.raises(TelemetryError, match="has '1,2,5'; expected a number$"):
        wb.open_run(log("step;loss\n1;2\n2;1,2,5\n"))


def test_what_a_file_begins_with_is_said_as_text(log):
    with pytest.raises(TelemetryError, match="it begins with 'hello there'"):
        wb.open_run(log("hello there"))


def test_the_telemetry_of_a_run_points_to_its_folder(tmp_path):
    run = runs.recorded(tmp_path)
    said = runs.here("replay", run / "telemetry.jsonl", "--step", "3")
    assert said.code == 2 and f"it is the telemetry of the run {run}: name the folder, {run}, to replay" in said.err


def test_the_report_of_a_log_does_not_speak_of_data(log, tmp_path):
    path = log([{"step": step, "loss": 2.0} for step in range(1, 9)])
    said = runs.here("report", path, "--step", "3", "--out", tmp_path / "r.html")
    assert said.code == 0 and "It holds numbers, keys and the path of the log: look" in said.out
