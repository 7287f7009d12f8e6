"""The doctor: what varies is found and named, with its remedy; what is sound is called sound; and how it is shown."""

import subprocess
import sys

import mlx.core as mx
import pytest
from helpers import experiment
from planted_operations import drifting_gradient, printed, small, steady_operation, varying_operation
from runs import here, strict

from workbench import doctor
from workbench.errors import ReplayError
from workbench.examination.diagnosis import facts
from workbench.experiment import random_key

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


# ----------------------------------------------------------------------------------------------------- how it is shown


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
