"""The built-in trainer: every option replays exactly, what only looks moves no bit, and an interrupt loses nothing."""

import signal
import threading
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np
import pytest
import runs

from workbench import open_run, snapshot
from workbench.checkpoints import checkpoint_reader
from workbench.errors import ExperimentError
from workbench.trainer import recipe
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import split_point, validation_batches
from workbench.trainer.model import token_losses
from workbench.trainer.recipe import AdamWConfig, TrainConfig, build, config_from
from workbench.trainer.train import VALIDATION_BATCHES, Interrupted
from workbench.trainer.training import Quiet, fresh, train_run

CONSTANT = runs.SMALL | {"lr_schedule": "constant", "warmup": 2, "device": "cpu", "save_every": 4}


def trained(out, *options, steps=3, code=0):
    """Runs `workbench train`, with the small shape, in this process."""
    said = runs.here("train", "--corpus", runs.corpus(), "--steps", steps, "--out", out, *runs.FLAGS, *options)
    assert said.code == code, said.err
    return said


# ------------------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    "options",
    [
        "--lr-schedule wsd --decay-steps 1 --decay-shape linear --warmup 1",
        "--lr-schedule constant --warmup 0 --max-lr 0.01",
        "--lr-schedule cosine --min-lr 1e-4 --max-lr 0.01",
        "--dtype bfloat16",
        "--dtype float16",
        "--dtype bfloat16 --dropout 0.1 --val-every 1 --val-split 0.2",
        "--no-compile",
        "--no-compile --dropout 0.5 --val-every 1 --val-split 0.2",  # evaluation must leave the model in training mode
        "--accum 2",
        "--accum 2 --dropout 0.2",
        "--dropout 0.5",
        "--untied",
        "--grad-clip 0",
        "--grad-clip 0.01",
        "--beta1 0 --beta2 0.5 --eps 1e-3 --weight-decay 0",
        "--no-bias-correction",
        "--prefetch 3",
        "--val-every 2 --sample-every 2",
        "--seed 7 --save-every 1 --keep-last 1 --keep-every 2",
        "--no-spike-detect",
        "--spike-factor 2 --spike-window 4",
        "--no-deterministic",
        "--fault garbage@2:rows=1 --fault garbage@3",
    ],
)
def test_a_run_with_these_options_replays_exactly(tmp_path, options):
    trained(tmp_path / "run", *options.split())
    for step in (2, 3):
        trace = open_run(tmp_path / "run").replay(step, fresh_process=False)
        assert trace.exact, trace.sentence()
        assert trace.record.certified_probe is True
        assert [verdict for _, verdict, _ in trace.badges()] == ["exact"] * 3
    assert trace.record.items["checkpoint"].verdict == "exact"  # the final one


@pytest.mark.parametrize("suffix", [".bin", ".npy"])
def test_tokens_of_two_bytes(tmp_path, suffix):
    corpus = tmp_path / f"tokens{suffix}"
    tokens = np.random.default_rng(0).integers(0, 300, 4000).astype("<u2")
    tokens.tofile(corpus) if suffix == ".bin" else np.save(corpus, tokens)
    said = runs.here(
        *("train", "--corpus", corpus, "--steps", 2, "--out", tmp_path / "run", "--fault", "garbage@2:rows=1"),
        *("--sample-every", 2, *runs.FLAGS),
    )
    assert said.code == 0 and "⟨" in said.err  # a sample: ids, not text
    run = open_run(tmp_path / "run")
    assert run.manifest.rebuild["config"]["model"]["vocabulary"] == tokens.max() + 1
    assert run.replay(2, fresh_process=False, with_probe=False).exact


def test_the_options_reach_the_experiment():
    given = dict(dropout=0.25, tied=False, grad_clip=0.5, beta1=0.8, beta2=0.7, eps=1e-5, weight_decay=0.3)
    job = train_job(**given, bias_correction=False, accum=3, compile_=False, seed=9, max_lr=0.5, warmup=4)
    experiment = build(job.config, job.files)
    optimizer = experiment.optimizer
    assert optimizer.betas == [0.8, 0.7] and optimizer.eps == 1e-5 and optimizer.weight_decay == 0.3
    assert optimizer.bias_correction is False
    options = experiment.options
    assert (options.clip, options.accumulate, options.compile) == (0.5, 3, False)
    assert experiment.sampler.batch == 4 * 3 and experiment.sampler.seed == 9
    assert job.config.model.dropout == 0.25 and job.config.model.tied is False
    assert job.config.schedule.max_lr == 0.5 and job.config.schedule.warmup == 4


def train_job(**given):
    return fresh(runs.SMALL | {"corpus": runs.corpus(), "steps": 20, "out": Path("nowhere"), "device": "cpu"} | given)


def test_the_defaults_are_stated_and_adamw_is_corrected():
    assert AdamWConfig().bias_correction is True
    job = train_job()
    assert (job.config.clip, job.config.adamw.eps, job.config.compile) == (1.0, 1e-8, True)
    assert train_job(dtype="float16").config.adamw.eps == 1e-4  # 1e-8 is 0 in float16
    assert train_job(dtype="float16", eps=1e-3).config.adamw.eps == 1e-3
    assert train_job(grad_clip=0.0).config.clip is None


@pytest.mark.parametrize(
    ("changed", "word"),
    [
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"eps": float("nan")}, "eps"),
        ({"weight_decay": -1}, "wei"),
    ],
)
def test_adamw_settings_out_of_range(changed, word):
    with pytest.raises(ExperimentError, match=f"{word}.* is .*; expected"):
        AdamWConfig(**changed)


def test_a_config_survives_its_manifest():
    config = train_job(dropout=0.1).config
    assert config_from(msgspec.json.decode(msgspec.json.encode(config))) == config
    assert isinstance(config, TrainConfig)


# ----------------------------------------------------------------------------------------------- what moves no bit (D2)


def fingerprint(tmp_path, *options):
    """What `--print-fingerprint` prints of the shared run, trained anew with these options besides."""
    said = trained(tmp_path / "again", "--val-split", 0.2, "--print-fingerprint", *options, steps=runs.STEPS)
    return runs.strict(said.out)


@pytest.mark.parametrize(
    "options",
    [
        "",
        "--val-every 1",
        "--sample-every 3",
        "--val-every 4 --sample-every 4 --save-every 1 --keep-last 1",
        "--no-spike-detect",
        "--prefetch 1",
        "--prefetch 4",
        "--no-record",
    ],
)
def test_looking_saving_and_prefetching_move_no_bit(tmp_path, options):
    """R7 besides: the cursor in the fingerprint is that of the batch consumed, whatever was drawn ahead."""
    assert fingerprint(tmp_path, *options.split()) == runs.fingerprint()


@pytest.mark.parametrize("options", ["--seed 1", "--max-lr 0.0010001", "--fault garbage@12:rows=1", "--dropout 0.01"])
def test_what_moves_bits_is_seen_in_the_fingerprint(tmp_path, options):
    found, shared = fingerprint(tmp_path, *options.split()), runs.fingerprint()
    assert found["step"] == shared["step"] and found["weights"] != shared["weights"]


def test_the_fingerprint_is_that_of_the_telemetry_and_of_the_last_checkpoint():
    line = [line for line in runs.lines(runs.recorded_read_only()) if line["type"] == "step"][-1]
    commit = runs.strict((runs.recorded_read_only() / "checkpoints" / "00000012.json").read_bytes())
    assert {"step": 12} | line["state"] == runs.fingerprint()
    assert line["state"] == commit["state"]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_any_prefetch_depth_logs_and_replays_the_same_batches(tmp_path, depth):
    trained(tmp_path / "run", "--prefetch", depth, "--save-every", 2, "--val-split", 0.2, steps=6)
    expected = [line["batch_hash"] for line in runs.lines(runs.recorded_read_only()) if line["type"] == "step"][:6]
    assert [line["batch_hash"] for line in runs.lines(tmp_path / "run") if line["type"] == "step"] == expected
    assert open_run(tmp_path / "run").replay(4, fresh_process=False, with_probe=False).exact
    for other in (0, 3):  # a resume may choose its own depth
        said = runs.here("train", "--out", tmp_path / "run", "--resume", "4", "--steps", 6, "--prefetch", other)
        assert said.code == 0
        assert [line["batch_hash"] for line in runs.lines(tmp_path / "run") if line["type"] == "step"][-2:] == expected[
            4:
        ]


def test_no_thread_of_a_prefetcher_outlives_training(tmp_path):
    trained(tmp_path / "run", "--prefetch", 2)
    assert [thread.name for thread in threading.enumerate() if "prefetch" in thread.name] == []


def test_validation_is_the_mean_loss_of_the_held_out_tail(tmp_path):
    class Watch(Quiet):
        def on_validation(self, step, loss):
            self.seen = step, loss

        def on_sample(self, step, text):
            self.text = text

    watch = Watch()
    run = train_run(
        tmp_path / "run", runs.corpus(), 4, watcher=watch, **runs.SMALL, val_every=4, sample_every=4, val_split=0.2
    )
    step, loss = watch.seen
    assert run.steps["val_loss"].tolist()[3] == pytest.approx(np.float32(loss), abs=0) and step == 4
    experiment = build(config_from(run.manifest.rebuild["config"]), [runs.corpus()])
    snapshot.restore(experiment, checkpoint_reader.read(run.path / "checkpoints", 4, 0))
    corpus = Corpus.open(runs.corpus())
    experiment.model.eval()
    batches = validation_batches(corpus, 4, 16, split_point(len(corpus), 0.2, 16), None, VALIDATION_BATCHES)
    losses = [mx.mean(token_losses(experiment.model, *(mx.array(a) for a in batch))).item() for batch in batches]
    assert loss == np.mean(losses, dtype=np.float64)
    start = Corpus.open(runs.corpus()).decode(corpus.tokens[:8])
    assert watch.text.startswith(start) and len(watch.text) > 60  # 120 bytes, some of which make one letter


# ----------------------------------------------------------------------------------------------------------- interrupts


class Pressing(Quiet):
    """Presses Ctrl-C so many times after a step."""

    def __init__(self, at, times=1, number=signal.SIGINT):
        self.at, self.times, self.number = at, times, number

    def on_step(self, step, loss, reading):
        if step == self.at:
            for _ in range(self.times):
                signal.raise_signal(self.number)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return train_run(tmp_path_factory.mktemp("straight") / "run", runs.corpus(), 10, **CONSTANT)


def states(run, segment=0):
    return {line["step"]: line["state"] for line in runs.lines(run.path) if line["type"] == "step"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_after_a_step_saves_it_and_resumes_to_the_same_bits(tmp_path, straight, number):
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with pytest.raises(
        Interrupted, match="interrupted after step 6; all is saved; go on with --out .* --resume"
    ) as caught:
        train_run(tmp_path / "run", runs.corpus(), 10, watcher=Pressing(6, number=number), **CONSTANT)
    assert caught.value.number == number and isinstance(caught.value, KeyboardInterrupt)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    run = open_run(tmp_path / "run")
    assert run.checkpoints == [(0, 0), (4, 0), (6, 0)] and run.last_step == 6
    assert runs.lines(run.path)[-1]["type"] == "step"  # it is not done
    assert runs.here("train", "--out", run.path, "--resume").code == 0  # 10 steps, says the manifest
    assert states(run) == states(straight) and run.checkpoints[-1] == (10, 0)
    assert len(run.manifest.segments) == 1


def interrupt_within_step(monkeypatch, calls, at, times):
    """The signal comes while step `at` computes its loss; the step is not compiled, so that this runs every step.

    Args:
        calls: path of a file in which they are counted, for which the self-check performs no step twice.
    """
    real = recipe.loss

    def loss(*arguments):
        with calls.open("ab") as file:
            file.write(b".")
        if calls.stat().st_size == at:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(recipe, "loss", loss)


@pytest.mark.filterwarnings("ignore:the self-check is unverified")
def test_an_interrupt_within_a_step_lets_it_finish(tmp_path, monkeypatch):
    interrupt_within_step(monkeypatch, tmp_path / "calls", 6, 1)
    with pytest.raises(Interrupted, match="after step 6"):
        train_run(tmp_path / "run", runs.corpus(), 10, compile_=False, **CONSTANT)
    assert open_run(tmp_path / "run").checkpoints[-1] == (6, 0)


@pytest.mark.filterwarnings("ignore:the self-check is unverified")
def test_a_second_interrupt_stops_at_once_and_saves_no_half_step(tmp_path, monkeypatch):
    straight = train_run(tmp_path / "straight", runs.corpus(), 10, compile_=False, **CONSTANT)
    interrupt_within_step(monkeypatch, tmp_path / "calls", 6, 2)
    with pytest.raises(KeyboardInterrupt) as caught:
        train_run(tmp_path / "run", runs.corpus(), 10, compile_=False, **CONSTANT)
    assert not isinstance(caught.value, Interrupted)
    monkeypatch.undo()
    run = open_run(tmp_path / "run")
    assert run.checkpoints == [(0, 0), (4, 0)] and run.last_step == 5
    assert run.replay(5, fresh_process=False, with_probe=False).exact
    assert runs.here("train", "--out", run.path, "--resume").code == 0
    assert run.replay(10, fresh_process=False, with_probe=False).exact
    assert states(run)[10] == states(straight)[10]


def test_a_second_interrupt_between_steps_keeps_the_whole_state(tmp_path, straight):
    with pytest.raises(KeyboardInterrupt):
        train_run(tmp_path / "run", runs.corpus(), 10, watcher=Pressing(6, 2), **CONSTANT)
    run = open_run(tmp_path / "run")
    assert run.checkpoints[-1] == (6, 0)
    assert runs.here("train", "--out", run.path, "--resume").code == 0
    assert states(run) == states(straight)


def test_an_interrupt_without_a_record_says_so(tmp_path):
    with pytest.raises(Interrupted, match="interrupted after step 2; nothing was recorded"):
        train_job(no_record=True, steps=5, out=None).run(Pressing(2))


def test_training_in_a_thread_needs_no_signals(tmp_path, straight):
    """A notebook's worker, say. D3: a thread has its own random state and stream, and gives the same bits."""
    thread = threading.Thread(target=lambda: train_run(tmp_path / "run", runs.corpus(), 10, **CONSTANT))
    thread.start()
    thread.join()
    assert states(open_run(tmp_path / "run")) == states(straight)
