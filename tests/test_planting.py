"""What faults come to: the recipe, the data files, the labels; and nothing written where one can't be planted."""

import json

import msgspec
import numpy as np
import pytest
from helpers import config, write_corpus

from workbench.errors import DataError, ExperimentError
from workbench.faults import KINDS, parse
from workbench.sabotage.alterations import Relabelling, Repetition
from workbench.sabotage.planting import plant
from workbench.trainer.corpus import Corpus
from workbench.trainer.recipe import stream
from workbench.trainer.schedule import RateChange
from workbench.trainer.scheduled import AdamChange, Drift


@pytest.fixture
def corpus(tmp_path):
    return Corpus.open(write_corpus(tmp_path))


@pytest.fixture
def planted(corpus, tmp_path):
    """Plants faults into a run of 20 steps, 4 rows of 16 tokens and one block; `changed` are fields of its config."""

    def plant_all(*texts, corpus=corpus, **changed):
        settings = config(20, **({"seed": 3} | changed))
        return plant([parse(text) for text in texts], settings, [corpus], tmp_path / "run")

    return plant_all


def label(planted, text, **changed):
    (found,) = planted(text, **changed).labels
    return found


# ---------------------------------------------------------------------------------------------------------------- data


@pytest.mark.parametrize("suffix", [".txt", ".bin"])
def test_garbage_is_a_data_file_of_the_runs_kind(tmp_path, planted, suffix):
    corpus = Corpus.open(write_corpus(tmp_path, suffix))
    vocabulary = 300 if suffix == ".bin" else 256
    found = planted("garbage@4:rows=2", "garbage@6", corpus=corpus, vocabulary=vocabulary)
    names = ["1.bin", "2.bin"] if suffix == ".bin" else ["1.bytes", "2.bytes"]
    assert [path.name for path in found.files] == names
    for path, rows in zip(found.files, (2, 4), strict=True):
        source = Corpus.open(path)
        assert source.kind == corpus.kind and len(source) == rows * 17
        assert source.tokens.max() < vocabulary and len(np.unique(source.tokens)) > 15
    first, second = found.config.substitutions
    assert (first.step, first.rows, first.source, first.offsets) == (4, (1, 2), 1, (0, 17))  # amid the batch
    assert (second.step, second.rows, second.source) == (6, (0, 1, 2, 3), 2)
    before = [path.read_bytes() for path in found.files]
    again = planted("garbage@4:rows=2", "garbage@6", corpus=corpus, vocabulary=vocabulary)
    assert [path.read_bytes() for path in again.files] == before
    assert before[0] != before[1][: len(before[0])]


def test_a_small_vocabulary_bounds_what_is_random(planted):
    found = planted("garbage@4", vocabulary=300)  # a corpus of bytes has 256
    assert Corpus.open(found.files[0]).tokens.dtype == np.uint8
    with pytest.raises(ExperimentError, match="token=256; expected 0 to 255"):
        planted("repeated-token@4:token=256", vocabulary=300)


def test_one_token_repeated(planted, corpus):
    found = planted("repeated-token@4:rows=1,token=65")
    inputs, targets = stream(found.config, [corpus, *map(Corpus.open, found.files)]).batch_at(4)
    assert inputs[1].tolist() == targets[1].tolist() == [65] * 16
    assert (np.diff(inputs[[0, 2, 3]], axis=1) != 0).any(axis=1).all()


def test_targets_and_batches(planted):
    found = planted("targets-shifted@4:rows=1,by=5", "targets-shuffled@5", "targets-ignored@6", "repeated-batch@7:of=2")
    assert found.files == [] and found.config.relabellings == (
        Relabelling(4, (1,), "shift", 5),
        Relabelling(5, (0, 1, 2, 3), "shuffle", 3),
        Relabelling(6, (0, 1, 2, 3), "ignore"),
    )
    assert found.config.repetitions == (Repetition(7, 2),)
    assert planted("repeated-batch@7").config.repetitions == (Repetition(7, 6),)


# ------------------------------------------------------------------------------------------------- schedule and options


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("lr@5", RateChange(step=5, factor=100.0, until=5)),
        ("lr@5:factor=0.5,until=8", RateChange(step=5, factor=0.5, until=8)),
        ("lr@5:until=end", RateChange(step=5, factor=100.0)),
    ],
)
def test_learning_rate(planted, text, change):
    assert planted(text).config.schedule.changes == (change,)


def test_options(planted):
    found = planted("no-clip@1", "beta2@1:value=0.5", "eps@1:value=0.25", "frozen@1").config
    assert (found.clip, found.adamw.beta2, found.adamw.eps, found.freeze) == (None, 0.5, 0.25, ("blocks.0.mlp",))


# -------------------------------------------------------------------------------------------------------------- labels


def test_labels_say_what_was_planted(planted, corpus, tmp_path):
    found = planted("garbage@4:rows=1")
    assert json.loads((tmp_path / "run" / "planted.json").read_text()) == found.labels
    assert found.labels == [
        {
            "fault": "garbage",
            "step": 4,
            "keys": {"rows": "1"},
            "applied": "data",
            "replay": "exact",
            "shows": 4,
            "expected_verdict": "data",
            "culprit": {"step": 4, "rows": [{"row": 1, "source": "1.bytes", "offset": 0}]},
        }
    ]


def test_rows_of_the_corpus_are_labelled_with_their_place_in_it(planted, corpus):
    found = planted("targets-shuffled@4:rows=2")
    rows = found.labels[0]["culprit"]["rows"]
    inputs, _ = stream(found.config, [corpus]).batch_at(4)
    assert [row["row"] for row in rows] == [1, 2]
    for row in rows:
        assert row["source"] == corpus.path.name
        assert corpus.tokens[row["offset"] : row["offset"] + 16].tolist() == inputs[row["row"]].tolist()


@pytest.mark.parametrize(
    ("text", "shows", "culprit"),
    [
        ("lr@5", 6, {"step": 5}),
        ("no-clip@1", None, {"step": 1, "option": "clip"}),
        ("frozen@1", None, {"step": 1, "layer": "blocks.0.mlp"}),
        ("moments-zeroed@5:of=both", 6, {"step": 5, "lanes": ["adam_m", "adam_v"]}),
        ("lost-cursor@5", 5, {"step": 5, "lanes": ["cursor"]}),
        (
            "attention-scaled@5",
            5,
            {
                "step": 5,
                "lanes": ["weights"],
                "layer": "blocks.0.attention.query",
                "parameter": "blocks.0.attention.query.weight",
            },
        ),
        (
            "v-bit@5:index=3",
            6,
            {
                "step": 5,
                "lanes": ["adam_v"],
                "layer": "blocks.0.mlp.up",
                "parameter": "blocks.0.mlp.up.weight",
                "index": 3,
                "bit": 31,
            },
        ),
        ("log-bit@5", 5, {"step": 5, "item": "loss", "bit": 24}),
    ],
)
def test_what_a_label_names(planted, text, shows, culprit):
    found = label(planted, text)
    assert (found["shows"], found["culprit"]) == (shows, culprit)


def test_the_expected_verdict_follows_the_size_where_it_must(planted):
    for name, kind in KINDS.items():
        text = f"{name}@{1 if kind.applied == 'option' else 5}"
        assert label(planted, text, dropout=0.1)["expected_verdict"] == kind.verdict
    assert label(planted, "weight-bit@5:bit=22")["expected_verdict"] == "no-spike"
    assert label(planted, "weight-bit@5:bit=23")["expected_verdict"] == "resume"
    assert label(planted, "eps@1", dtype="float16")["expected_verdict"] == "precision"


def test_without_faults_nothing_is_written(planted, tmp_path):
    found = planted()
    assert (found.files, found.labels, bool(found.acts)) == ([], [], False)
    assert not (tmp_path / "run").exists()


def test_a_recipe_with_faults_in_it_round_trips(planted):
    recipes = [name for name, kind in KINDS.items() if kind.applied in ("data", "schedule", "option")]
    settings = planted(*(f"{name}@{1 if KINDS[name].applied == 'option' else 3 + i}" for i, name in enumerate(recipes)))
    assert msgspec.convert(msgspec.to_builtins(settings.config), type(settings.config)) == settings.config


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("rows", ["0", "5", "-1", "x", "", "1.5", "²"])
def test_rows_out_of_range(planted, tmp_path, rows):
    with pytest.raises(ExperimentError, match=f"garbage@4 has rows={rows}; expected 1 to 4"):
        planted(f"garbage@4:rows={rows}")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        (["garbage@21"], ("garbage@21", "after the last step, 20")),
        (["garbage@99999999999999999999"], ("after the last step",)),
        (["targets-shifted@4:by=16"], ("by=16", "1 to 15")),
        (["repeated-batch@1"], ("of is 0",)),
        (["repeated-batch@5:of=5"], ("repeats batch 5",)),
        (["repeated-batch@5:of=21"], ("of=21", "1 to 20")),
        (["lr@5:factor=x"], ("factor=x", "a number from 0")),
        (["lr@5:factor=nan"], ("factor=nan",)),
        (["lr@5:factor=-1"], ("factor=-1",)),
        (["lr@5:until=4"], ("until=4", "5 to")),
        (["beta2@1:value=1"], ("value=1", "below 1")),
        (["frozen@1:layer=blocks.7"], ("layer blocks.7", "does not have")),
        (["moments-zeroed@5:of=w"], ("of=w", "m, v, both")),
        (["lost-rng@5"], ("lost-rng@5", "dropout")),
        (["garbage@9", "lost-cursor@5"], ("lost-cursor@5 starts the data anew", "garbage@9")),
        (["weight-scaled@5:path=head.weight"], ("head.weight", "embedding.weight")),
        (["attention-scaled@5:layer=blocks.0.mlp"], ("blocks.0.mlp.query.weight",)),
        (["m-bit@5", "frozen@1"], ("blocks.0.mlp.up.weight", "expected a parameter")),  # it has no moments then
        (["weight-bit@5:index=1024"], ("index=1024", "0 to 1023")),
        (["weight-bit@5:bit=32"], ("bit=32", "0 to 31")),
        (["log-bit@5:bit=32"], ("bit=32", "0 to 31")),
    ],
)
def test_what_can_not_be_planted_is_said_before_anything_is_written(planted, tmp_path, texts, words):
    with pytest.raises((ExperimentError, DataError)) as caught:
        planted(*texts)
    assert [word for word in words if word not in str(caught.value)] == [], str(caught.value)
    assert not (tmp_path / "run").exists()


def test_two_faults_of_the_same_rows(planted, tmp_path):
    with pytest.raises(DataError, match="row 0 of step 4 a second time"):
        planted("garbage@4", "repeated-token@4")
    with pytest.raises(DataError, match="row 1 of step 4 a second time"):
        planted("targets-ignored@4:rows=2", "targets-shuffled@4:rows=2")
    assert not (tmp_path / "run").exists()
    assert planted("garbage@4", "targets-shuffled@4").labels  # of one, the inputs; of the other, the targets


def test_an_option_of_the_optimizer_may_hold_for_some_steps(planted):
    found = planted("beta2@4:value=0.3,for=3", "eps@1:value=1e-6", "attention-growth@5:growth=1.2,for=6").config
    assert found.adam_changes == (AdamChange(step=4, until=6, option="beta2", value=0.3),) and found.adamw.eps == 1e-6
    layer = "blocks.0.attention"
    paths = (f"{layer}.query.weight", f"{layer}.key.weight")
    assert found.drifts == (Drift(step=5, until=10, growth=1.2, parameters=paths),)
    with pytest.raises(ExperimentError, match="growth=1; expected a factor above 1"):
        planted("attention-growth@5:growth=1")


def test_an_unstable_rate_is_constant_and_as_given(planted):
    schedule = planted("unstable-rate@1:rate=0.7").config.schedule
    assert (schedule.kind, schedule.max_lr) == ("constant", 0.7)
