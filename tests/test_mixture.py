"""Rows from several corpora, by weight: how often, which, and where each source stands; and runs that differ in it."""

import collections
import json

import numpy as np
import pytest
import runs

from workbench import compare_runs, open_run, train_run
from workbench.batches.batch import batch_table
from workbench.errors import DataError, ExperimentError
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import WindowSampler
from workbench.trainer.mixture import BLOCK, Mixture

CTX, ROWS = 8, 4


@pytest.fixture
def corpora(tmp_path):
    """Two corpora whose tokens say which they are: letters and digits."""
    found = []
    for name, first, size in (("letters", 97, 3000), ("digits", 48, 700)):
        path = tmp_path / f"{name}.txt"
        path.write_bytes((np.random.Philox(key=size).random_raw(size) % 10 + first).astype("u1").tobytes())
        found.append(Corpus.open(path))
    return found


def sampler(corpora, *weights, **options):
    return WindowSampler(corpora, ROWS, CTX, 7, weights=weights or (0.7, 0.3), **options)


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1, 1, 2), (999, 1), (3.0,)])
def test_every_block_holds_exactly_its_shares_and_every_sample_once(weights):
    mixture = Mixture(weights, 5)
    exact = np.array(weights) / sum(weights) * BLOCK
    assert sum(mixture.counts) == BLOCK and (np.abs(np.array(mixture.counts) - exact) < 1).all()
    sources, positions = mixture.places(np.arange(2 * BLOCK, dtype=np.uint64))
    for source, count in enumerate(mixture.counts):
        own = positions[sources == source]
        assert own.tolist() == list(range(2 * count))  # in order, each once
        assert (sources[:BLOCK] == source).sum() == count


def test_how_far_each_source_has_come_is_a_count():
    mixture = Mixture((0.6, 0.4), 5)
    sources, _ = mixture.places(np.arange(3000, dtype=np.uint64))
    for before in (0, 1, 17, BLOCK, 2500):
        assert mixture.given(before) == np.bincount(sources[:before], minlength=2).tolist()


def test_another_seed_is_another_order():
    numbers = np.arange(BLOCK, dtype=np.uint64)
    one, other = (Mixture((0.5, 0.5), seed).places(numbers)[0] for seed in (1, 2))
    assert (one != other).any() and sorted(one.tolist()) == sorted(other.tolist())


def test_each_row_knows_its_source_and_offset(corpora):
    stream = sampler(corpora)
    seen = collections.Counter()
    for step in range(1, 200):
        inputs, targets = stream.batch_at(step)
        for row, place in enumerate(stream.provenance(step)):
            tokens = corpora[place.source].tokens[place.offset : place.offset + CTX + 1]
            assert inputs[row].tolist() == tokens[:-1].tolist() and targets[row].tolist() == tokens[1:].tolist()
            seen[place.source] += 1
    assert seen[1] / sum(seen.values()) == pytest.approx(0.3, abs=0.05)


def test_the_windows_of_a_source_do_not_depend_on_the_weights(corpora):
    def windows(weights, source):
        stream = sampler(corpora, *weights)
        places = [place for step in range(1, 120) for place in stream.provenance(step)]
        return [place[1:] for place in places if place.source == source][:100]

    for source in (0, 1):
        assert windows((0.5, 0.5), source) == windows((0.75, 0.25), source)
    epochs = collections.Counter((epoch, index) for _, epoch, index in windows((0.5, 0.5), 1))
    assert max(epochs.values()) == 1  # each window once an epoch


def test_the_cursor_holds_the_position_of_every_source(corpora):
    stream = sampler(corpora)
    batches = [next(stream) for _ in range(60)]
    cursor = json.loads(json.dumps(stream.state_dict()))
    assert cursor["sample"] == 60 * ROWS and len(cursor["sources"]) == 2
    places = [place for step in range(1, 61) for place in stream.provenance(step)]
    for source, where in enumerate(cursor["sources"]):
        own = [place for place in places if place.source == source]
        assert where["epoch"] * stream.feeds[source].windows + where["index"] == len(own)
    other = sampler(corpora)
    other.load_state_dict(cursor)
    assert np.array_equal(next(other)[0], stream.batch_at(61)[0])
    stream.seek(3)
    assert np.array_equal(next(stream)[0], batches[2][0])


def test_a_cursor_of_another_mixture_is_refused(corpora):
    stream = sampler(corpora)
    next(stream)
    cursor = stream.state_dict()
    with pytest.raises(DataError, match="weights"):
        sampler(corpora, 0.2, 0.8).load_state_dict(cursor)
    with pytest.raises(DataError, match="several corpora"):
        stream.load_state_dict({"seed": 7, "epoch": 0, "index": 4})
    with pytest.raises(DataError, match=r"expected \['epoch', 'index', 'seed'\]"):
        WindowSampler(corpora, ROWS, CTX, 7).load_state_dict(cursor)


@pytest.mark.parametrize(
    ("weights", "words"),
    [((0.5, 0.0), "weight of corpus 1 is 0.0"), ((1.0, 1e-9), "no row would ever"), ((1, 1, 1), "3 weights for 2")],
)
def test_weights_that_make_no_mixture_are_named(corpora, weights, words):
    with pytest.raises(DataError, match=words):
        sampler(corpora, *weights)


def test_bytes_and_numbers_do_not_mix(corpora, tmp_path):
    (tmp_path / "tokens.bin").write_bytes(np.arange(2000, dtype="<u2").tobytes())
    with pytest.raises(DataError, match="expected corpora of one kind"):
        sampler([corpora[0], Corpus.open(tmp_path / "tokens.bin")])


# ------------------------------------------------------------------------------------------------------------ runs


def train(out, corpora, *weights, steps=8, **options):
    given = [f"{corpus.path}={weight}" for corpus, weight in zip(corpora, weights, strict=True)]
    settings = {"ctx": CTX, "batch": ROWS, "depth": 1, "device": "cpu", "compile_": False, "val_split": 0.0}
    return train_run(out, given, steps, **(settings | {"save_every": 4, "warmup": 1} | options))


def test_runs_that_differ_only_in_the_weights(corpora, tmp_path):
    """A/A: the same bits. A/B: they part at the first batch that the weights decide, and nothing else can be why."""
    one, twin = (train(tmp_path / name, corpora, 0.7, 0.3) for name in ("one", "twin"))
    assert compare_runs(one.path, twin.path).attribution == "identical"
    other = train(tmp_path / "other", corpora, 0.5, 0.5)
    found = compare_runs(one.path, other.path)
    assert found.attribution == "one setting" and [knob.name for knob in found.knobs] == ["config.mixture"]
    assert "config.mixture" in found.sentence and "batch" in found.sentence


def test_a_mixture_replays_exactly_and_goes_on_after_a_break(corpora, tmp_path):
    whole = train(tmp_path / "whole", corpora, 0.7, 0.3, faults=["garbage@6:rows=2"])
    assert all(whole.replay(step).exact for step in (1, 6, 8))
    table = batch_table(whole, 6)
    assert set(table["source"]) >= {"1.bytes"} and set(table["source"]) <= {"letters.txt", "digits.txt", "1.bytes"}
    broken = train(tmp_path / "broken", corpora, 0.7, 0.3, steps=8)
    fingerprint = broken.evidence(8, 0)["state.weights"]
    said = runs.here("train", "--out", broken.path, "--resume", "4")
    assert said.code == 0, said.err
    assert open_run(broken.path).evidence(8, 1)["state.weights"] == fingerprint


def test_the_command_takes_several_corpora(corpora, tmp_path):
    flags = ["--steps", 3, "--out", tmp_path / "run", *runs.FLAGS, "--ctx", CTX, "--val-split", 0]
    mixed = [
        part
        for corpus, weight in zip(corpora, (0.7, 0.3), strict=True)
        for part in ("--corpus", f"{corpus.path}={weight}")
    ]
    assert runs.here("train", *mixed, *flags).code == 0
    run = open_run(tmp_path / "run")
    assert [entry["weight"] for entry in run.manifest.rebuild["config"]["mixture"]] == [0.7, 0.3]
    said = runs.here(
        "train", "--corpus", corpora[0].path, "--corpus", corpora[1].path, *flags[:2], "--out", tmp_path / "b"
    )
    assert "expected each with its weight" in said.sentence


def test_one_of_several_without_a_weight_is_named(corpora, tmp_path):
    with pytest.raises(ExperimentError, match="expected each with its weight"):
        train_run(tmp_path / "run", [f"{corpora[0].path}=1", str(corpora[1].path)], 3)
