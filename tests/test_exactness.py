"""The promise, end to end: what a run was is what a replay gives, byte for byte, whatever the settings and the process.

Runs are recorded with the built-in trainer at its smallest. Each "exact" here has a twin further down where one bit was
changed and the replay says which.
"""

import inspect
import json
import shutil

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from click.testing import CliRunner
from helpers import (
    advance,
    assert_same_state,
    config,
    edit_json,
    experiment,
    flip_in_safetensors,
    parts,
    python,
    record,
    repair_commit,
    state_of,
    tree,
    write_corpus,
)

from workbench import Recorder, open_run
from workbench.checkpoints import checkpoint_reader
from workbench.cli import main
from workbench.compare import ITEMS
from workbench.experiment import as_batch, state_arrays
from workbench.rebuild import rebuild
from workbench.replay import replay_steps
from workbench.step import Stepper
from workbench.trainer.corpus import Corpus
from workbench.trainer.prefetch import Prefetcher
from workbench.trainer.recipe import build
from workbench.trainer.train import train
from workbench.trainer.training import Quiet

STEPS = 16  # checkpoints 0, 7, 14 and 16
VARIANTS = {
    "plain": {},
    "dropout": {"dropout": 0.1},
    "accumulation": {"accumulate": 3, "batch": 2},
    "prefetch": {"prefetch": 4},
    "bfloat16": {"dtype": "bfloat16"},
    "uncompiled": {"compile": False, "dropout": 0.1},
    "uint16": {"vocabulary": 300},
    "together": {"dropout": 0.1, "accumulate": 3, "batch": 2, "prefetch": 1, "dtype": "bfloat16", "tied": False},
}


class Variant:
    """A run of 16 steps in one of the settings, and what is needed to perform it again."""

    def __init__(self, name, folder):
        self.name, self.path = name, folder / "run"
        self.corpus = write_corpus(folder, ".bin" if name == "uint16" else ".txt")
        self.lanes = record(self.path, self.corpus, self.config(STEPS))

    def config(self, steps):
        return config(steps, **VARIANTS[self.name])

    def uninterrupted(self, steps):
        """The state after `steps`, by fresh objects and without a recorder."""
        job = build(self.config(STEPS), [self.corpus])
        advance(job, steps)
        return state_of(job, steps)

    def checkpoint(self, step, segment=0, path=None):
        return checkpoint_reader.read((path or self.path) / "checkpoints", step, segment)

    def outcome(self, step, run=None):
        """The replay of one step, with its states."""
        run = run or open_run(self.path)
        start = run.plan(step).checkpoint
        (found,) = replay_steps(
            rebuild(run.manifest, run.path),
            self.checkpoint(*start),
            [step],
            lambda number: run.evidence(number, 0),
            layers=run.manifest.layers,
        )
        return found


@pytest.fixture(scope="module")
def variants(tmp_path_factory):
    made = {}

    def get(name):
        if name not in made:
            made[name] = Variant(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture(params=VARIANTS)
def variant(request, variants):
    return variants(request.param)


# -------------------------------------------------------------------------------------------------------- byte for byte


def test_replaying_step_5_gives_weights_and_moments_of_the_uninterrupted_run(variant):
    outcome = variant.outcome(5)
    assert outcome.exact and outcome.probe.certified
    assert_same_state(outcome.before, variant.uninterrupted(4))
    assert_same_state(outcome.after, variant.uninterrupted(5))
    assert {path.rpartition(".")[2] for path in outcome.after.optimizer} == {"m", "v", "step", "learning_rate"}


def test_checkpoints_are_the_states_of_the_uninterrupted_run(variant):
    for step in (0, 7, STEPS):
        assert_same_state(variant.checkpoint(step), variant.uninterrupted(step))


def test_a_fresh_run_has_the_bits_of_the_original_at_every_step(variant, tmp_path):
    record(tmp_path / "again", variant.corpus, variant.config(10))
    ours, theirs = open_run(tmp_path / "again"), open_run(variant.path)
    for step in range(1, 11):
        assert ours.evidence(step, 0) == theirs.evidence(step, 0)
    assert ours.evidence(10, 0)["loss"].startswith("0x")


def test_every_step_replays_exactly(variant):
    traces = open_run(variant.path).replay(range(1, STEPS + 1), fresh_process=False)
    for trace in traces:
        assert trace.exact and trace.record.certified_probe
        verdicts = {name: item.verdict for name, item in trace.record.items.items()}
        saved = trace.step in (7, 14, STEPS)
        assert verdicts == dict.fromkeys(ITEMS, "exact") | {"checkpoint": "exact" if saved else "unverified"}
        assert [verdict for _, verdict, _ in trace.badges()] == ["exact"] * 3


@pytest.mark.parametrize("start", [0, 7, 14])
def test_resuming_from_any_checkpoint_reaches_the_same_bytes(variant, start, tmp_path):
    path = shutil.copytree(variant.path, tmp_path / "run")
    mx.random.seed(31337)
    _, lanes = train(variant.config(STEPS), [variant.corpus], path, Quiet(), save_every=7, spikes=None, resume=start)
    assert lanes == variant.lanes
    final = variant.checkpoint(STEPS, segment=1, path=path)
    assert_same_state(final, variant.checkpoint(STEPS))
    run = open_run(path)
    assert run.evidence(STEPS, 1) == run.evidence(STEPS, 0)
    assert run.replay(start + 1, segment=1, fresh_process=False, with_probe=False).exact


def test_recorded_and_unrecorded_runs_end_in_the_same_state(variant):
    _, lanes = train(variant.config(STEPS), [variant.corpus], None, Quiet())
    assert lanes == variant.lanes


@pytest.mark.parametrize("with_probe", [True, False])
def test_a_replay_ends_in_the_recorded_state_and_training_goes_on_from_it(variants, with_probe):
    for name in ("dropout", "uncompiled"):
        variant = variants(name)
        run = open_run(variant.path)
        job = rebuild(run.manifest, run.path)
        list(
            replay_steps(
                job,
                variant.checkpoint(7),
                [9],
                lambda step, run=run: run.evidence(step, 0),
                layers=run.manifest.layers,
                with_probe=with_probe,
            )
        )
        logged = run.evidence(9, 0)
        assert {f"state.{lane}": value for lane, value in state_of(job, 9).lanes().items()}.items() <= logged.items()
        advance(job, STEPS - 9)
        assert_same_state(state_of(job, STEPS), variant.checkpoint(STEPS))


# ------------------------------------------------------------------------------------------------------ fresh processes


def test_every_step_of_a_run_replays_exactly_in_a_fresh_process(tmp_path):
    """60 steps with dropout, a checkpoint every 7: each step is up to 6 steps away from the nearest one."""
    corpus = write_corpus(tmp_path)
    record(tmp_path / "run", corpus, config(60, dropout=0.1))
    before = tree(tmp_path / "run")
    done = python("-m", "workbench", "replay", tmp_path / "run", "--step", "1..60", "--json")
    assert done.returncode == 0, done.stderr
    traces = json.loads(done.stdout)
    assert [trace["step"] for trace in traces] == list(range(1, 61))
    for trace in traces:
        assert trace["exact"] and trace["certified_probe"] and trace["first_difference"] is None
        assert [gate["verdict"] for gate in trace["gates"].values()] == ["exact"] * 3
        assert "the recording process, another one, had them too" in trace["gates"]["repeatable"]["explanation"]
    after = tree(tmp_path / "run")
    assert {name: after[name] for name in before} == before
    assert sorted(after.keys() - before.keys()) == [f"traces/{step:08d}.json" for step in range(1, 61)]
    # Each step on its own, from the checkpoint nearest to it, gives what the range gave.
    run = open_run(tmp_path / "run")
    for step in (8, 14, 15, 37, 56, 57, 60):
        alone = run.replay(step, fresh_process=False, with_probe=False, trace_dir=tmp_path / "alone").record
        assert json.loads(json.dumps(traces[step - 1]["state"])) == alone.state
        assert traces[step - 1]["loss_bits"] == alone.loss_bits and alone.exact
        assert alone.checkpoint == (step - 1) // 7 * 7 and alone.rolled == (step - 1) % 7


@pytest.mark.parametrize("name", ["together", "uncompiled", "uint16"])
def test_other_settings_replay_exactly_in_a_fresh_process_too(variants, name, tmp_path):
    variant = variants(name)
    done = python(
        *("-m", "workbench", "replay", variant.path, "--step", "5..9", "--json", "--trace-dir", tmp_path),
        *(() if name == "together" else ("--no-probe",)),
    )
    assert done.returncode == 0, done.stderr
    traces = json.loads(done.stdout)
    assert [trace["exact"] for trace in traces] == [True] * 5
    assert traces[0]["state"] == variant.uninterrupted(5).lanes()


def test_fingerprints_of_the_command_line_are_those_of_the_run(tmp_path):
    """One recorded run by one process, one unrecorded by another, one resumed by this one."""
    corpus = write_corpus(tmp_path)
    shape = ("--depth", "1", "--ctx", "16", "--batch", "4", "--dropout", "0.1", "--lr-schedule", "constant")
    options = ("train", "--corpus", corpus, "--device", "cpu", "--print-fingerprint", *shape)
    bare = python("-m", "workbench", *options, "--steps", "9", "--no-record")
    assert bare.returncode == 0, bare.stderr

    def run(*arguments):
        done = CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    expected = json.loads(bare.stdout)
    assert expected["step"] == 9 and len(expected) == 7
    assert run(*options, "--steps", "9", "--out", tmp_path / "run", "--save-every", "4") == expected
    assert run(*options, "--steps", "5", "--warmup", "1", "--out", tmp_path / "cut", "--save-every", "4") != expected
    resumed = ("--steps", "9", "--out", tmp_path / "run", "--resume", "4", "--print-fingerprint")
    assert run("train", *resumed) == expected


# ------------------------------------------------------------------------------------------------------------- prefetch


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetching_moves_neither_batches_nor_cursors(variants, depth, tmp_path):
    variant = variants("plain")
    record(tmp_path / "run", variant.corpus, config(9, prefetch=depth))
    run, plain = open_run(tmp_path / "run"), open_run(variant.path)
    for step in range(10):
        assert run.evidence(step, 0) == plain.evidence(step, 0)
    assert run.replay(9, fresh_process=False).exact


def test_a_cursor_of_what_was_fetched_ahead_is_red_from_the_first_step(tmp_path):
    """What a careless loader saves: it stands after the batches that wait in the queue."""

    class Careless(Prefetcher):
        def state_dict(self):
            return self._sampler_cursor()

        def __next__(self):
            batch = super().__next__()
            with self._changed:  # until the queue is full, so that the offset is always the same
                self._changed.wait_for(lambda: len(self._drawn) == self.depth, timeout=10)
            return batch

    corpus = write_corpus(tmp_path)
    job = build(config(8, compile=False), [corpus])
    with Careless(job.sampler, 2) as job.sampler:
        options = {"clip": 1.0, "compile": False, "save_every": 4, "self_check": False}  # which would refuse it
        with Recorder(tmp_path / "run", *parts(job), **options) as recorder:
            for batch in recorder.batches(8):
                recorder.step(batch)
    trace = open_run(tmp_path / "run").replay(6, experiment=build(config(8, compile=False), [corpus]))
    difference = trace.record.first_difference
    assert (difference.step, difference.where, difference.item) == (5, "roll-forward", "batch_hash")


# ------------------------------------------------------------------------------------------------- one bit of the state


DAMAGED = {
    "weights": (".safetensors", lambda name: "attention.query" in name),
    "adam_m": (".optimizer.safetensors", lambda name: name.endswith("mlp.up.weight.m")),
    "adam_v": (".optimizer.safetensors", lambda name: name.endswith("norm.weight.v")),
    "other": (".optimizer.safetensors", lambda name: name == "step"),
}


@pytest.fixture
def copied(variants, tmp_path):
    """A copy of a run with dropout, to be damaged."""
    variant = variants("dropout")
    return shutil.copytree(variant.path, tmp_path / "run")


def replayed(path, step, **options):
    return open_run(path).replay(step, fresh_process=False, trace_dir=path.parent / "traces", **options)


def damage(path, lane, step=7):
    """Changes one bit of checkpoint `step` so that no digest shows it."""
    stem = path / "checkpoints" / f"{step:08d}"
    if lane in DAMAGED:
        suffix, choose = DAMAGED[lane]
        flip_in_safetensors(stem.with_name(stem.name + suffix), choose)
    elif lane == "rng":
        edit_json(stem.with_name(stem.name + ".rng"), lambda rng: rng["key"].__setitem__(1, rng["key"][1] ^ 1))
    else:
        batch = 4  # a place where a batch begins: one step further on
        edit_json(stem.with_name(stem.name + ".cursor"), lambda cursor: cursor.update(index=cursor["index"] ^ batch))
    repair_commit(path, stem.name)


EXPECTED = {  # items that must differ at step 8 when one bit of state 7 did
    "weights": {"state.weights"},
    "adam_m": {"state.adam_m"},
    "adam_v": {"state.adam_v"},
    "other": {"state.other"},
    "rng": {"per_layer_act_norms", "loss", "state.rng"},
    "cursor": {"batch_hash", "loss", "state.cursor"},
}


@pytest.mark.parametrize("lane", EXPECTED)
def test_one_bit_of_a_checkpoint_is_the_first_difference(copied, lane):
    assert replayed(copied, 8).exact
    damage(copied, lane)
    for step in (8, 10):
        trace = replayed(copied, step)
        difference = trace.record.first_difference
        assert not trace.exact and trace.badges()[1][1] == "mismatch"
        assert (difference.step, difference.where, difference.item) == (7, "restored state", f"state.{lane}")
        assert difference.consequences == []  # state 7 itself: nothing else of it differs
        red = {name for name, item in trace.record.items.items() if item.verdict == "mismatch"}
        assert EXPECTED[lane] <= red or step == 10
    # The replay itself is as repeatable, and the checker as sensitive, as ever.
    assert [trace.badges()[n][1] for n in (0, 2)] == ["exact", "exact"]
    assert replayed(copied, 7).record.items["checkpoint"].verdict == "mismatch"
    assert replayed(copied, 16).exact  # from checkpoint 14, which is whole


def test_an_edit_without_repaired_digests_is_refused(copied):
    flip_in_safetensors(copied / "checkpoints" / "00000007.safetensors", lambda name: True)
    with pytest.raises(Exception, match="00000007.safetensors was changed: its SHA-256"):
        replayed(copied, 8)
    assert replayed(copied, 6).exact


# -------------------------------------------------------------------------------------------------- one bit of the data


def token_of(variant, step, row=1, column=3):
    """Where in the corpus a token of a step's batch stands."""
    run = open_run(variant.path)
    row = rebuild(run.manifest, run.path).sampler.provenance(step)[row]
    return row.offset + column


@pytest.mark.parametrize(("bad", "step", "where"), [(9, 9, "step"), (9, 12, "roll-forward")])
def test_one_bit_of_a_batch_is_the_first_difference(variants, tmp_path, bad, step, where):
    variant = variants("dropout")
    path, corpus = shutil.copytree(variant.path, tmp_path / "run"), tmp_path / "corpus.txt"
    content = bytearray(variant.corpus.read_bytes())
    content[token_of(variant, bad)] ^= 1
    corpus.write_bytes(content)
    edit_json(path / "run.json", lambda manifest: manifest.update(data=[Corpus.open(corpus).describe()]))
    assert replayed(path, 8).exact  # other batches are whole
    trace = replayed(path, step)
    difference = trace.record.first_difference
    assert (difference.step, difference.where, difference.item) == (bad, where, "batch_hash")
    assert {"per_layer_act_norms", "loss", "grad_norm", "state.weights"} <= set(difference.consequences)
    assert not {"state.rng", "state.cursor"} & set(difference.consequences)
    # The range says the same, at its own step, and from there on nothing is exact.
    traces = replayed(path, range(8, 13), with_probe=False)
    assert [one.exact for one in traces] == [True, False, False, False, False]
    assert {one.record.first_difference.item for one in traces[1:]} == {"batch_hash"}


def test_a_corpus_that_changed_is_refused(variants, tmp_path):
    variant = variants("plain")
    path, corpus = shutil.copytree(variant.path, tmp_path / "run"), tmp_path / "corpus.txt"
    shutil.copyfile(variant.corpus, corpus)
    edit_json(path / "run.json", lambda manifest: manifest["data"][0].update(path=str(corpus)))
    assert replayed(path, 3).exact
    content = bytearray(corpus.read_bytes())
    content[10] ^= 1
    corpus.write_bytes(content)
    with pytest.raises(Exception, match="has changed.*sha256"):
        replayed(path, 3)


# ----------------------------------------------------------------------------------------------------------- optimizers

ARGUMENTS = {  # what can't be made with nothing but a learning rate
    "MultiOptimizer": lambda: optim.MultiOptimizer(
        [optim.Muon(1e-2), optim.AdamW(1e-3)], [lambda path, weight: weight.ndim == 2]
    ),
}
EXTRA = {  # settings that keep more state
    "SGD with momentum": lambda: optim.SGD(1e-2, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "AdamW with a schedule": lambda: optim.AdamW(
        optim.join_schedules([optim.linear_schedule(0, 1e-2, 2), optim.cosine_decay(1e-2, 9)], [2])
    ),
    "Adafactor with momentum": lambda: optim.Adafactor(1e-3, beta_1=0.9, relative_step=False),
    "Adafactor by itself": optim.Adafactor,
}


def every_optimizer():
    """Each class that MLX has, so that a new one is tried without being named here."""
    for name, cls in sorted(vars(optim).items()):
        if inspect.isclass(cls) and issubclass(cls, optim.Optimizer) and cls is not optim.Optimizer:
            yield name, ARGUMENTS.get(name, lambda cls=cls: cls(1e-2))


OPTIMIZERS = dict(every_optimizer()) | EXTRA


def test_the_optimizers_were_found():
    assert {"AdamW", "SGD", "Muon", "Lion", "MultiOptimizer"} <= OPTIMIZERS.keys()


class Wide(nn.Module):
    """Matrices, vectors, and a matrix with an axis of length 1, whose stride MLX leaves to chance."""

    def __init__(self):
        super().__init__()
        mx.random.seed(8)
        self.inner, self.norm, self.outer = nn.Linear(4, 6), nn.RMSNorm(6), nn.Linear(6, 1)

    def __call__(self, x):
        return self.outer(mx.tanh(self.norm(self.inner(x))))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_records_and_replays_exactly(tmp_path, name, compiled):
    def make():
        return experiment(model=Wide(), optimizer=OPTIMIZERS[name](), compile=compiled)

    job = make()
    with Recorder(tmp_path / "run", *parts(job), compile=compiled, save_every=2) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    for tree_of in (job.model, job.optimizer.state):
        for path, array in state_arrays(tree_of).items():
            fresh = np.empty(array.shape, np.asarray(array).dtype)
            assert array.ndim < 2 or memoryview(array).strides == fresh.strides, path
    run = open_run(tmp_path / "run")
    for steps in (range(1, 5), range(3, 5)):
        for trace in run.replay(steps, experiment=make()):
            assert trace.exact and trace.record.certified_probe
            assert [verdict for _, verdict, _ in trace.badges()] == ["exact"] * 3
            assert trace.record.items["state.other"].verdict == "exact"


def test_the_optimizer_test_can_fail(tmp_path):
    """The same loop, with an optimizer that keeps something outside of its state."""

    class Forgetful(optim.SGD):
        def apply_single(self, gradient, parameter, state):
            self.calls = getattr(self, "calls", 0) + 1
            return parameter - (1e-2 + 1e-6 * self.calls) * gradient

        calls = property(lambda self: self.__dict__.get("_calls", 0), lambda self, n: self.__dict__.update(_calls=n))

    def make():
        return experiment(model=Wide(), optimizer=Forgetful(1e-2))

    with Recorder(tmp_path / "run", *parts(make()), compile=False, save_every=2, self_check=False) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    trace = open_run(tmp_path / "run").replay(3, experiment=make())
    assert not trace.exact and trace.record.first_difference.item == "state.weights"
    assert trace.badges()[0][1] == "mismatch"  # its repetition differs, too


def test_stepping_twice_from_one_state_gives_one_result(variants):
    """The simplest form of all: no files, no comparison code of ours but bytes."""
    variant = variants("together")
    results = []
    for _ in range(2):
        job = build(variant.config(3), [variant.corpus])
        stepper = Stepper(job)
        losses = [stepper(as_batch(next(job.sampler))).loss.tobytes() for _ in range(3)]
        results.append((losses, state_of(job, 3)))
    assert results[0][0] == results[1][0]
    assert_same_state(results[0][1], results[1][1])
