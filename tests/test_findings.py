"""What stands out is said, in words; a healthy step says nothing."""

import mlx.core as mx
import mlx.optimizers as optim
import msgspec
import numpy as np
import pytest
from models import CTX, ROWS, VOCABULARY, ByHand, Decoder, Tokens, job, seeded, token_loss

from workbench import Recorder, open_run, trace
from workbench.compare import Item
from workbench.probes.measured import Attention, Logits
from workbench.trace import Difference, Trace


def replayed(folder, make, step=2, steps=3, **options):
    """The trace of a step of a run of `make`."""
    mx.random.seed(3)
    one = make()
    settings = {"compile": False, "clip": 1.0} | options
    with Recorder(folder / "run", one.model, one.optimizer, one.loss_fn, one.sampler, **settings) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)
    return open_run(folder / "run").replay(step, experiment=make())


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    return replayed(tmp_path_factory.mktemp("healthy"), job)


def changed(one, **fields):
    return Trace(msgspec.structs.replace(one.record, **fields)).findings()


def test_a_healthy_step_has_none(healthy):
    assert healthy.exact and healthy.findings() == [] and healthy.record.first_nonfinite is None
    assert trace.read(healthy.path).findings() == []


def test_the_trace_holds_what_was_measured(healthy):
    record = healthy.record
    assert record.certified_forward is True and record.logits.vocabulary == VOCABULARY
    assert [one.path for one in record.attention] == ["blocks.0.attention", "blocks.1.attention"]
    assert healthy.attention.columns.tolist() == ["path", "call", "head", "logit_max", "entropy", "source"]
    assert len(healthy.attention) == 4 and healthy.attention["entropy"].between(0, np.log(CTX)).all()
    updates = healthy.updates
    assert updates["path"].tolist() == sorted(path for paths in record.owned.values() for path in paths)
    assert (updates["ratio"] > 0).all() and updates["staleness_rms"].between(0.3, 1.8).all()
    assert trace.read(healthy.path).record == record


def test_without_a_second_moment_its_columns_are_nan(tmp_path):
    one = replayed(tmp_path, lambda: job(optimizer=optim.SGD(1e-2)))
    assert one.updates[["staleness_rms", "eps_fraction"]].isna().all(axis=None)
    assert one.updates["ratio"].notna().all() and one.updates.dtypes["staleness_rms"] == "float64"


def masked(model, inputs, targets, keep):
    losses, extras = token_loss(model, inputs, targets), {"targets": keep}
    return losses * mx.sum(keep) / mx.sum(keep), extras


class Masked(Tokens):
    """The second batch has no target that counts."""

    def __next__(self):
        x, y = super().__next__()
        return x, y, np.full(y.shape, self.number != 2, np.float32)


def without_targets(**options):
    one = job(loss_fn=masked, **options)
    one.sampler = Masked()
    return one


def test_zero_target_tokens(tmp_path):
    """Case S2: named, and the loss is the first non-finite tensor."""
    one = replayed(tmp_path, without_targets)
    assert one.exact and one.record.targets == 0 and one.record.first_nonfinite.kind == "loss"
    assert one.findings() == [
        "Zero target tokens: no token of this step counts in the loss; a mean over them is 0/0.",
        "The first non-finite tensor is the loss: NaN; all before it is finite.",
    ]


def test_targets_are_counted_over_micro_batches(tmp_path):
    one = replayed(tmp_path, lambda: without_targets(accumulate=3), step=1, accumulate=3)
    assert one.record.targets == ROWS * CTX and one.findings() == []


def test_a_state_that_was_broken_already(tmp_path):
    """Case S7: the step after the one that broke the weights."""
    one = replayed(tmp_path, without_targets, step=3)
    first, second = one.findings()
    assert "the weight " in first and "of state N-1" in first
    assert second.startswith("State 2, from which step 3 started, was broken already")


def test_a_fully_masked_row_is_told_twice(tmp_path):
    """Case S3: the queries that see nothing, and the gradient in which the NaN arises."""
    one = replayed(tmp_path, lambda: job(model=seeded(lambda: Decoder([ByHand(hide=[3])])), loss_fn=token_loss), step=1)
    first, second = one.findings()
    assert first == f"{2 * ROWS} of {2 * ROWS * CTX} queries of attention in blocks.0 have all positions hidden."
    assert "the gradient of the attention scores in blocks.0" in second
    assert np.isfinite(one.loss)


def test_layers_without_any_gradient(tmp_path):
    """Case S6."""

    def severed(model, inputs, targets):
        for layer in (model.blocks[0].mlp.up, model.blocks[0].mlp.down):
            layer.weight = mx.stop_gradient(layer.weight)
        return token_loss(model, inputs, targets)

    one = replayed(tmp_path, lambda: job(loss_fn=severed))
    (found,) = one.findings()
    assert found == "The gradient is exactly 0 in 2 of 18 layers: blocks.0.mlp.up, blocks.0.mlp.down."
    assert changed(one, rows=[], updates=[], attention=None, logits=None) == [found]  # no probe pass is needed


def test_tensors_that_never_move(tmp_path):
    """Case R11."""
    make = optim.AdamW
    one = replayed(tmp_path, lambda: job("bfloat16", optimizer=make(1e-4, weight_decay=0.0, bias_correction=True)))
    (found,) = one.findings()
    assert found.startswith("5 of 19 tensors did not move: each change was under half a unit in the last place")
    assert "(bfloat16)" in found and "blocks.0.attention_norm.weight" in found
    assert changed(one, lr=0.0) == ["The learning rate of this step is 0."]


@pytest.mark.parametrize("bits", ["0x7fc00000", "0x7f800000"])
def test_telemetry_that_masks_a_non_finite_loss(healthy, bits):
    """Case S1: finite in the log, not finite in the replay, and all else agrees."""
    item = Item("0x40133333", bits, "mismatch", "")
    difference = Difference(step=2, where="step", item="loss", detail="", consequences=[])
    fields = {"loss": None, "loss_bits": bits, "exact": False, "first_difference": difference}
    (found,) = changed(healthy, **fields, items=healthy.record.items | {"loss": item})
    assert found.startswith("Telemetry masks a non-finite loss: it has 2.3 for step 2, and that step's loss is ")
    other = Item("a", "b", "mismatch", "")
    assert changed(healthy, **fields, items=healthy.record.items | {"loss": item, "batch_hash": other}) == []
    earlier = fields | {"first_difference": msgspec.structs.replace(difference, step=1, where="roll-forward")}
    assert changed(healthy, **earlier, items=healthy.record.items | {"loss": item}) == []
    same = Item(bits, bits, "exact", "")
    assert changed(healthy, loss=None, loss_bits=bits, items=healthy.record.items | {"loss": same}) == []


@pytest.mark.parametrize(("loss", "odd"), [(1.05, False), (1.2, True), (None, True)])
def test_a_first_loss_above_a_uniform_guess(healthy, loss, odd):
    """Case S7."""
    total = None if loss is None else loss * np.log(VOCABULARY) * CTX
    fields = {"row_loss": [total] * ROWS, "targets": ROWS * CTX}
    found = changed(healthy, step=1, **fields)
    assert len(found) == odd and all("above ln(32) = 3.466" in text for text in found)
    assert changed(healthy, step=2, **fields) == []
    rows = fields | {"targets": None, "row_targets": [CTX] * ROWS}  # a loss function that says nothing of what counts
    assert changed(healthy, step=1, **rows) == found
    assert changed(healthy, step=1, **rows | {"row_targets": [None] + [CTX] * (ROWS - 1)}) == []
    assert changed(healthy, step=1, **rows | {"row_targets": None}) == []


def test_a_notebook_shows_them_escaped(healthy):
    one = Attention(path="<b>", call=0, source="", logit_max=[], entropy=[], hidden_queries=3, queries=9)
    shown = Trace(msgspec.structs.replace(healthy.record, attention=[one]))._repr_html_()
    assert "3 of 9 queries of attention in &lt;b&gt; have" in shown and "<b>" not in shown


def test_hidden_queries_name_the_module(healthy):
    one = Attention(path="", call=0, source="", logit_max=[], entropy=[], hidden_queries=3, queries=1200)
    assert changed(healthy, attention=[one]) == [
        "3 of 1,200 queries of attention in the model have all positions hidden."
    ]


def test_an_old_trace_still_reads(healthy, tmp_path):
    """One that knows nothing of these measurements: they are absent, not zero."""
    document = msgspec.to_builtins(healthy.record)
    for name in ("targets", "updates", "attention", "logits", "certified_forward", "first_nonfinite"):
        del document[name]
    for row in document["rows"]:
        del row["mean"], row["zero_fraction"]
    path = tmp_path / "old.json"
    path.write_bytes(msgspec.json.encode(document))
    old = trace.read(path)
    assert old.findings() == [] and old.updates.empty and old.attention.empty
    assert old.record.attention is None and old.record.logits is None and old.record.targets is None
    assert old.layers["mean"].isna().all() and old.parameters["zero_fraction"].isna().all()
    assert old.layers["l2"].equals(healthy.layers["l2"]) and isinstance(healthy.record.logits, Logits)
