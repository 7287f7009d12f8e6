"""The doctor must find what varies, name it, and not be fooled by a count that can't fail. No GPU is needed for that:
what varies is planted."""

import itertools
import subprocess
import sys

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import Points, experiment, tensor_bytes, tree
from rich.console import Console
from runs import build as build_regression
from runs import here, parts, recorded_read_only, strict, workbench

from workbench import Recorder, doctor, open_run
from workbench.errors import ExperimentError, ReplayError
from workbench.examination import conclusion, operations, repeats, selftest, shards
from workbench.examination.catalogue import CATALOGUE, Inputs
from workbench.examination.diagnosis import OperationRow, SelfTest, StepRow, facts
from workbench.examination.operations import Operation, count_distinct, with_one_bit_flipped
from workbench.examination.repeats import Job, Setting, fresh_experiments, in_fresh_processes, perform, repeat, tally
from workbench.examination.speed import advice
from workbench.experiment import random_key

SETTING = Setting("float32", False, True)


# --------------------------------------------------------------------------------------------- things that are planted


def small(setting):
    """A few parameters, dropout and AdamW: milliseconds a step."""
    return experiment(dropout=0.2, dtype=setting.dtype, compile=setting.compile, deterministic=setting.deterministic)


def varying_operation(name="my kernel", dtype="float32"):
    """An operation whose result is one ulp larger each time that it is performed."""

    def make():
        values, calls = mx.arange(1, 9).astype(mx.float32), itertools.count()
        return lambda: (values.view(mx.int32) + next(calls)).view(mx.float32)

    return Operation(name, dtype, make, remedy="use another kernel")


def steady_operation(name="steady", dtype="float32"):
    return Operation(name, dtype, lambda: lambda: mx.arange(8))


def drifting_gradient():
    """A loss function whose forward pass repeats and whose backward pass does not: a little more at each call."""
    calls = itertools.count()

    @mx.custom_function
    def identity(x):
        return x

    @identity.vjp
    def drifting(primal, cotangent, output):
        return cotangent * (1 + 2.0**-6 * next(calls))

    return lambda model, x, y: nn.losses.mse_loss(identity(model(x)), y)


def record_own_loop(folder, build=build_regression, steps=3):
    """Also what does not repeat, which the recorder's own check would refuse."""
    how = {"compile": False, "factory": "runs:build", "save_every": 2, "self_check": False}
    with Recorder(folder, *parts(build()), **how) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(folder)


# ------------------------------------------------------------------------------------------------------- the catalogue


def test_every_operation_has_one_result_on_the_cpu(monkeypatch):
    monkeypatch.setattr(doctor, "REPEATS", 2)
    rows = [shards.count(operation, lambda number: None) for operation in CATALOGUE]
    assert [row.name for row in rows if row.distinct > 1] == []
    absent = [(row.name, row.dtype) for row in rows if row.distinct == 0]
    assert absent in ([], [("mixture of experts backward", "bfloat16")])
    assert all(row.remedy is None for row in rows if row.distinct == 1)
    assert len({(row.name, row.dtype) for row in rows}) == len(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    """matrix products|embedding gradient|embedding gradient (deterministic)|attention forward|attention backward
    attention backward (deterministic)|layer norm and RMS norm backward|cross-entropy and its gradient|reductions
    sorting with ties|convolution backward|overlapping pooling backward|random normal and dropout|AdamW update
    scatter-add and scatter-multiply|assignment to repeated indices|take_along_axis backward""".replace(
        "\n", "|"
    ).split("|"),
)
def test_the_catalogue_has(name, dtype):
    assert any((operation.name, operation.dtype) == (name.strip(), dtype) for operation in CATALOGUE)


def test_rows_of_a_scattered_table_get_three_addends_or_more():
    """Two floats add to the same sum in either order; three don't."""
    ids = np.array(Inputs("float32").ids(256, 512))
    assert np.bincount(ids).max() >= 3 and np.sum(np.bincount(ids) >= 3) > 20


def test_the_deterministic_row_really_runs_the_replacement(monkeypatch):
    from workbench import deterministic

    calls = []
    real = deterministic.gather_gradient
    monkeypatch.setattr(deterministic, "gather_gradient", lambda *parts: calls.append(1) or real(*parts))
    for operation in CATALOGUE:
        if operation.name.startswith("embedding gradient"):
            before = len(calls)
            count_distinct(operation.make(), 2)
            assert len(calls) - before == (2 if operation.name.endswith("(deterministic)") else 0)


def test_results_are_counted_by_bits():
    assert count_distinct(varying_operation().make(), 5) == 5
    assert count_distinct(steady_operation().make(), 5) == 1
    zeros = itertools.cycle([0.0, -0.0])
    assert count_distinct(lambda: mx.array([next(zeros)]), 4) == 2
    assert count_distinct(lambda: [mx.array(1), {"a": mx.array(2)}], 3) == 1


def test_what_a_backend_cannot_do_is_no_result():
    def make():
        raise RuntimeError("[Thing::eval] not here.\nmore")

    row = shards.count(Operation("thing", "float32", make), lambda number: None)
    assert (row.distinct, row.remedy) == (0, "MLX can't do it here: [Thing::eval] not here")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint64, mx.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_one_bit_is_flipped_and_no_other(dtype, shape):
    array = mx.ones(shape).astype(dtype)
    one, other = (tensor_bytes({"": a})[""] for a in (array, with_one_bit_flipped(array)))
    assert sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) == 1


# --------------------------------------------------------------------------------------------------------- whole steps


def test_steps_repeat_from_the_same_state():
    stepper, start = fresh_experiments(small)(SETTING)
    found = repeat(stepper, start, 3, 4, 60.0, lambda number: None)
    assert len(found) == 4
    counted = tally(found)
    assert (counted.distinct, counted.first, set(counted.counts.values())) == (1, None, {1})
    names = list(found[0])
    assert names[0] == "batch (step 1)" and names[-1] == "state (cursor)"
    gradients = [name for name in names if name.startswith("gradient of")]
    assert gradients[0].startswith("gradient of layers.3.")  # the last layer's come first


def test_a_slow_step_is_repeated_twice_at_least():
    stepper, start = fresh_experiments(small)(SETTING)
    assert len(repeat(stepper, start, 1, 8, 0.0, lambda number: None)) == 2


def test_the_first_tensor_that_varies_is_the_first_in_execution():
    runs = [{"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "c": "2"}, {"a": "1", "b": "1", "c": "3"}]
    counted = tally(runs)
    assert (counted.distinct, counted.counts, counted.first) == (3, {"a": 1, "b": 2, "c": 3}, "b")
    assert tally([{"a": "1"}, {"a": "1", "b": "1"}]).first == "b"


def test_a_fresh_process_finds_the_same():
    settings = [Setting(dtype, False, True) for dtype in ("float32", "bfloat16")]
    found = in_fresh_processes(Job(device="cpu", settings=settings, steps=1), 1)
    subject = fresh_experiments(repeats.small_transformer)
    assert found == [[perform(*subject(setting), 1) for setting in settings]]
    assert "gradient of embedding.weight" in found[0][0]


def test_a_fresh_process_that_fails_says_why(tmp_path):
    with pytest.raises(ReplayError, match=r"a fresh process failed: .*nowhere does not exist"):
        in_fresh_processes(Job(device="cpu", settings=[SETTING], steps=1, run=str(tmp_path / "nowhere")), 1)


# ----------------------------------------------------------------------------------------------------------- self-test


def test_the_self_test_finds_what_it_plants():
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found == test.planted >= 15


def test_a_count_that_always_says_one_fails_the_self_test(monkeypatch):
    monkeypatch.setattr(operations, "count_distinct", lambda *parts: 1)
    report = doctor.examine(operations=[varying_operation()], build=small)
    assert report.operations[0].distinct == 1  # fooled, but
    assert report.self_test.found == report.self_test.planted - 2
    assert report.sentence.startswith("Nothing is proven: the doctor missed 2 of")


@pytest.mark.parametrize(
    ("module", "name", "blind"),
    [
        (selftest, "missed_flips", lambda evidence: list(evidence)),
        (selftest, "first_difference", lambda left, right: None),
        (selftest, "tally", lambda found: tally(found[:1])),
    ],
)
def test_each_blind_spot_fails_the_self_test(monkeypatch, module, name, blind):
    monkeypatch.setattr(module, name, blind)
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found < test.planted


def test_a_fingerprint_of_shapes_only_fails_the_self_test(monkeypatch):
    monkeypatch.setattr(repeats, "fingerprint", lambda tensors: str([array.shape for array in tensors.values()]))
    test = selftest.self_test(*fresh_experiments(small)(SETTING))
    assert test.found == test.planted - 1


# ---------------------------------------------------------------------------------------------------- the whole answer


@pytest.fixture(scope="module")
def sound():
    return doctor.examine(device="cpu", operations=[steady_operation()], build=small)


def test_a_sound_machine(sound):
    assert sound.sentence == (
        "Replay is bit-exact within one process on this machine for float32 and bfloat16, eager and compiled, "
        "with deterministic operations (the default) and with stock operations."
    )
    assert len(sound.step) == 8 and all((row.distinct, row.processes) == (1, 0) for row in sound.step)
    assert repr(sound) == f"Report({sound.sentence!r})"


def test_a_varying_operation_is_named_with_its_remedy():
    report = doctor.examine(operations=[steady_operation(), varying_operation("my <kernel>")], build=small)
    row = report.operations[1]
    assert (row.name, row.repeats, row.distinct, row.remedy) == ("my <kernel>", 8, 8, "use another kernel")
    assert report.sentence.endswith("; not bit-exact for a model that uses my <kernel>.")
    text = printed(report)
    assert "8  FAIL" in text and "my <kernel>: use another kernel" in text
    assert "my &lt;kernel&gt;" in report._repr_html_()


def test_a_varying_step_is_found_and_its_first_tensor_named():
    """Compiled, the counter is frozen when the step is traced; each repetition is then the same."""

    def build(setting):
        return experiment(loss_fn=drifting_gradient(), dtype=setting.dtype, compile=setting.compile)

    report = doctor.examine(operations=[steady_operation()], build=build)
    eager = [row for row in report.step if not row.compile]
    assert all((row.distinct, row.first) == (3, "gradient of layers.3.weight (step 1)") for row in eager)
    assert {row.module for row in eager} == {"layers.3"}
    assert all(row.distinct == 1 for row in report.step if row.compile)
    assert "; not bit-exact for float32 and bfloat16, eager," in report.sentence
    assert "no operation of the catalogue, but the gradient of layers.3.weight (step 1) varies first" in report.sentence
    assert "gradient of layers.3.weight (step 1)" in printed(report).replace("\n", " ")


def test_a_fresh_process_that_disagrees_is_found(monkeypatch):
    monkeypatch.setattr(doctor, "small_transformer", small)

    def other(job, count):
        return [[{"loss (step 1)": "other"} for _ in job.settings] for _ in range(count)]

    monkeypatch.setattr(doctor, "in_fresh_processes", other)
    report = doctor.examine(operations=[])
    assert all((row.distinct, row.processes) == (2, 2) for row in report.step)
    assert report.sentence.startswith("Replay is not bit-exact on this machine for float32 and bfloat16, eager and")


def test_a_fresh_process_that_fails_leaves_a_note(monkeypatch):
    def failing(job, count):
        raise ReplayError("a fresh process failed: out of memory")

    monkeypatch.setattr(doctor, "small_transformer", small)
    monkeypatch.setattr(doctor, "in_fresh_processes", failing)
    report = doctor.examine(operations=[])
    assert report.notes[0] == "Fresh processes could not be tried: a fresh process failed: out of memory."
    assert report.sentence.startswith("Replay is bit-exact within one process on this machine")


def test_it_leaves_random_state_and_device_as_they_were():
    mx.random.seed(11)
    before = random_key(), mx.default_device()
    doctor.examine(operations=[steady_operation()], build=small)
    assert (random_key(), mx.default_device()) == before


def test_progress_is_told_and_may_stop_it():
    told = []
    doctor.examine(lambda *step: told.append(step), operations=[steady_operation()], build=small)
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] and {total for _, total, _ in told} == {33}

    def stop(done, total, what):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        doctor.examine(stop)


@pytest.mark.parametrize("device", ["tpu", *([] if mx.is_available(mx.Device(mx.DeviceType.gpu)) else ["gpu"])])
def test_an_unknown_device_is_refused(device):
    with pytest.raises(ReplayError, match="expected"):
        doctor.examine(device=device)


# -------------------------------------------------------------------------------------------------------- the sentence


def step_rows(varies):
    """All eight settings; those for which `varies(dtype, compile, deterministic)` have three results."""
    return [
        StepRow(dtype, compiled, det, 4, 3, 2, 3 if varies(dtype, compiled, det) else 1)
        for dtype in ("float32", "bfloat16")
        for compiled in (False, True)
        for det in (True, False)
    ]


def operation_rows(**distinct):
    """`embedding_gradient_float32=6`, and the deterministic variants, which have one result."""
    rows = []
    for name, count in distinct.items():
        words, _, dtype = name.rpartition("_")
        rows.append(OperationRow(words.replace("_", " "), dtype, 8, count, None))
        if words in ("embedding_gradient", "attention_backward"):
            rows.append(OperationRow(f"{words.replace('_', ' ')} (deterministic)", dtype, 8, 1, None))
    return rows


TEST = SelfTest(18, 18)
CUDA = operation_rows(
    embedding_gradient_float32=6,
    embedding_gradient_bfloat16=6,
    pooling_float32=2,
    pooling_bfloat16=1,
    attention_backward_float32=1,
    attention_backward_bfloat16=6,
    softmax_float32=1,
    softmax_bfloat16=1,
)


def test_stock_operations_that_vary_as_measured_on_cuda():
    rows = step_rows(lambda dtype, compiled, deterministic: not deterministic)
    assert conclusion.conclude(CUDA, rows, TEST, elsewhere={"pooling"}) == (
        "Replay is bit-exact on this machine for float32 and bfloat16, eager and compiled, with deterministic "
        "operations (the default); not bit-exact for float32 and bfloat16, eager and compiled, with stock operations: "
        "embedding gradient, attention backward (bfloat16); "
        "not bit-exact for a model that uses pooling (float32)."
    )


def test_nothing_is_exact():
    said = conclusion.conclude(CUDA, step_rows(lambda *setting: True), TEST, elsewhere={"pooling"})
    assert said.startswith("Replay is not bit-exact on this machine for float32 and bfloat16, eager and compiled, with")
    assert ": embedding gradient, attention backward (bfloat16); not" in said


def test_an_operation_that_has_no_replacement_is_named_and_replaced_ones_are_not():
    rows = [row for row in CUDA if row.name != "softmax"]
    rows += operation_rows(softmax_float32=1, softmax_bfloat16=2)
    varies = step_rows(lambda dtype, compiled, deterministic: deterministic and dtype == "bfloat16")
    said = conclusion.conclude(rows, varies, TEST, elsewhere={"pooling"})
    assert said.startswith("Replay is bit-exact on this machine for float32, eager and compiled, with deterministic op")
    assert "not bit-exact for bfloat16, eager and compiled, with deterministic operations" in said
    assert ": softmax (bfloat16); not bit-exact for a model that uses pooling (float32)." in said


def test_settings_that_are_no_product_are_listed():
    said = conclusion.conclude(
        [], step_rows(lambda dtype, compiled, det: det and dtype == "float32" and compiled), TEST
    )
    assert (
        "for float32 eager, bfloat16 eager and bfloat16 compiled, with deterministic operations (the default)" in said
    )


# ----------------------------------------------------------------------------------------------------- how it is shown


def printed(report, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))
    with console.file:
        console.print(report)
    return console.export_text()


def test_it_reads_well_at_100_columns(sound):
    text = printed(sound)
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert " ".join(text.split()).endswith(sound.sentence)
    assert "Self-test: " in text


def test_json_is_strict_and_has_the_promised_keys(sound):
    document = strict(sound.to_json())
    assert {"environment", "operations", "step", "self_test", "sentence"} <= document.keys()
    assert set(document["operations"][0]) == {"name", "dtype", "repeats", "distinct", "remedy"}
    assert set(document["self_test"]) == {"planted", "found"}
    assert document["environment"]["backend"] == "cpu"


def test_facts_of_a_gpu():
    environment = {"backend": "cuda", "device": "NVIDIA H200", "mlx": "1", "system": "Linux", "machine": "x86_64"}
    found = facts(environment | {"tf32": True, "blas": None, "variables": {"MLX_ENABLE_TF32": "1"}}, 51234.5)
    assert found["TF32"].startswith("on") and found["float32 matmul"] == "51,234 GFLOP/s"
    assert found["variables"] == "MLX_ENABLE_TF32=1" and "BLAS" not in found


REFERENCE = {"backend": "cpu", "system": "Linux", "blas": {"library": "libblas.so.3"}, "jit_compiler": "g++ 12"}


def test_a_reference_blas_is_named_with_what_to_do():
    said = " ".join(advice(REFERENCE, 6.2))
    assert "reference BLAS (libblas.so.3, 6 GFLOP/s)" in said and "LD_PRELOAD=" in said and "other bits" in said


def test_a_tuned_blas_or_none_at_all_is_no_news():
    tuned = REFERENCE | {"blas": {"library": "libblas.so.3", "internal_api": "openblas"}}
    assert len(advice(tuned, 9.0)) == 1  # a busy machine is no reference BLAS
    assert advice({"backend": "cuda", "system": "Linux", "blas": None, "jit_compiler": None}, 9.0) == []


def test_a_missing_compiler_is_named():
    assert "no g++" in advice(REFERENCE | {"jit_compiler": "none (MLX runs uncompiled)"}, 100.0)[-1]


def test_a_report_is_read_without_mlx():
    code = (
        "import sys, workbench.examination.diagnosis, workbench.examination.conclusion; assert 'mlx' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_command_line(monkeypatch, sound):
    def stub(progress, device):
        progress(1, 2, "something")
        assert device == "cpu"
        return sound

    monkeypatch.setattr(doctor, "examine", stub)
    said = here("doctor", "--device", "cpu")
    assert said.code == 0 and said.out.strip().endswith("with stock operations.")
    assert max(map(len, said.out.splitlines())) <= 100
    assert strict(here("doctor", "--device", "cpu", "--json").out)["sentence"] == sound.sentence


@pytest.mark.parametrize(
    ("arguments", "about"),
    [
        (["nowhere"], "nowhere does not exist"),
        (["--factory", "runs:build"], "--factory goes with a RUN"),
        (["nowhere", "--device", "cpu"], "--device does not go with a RUN"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_input_is_one_sentence(arguments, about):
    assert about in here("doctor", *arguments).sentence


# --------------------------------------------------------------------------------------------------------------- a run


def test_a_run_of_the_trainer():
    run = recorded_read_only()
    before = tree(run)
    said = workbench("doctor", run, "--json")
    assert said.code == 0, said.err
    report = strict(said.out)
    assert report["sentence"] == (
        "Replay is bit-exact on this machine for recorded (float32, compiled, deterministic operations): "
        "8 repetitions here and 1 in a fresh process gave one result."
    )
    assert [row["distinct"] for row in report["operations"]] == [1] * len(open_run(run).manifest.parameters)
    assert report["operations"][-1]["name"] == "embedding.weight"  # the first layer's gradient comes last
    assert tree(run) == before


def test_a_loop_of_ones_own(tmp_path):
    run = record_own_loop(tmp_path / "run")
    report = doctor.examine_run(run, experiment=build_regression())
    assert report.sentence.startswith("Replay is bit-exact within one process on this machine for run (float32, eager")
    with pytest.raises(ExperimentError, match="runs:build"):
        doctor.examine_run(run)
    with pytest.raises(ExperimentError, match="learning_rate|eps"):
        doctor.examine_run(run, experiment=build_regression(eps=1e-3))


def test_a_run_whose_gradient_varies_is_told_module_and_parameter(tmp_path):
    def build():
        job = build_regression()
        job.loss_fn = drifting_gradient()
        return job

    run = record_own_loop(tmp_path / "run", build)
    report = doctor.examine_run(run, experiment=build())
    assert report.step[0].first == "gradient of layers.1.weight" and report.step[0].module == "layers.1"
    assert report.sentence == (
        "Replay is not bit-exact on this machine for run (float32, eager, deterministic operations): "
        "the gradient of layers.1.weight (module layers.1) varies first; 4 gradients vary in all."
    )
    assert all(row.distinct == row.repeats == 8 and row.remedy for row in report.operations)
    text = printed(report)
    assert "0 of 4 gradients came out the same" in text and "layers.0.bias" in text


def test_a_sampler_that_gives_another_batch_is_named(tmp_path):
    class Forgetful(Points):
        calls = itertools.count()

        def load_state_dict(self, cursor):
            self.number = cursor["number"] + next(self.calls)

    def build():
        job = experiment()
        job.sampler = Forgetful()
        return job

    run = record_own_loop(tmp_path / "run", build)
    report = doctor.examine_run(run, experiment=build())
    assert report.sentence.endswith(
        "the batch varies first; 4 gradients vary in all, so its sampler does not give the "
        "same batch from the same cursor."
    )


def test_stock_operations_of_a_run_are_told_the_remedy():
    rows = [
        StepRow("bfloat16", True, det, 1, 8, 1, n, first, "embedding" if first else None)
        for det, n, first in ((False, 9, "gradient of embedding.weight"), (True, 1, None))
    ]
    assert conclusion.conclude_run("mine", rows, 1, TEST) == (
        "Replay is not bit-exact on this machine for mine (bfloat16, compiled, stock operations): "
        "the gradient of embedding.weight (module embedding) varies first; with deterministic operations (the default) "
        "it would be exact, so record with them."
    )


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    run = record_own_loop(tmp_path / "run")
    for path in (run.path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(ReplayError, match="no checkpoint"):
        doctor.examine_run(run, experiment=build_regression())


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU that MLX can use")
def test_the_doctor_finds_both_stock_gradients_on_cuda():
    report = doctor.examine(device="gpu")
    found = {(row.name, row.dtype): row.distinct for row in report.operations}
    for name, dtype in (("embedding gradient", "float32"), ("attention backward", "bfloat16")):
        assert found[name, dtype] > 1
        assert found[f"{name} (deterministic)", dtype] == 1
    assert all(row.distinct == 1 for row in report.step if row.deterministic), report.sentence
    assert all(row.distinct > 1 for row in report.step if not row.deterministic), report.sentence


@pytest.mark.parametrize("count", [1, 3, 8, 16])
def test_shards_have_every_setting_and_operation_once(count):
    made = shards.shards("gpu", 4, count)
    assert len(made) == count
    assert sorted(number for one in made for number in one.settings) == list(range(len(shards.SETTINGS)))
    assert sorted(number for one in made for number in one.operations) == list(range(len(CATALOGUE)))


def small_shards():
    return [shards.Shard("cpu", [0], [3], 1), shards.Shard("cpu", [1], [2, 5], 1)]


def test_shards_are_examined_in_processes_and_a_failed_one_once_more(monkeypatch):
    started, real = [], shards._started

    def once_broken(shard, stack):
        started.append(shard)
        child = real(shard, stack)
        if len(started) == 1:
            child.kill()
        return child

    monkeypatch.setattr(shards, "_started", once_broken)
    rows, digests = shards.examine_shards(small_shards(), lambda what: None)
    assert [shard.settings for shard in started] == [[0], [1], [0]]
    assert [(row.name, row.dtype) for row in rows] == [(CATALOGUE[n].name, CATALOGUE[n].dtype) for n in (2, 3, 5)]
    assert {row.distinct for row in rows} == {1}
    subject = fresh_experiments(repeats.small_transformer)
    assert digests == [perform(*subject(shards.SETTINGS[number]), 1) for number in (0, 1)]


def test_a_shard_that_fails_twice_is_an_error(monkeypatch):
    monkeypatch.setattr(shards.sys, "executable", "/bin/false")
    with pytest.raises(ReplayError, match="a process of the examination ended with code 1"):
        shards.examine_shards(small_shards()[:1], lambda what: None)


def test_what_shards_found_counts_as_a_fresh_process(monkeypatch):
    settings = shards.SETTINGS[:2]
    subject = fresh_experiments(repeats.small_transformer)
    before = [perform(*subject(setting), 1) for setting in settings]
    job = Job(device="cpu", settings=settings, steps=1)
    monkeypatch.setattr(doctor, "in_fresh_processes", None)  # not needed: one was asked for, and one is there

    def rows(found):
        effort = doctor._Effort(steps=1, repeats=2, processes=1, seconds=0.0)
        nothing = lambda *said: None  # noqa: E731
        return doctor._examine_steps(subject, settings, effort, job, nothing, nothing, [found]).rows

    assert [(row.repeats, row.processes, row.distinct) for row in rows(before)] == [(2, 1, 1)] * 2
    other = before[1] | {"loss": "0" * 8}
    assert [(row.distinct, row.first) for row in rows([before[0], other])] == [(1, None), (2, "loss")]
