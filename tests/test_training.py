"""From options to a job: what is missing, contradictory or decided already is said before anything is written."""

import math
from pathlib import Path

import msgspec
import pytest
import runs

from workbench import open_run
from workbench.errors import DataError, ExperimentError, RunError, WorkbenchError
from workbench.trainer.model import PRESETS
from workbench.trainer.options import OPTIONS, RESUMABLE
from workbench.trainer.training import fresh, resumed, train_run


def job(**given):
    return fresh({"corpus": runs.corpus(), "steps": 20, "out": Path("nowhere"), "device": "cpu"} | runs.SMALL | given)


def resume(path, **given):
    return resumed(dict.fromkeys(OPTIONS) | {"out": path, "resume": "last"} | given)


# --------------------------------------------------------------------------------------------------------------- fresh


def test_what_a_run_needs():
    for missing, words in (
        ("corpus", "--corpus is missing"),
        ("steps", "--steps is missing"),
        ("out", "--out is missing"),
    ):
        with pytest.raises(ExperimentError, match=words):
            job(**{missing: None})
    assert job(out=None, no_record=True).out is None


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_presets(preset):
    made = job(preset=preset, depth=None, ctx=None, batch=None).config
    expected = PRESETS[preset or "tiny"]
    assert made.batch == expected["batch"]
    assert {key: getattr(made.model, key) for key in expected["model"]} == expected["model"]


def test_depth_sets_the_size():
    made = job(depth=3, batch=None).config
    assert (made.model.depth, made.model.width, made.model.heads, made.batch) == (3, 192, 3, 8)


def test_warm_up_is_a_twentieth_and_fits_any_length():
    for steps in (1, 2, 3, 20, 100):
        for kind in ("cosine", "wsd", "constant"):
            schedule = job(steps=steps, lr_schedule=kind).config.schedule
            assert schedule.warmup == min(max(1, steps // 20), steps - 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"preset": "tiny"}, ("--preset and --depth",)),
        ({"depth": None, "preset": "enormous"}, ("'enormous'", "tiny, small, huge")),
        ({"depth": 0}, ("depth", "0")),
        ({"depth": -1}, ("depth", "-1")),
        ({"steps": 0}, ("steps is 0",)),
        ({"steps": -5}, ("steps is -5",)),
        ({"batch": 0}, ("batch is 0",)),
        ({"batch": -4}, ("batch is -4",)),
        ({"ctx": 0}, ("ctx", "0")),
        ({"accum": 0}, ("accumulate is 0",)),
        ({"dropout": 1.5}, ("dropout", "1.5")),
        ({"dropout": math.nan}, ("dropout", "nan")),
        ({"dtype": "int8"}, ("dtype", "int8")),
        ({"beta1": 2.0}, ("beta1 is 2.0",)),
        ({"eps": -1.0}, ("eps is -1.0",)),
        ({"weight_decay": math.inf}, ("weight_decay is inf",)),
        ({"lr_schedule": "sawtooth"}, ("kind", "sawtooth")),
        ({"max_lr": 0.0}, ("max_lr", "0.0")),
        ({"max_lr": -1.0}, ("max_lr", "-1.0")),
        ({"min_lr": 1.0}, ("min_lr", "1.0")),
        ({"warmup": -1}, ("warmup", "-1")),
        ({"warmup": 21}, ("warm-up (21)",)),
        ({"lr_schedule": "wsd", "decay_steps": 0}, ("decay_steps", "0")),
        ({"lr_schedule": "wsd", "decay_steps": 21}, ("21",)),
        ({"seed": -1}, ("seed is -1",)),
        ({"seed": -1, "faults": ["garbage@3"]}, ("seed is -1",)),
        ({"val_every": -1}, ("val_every is -1",)),
        ({"sample_every": -5}, ("sample_every is -5",)),
        ({"prefetch": -1}, ("prefetch is -1",)),
        ({"device": "tpu"}, ("'tpu'", "cpu or gpu")),
        ({"spike_factor": 1.0}, ("factor", "1.0")),
        ({"spike_window": 3}, ("window", "3")),
        ({"no_record": True, "log_jsonl": Path("x")}, ("--log-jsonl", "--no-record")),
        ({"no_record": True, "faults": ["garbage@3"]}, ("--fault needs --out",)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_options_out_of_range_are_named_before_anything_is_written(given, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkbenchError) as caught:
        job(**given)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grad_clip": -1.0}, ("clip is -1.0",)),
        ({"grad_clip": math.nan}, ("clip is nan",)),
        ({"val_split": 1.5}, ("val_split", "1.5")),
        ({"val_split": -0.5}, ("val_split", "-0.5")),
        ({"val_split": 0.0, "val_every": 2}, ("val_every", "val_split is 0")),
        ({"ctx": 5000}, ("5001",)),
        ({"batch": 5000}, ("tokens",)),
        ({"save_every": -1}, ("save_every is -1",)),
        ({"keep_last": 0}, ("keep_last is 0",)),
        ({"keep_every": -2}, ("keep_every is -2",)),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_what_only_building_finds_starts_no_run_either(given, words, tmp_path):
    with pytest.raises(WorkbenchError) as caught:
        train_run(tmp_path / "run", runs.corpus(), 3, **(runs.SMALL | given))
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_unknown_option_of_train_run_is_named():
    with pytest.raises(ExperimentError, match="'learning_rate' is no option of training; expected .*max_lr"):
        train_run("nowhere", runs.corpus(), 3, learning_rate=1.0)
    assert not Path("nowhere").exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, ("cannot be read", "missing.txt")),
        ("empty.txt", b"", ("empty",)),
        ("short.txt", b"too short", ("tokens",)),
        ("odd.bin", b"123", ("odd.bin", "even number")),
        ("no.npy", b"not an array", ("no.npy",)),
    ],
)
def test_a_corpus_that_can_not_be_used(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        train_run(tmp_path / "run", tmp_path / name, 3, **runs.SMALL)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists()


def test_out_that_holds_a_run_or_is_a_file(tmp_path):
    path = runs.recorded(tmp_path)
    before = runs.digest(path)
    with pytest.raises(
        RunError, match=f"already holds a run .run.json.; choose another folder, or go on with it: --out {path}"
    ):
        job(out=path, faults=["garbage@3"])
    assert runs.digest(path) == before
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="is a file; expected a folder"):
        job(out=tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_what_is_left_of_a_run_is_not_mixed_with_a_new_one(tmp_path):
    path = runs.recorded(tmp_path)
    (path / "run.json").unlink()
    before = runs.digest(path)
    with pytest.raises(RunError, match="already holds a run"):
        job(out=path, faults=["garbage@3"])
    assert runs.digest(path) == before


# -------------------------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize(
    ("name", "value", "option"),
    [
        ("corpus", Path("x"), "--corpus"),
        ("preset", "tiny", "--preset"),
        ("depth", 1, "--depth"),
        ("batch", 4, "--batch"),
        ("ctx", 16, "--ctx"),
        ("accum", 1, "--accum"),
        ("dropout", 0.0, "--dropout"),
        ("tied", True, "--tied/--untied"),
        ("tied", False, "--tied/--untied"),
        ("dtype", "float32", "--dtype"),
        ("grad_clip", 0.0, "--grad-clip"),
        ("beta1", 0.0, "--beta1"),
        ("beta2", 0.9, "--beta2"),
        ("eps", 1e-8, "--eps"),
        ("weight_decay", 0.0, "--weight-decay"),
        ("bias_correction", False, "--bias-correction/--no-bias-correction"),
        ("lr_schedule", "cosine", "--lr-schedule"),
        ("warmup", 0, "--warmup"),
        ("max_lr", 1e-3, "--max-lr"),
        ("min_lr", 0.0, "--min-lr"),
        ("decay_steps", 1, "--decay-steps"),
        ("decay_shape", "linear", "--decay-shape"),
        ("seed", 0, "--seed"),
        ("val_split", 0.0, "--val-split"),
        ("val_every", 0, "--val-every"),
        ("sample_every", 0, "--sample-every"),
        ("device", "cpu", "--device"),
        ("compile_", False, "--compile/--no-compile"),
        ("deterministic", False, "--deterministic/--no-deterministic"),
        ("faults", ("garbage@3",), "--fault"),
        ("spike_factor", 3.0, "--spike-factor"),
        ("spike_window", 50, "--spike-window"),
        ("no_spike_detect", True, "--no-spike-detect"),
        ("no_record", True, "--no-record"),
    ],
)
def test_what_the_manifest_decides_is_refused_by_name(name, value, option):
    """Falsy values too: an option that is silently ignored would be a guess about what the user meant."""
    with pytest.raises(ExperimentError, match=f"^{option} is decided by the manifest of .* on resume; leave it out$"):
        resume(runs.recorded_read_only(), **{name: value})


def test_every_option_is_either_refused_on_resume_or_used():
    assert set(OPTIONS) >= RESUMABLE
    assert RESUMABLE == {
        *(
            "out",
            "resume",
            "steps",
            "print_fingerprint",
            "prefetch",
            "log_jsonl",
            "save_every",
            "keep_last",
            "keep_every",
            "black_box",
            "auto_rollback",
            "rollback_skip_batch",
        )
    }


def test_resume_takes_everything_from_the_manifest():
    path = runs.recorded_read_only()
    made = resume(path)
    manifest = open_run(path).manifest
    assert made.resume is True and made.files == [runs.corpus()] and made.out == path
    assert made.recording["save_every"] == runs.SAVE_EVERY and made.recording["spikes"].window == 4
    assert made.config.steps == runs.STEPS and made.config.val_every == 5
    assert msgspec.json.encode(made.config) == msgspec.json.encode(manifest.rebuild["config"])


def test_what_may_be_given_with_resume():
    made = resume(
        runs.recorded_read_only(), resume="8", steps=20, prefetch=2, save_every=3, keep_last=2, log_jsonl=Path("x")
    )
    assert (made.resume, made.config.steps, made.config.prefetch) == (8, 20, 2)
    assert made.recording["save_every"] == 3 and made.recording["keep_last"] == 2
    assert made.recording["copy_telemetry_to"] == Path("x")


@pytest.mark.parametrize("value", ["x", "-1", "1.5", "²", "last one"])
def test_resume_from_what_is_no_step(value):
    with pytest.raises(ExperimentError, match=f"--resume is '{value}'; expected nothing or the step of a checkpoint"):
        resume(runs.recorded_read_only(), resume=value)


def test_resume_of_what_can_not_be_resumed(tmp_path):
    with pytest.raises(ExperimentError, match="--resume needs --out"):
        resume(None)
    with pytest.raises(RunError, match="does not exist"):
        resume(tmp_path / "nowhere")
    path = runs.recorded(tmp_path)
    runs.edit_json(path / "run.json", lambda d: d.update(rebuild={"kind": "none"}))
    with pytest.raises(ExperimentError, match="was not recorded by `workbench train`; resume it from your own loop"):
        resume(path)


def test_resume_with_a_changed_corpus(tmp_path):
    path = runs.recorded(tmp_path)
    runs.edit_json(path / "run.json", lambda d: d["data"][0].update(sha256="0" * 64))
    before = runs.digest(path)
    with pytest.raises(DataError, match="has changed"):
        resume(path)
    assert runs.digest(path) == before


def test_steps_out_of_range_on_resume():
    with pytest.raises(ExperimentError, match="steps is 0"):
        resume(runs.recorded_read_only(), steps=0)
