"""The decoded batch: right rows, right places, right losses, or an error."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import runs

from workbench.batches.batch import batch_table, sampler_of
from workbench.errors import DataError, ReplayError, WorkbenchError
from workbench.record import Recorder
from workbench.run import Run
from workbench.share import shared
from workbench.trainer.corpus import Corpus


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(runs.recorded(tmp_path))


def test_rows_are_the_windows_that_the_run_consumed(run):
    table = batch_table(run, 5)
    assert table.columns.tolist() == ["row", "source", "offset", "text"]
    assert table["row"].tolist() == [0, 1, 2, 3] and set(table["source"]) == {"corpus.txt"}
    content = runs.corpus().read_bytes()
    for row in table.itertuples():
        window = content[row.offset : row.offset + runs.SMALL["ctx"] + 1]
        assert row.text == window.decode().replace("\n", "␊")


def test_a_replay_adds_the_losses(run):
    trace = run.replay(5)
    table = batch_table(run, 5, trace)
    assert table.columns.tolist() == ["row", "loss", "share", "source", "offset", "text"]
    assert table["share"].is_monotonic_decreasing and table["share"].sum() == pytest.approx(1)
    assert table["loss"].mean() == pytest.approx(trace.loss, rel=1e-5)
    plain = batch_table(run, 5).set_index("row")
    assert (table.set_index("row")["text"].sort_index() == plain["text"]).all()
    assert (trace.batch[0][table["row"][0]] == Corpus.open(runs.corpus()).tokens[table["offset"][0] :][:16]).all()


def test_rows_without_a_finite_loss_come_first(run):
    trace = run.replay(5)
    trace.record.row_loss[2] = None
    table = batch_table(run, 5, trace)
    assert table["row"][0] == 2 and np.isnan(table["loss"][0])


def test_accumulated_rows_are_one_batch(tmp_path):
    said = runs.workbench(
        *("train", "--corpus", runs.corpus(), "--steps", 3, "--out", tmp_path / "run", *runs.FLAGS, "--accum", 2),
    )
    assert said.code == 0, said.err
    run = Run(tmp_path / "run")
    table = batch_table(run, 3, run.replay(3))
    assert len(table) == 8 and table["share"].sum() == pytest.approx(1)


def test_a_batch_of_other_data_is_refused(run):
    path = run.path / "corpus.txt"
    content = bytearray(runs.corpus().read_bytes())
    content[batch_table(run, 5)["offset"][0]] ^= 1
    path.write_bytes(content)
    runs.edit_json(run.path / "run.json", lambda m: m["data"][0].update(path="corpus.txt"))
    changed = Run(run.path)
    with pytest.raises(DataError, match="has changed"):
        batch_table(changed, 5)
    # The hash proves each batch by itself, so steps that the change does not touch can still be read.
    assert len(batch_table(changed, 6)) == 4


def test_without_a_hash_the_file_itself_is_verified(run):
    runs.edit_line(run.path, 5, batch_hash=...)
    assert len(batch_table(Run(run.path), 5)) == 4
    runs.edit_json(run.path / "run.json", lambda m: m["data"][0].update(sha256="0" * 64))
    with pytest.raises(DataError, match="has changed"):
        batch_table(Run(run.path), 5)


def test_another_stream_than_the_recorded_one_is_refused(run):
    runs.edit_json(run.path / "run.json", lambda m: m["rebuild"]["config"].update(seed=5))
    with pytest.raises(DataError, match="is not the one that run consumed"):
        batch_table(Run(run.path), 5)


def test_token_ids_of_a_replay_are_shown_where_the_corpus_is_lost(run):
    trace = run.replay(5)
    runs.edit_json(run.path / "run.json", lambda m: m["data"][0].update(path="/nowhere/lost.txt"))
    lost = Run(run.path)
    with pytest.raises(DataError, match="lost.txt.* is missing"):
        batch_table(lost, 5)
    table = batch_table(lost, 5, trace)
    first = table.iloc[0]
    assert first.text.startswith("".join(f"⟨{token}⟩" for token in trace.batch[0][first.row][:3]))
    assert table["source"].isna().all() and table["share"].sum() == pytest.approx(1)


def test_a_loop_of_ones_own(tmp_path):
    experiment = runs.build()
    parts = (experiment.model, experiment.optimizer, experiment.loss_fn, experiment.sampler)
    with Recorder(tmp_path / "mine", *parts, compile=False) as recorder:
        for batch in recorder.batches(3):
            recorder.step(batch)
    run = Run(tmp_path / "mine")
    with pytest.raises(DataError, match="only that loop knows its batches"):
        batch_table(run, 2)
    trace = run.replay(2, experiment=runs.build())
    table = batch_table(run, 2, trace)
    assert len(table) == 4 and table["text"][1].startswith("float32[3]: ") and "; float32[1]: " in table["text"][1]
    trace.batch = (np.arange(20), np.array(3.5))  # no common leading axis
    assert batch_table(run, 2, trace)["text"].tolist() == ["int64[20]: 0 1 2 3 4 5 6 7 8 9 10 11 …", "float64[]: 3.5"]


def test_what_does_not_fit_together_is_refused(run):
    with pytest.raises(ReplayError, match="step 99 is not in the telemetry"):
        batch_table(run, 99)
    with pytest.raises(ReplayError, match="trace is of step 5"):
        batch_table(run, 6, run.replay(5))
    runs.edit_json(run.path / "run.json", lambda m: m.update(data=[]))
    with pytest.raises(DataError, match="names no data file"):
        batch_table(Run(run.path), 5)
    runs.edit_json(run.path / "run.json", lambda m: m["rebuild"]["config"].update(batch="many"))
    with pytest.raises(WorkbenchError, match="config of this run is damaged"):
        batch_table(Run(run.path), 5)


def test_the_example_finds_its_corpus_by_name(tmp_path):
    example = Run(shared("data") / "demo-run")
    assert sampler_of(example).sources[0].path == shared("data").resolve() / "shakespeare.txt"
    assert batch_table(example, 97)["source"].tolist().count("1.bytes") == 3
    alone = Run(Path(shutil.copytree(example.path, tmp_path / "alone")))
    with pytest.raises(DataError, match="shakespeare.txt.* is missing.*copy it to"):
        batch_table(alone, 97)
    shutil.copy(shared("data") / "shakespeare.txt", alone.path)
    assert batch_table(alone, 97).equals(batch_table(example, 97))


def test_no_mlx_is_needed(run):
    code = "import sys; from workbench.batches.batch import batch_table; from workbench.run import open_run; "
    code += "batch_table(open_run(sys.argv[1]), 5); assert 'mlx.core' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(run.path)], check=True, timeout=60)
