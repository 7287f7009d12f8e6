"""Which data was in a step of another loop than the built-in trainer's: stored, drawn again, or mlx-lm's."""

import json
import shutil

import helpers
import mlx.core as mx
import numpy as np
import pandas as pd
import pytest
import runs
from experiments import record_own
from helpers import mse

from workbench.errors import DataError, ExperimentError, ReplayError
from workbench.record import Recorder
from workbench.run import Run


def stored(path, batches, loss=mse, **options):
    """A run over batches that the loop itself hands over."""
    job = helpers.experiment(loss_fn=loss, **options)
    with Recorder(path, job.model, job.optimizer, loss, compile=False, save_every=4, spikes=None) as recorder:
        for batch in batches:
            recorder.step(batch)
    return Run(path)


def points(steps, kind=mx.float32):
    random = np.random.default_rng(4)
    for _ in range(steps):
        x = mx.array(random.standard_normal((6, 4)).astype(np.float32)).astype(kind)
        yield x, x.sum(axis=1, keepdims=True)


def of_step(frame, step):
    return frame[frame["step"] == step].set_index("row").sort_index()


# ---- stored batches


def test_rows_of_numbers_are_described_by_type_shape_and_range(tmp_path):
    batches = list(points(3))
    batches[1] = (batches[1][0].at[2, 1].add(float("inf")), batches[1][1])
    run = stored(tmp_path / "own", batches)
    facts = run.batch_facts(2)
    assert set(facts["step"]) == {1, 2} and len(facts) == 12 and facts["loss"].isna().all()
    x, y = (np.array(array) for array in batches[1])
    texts = of_step(facts, 2)["text"]
    assert texts[0] == f"float32[4] {' '.join(f'{value:.6g}' for value in x[0])}; float32[1] {y[0, 0]:.6g}"
    assert "inf" in texts[2] and any("step 2 was not replayed" in notice for notice in facts.attrs["notices"])


@pytest.mark.parametrize("place", [0, 2])
def test_an_array_without_rows_is_no_part_of_any(tmp_path, place):
    def loss(model, *arrays):
        x, y = (array for array in arrays if array.size)
        return mse(model, x, y)

    plain = list(points(2))
    batches = [(*batch[:place], mx.zeros((0, 3)), *batch[place:]) for batch in plain]
    run, other = stored(tmp_path / "own", batches, loss), stored(tmp_path / "plain", plain)
    texts = of_step(run.batch_facts(2), 2)["text"].tolist()
    assert len(texts) == 6 and texts == of_step(other.batch_facts(2), 2)["text"].tolist()


def test_of_many_values_the_range_of_the_finite_ones(tmp_path):
    x = np.arange(36, dtype=np.float32).reshape(3, 2, 6)
    x[1, 0, 1], x[2] = np.inf, np.nan

    def loss(model, x, y):
        return mse(model, x[:, 0, :4], y)

    run = stored(tmp_path / "own", [(mx.array(x), mx.array([[True], [False], [True]]))], loss)
    assert of_step(run.batch_facts(1), 1)["text"].tolist() == [
        "float32[2, 6] 0 to 11; bool[1] 1 of 1 true",
        "float32[2, 6] 12 to 23, 1 not finite; bool[1] 0 of 1 true",
        "float32[2, 6] 12 not finite; bool[1] 1 of 1 true",
    ]


def test_bfloat16_is_shown_as_its_values(tmp_path):
    run = stored(tmp_path / "own", points(1, mx.bfloat16), dtype="bfloat16")
    (x, _), texts = next(points(1, mx.bfloat16)), of_step(run.batch_facts(1), 1)["text"]
    assert texts[3].startswith(f"float32[4] {' '.join(f'{value:.6g}' for value in x[3].tolist())}; ")


def test_a_row_that_earlier_steps_had_is_found_by_its_contents(tmp_path):
    batches = [tuple(map(np.array, batch)) for batch in points(4)]
    batches[3][0][5], batches[3][1][5] = batches[1][0][2], batches[1][1][2]
    batches[3][0][4], batches[3][1][4] = batches[3][0][0], batches[3][1][0]
    rows = of_step(stored(tmp_path / "own", batches).batch_facts(4), 4)
    assert rows["seen_at"].tolist() == [pd.NA] * 5 + [2] and rows["copy_of"].tolist() == [
        4,
        pd.NA,
        pd.NA,
        pd.NA,
        0,
        pd.NA,
    ]


def token_run(path):
    """Twelve steps; in the last, row 2 repeats one token, and its targets are no next tokens."""
    from test_batchfacts import Tokens, token_loop

    job, stream = token_loop(), Tokens()
    with Recorder(path, job.model, job.optimizer, job.loss_fn, compile=False, save_every=6, spikes=None) as recorder:
        for step in range(12):
            x, y = next(stream)
            if step < 11:
                x[1], x[3] = np.arange(40) % 29, np.arange(40)[::-1] % 29
            recorder.step((x, y))
    return Run(path)


def test_token_ids_are_read_against_the_eight_steps_before_and_a_trace_of_the_run_adds_the_losses(tmp_path):
    from test_batchfacts import token_loop

    run = token_run(tmp_path / "own")
    before = run.batch_facts(12)
    rows = of_step(before, 12)
    assert rows["period"].tolist() == [pd.NA, 1, pd.NA, pd.NA] and rows["repeats"][1] == 40
    assert before["row"][0] == 1 and rows["outlier"][1] == rows["outlier"].max() > 6
    assert rows["log_likelihood"].isna().all() and rows["text"][1] == "⟨7⟩" * 40
    run.replay(12, experiment=token_loop(), fresh_process=False)
    after = run.batch_facts(12)
    own = after[after["step"] == 12]
    assert own["share"].is_monotonic_decreasing and own["share"].sum() == pytest.approx(1)
    assert own["loss"].tolist() == run.trace(12).rows["loss"].tolist()
    said = runs.here("batch", run.path, "--step", 12)
    assert said.code == 0 and "1 token repeated 40 times" in said.out and "share" in said.out and "⟨7⟩⟨7⟩" in said.out


def test_no_weights_and_no_code_are_needed(tmp_path):
    run = stored(tmp_path / "own", points(3))
    shutil.rmtree(run.path / "checkpoints")
    said = runs.here("batch", run.path, "--step", 3, "--json", "--rows", 2)
    document = runs.strict(said.out)
    assert [row["row"] for row in document["rows"]] == [0, 1, 0, 1] and document["rows"][0]["text"].startswith(
        "float32"
    )


def test_a_damaged_batch_is_named_and_one_before_it_left_out(tmp_path):
    run = stored(tmp_path / "own", points(3))
    for step in (1, 2):
        (run.path / "batches" / f"{run.line(step, 0).batch_hash}.safetensors").write_bytes(b"torn")
    with pytest.raises(DataError, match="can't be read"):
        run.batch_facts(2)
    facts = run.batch_facts(3)
    assert set(facts["step"]) == {3} and any("batch of step 2 is left out" in one for one in facts.attrs["notices"])
    assert "can't be read" in runs.here("batch", run.path, "--step", 1).sentence


def test_arrays_without_a_common_axis_are_a_line_each(tmp_path):
    def loss(model, x, scale):
        return mx.mean(model(x) * scale)

    run = stored(tmp_path / "own", [(mx.ones((6, 4)), mx.array(2.0))], loss)
    facts = run.batch_facts(1)
    assert facts["text"].tolist() == ["float32[6, 4] 1 to 1", "float32[] 2"]
    assert any("no leading axis in common" in notice for notice in facts.attrs["notices"])


def test_the_panels_table_has_stored_batches_without_a_replay(tmp_path):
    from workbench.batches.batch import batch_table

    run = stored(tmp_path / "own", points(2))
    assert batch_table(run, 2)["text"][0].startswith("float32[4]: ")


# ---- drawn again by the sampler that the user names


def test_a_sampler_with_a_cursor_draws_the_batch_again(tmp_path):
    run = record_own(tmp_path / "own", helpers.experiment(), 7, save_every=3)
    key = mx.random.state[0].tolist()
    facts = run.batch_facts(5, experiment=helpers.experiment())
    assert mx.random.state[0].tolist() == key and set(facts["step"]) == {4, 5}
    reference = helpers.experiment().sampler
    drawn = [next(reference) for _ in range(5)]
    first = " ".join(f"{value:.6g}" for value in np.array(drawn[4][0])[0].tolist())
    assert of_step(facts, 5)["text"][0].startswith(f"float32[4] {first}; ")


def test_another_sampler_is_refused(tmp_path):
    run = record_own(tmp_path / "own", helpers.experiment(), 5)
    with pytest.raises(ReplayError, match="is not the one that own logged"):
        run.batch_facts(3, experiment=helpers.experiment(rows=11))
    with pytest.raises(ExperimentError, match="can't be imported"):
        run.batch_facts(3, factory="nowhere:build")


# ---- mlx-lm


def test_lines_and_text_of_a_run_of_mlx_lm(tmp_path):
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'spike-workbench[mlx-lm]'")
    import small_llm

    import workbench as wb
    from workbench.rebuild import rebuild

    model = small_llm.save_model(tmp_path / "model", family="qwen3", quantised=False)
    data = small_llm.save_data(tmp_path / "data", "text", longest=70)
    run = wb.fine_tune(
        small_llm.settings(model, data, iters=12, grad_accumulation_steps=2), tmp_path / "run", compile=False
    )
    last = run.last_step
    weights = next(model.glob("*.safetensors"))
    content = weights.read_bytes()
    sampler = rebuild(run.manifest, run.path).sampler
    weights.write_bytes(b"")  # not read
    facts = run.batch_facts(last)
    lines = (data / "train.jsonl").read_text().splitlines()
    for step in (last, last - 1):
        rows = of_step(facts, step)
        assert (rows["line"] - 1).tolist() == sampler.rows(step) and set(rows["source"]) == {"train.jsonl"}
        for line, text in zip(rows["line"], rows["text"], strict=True):
            assert text.split()[0] in json.loads(lines[line - 1])["text"]
    assert not any("loop of your own" in notice for notice in facts.attrs["notices"])
    said = runs.here("batch", run.path, "--step", 2)
    assert said.code == 0 and "line" in said.out and "train.jsonl" in said.out
    weights.write_bytes(content)
    (data / "train.jsonl").write_text("\n".join(reversed(lines)) + "\n")
    with pytest.raises(DataError, match="is not the one that run consumed"):
        run.batch_facts(last)
