"""A loop's own script as the way to rebuild a run: never past its recorder, nor do its prints get into an answer."""

import json
import sys

import mlx.core as mx
import numpy as np
import pytest
import runs
from helpers import python, tree

import workbench as wb
from workbench.errors import ExperimentError

LOOP = """
import sys

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

import workbench as wb

ROWS, STEPS = 6, 10


def loss_fn(model, x, y):
    each = nn.losses.mse_loss(model(x), y, reduction="none")
    return each.mean(), {"token_loss": each}


def step(x, y):
    (loss, _), gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    print("a step of loss", loss.item())
    return loss


mx.random.seed(1)
rng = np.random.default_rng(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = optim.Adam(1e-2)
recorder = wb.Recorder(sys.argv[1], model, optimizer, LOSS, step_fn=step, FORK)
for number in range(STEPS):
    x = rng.standard_normal((ROWS, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    if number == 7:
        y[2] = 40.0
    if number >= recorder.step_number:
        recorder.step((mx.array(x), mx.array(y)))
recorder.close()
"""


def write(folder, name, fork="", loss="loss_fn"):
    (folder / name).write_text(LOOP.replace(", FORK", fork).replace("LOSS", loss))
    return folder / name


def record(script, path):
    done = python(script, path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """A script, and the run that it recorded: ten steps that print, checkpoints 0 and 10."""
    folder = tmp_path_factory.mktemp("loop")
    script = write(folder, "loop.py")
    return script, record(script, folder / "run")


@pytest.fixture(scope="module")
def forked(loop, tmp_path_factory):
    """A script that forks that run from a state which has to be rolled forward to, and the fork."""
    script, run = loop
    folder = tmp_path_factory.mktemp("fork")
    point = f', fork=wb.fork_point({str(run)!r}, 6, changes=["lr=0.01"], factory={str(script)!r})'
    fork = write(folder, "fork.py", point)
    return fork, record(fork, folder / "fork")


@pytest.fixture(scope="module")
def unfit(tmp_path_factory):
    """The same with a loss function that the step's batch does not fit."""
    folder = tmp_path_factory.mktemp("unfit")
    script = write(folder, "loop.py", loss="lambda model, x: model(x).sum()")
    return script, record(script, folder / "run")


# --------------------------------------------------------------------------------------------- up to its recorder


def test_a_fork_script_whose_parent_another_script_rebuilds_is_run_up_to_its_recorder(forked):
    script, path = forked
    before = tree(path)
    trace = wb.open_run(path).replay(8, factory=str(script), fresh_process=False)
    assert trace.exact
    after = tree(path)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("traces/") for name in after.keys() - before.keys())


def test_it_replays_in_a_process_of_its_own_too(forked):
    script, path = forked
    done = python("-m", "workbench", "replay", path, "--step", 9, "--factory", script, "--fresh-process", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gates"]["repeatable"]["verdict"] == "exact"


def test_a_recorder_records_again_afterwards(loop, tmp_path):
    script, path = loop
    wb.open_run(path).replay(3, factory=str(script), fresh_process=False)
    with wb.Recorder(tmp_path / "new", *runs.parts(runs.build()), compile=False) as recorder:
        for batch in recorder.batches(1):
            recorder.step(batch)
    assert wb.open_run(tmp_path / "new").telemetry.last_step() == 1


def test_a_factory_that_makes_a_recorder_hands_over_what_it_gave(loop, tmp_path, monkeypatch):
    _, path = loop
    body = LOOP.replace(", FORK", "").replace("LOSS", "loss_fn").replace("sys.argv[1]", repr(str(tmp_path / "new")))
    head, _, rest = body.partition("mx.random.seed")
    indented = "".join(f"    {line}\n" for line in ("mx.random.seed" + rest).splitlines())
    (tmp_path / "recording_factory.py").write_text(f"{head}def train():\n    global model, optimizer\n{indented}")
    monkeypatch.syspath_prepend(tmp_path)
    trace = wb.open_run(path).replay(3, factory="recording_factory:train", fresh_process=False, other_environment=True)
    assert trace.record.first_difference is None and not (tmp_path / "new").exists()


def test_a_module_that_records_as_it_is_imported_is_refused_and_records_nothing(loop, tmp_path, monkeypatch):
    _, path = loop
    body = LOOP.replace(", FORK", ", resume=True").replace("LOSS", "loss_fn")
    (tmp_path / "recording_module.py").write_text(body.replace("sys.argv[1]", repr(str(tmp_path / "new"))))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ExperimentError, match="makes a Recorder as it is imported"):
        wb.open_run(path).replay(3, factory="recording_module:build")
    assert not (tmp_path / "new").exists()
    sys.modules.pop("recording_module", None)


def test_a_run_that_names_no_factory_says_which_script_recorded_it(loop, monkeypatch):
    script, path = loop
    with pytest.raises(ExperimentError, match="named no factory") as caught:
        wb.open_run(path).replay(3)
    assert str(caught.value).endswith(f"--factory module:function or --factory {script}")
    monkeypatch.chdir(script.parent)
    with pytest.raises(ExperimentError, match=r"--factory loop\.py$"):
        wb.open_run(path).replay(3)


# ------------------------------------------------------------------------------------------------- what steps print


@pytest.mark.parametrize(
    "command",
    [
        ("replay", "--step", 3),
        ("replay", "--step", 5, "--context", 2),
        ("whatif", "--step", 3, "--set", "lr=0.5x", "--next", 1),
        ("autopsy", "--step", 8),
        ("sweep", "--steps", "3,4", "--workers", 0),
        ("diverge", "--step", 3, "--rung", "same process"),
        ("batch", "--step", 3),
    ],
    ids=lambda command: command[0],
)
def test_json_is_json_although_steps_print(loop, tmp_path, command):
    script, path = loop
    name, *options = command
    if name in ("replay", "whatif", "autopsy"):
        options += ["--trace-dir", tmp_path]
    said = runs.here(name, path, *options, "--factory", script, "--json")
    assert said.code == 0, said.err
    json.loads(said.out)
    assert name == "batch" or "a step of loss" in said.err


def test_what_other_processes_print_is_not_in_the_answer_either(loop):
    script, path = loop
    done = python("-m", "workbench", "sweep", path, "--steps", "3,9", "--workers", 2, "--factory", script, "--json")
    assert done.returncode == 0, done.stderr
    assert [row["verdict"] for row in json.loads(done.stdout)] == ["exact", "exact"]
    assert "a step of loss" in done.stderr


def test_tables_stand_alone(loop, tmp_path):
    script, path = loop
    options = ("--step", 3, "--set", "lr=0.5x", "--next", 1, "--trace-dir", tmp_path, "--factory", script)
    said = runs.here("whatif", path, *options)
    assert said.code == 0 and "a step of loss" not in said.out and "lr=0.5x" in said.out


# ------------------------------------------------------------------------------------- the loss function beside a step


def test_the_loss_function_says_which_row_carried_a_step_of_ones_own(loop, tmp_path):
    script, path = loop
    said = runs.here("replay", path, "--step", 8, "--factory", script, "--trace-dir", tmp_path)
    assert said.code == 0 and "Row 2 carries 100%" in said.out
    trace = wb.open_run(path).replay(8, factory=str(script), trace_dir=tmp_path, fresh_process=False)
    assert trace.record.certified_probe and len(trace.rows) == 6 and trace.rows["row"].iloc[0] == 2
    assert trace.rows["share"].sum() == pytest.approx(1)
    each = np.array(trace.record.token_loss, np.float32)  # (6, 1)
    assert each.mean() == pytest.approx(trace.record.loss, rel=1e-5)


@pytest.mark.parametrize(
    ("loss", "rows"),
    [
        ("loss_fn", "The batch of step 63 carries it: row 2 (high loss)."),
        ("None", "where loss_fn returns (loss, {"),
    ],
)
def test_an_autopsy_tells_rows_apart_by_the_loss_function_or_says_what_it_lacks(tmp_path, loss, rows):
    script = write(tmp_path, "loop.py", loss=loss)
    script.write_text(script.read_text().replace("ROWS, STEPS = 6, 10", "ROWS, STEPS = 6, 65").replace("== 7", "== 62"))
    path = record(script, tmp_path / "run")
    said = runs.here("autopsy", path, "--step", 63, "--factory", script)
    assert said.code == 0 and "Step 63: data." in said.out
    assert rows in " ".join(said.out.split())
    assert ("let it return" in said.out, "is not known" in said.out) == (False, loss == "None")
    if loss == "None":
        return
    assert runs.here("replay", path, "--step", 63, "--quick", "--factory", script).code == 0
    assert "and none was made" in runs.here("batch", path, "--step", 63).err
    assert runs.here("replay", path, "--step", 63, "--factory", script).code == 0
    shown = runs.here("batch", path, "--step", 63)
    assert "Batch of step 63, by share of its loss" in shown.out and "no loss of each row" not in shown.err


def test_without_a_certified_pass_no_row_is_named_and_why(tmp_path):
    """The step has the half of what the loss function gives: another computation."""
    script = write(tmp_path, "loop.py")
    script.write_text(script.read_text().replace("return loss\n\n", "return loss / 2\n\n"))
    run = wb.open_run(record(script, tmp_path / "run"))
    trace = run.replay(8, factory=str(script), fresh_process=False)
    assert trace.exact and trace.record.certified_probe is False and trace.record.row_loss is None
    notices = " ".join(run.batch_facts(8).attrs["notices"])
    assert "whose loss and gradients must then be the step's to the bit, and they are not" in notices


def test_a_loss_function_that_does_not_fit_the_batch_costs_the_probe_pass_alone(unfit, tmp_path):
    script, path = unfit
    said = runs.here("replay", path, "--step", 8, "--factory", script)
    assert said.code == 0 and "is exact" in said.out
    line = next(line for line in said.out.splitlines() if "probe pass certified" in line)
    assert "not made: the loss function (loss_fn) can't be run on the batch that the step took: TypeError: " in line
    trace = wb.open_run(path).trace(8)
    assert trace.record.certified_probe is None and "TypeError" in trace.record.probe_unmade
    assert {gate.verdict for gate in (trace.record.gates.repeatable, trace.record.gates.faithful)} == {"exact"}
    assert len(trace.record.updates) == 4 and {row.kind for row in trace.record.rows} >= {"gradient", "update"}
    notices = " ".join(wb.open_run(path).batch_facts(8).attrs["notices"])
    assert "none was made: the loss function (loss_fn) can't be run" in notices


def test_a_run_without_a_loss_function_has_no_probe_pass(tmp_path):
    script = write(tmp_path, "loop.py", loss="None")
    script.write_text(script.read_text().replace("y[2] = 40.0", "y[2] = np.inf"))
    run = wb.open_run(record(script, tmp_path / "run"))
    trace = run.replay(8, factory=str(script), fresh_process=False)
    assert trace.exact and trace.record.certified_probe is None
    assert trace.record.probe_unmade == "the experiment has no loss function (loss_fn), which it would run"
    assert trace.record.first_nonfinite.kind == "batch"  # no pass is needed to find it


def test_compiling_a_step_that_evaluates_an_array_is_a_rung_that_is_skipped(loop):
    script, path = loop
    ladder = wb.open_run(path).diverge(3, factory=str(script), rungs=("same process", "compile"))
    same, compiled = ladder.rungs
    assert same.verdict == "equal" and (compiled.name, compiled.verdict) == ("compile=on", "skipped")
    line = LOOP.replace(", FORK", "").splitlines().index('    print("a step of loss", loss.item())') + 1
    assert f"evaluates an array (item(), float(), print, an `if` on it, mx.eval) on line {line}" in compiled.detail
    assert "so it can't be compiled" in compiled.detail and "leave compile=True out" not in compiled.detail


# --------------------------------------------------------------------------------------------------- what step returns


def test_a_loop_written_for_an_array_gets_on_with_the_loss(tmp_path):
    losses = []
    with wb.Recorder(tmp_path / "run", *runs.parts(runs.build()), compile=False) as recorder:
        for batch in recorder.batches(2):
            losses.append(recorder.step(batch))
    loss = losses[0]
    assert isinstance(loss, float) and loss.item() == loss.tolist() == float(loss)
    assert (loss.shape, loss.ndim, loss.size, loss.dtype) == ((), 0, 1, mx.float32)
    half = loss.astype(mx.bfloat16)
    assert half.dtype == mx.bfloat16 and half.item() == mx.array(float(loss)).astype(mx.bfloat16).item()
    stacked = mx.array(losses)
    assert stacked.tolist() == losses and stacked.dtype == mx.float32
    total = mx.array(0.0) + loss + losses[1]
    assert total.item() == pytest.approx(sum(losses)) and f"{loss:.3f}" == f"{loss.item():.3f}"
