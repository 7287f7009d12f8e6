"""The mean loss of a row is over its own targets: counted where something says which they are, and not known elsewhere.

The reference is a loop over positions in numpy that knows the mask by which the batch was made.
"""

import json

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
import pytest
import runs
from experiments import record_own
from helpers import Numbered, experiment

import workbench as wb
from workbench.batches.row_targets import row_targets
from workbench.cause.counterfactual import Trials, row_losses
from workbench.interventions.scene import Scene
from workbench.step import StepResult
from workbench.trace import Trace

ROWS, LENGTH, VOCABULARY = 4, 40, 30
ENDS = [40, 6, 17, 9]  # tokens of each row; the rest is padding


def reference(losses, mask):
    """Sum, count and mean of each row, one position after another."""
    found = []
    for row, own in zip(losses, mask, strict=True):
        summed, count = 0.0, 0
        for value, counts in zip(row, own, strict=True):
            if counts:
                summed, count = summed + float(value), count + 1
        found.append((summed, count, summed / count if count else float("nan")))
    return np.array(found)


# ---------------------------------------------------------------------------------------------------------- the count


MASK = np.arange(LENGTH) < np.array(ENDS)[:, None]


def drawn(mask=MASK, zeros=()):
    """Losses of tokens by a mask; `zeros` are targets that were certain."""
    losses = np.where(mask, np.random.default_rng(2).uniform(0.5, 4, mask.shape), 0.0)
    for place in zeros:
        losses[place] = 0.0
    return losses


def test_a_row_without_a_loss_of_0_has_all_its_positions():
    assert row_targets(drawn(np.ones_like(MASK))).tolist() == [LENGTH] * ROWS


def test_without_a_word_on_what_counts_a_row_with_a_loss_of_0_is_not_known():
    found = row_targets(drawn())
    assert found[0] == LENGTH and np.isnan(found[1:]).all()


@pytest.mark.parametrize("said", ["total", "mean"])
def test_the_steps_own_number_tells_masked_positions_from_certain_ones(said):
    def by(losses, count):
        return row_targets(
            losses, **{"total": count} if said == "total" else {"mean": np.float32(losses.sum() / count)}
        )

    assert by(drawn(), MASK.sum()).tolist() == ENDS
    assert by(drawn(), MASK.size).tolist() == [LENGTH] * ROWS  # nothing is masked: those losses are 0
    certain = by(drawn(zeros=[(2, 3)]), MASK.sum())  # one of the zeros is a target, and nothing says which
    assert certain[0] == LENGTH and np.isnan(certain[1:]).all()


def test_a_mask_of_the_batch_counts_certain_targets_where_the_number_agrees():
    losses, targets = drawn(zeros=[(2, 3)]), np.where(MASK, 5, -100)
    inputs = np.zeros((ROWS, LENGTH), np.int32)
    for batch in ([inputs, targets], [inputs, np.abs(targets), MASK.astype(np.float32)], [inputs, inputs, MASK]):
        assert row_targets(losses, batch, total=int(MASK.sum())).tolist() == ENDS
        alone = row_targets(losses, batch)
        assert np.isnan(alone[2]) and alone[[0, 1, 3]].tolist() == [40, 6, 9]


def test_what_contradicts_the_losses_is_no_mask():
    losses, other = drawn(np.ones_like(MASK)), np.where(MASK, 5, -100)
    assert row_targets(losses, [np.zeros((ROWS, LENGTH), np.int32), other]).tolist() == [LENGTH] * ROWS


def test_a_mean_over_too_many_tokens_or_of_other_terms_says_nothing():
    assert np.isnan(row_targets(drawn(), mean=1.001 * drawn().sum() / MASK.sum())[1:]).all()
    many = np.ones((1, 200_000))
    many[0, :1000] = 0
    assert np.isnan(row_targets(many, mean=1.0)).all()  # in float32 one more or less can't be told
    assert row_targets(many, total=199_000).tolist() == [199_000]


def test_losses_that_are_not_finite_are_targets():
    losses = drawn()
    losses[1, 2], losses[3, 20] = np.inf, np.nan  # the second is masked: 0 times infinity
    batch = [np.zeros((ROWS, LENGTH), np.int32), np.where(MASK, 5, -100)]
    assert row_targets(losses, batch, kind="trainer").shape == (ROWS,)
    found = row_targets(losses, batch)
    assert found[[0, 1, 2]].tolist() == [40, 6, 17] and np.isnan(found[3])


@pytest.mark.parametrize("widths", [None, (21, 41)])
def test_mlx_lms_own_targets(widths):
    """By its own loss: of every kind of row, losses of 1 by its mask add up to its number of targets."""
    trainer = pytest.importorskip("mlx_lm.tuner.trainer")
    tokens = np.ones((ROWS, LENGTH + 1), np.int32)
    ends = np.array([[0, 20], [3, 6], [17, 17], [40, 41]], np.int32)
    ends[:2, 1] = [21, 6]  # the first row has its micro-batch's whole width
    parts = [slice(0, 2), slice(2, 4)] if widths else [slice(0, 4)]
    counts = []
    for part, width in zip(parts, widths or [LENGTH + 1], strict=True):
        for row in range(part.start, part.stop):
            one = mx.array(tokens[row : row + 1, :width]), mx.array(ends[row : row + 1])
            counts.append(trainer.default_loss(lambda x: mx.zeros((*x.shape, 3)), *one)[1].item())
    batch = [tokens, ends, *([np.zeros((ROWS, 0, *widths), np.int32)] if widths else [])]
    assert row_targets(np.zeros((ROWS, LENGTH)), batch, kind="mlx-lm").tolist() == counts


# ------------------------------------------------------------------------------------------------------- of a whole run


class Padded(Numbered):
    """Rows of many lengths, padded with 0; the first half of each is a prompt, whose targets do not count.

    In batch 9 the short row 3 is one of rare tokens, which the model has not seen.
    """

    def batch(self, number):
        return padded(number)


def mask_of():
    places = np.arange(LENGTH)
    return np.array([(places >= end // 2) & (places < end) for end in ENDS])


def padded(number):
    window = np.random.default_rng(number).integers(1, 9, (ROWS, LENGTH + 1)).astype(np.int32)
    window[:, 1:] = np.where(np.arange(LENGTH) < np.array(ENDS)[:, None], window[:, 1:], 0)
    window[:, 0] = 1
    if number == 9:
        window[3, 1 : ENDS[3] + 1] = np.arange(20, 20 + ENDS[3])
    return window[:, :-1].copy(), np.where(mask_of(), window[:, 1:], -100).astype(np.int32)


def masked_job(extras=lambda mask: {}, hidden=False):
    """`hidden`: the batch does not say what counts, for its targets are as large as they are."""

    lengths = mx.array(mask_of())

    def loss(model, x, y):
        mask = lengths if hidden else y >= 0
        tokens = nn.losses.cross_entropy(model(x), mx.maximum(y, 0)) * mask
        return tokens.sum() / mask.sum(), {"token_loss": tokens} | extras(mask)

    mx.random.seed(1)
    job = experiment(model=nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)), loss_fn=loss)
    job.sampler = Padded()
    return job


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return record_own(tmp_path_factory.mktemp("padded") / "own", masked_job(), 10)


@pytest.fixture(scope="module")
def trace(run):
    return run.replay(9, experiment=masked_job(), fresh_process=False)


def means_of(trace):
    return reference(np.array(trace.record.token_loss), mask_of())


def test_the_rows_of_a_trace_have_means_over_their_own_targets(trace):
    wanted, rows = means_of(trace), trace.rows.set_index("row").sort_index()
    assert rows["loss"].tolist() == pytest.approx(wanted[:, 2], rel=1e-6)
    assert rows["targets"].tolist() == wanted[:, 1].tolist() == trace.record.row_targets
    assert rows["share"].tolist() == pytest.approx(wanted[:, 0] / wanted[:, 0].sum(), rel=1e-6)
    whole = (rows["loss"] * rows["targets"]).sum() / rows["targets"].sum()
    assert whole == pytest.approx(trace.loss, rel=1e-6)
    assert rows["loss"].idxmax() == 3 != rows["share"].idxmax()  # short, and the worst


def test_what_only_the_loss_knows_it_tells_by_its_mean_or_its_extras(tmp_path):
    for number, extras in enumerate(
        (lambda mask: {}, lambda mask: {"mask": mask}, lambda mask: {"targets": mask.sum()})
    ):
        job = record_own(tmp_path / str(number), masked_job(extras, hidden=True), 2)
        trace = job.replay(2, experiment=masked_job(extras, hidden=True), fresh_process=False)
        assert trace.rows.set_index("row").sort_index()["targets"].tolist() == mask_of().sum(axis=1).tolist()
        assert trace.rows.set_index("row").sort_index()["loss"].tolist() == pytest.approx(
            means_of(trace)[:, 2], rel=1e-6
        )


def test_an_older_trace_is_read_and_says_what_its_losses_tell(trace, tmp_path):
    document = json.loads(trace.path.read_bytes())
    assert document.pop("row_targets") == mask_of().sum(axis=1).tolist()
    (tmp_path / "older.json").write_text(json.dumps(document))
    older = wb.trace.read(tmp_path / "older.json")
    assert older.record.row_targets is None and older.rows.equals(trace.rows)
    accumulated = msgspec.structs.replace(older.record, options=older.record.options | {"accumulate": 2})
    rows = Trace(accumulated).rows  # the mean of micro-batches is no mean over all targets
    assert rows["loss"].isna().all() and rows["targets"].isna().all() and rows["share"].equals(trace.rows["share"])


def test_a_mean_that_is_not_known_is_blank_and_said(run, trace, tmp_path):
    unknown = Trace(msgspec.structs.replace(trace.record, row_targets=[None] * ROWS), batch=trace.batch)
    facts = run.batch_facts(9, unknown)
    own = facts[facts["step"] == 9]
    assert own["loss"].isna().all() and own["row"].tolist() == trace.rows["row"].tolist()
    assert any("4 of 4 rows is not known" in notice for notice in facts.attrs["notices"])
    assert not any("not known" in notice for notice in run.batch_facts(9, trace).attrs["notices"])
    table = wb.batch_table(run, 9, unknown)
    assert table["loss"].isna().all() and table["row"].tolist() == trace.rows["row"].tolist()


def test_padding_is_no_repetition_of_a_batch(run, trace):
    facts = run.batch_facts(9, trace)
    assert facts["period"].isna().all() and (facts["follow"] == 1).all()  # 0 stands 31 times and more in rows 1 and 3
    inputs = padded(9)[0]
    for row, end in enumerate(ENDS):
        own = facts[(facts["step"] == 9) & (facts["row"] == row)].iloc[0]
        cut = inputs[row][: end + 1]  # the last token, whose target is padding, is the row's own
        assert own["distinct"] == len(set(cut.tolist())) / len(cut)


def test_where_a_repetition_stands_is_counted_from_the_rows_first_token():
    from workbench.batches.fact_table import Contents, facts

    tokens = np.arange(1, 81, dtype=np.int32)[None].repeat(2, axis=0)
    tokens[0, :10], tokens[0, 20:60] = 0, 7
    targets = np.where(np.arange(80) < 10, -1, np.roll(tokens, -1, axis=1))
    targets[1] = np.roll(tokens[1], -1)
    found = facts(1, Contents.of([tokens, targets]), {})
    assert (found["repeats"][0], found["position"][0]) == (40, 20) and found["period"].isna()[1]
    assert found["distinct"][0] == len(set(tokens[0, 10:].tolist())) / 70


# ------------------------------------------------------------------------------------------------------- counterfactual


def test_a_trial_ranks_rows_by_their_own_targets(run):
    trials = Trials(Scene.open(run, 9, experiment=masked_job(), next_steps=1))
    own = trials.own()
    wanted = reference(np.array(trials.scene.result.token_loss), mask_of())
    assert own.row_losses.tolist() == pytest.approx(wanted[:, 2], rel=1e-6)
    assert int(np.argmax(own.row_losses)) == 3 != int(np.argmax(wanted[:, 0]))
    assert trials.without_row(3).row_losses.tolist() != [] and len(trials.without_row(3).row_losses) == 3
    usual = trials.shot(8, 7)
    assert usual.row_losses.shape == (ROWS,) and np.isfinite(usual.row_losses).all()


def test_losses_of_rows_that_are_broken_or_not_known():
    tokens = mx.array([[1.0, 0.0, 3.0], [float("nan"), 1.0, 1.0], [2.0, 2.0, 2.0], [0.0, 0.0, 0.0]])
    found = row_losses(StepResult(np.float32(1), np.float32(1), {}, {}, tokens), whole=False)
    assert np.isnan(found[[0, 3]]).all() and found[[1, 2]].tolist() == [np.inf, 2.0]
    targets = mx.array([[4, -1, 4], [4, 4, 4], [4, 4, 4], [-1, -1, -1]])
    found = row_losses(StepResult(np.float32(1), np.float32(1), {}, {}, tokens), (mx.zeros((4, 3)), targets))
    assert found[:3].tolist() == [2.0, np.inf, 2.0] and np.isnan(found[3])  # a row without targets has no mean


def test_the_command_line_prints_the_mean_of_the_row(run, trace):
    said = runs.here("batch", run.path, "--step", 9, "--json")
    document = json.loads(said.out)
    wanted = means_of(trace)
    assert said.code == 0
    for row in document["rows"]:
        if row["step"] == 9:
            assert row["loss"] == pytest.approx(wanted[row["row"], 2], rel=1e-6)
