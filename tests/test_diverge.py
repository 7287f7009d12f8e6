"""The divergence ladder: equal where nothing moves bits, and every planted difference named with tensor and size."""

import json
import os
import threading
from pathlib import Path

import helpers
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from test_ways import Contracted

from workbench import diverge, open_run, worker
from workbench.bits import flip_bit
from workbench.errors import EnvironmentMismatch, ExperimentError, ReplayError
from workbench.experiment import Experiment, StepOptions, random_key
from workbench.record import Recorder

OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libblas.so.3")
HAS_GPU = mx.is_available(mx.Device(mx.DeviceType.gpu))


@pytest.fixture
def path(tmp_path):
    return runs.recorded(tmp_path)


class Planted(Contracted):
    """`Contracted`, and a forward pass that is one ULP off in a process where `PLANTED` is not this one."""

    def __call__(self, x):
        y = super().__call__(x)
        if os.environ.get("PLANTED", str(os.getpid())) == str(os.getpid()):
            return y
        one_more = (y.view(mx.uint32) + 1).view(mx.float32)
        return y + mx.stop_gradient(one_more - y)


def build():
    """A factory: `test_diverge:build`."""
    mx.random.seed(3)
    model = nn.Sequential(Planted(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
    optimizer = optim.AdamW(1e-2, bias_correction=True)
    return Experiment(model, optimizer, helpers.mse, helpers.Points(), StepOptions(compile=False))


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A run of a loop of one's own: 14 steps, and from step 10 on a compiled one has other bits."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    job, out = build(), tmp_path / "own"
    with Recorder(
        out, *helpers.parts(job), compile=False, save_every=7, factory="test_diverge:build", spikes=None
    ) as recorder:
        for batch in recorder.batches(steps=14):
            recorder.step(batch)
    return open_run(out)


def verdicts(ladder):
    return {rung.name: rung.verdict for rung in ladder.rungs}


# ------------------------------------------------------------------------------------------------------------- equal


def test_a_step_that_repeats_is_equal_on_every_rung_and_nothing_is_written(path):
    """Case R13; that the first difference of a rung is named, compile setting and BLAS among them, is below."""
    before = runs.digest(path)
    ladder = open_run(path).diverge(6, bisect=True)
    assert ladder.record.verdict == "equal"
    assert {name: verdict for name, verdict in verdicts(ladder).items() if "=gpu" not in name} == {
        "same process": "equal",
        "another thread": "equal",
        "fresh process": "equal",
        "compile=off": "equal",
        "deterministic=off": "skipped",
    }
    assert {rung.compared for rung in ladder.rungs if rung.verdict == "equal"} == {59}  # and not nothing
    assert "the same operations on the CPU" in ladder["deterministic=off"].detail
    assert [rung.name for rung in ladder.rungs if rung.intervention][:2] == ["compile=off", "deterministic=off"]
    departure = ladder["compile=off"].departure
    assert (departure.start, departure.stop, departure.step, departure.computed) == (4, 6, None, 4)
    assert (ladder.step, ladder.checkpoint, ladder.segment, ladder.environment_differences) == (6, 4, 0, [])
    assert runs.digest(path) == before


@pytest.mark.skipif(HAS_GPU, reason="this machine has a GPU")
def test_without_a_gpu_the_device_rung_says_so(path):
    rung = open_run(path).diverge(6, rungs=["device"])["device=gpu"]
    assert (rung.verdict, rung.detail) == ("skipped", "this machine has no GPU that MLX can use")


def test_the_thread_is_another_one_and_random_state_stays(path, monkeypatch):
    threads = []
    real = diverge.Way.perform

    def perform(self, before):
        threads.append(threading.current_thread())
        return real(self, before)

    monkeypatch.setattr(diverge.Way, "perform", perform)
    mx.random.seed(11)
    key = random_key()
    open_run(path).diverge(6, rungs=["same process", "another thread"])
    assert random_key() == key
    assert threads[0] is threading.main_thread() and threads[1] is not threads[0]


def test_from_the_background_thread_it_does_not_wait_for_itself(path):
    found = []
    worker.submit(lambda: found.append(open_run(path).diverge(6, rungs=["another thread"]))).result(timeout=60)
    assert found[0].record.verdict == "equal" and found[0]["another thread"].verdict == "skipped"


def test_rungs_are_chosen_by_name_and_steps_may_be_numpys(path):
    ladder = open_run(path).diverge(np.int64(6), rungs=["compile", "same process"])
    assert list(verdicts(ladder)) == ["compile=off", "same process"]


# ------------------------------------------------------------------------------------- a planted difference, each rung


@pytest.mark.parametrize(("bit", "ulp"), [(0, 1), (4, 16), (22, 2**22)])
@pytest.mark.parametrize("what", ["weight", "adam_m", "adam_v"])
def test_a_bit_of_the_runs_own_checkpoint_is_found_with_tensor_and_size(path, what, bit, ulp):
    suffix = {"weight": ".safetensors", "adam_m": ".optimizer.safetensors", "adam_v": ".optimizer.safetensors"}[what]
    leaf = {"weight": "up.weight", "adam_m": "up.weight.m", "adam_v": "up.weight.v"}[what]
    file = path / "checkpoints" / f"00000008{suffix}"
    name = helpers.flip_in_safetensors(file, lambda name: name.endswith(leaf), bit)
    helpers.repair_commit(path, "00000008")
    ladder = open_run(path).diverge(8, rungs=["same process"])
    first = ladder.record.first
    assert ladder.record.verdict == "differs" and ladder.record.differing == 1
    assert (first.kind, first.path) == (what, name.removesuffix(".m").removesuffix(".v"))
    assert (first.differing, first.max_ulp, first.dtype) == (1, ulp, "float32")
    assert ladder["same process"].verdict == "equal"
    said = ladder.sentences()[0]
    assert "departs from the run: first at step 8 (step) in checkpoint" in said and first.path in said


def test_the_first_departing_step_of_the_way_there_is_named(path):
    line = next(line for line in runs.lines(path) if line["type"] == "step" and line["step"] == 5)
    bits = flip_bit(line["loss_bits"])
    value = np.array(int(bits, 16), np.uint32).view(np.float32)
    runs.edit_line(path, 5, loss=float(str(value)), loss_bits=bits)
    ladder = open_run(path).diverge(7, rungs=[])
    assert ladder.record.verdict == "differs" and "first at step 5 (roll-forward) in loss" in ladder.record.detail
    assert open_run(path).diverge(7, rungs=[], checkpoint=0).record.verdict == "differs"
    assert open_run(path).diverge(9, rungs=[]).record.verdict == "equal"  # from checkpoint 8 on, the record is whole


def test_a_compiled_step_with_other_bits_names_tensor_size_and_departing_step(own):
    ladder = own.diverge(12, factory="test_diverge:build", bisect=True, checkpoint=0)
    assert {ladder[name].verdict for name in ("same process", "another thread", "fresh process")} == {"equal"}
    rung = ladder["compile=on"]
    assert rung.intervention and rung.verdict == "differs" and rung.differing > 5
    assert rung.first.name == "activation of layers.0" and rung.first.max_ulp == 1
    assert (rung.first.differing, rung.first.size, rung.first.shape) == (96, 96, [12, 8])
    assert (rung.departure.start, rung.departure.step) == (0, 10)
    assert rung.departure.first.name == "activation of layers.0"
    assert rung.departure.computed < 6 * 10
    said = " ".join(ladder.sentences())
    assert (
        "compile=on differs first in the activation of layers.0 (float32[12, 8]): 96 of 96 elements, at most 1" in said
    )
    assert "departs from state 0 on at step 10" in said
    before = own.diverge(9, factory="test_diverge:build", rungs=["compile"])
    assert before["compile=on"].verdict == "equal"
    assert not (own.path / "traces").exists()


def test_another_process_with_other_bits_is_found(own, monkeypatch):
    monkeypatch.setenv("PLANTED", str(os.getpid()))
    ladder = own.diverge(12, factory="test_diverge:build", rungs=["same process", "fresh process"])
    assert (ladder["same process"].verdict, ladder["fresh process"].verdict) == ("equal", "differs")
    first = ladder["fresh process"].first
    assert (first.name, first.differing, first.max_ulp) == ("activation of layers.0", 96, 1)
    assert "As the step varies by itself here" in " ".join(ladder.sentences())


def test_a_variable_of_the_environment_is_an_intervention_of_its_own(own):
    ladder = own.diverge(12, factory="test_diverge:build", rungs=[], variables={"PLANTED": "0", "MLX_QUIET": "1"})
    assert verdicts(ladder) == {"PLANTED=0": "differs", "MLX_QUIET=1": "equal"}
    assert all(rung.intervention for rung in ladder.rungs)
    assert "As the step varies" not in " ".join(ladder.sentences())


@pytest.mark.skipif(not OPENBLAS.exists(), reason="there is no second BLAS here to load")
def test_another_blas_is_named_by_the_first_matrix_product(path):
    preloaded = os.environ.get("LD_PRELOAD", "")
    if "openblas" in preloaded:
        pytest.skip("it is loaded already")
    ladder = open_run(path).diverge(6, rungs=["fresh process"], variables={"LD_PRELOAD": str(OPENBLAS)})
    assert ladder["fresh process"].verdict == "equal"
    first = ladder[f"LD_PRELOAD={OPENBLAS}"].first
    assert first.name == "activation of blocks.0.attention.query" and first.max_ulp > 0


def test_a_step_that_varies_in_this_process_is_seen(path, monkeypatch):
    real = diverge.Way.perform

    def perform(self, before):
        found = real(self, before)
        key = next(key for key in found if key[0] == "gradient")
        return found | {key: helpers.flipped(found[key])}

    monkeypatch.setattr(diverge.Way, "perform", perform)
    ladder = open_run(path).diverge(6, rungs=["same process", "compile"])
    assert ladder["same process"].verdict == "differs" and ladder["same process"].first.kind == "gradient"
    assert ladder["same process"].first.path == "norm.weight"  # gradients flow backwards
    assert "an intervention that differs may have moved nothing" in " ".join(ladder.sentences())


@pytest.mark.cuda
@pytest.mark.skipif(not HAS_GPU, reason="no GPU that MLX can use")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_repetitions_are_equal_and_the_cpu_has_other_bits(tmp_path, dtype):
    out = tmp_path / "gpu"
    flags = ("--device", "gpu", "--depth", 2, "--ctx", 128, "--batch", 8, "--dropout", 0.1, "--dtype", dtype)
    said = runs.here("train", "--corpus", runs.corpus(), "--steps", 8, "--out", out, "--save-every", 4, *flags)
    assert said.code == 0, said.err
    ladder = open_run(out).diverge(7, bisect=True)
    assert ladder.record.verdict == "equal"
    assert {ladder[name].verdict for name in ("same process", "another thread", "fresh process")} == {"equal"}
    cpu = ladder["device=cpu"]
    assert cpu.verdict == "differs" and cpu.first.max_ulp > 0 and cpu.departure.step == 5
    assert ladder["deterministic=off"].verdict in ("equal", "differs")  # with few tokens both may add alike


# ------------------------------------------------------------------------------------------------------ what is refused


def test_an_experiment_of_this_process_has_no_fresh_process(own):
    ladder = own.diverge(12, experiment=build(), variables={"A": "1"})
    assert ladder["fresh process"].verdict == ladder["A=1"].verdict == "skipped"
    assert "exists only in this process" in ladder["fresh process"].detail
    assert ladder["compile=on"].verdict == "differs"


def test_code_is_imported_only_with_consent(own):
    with pytest.raises(ExperimentError, match="pass factory="):
        own.diverge(12)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"step": 99}, "step 99 is not in the telemetry"),
        ({"step": range(5, 7)}, "no single step"),
        ({"step": 5.5}, "5.5 is no step"),
        ({"step": 6, "rungs": ["compiled"]}, "'compiled' is no rung; expected some of same process, another thread"),
        ({"step": 6, "checkpoint": 8}, "no checkpoint 8 before step 6"),
    ],
)
def test_a_mistake_is_a_sentence(path, arguments, words):
    with pytest.raises(ReplayError, match=words):
        open_run(path).diverge(**arguments)


def test_another_environment_is_refused_or_said(path):
    runs.edit_json(path / "run.json", lambda d: d["segments"][0]["environment"].update(mlx="0.1.2"))
    with pytest.raises(EnvironmentMismatch, match="mlx: recorded 0.1.2"):
        open_run(path).diverge(6)
    ladder = open_run(path).diverge(6, rungs=["same process"], other_environment=True)
    assert len(ladder.environment_differences) == 1
    assert "This is informational: mlx: recorded 0.1.2" in ladder.sentences()[0]


def test_a_damaged_checkpoint_of_the_step_itself_is_a_notice(path):
    file = path / "checkpoints" / "00000008.rng"
    file.write_bytes(file.read_bytes() + b" ")
    ladder = open_run(path).diverge(8, rungs=["same process"])
    assert ladder["same process"].verdict == "equal" and "checkpoint 8 was not compared" in ladder.notices[0]
    assert ladder.record.first is None


def test_a_fresh_process_that_fails_is_a_sentence(own, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.chdir(own.path)
    with pytest.raises(ReplayError, match="fresh process failed: the factory 'test_diverge:build' can't be imported"):
        own.diverge(12, factory="test_diverge:build", rungs=["fresh process"])


def test_progress_is_told_and_may_stop_it(path):
    told = []
    open_run(path).diverge(6, rungs=["same process", "compile"], bisect=True, progress=lambda *at: told.append(at))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][0] == told[-1][1] and len({total for _, total, _ in told}) == 1
    assert any("compile=off: rolling to step" in what for _, _, what in told)

    def stop(done, total, what):
        if "same process" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_run(path).diverge(6, progress=stop)


# ------------------------------------------------------------------------------------------------- what people look at


def test_the_table_has_a_row_a_rung(own):
    ladder = own.diverge(12, factory="test_diverge:build", rungs=["same process", "compile"], bisect=True)
    table = ladder.table.set_index("rung")
    assert list(table.index) == ["the run's record", "same process", "compile=on"]
    row = table.loc["compile=on"]
    assert (row["first"], row["dtype"], row["differing"], row["size"], row["max_ulp"], row["departs"]) == (
        *("activation of layers.0", "float32"),
        *(96, 96, 1, 10),
    )
    assert table.loc["same process", ["differing", "max_ulp", "departs"]].isna().all()
    assert "activation of layers.0" in ladder._repr_html_() and "compile=on: differs" in repr(ladder)


def test_command_line(path):
    said = runs.here("diverge", path, "--step", 6, "--rung", "same process", "--rung", "compile", "--bisect")
    assert said.code == 0
    for words in ("Step 6 of run, replayed in the recorded way, has the run's bits", "compile=off", "same process"):
        assert words in said.out
    said = runs.here("diverge", path, "--step", 6, "--from", 0, "--rung", "fresh process", "--env", "A=b=c", "--json")
    document = json.loads(said.out)
    assert said.code == 0 and document["checkpoint"] == 0
    assert [(rung["name"], rung["verdict"]) for rung in document["rungs"]] == [
        ("fresh process", "equal"),
        ("A=b=c", "equal"),
    ]


def test_command_line_answers_with_code_0_also_where_bits_differ(own):
    said = runs.here(
        "diverge", own.path, "--step", 12, "--factory", "test_diverge:build", "--rung", "compile", "--json"
    )
    assert said.code == 0
    (rung,) = json.loads(said.out)["rungs"]
    assert rung["first"]["path"] == "layers.0" and rung["first"]["max_ulp"] == 1 and rung["intervention"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--step", 99), "step 99"),
        (("--step", "x"), "'x'"),
        ((), "--step"),
        (("--step", 6, "--env", "A"), "expected NAME=VALUE"),
        (("--step", 6, "--rung", "blas"), "'blas' is no rung"),
        (("--step", 6, "--from", 3), "no checkpoint 3"),
    ],
)
def test_command_line_refuses_with_a_sentence(path, options, words):
    assert words in runs.here("diverge", path, *options).sentence
