"""Which data was in a step: rows, places, losses and oddities, without a replay and without MLX."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import runs
from experiments import record_own
from helpers import config, experiment, record

from workbench.batches import rowfacts
from workbench.batches.batch import batch_table, sampler_of
from workbench.batches.batchfacts import COLUMNS, batch_facts, token_counts
from workbench.errors import DataError, ReplayError
from workbench.record import Recorder
from workbench.run import Run
from workbench.sabotage.alterations import Relabelling, Repetition, Substitution
from workbench.share import shared
from workbench.trainer.corpus import Corpus
from workbench.trainer.data import training_windows


@pytest.fixture
def run(tmp_path):
    return Run(runs.recorded(tmp_path))


@pytest.fixture(scope="module")
def demo():
    """The run that comes with the workbench: three rows of random bytes at step 97, and no traces."""
    return Run(shared("data") / "demo-run")


def of_step(frame, step):
    return frame[frame["step"] == step].sort_values("row", ignore_index=True)


def test_rows_of_the_step_and_of_the_one_before_with_their_places(run):
    facts = run.batch_facts(5)
    assert facts.columns.tolist() == list(COLUMNS) and facts.attrs["notices"] == []
    assert facts["step"].tolist() == [5] * 4 + [4] * 4
    content, sampler = runs.corpus().read_bytes(), sampler_of(run)
    for step in (5, 4):
        rows = of_step(facts, step)
        assert rows["row"].tolist() == [0, 1, 2, 3] and rows["text"].equals(batch_table(run, step)["text"])
        places = sampler.provenance(step)
        assert rows["offset"].tolist() == [place.offset for place in places]
        assert rows["epoch"].tolist() == [place.epoch for place in places]
        for row, tokens in zip(rows.itertuples(), sampler.batch_at(step)[0], strict=True):
            assert content[row.offset : row.offset + 16] == bytes(tokens.tolist())
            assert row.distinct == len(set(tokens.tolist())) / 16
    assert facts["loss"].isna().all() and (facts["follow"] == 1).all()
    assert facts[["period", "copy_of", "seen_at"]].isna().all(axis=None)


def test_each_row_is_read_against_the_eight_steps_before(demo):
    facts, sampler = of_step(demo.batch_facts(97), 97), sampler_of(demo)
    past = np.concatenate([sampler.batch_at(step)[0] for step in range(89, 97)])
    counts = np.bincount(sampler.sources[0].tokens[: sampler.stop], minlength=256)
    own = rowfacts.measures(sampler.batch_at(97)[0], counts)
    before = rowfacts.measures(past, counts)
    for name in rowfacts.MEASURES:
        assert facts[name].tolist() == own[name].tolist()
        assert facts[f"{name}_z"].tolist() == rowfacts.robust_z(own[name], before[name]).tolist()


def test_rows_that_are_unlike_the_others_come_first(demo):
    facts = demo.batch_facts(97)
    first = facts.head(3)
    assert set(first["source"]) == {"1.bytes"} and (first["outlier"] > 10).all()
    rest = facts.iloc[3:]
    assert set(rest["source"]) == {"shakespeare.txt"} and rest["outlier"].max() < first["outlier"].min()
    assert facts[facts["step"] == 97]["outlier"].is_monotonic_decreasing


def test_the_traces_of_both_steps_add_their_losses_and_the_order(run):
    traces = {trace.step: trace for trace in run.replay(range(4, 6), with_probe=False)}
    facts = run.batch_facts(5)
    for step in (5, 4):
        rows, known = facts[facts["step"] == step], traces[step].rows.set_index("row")
        assert rows["share"].is_monotonic_decreasing and rows["share"].sum() == pytest.approx(1)
        for row in rows.itertuples():
            assert row.loss == known["loss"][row.row] and row.share == known["share"][row.row]
    assert run.batch_facts(5, traces[5]).equals(facts)
    (run.path / "traces" / "00000004.json").unlink()
    assert run.batch_facts(5)[lambda f: f["step"] == 4]["loss"].isna().all()


def test_a_trace_that_is_not_of_this_batch_is_left_out_and_named(run):
    run.replay(5, with_probe=False)
    path = run.path / "traces" / "00000005.json"
    runs.edit_json(path, lambda record: record.update(batch_hash="0" * 64))
    facts = run.batch_facts(5)
    assert facts["loss"].isna().all() and "of another batch" in facts.attrs["notices"][0]
    runs.edit_json(path, lambda record: record.update(run="f" * 32))
    assert "of another run" in run.batch_facts(5).attrs["notices"][0]
    path.write_text("{")
    assert "is not a trace of version 1" in run.batch_facts(5).attrs["notices"][0]
    with pytest.raises(ReplayError, match="the trace is of step 6; expected one of step 5"):
        run.batch_facts(5, run.replay(6, with_probe=False))


def test_the_first_step_has_none_before_it(run):
    facts = run.batch_facts(1)
    assert set(facts["step"]) == {1} and facts["outlier"].isna().all()
    assert facts.attrs["notices"] == ["step 1 has no batch before it, and no earlier rows to compare its own with"]
    with pytest.raises(ReplayError, match="step 99 is not in the telemetry"):
        run.batch_facts(99)


def test_a_corpus_that_repeats_itself_has_its_period_in_every_row(tmp_path):
    corpus = tmp_path / "again.txt"
    corpus.write_text("one two " * 2000)
    flags = ("--ctx", 400, "--batch", 2, "--depth", 1, "--device", "cpu", "--val-split", 0)
    out = tmp_path / "run"
    assert runs.here("train", "--corpus", corpus, "--steps", 1, "--out", out, *flags).code == 0
    facts = Run(out).batch_facts(1)
    assert set(facts["period"]) == {8} and set(facts["repeats"]) == {50} and set(facts["position"]) == {0}


def altered(tmp_path, **alterations):
    record(tmp_path / "run", runs.corpus(), config(5, **alterations))
    return Run(tmp_path / "run")


def test_targets_that_are_not_the_next_tokens_show(tmp_path):
    run = altered(tmp_path, relabellings=(Relabelling(3, (2,), "shift", 2), Relabelling(3, (3,), "ignore")))
    assert (of_step(run.batch_facts(3), 3)["follow"] == 1).tolist() == [True, True, False, False]
    assert (of_step(run.batch_facts(4), 4)["follow"] == 1).all()


def test_a_row_that_stands_twice_and_a_batch_that_was_there_before(tmp_path):
    plain = sampler_of(altered(tmp_path / "plain")).provenance(3)
    twice = Substitution(3, (1,), 0, (plain[0].offset,))
    run = altered(tmp_path / "altered", substitutions=(twice,), repetitions=(Repetition(5, 4),))
    assert of_step(run.batch_facts(3), 3)["copy_of"].tolist() == [1, 0, pd.NA, pd.NA]
    facts = run.batch_facts(5)
    assert of_step(facts, 5)["seen_at"].tolist() == [4] * 4 and of_step(facts, 4)["seen_at"].isna().all()


def test_one_batch_of_other_data_on_the_way_is_left_out(run):
    content = bytearray(runs.corpus().read_bytes())
    content[of_step(run.batch_facts(5), 5)["offset"][0]] ^= 1
    (run.path / "corpus.txt").write_bytes(content)
    runs.edit_json(run.path / "run.json", lambda m: m["data"][0].update(path="corpus.txt"))
    changed = Run(run.path)
    facts = changed.batch_facts(7)
    assert len(facts) == 8 and "the batch of step 5 is left out" in facts.attrs["notices"][0]
    assert set(changed.batch_facts(6)["step"]) == {6}
    with pytest.raises(DataError, match="has changed"):
        changed.batch_facts(5)


def test_frequencies_of_a_short_range_are_all_of_it_and_of_a_long_one_evenly_spread(tmp_path, monkeypatch):
    path = tmp_path / "corpus.bin"
    tokens = np.random.Philox(key=1).random_raw(300_000).astype("<u2") % 50
    path.write_bytes(tokens.tobytes())
    sampler = training_windows([Corpus.open(path)], batch=2, ctx=8, seed=0, val_split=0.5)
    assert token_counts(sampler).tolist() == np.bincount(tokens[:150_000], minlength=65536).tolist()
    monkeypatch.setattr("workbench.batches.batchfacts.COUNTED", 2 * 65536)
    spread = token_counts(sampler)
    last = (150_000 - 65536) // 2
    expected = np.bincount(tokens[:65536], minlength=65536)
    expected += np.bincount(tokens[last : last + 65536], minlength=65536)
    assert spread.tolist() == expected.tolist()


# ------------------------------------------------------------------------------------------------- a loop of one's own


def test_a_loop_of_ones_own_needs_its_sampler_or_a_trace_and_says_what_stays_unknown(tmp_path):
    parts = runs.parts(runs.build())
    with Recorder(tmp_path / "mine", *parts, compile=False) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    run = Run(tmp_path / "mine")
    with pytest.raises(DataError, match=r"only that sampler has them.*workbench batch .*mine --step 2 --factory "):
        run.batch_facts(2)
    facts = run.batch_facts(2, run.replay(2, experiment=runs.build(), fresh_process=False))
    assert facts["row"].tolist() == [0, 1, 2, 3] and set(facts["step"]) == {2}
    assert facts[["source", "offset", "epoch", "seen_at", "distinct"]].isna().all(axis=None)
    assert facts["text"][0].startswith("float32[3] ")
    first, second, third = facts.attrs["notices"]
    assert "only that loop knows" in first and "not one of token ids" in second and "no loss of each row" in third


class Tokens:
    """Rows of token ids in which one row stands twice and one repeats a token."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        x = np.random.Generator(np.random.Philox(key=5, counter=self.number)).integers(0, 30, (4, 40))
        x[3], x[1] = x[0], 7
        self.number += 1
        return x.astype(np.int32), np.roll(x, -1, axis=1).astype(np.int32)

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, cursor):
        self.number = cursor["number"]


def token_loop():
    import mlx.core as mx
    import mlx.nn as nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)

        def __call__(self, x):
            return self.head(self.table(x))

    def loss(model, x, y):
        tokens = nn.losses.cross_entropy(model(x), y)
        return mx.mean(tokens), {"token_loss": tokens}

    mx.random.seed(1)
    job = experiment(model=Model(), loss_fn=loss)
    job.sampler = Tokens()
    return job


def test_token_ids_of_ones_own_loop_have_facts_and_a_trace_file_only_losses(tmp_path):
    run = record_own(tmp_path / "own", token_loop(), 3)
    trace = run.replay(2, experiment=token_loop(), fresh_process=False)
    facts = run.batch_facts(2, trace)
    rows = of_step(facts, 2)
    assert rows["copy_of"].tolist() == [3, pd.NA, pd.NA, 0] and rows["period"].tolist() == [pd.NA, 1, pd.NA, pd.NA]
    assert rows["repeats"][1] == 40 and rows["log_likelihood"].isna().all() and (rows["follow"] == 1).all()
    assert facts["share"].is_monotonic_decreasing and facts["share"].sum() == pytest.approx(1)
    from_file = run.batch_facts(2)
    assert from_file["loss"].tolist() == facts["loss"].tolist() and from_file["distinct"].isna().all()
    assert "holds the losses of the rows, not the batch itself" in from_file.attrs["notices"][0]


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_command_answers_without_mlx_and_without_weights(run):
    shutil.rmtree(run.path / "checkpoints")
    code = "import sys; sys.argv = ['workbench', 'batch', sys.argv[1], '--step', '5', '--json']\n"
    code += "from workbench.cli import main\ntry:\n    main(standalone_mode=False)\nfinally:\n"
    code += "    assert 'mlx.core' not in sys.modules and 'workbench.batches.batchfacts' in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    document = runs.strict(done.stdout)
    assert document["step"] == 5 and len(document["rows"]) == 8
    facts = run.batch_facts(5)
    assert [row["text"] for row in document["rows"]] == facts["text"].tolist()
    assert {row["loss"] for row in document["rows"]} == {None}


def test_the_command_prints_a_table_a_batch(run):
    said = runs.here("batch", run.path, "--step", 5, "--rows", 2)
    assert said.code == 0 and "Batch of step 5" in said.out and "Batch of step 4" in said.out
    shown = run.batch_facts(5).groupby("step", sort=False).head(2)
    assert all(str(offset) in said.out for offset in shown["offset"])
    assert said.out.count("corpus.txt") == 4 and "share" not in said.out
    assert runs.here("batch", run.path, "--step", 99).sentence.startswith("workbench: step 99 is not in the telemetry")


def test_the_command_on_a_replayed_step_shows_the_shares(run):
    run.replay(5, with_probe=False)
    assert "share" in runs.here("batch", run.path, "--step", 5).out
    assert batch_facts(run, 5).equals(run.batch_facts(5))


def test_where_it_was_recorded_does_not_matter(demo, tmp_path):
    alone = Run(Path(shutil.copytree(demo.path, tmp_path / "alone")))
    with pytest.raises(DataError, match="shakespeare.txt.* is missing"):
        alone.batch_facts(97)
