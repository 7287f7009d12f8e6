"""What passes by during a forward pass is seen, in any model, for as long as the watch is open, and for this thread."""

import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from models import CTX, MODELS, ROWS, VOCABULARY, ByHand, Decoder, classes_of, job, seeded, token_loss, transformer
from test_attention import reference

from workbench.deterministic import deterministic_operations, make_deterministic
from workbench.experiment import as_batch
from workbench.probes.watch import CROSS_ENTROPY, EXTRAS, FUSED, SOFTMAX, Watch
from workbench.trainer.model import loss

BATCH = as_batch(next(iter(job().sampler)))


def watched(model, loss_fn, *batches):
    """What a watch sees in the forward passes of a value_and_grad."""
    watch = Watch(model, loss_fn)
    with watch:
        for batch in batches or (BATCH,):
            mx.eval(nn.value_and_grad(model, watch.loss_fn)(model, *batch))
    return watch.forward([one.arrays for one in watch.seen])


def caught_queries(model, loss_fn):
    """The arguments of each attention call, caught by hand."""
    real, calls = mx.fast.scaled_dot_product_attention, []

    def attention(q, k, v, **options):
        calls.append((q, k, options))
        return real(q, k, v, **options)

    mx.fast.scaled_dot_product_attention = attention
    try:
        loss_fn(model, *BATCH)
    finally:
        mx.fast.scaled_dot_product_attention = real
    return calls


PATHS = {
    "transformer": [("blocks.0.attention", 0), ("blocks.1.attention", 0)],
    "bfloat16": [("blocks.0.attention", 0), ("blocks.1.attention", 0)],
    "grouped": [("blocks.0", 0), ("blocks.1", 0)],
    "shared": [("blocks.0", 0), ("blocks.0", 1)],
    "by hand": [("blocks.0", 0)],
}


@pytest.mark.parametrize("name", MODELS)
def test_each_call_is_seen_where_it_happened(name):
    make, loss_fn = MODELS[name]
    found = watched(make(), loss_fn)
    assert [(one.path, one.call) for one in found.attention] == PATHS[name]
    assert {one.source for one in found.attention} == {SOFTMAX if name == "by hand" else FUSED}
    assert all(one.hidden_queries == 0 for one in found.attention)


@pytest.mark.parametrize("name", ["bfloat16", "grouped", "shared"])
def test_its_numbers_are_those_of_what_entered(name):
    make, loss_fn = MODELS[name]
    model = make()
    found, causal = watched(model, loss_fn).attention, np.tril(np.ones((CTX, CTX), bool))
    for one, (q, k, options) in zip(found, caught_queries(model, loss_fn), strict=True):
        tops, entropies, visible = reference(q, k, scale=options["scale"], allowed=causal, sinks=options.get("sinks"))
        assert one.logit_max == pytest.approx(tops, rel=1e-5, abs=1e-6)
        assert one.entropy == pytest.approx(entropies, rel=1e-5, abs=1e-6)
        assert one.queries == visible.sum()


def test_by_hand_equals_fused():
    hand = seeded(lambda: Decoder([ByHand()]))
    (one,) = watched(hand, token_loss).attention

    class Fused(ByHand):
        def __call__(self, x):
            q, k, v = (
                layer(x).reshape(*x.shape[:2], 2, -1).transpose(0, 2, 1, 3)
                for layer in (self.query, self.key, self.value)
            )
            mixed = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask="causal")
            return mixed.transpose(0, 2, 1, 3).reshape(x.shape)

    (other,) = watched(seeded(lambda: Decoder([Fused()])), token_loss).attention
    assert one.logit_max == pytest.approx(other.logit_max, rel=1e-5)
    assert one.entropy == pytest.approx(other.entropy, rel=1e-5) and one.queries == other.queries


def test_queries_that_see_nothing_are_counted():
    (one,) = watched(seeded(lambda: Decoder([ByHand(hide=[2, 5])])), token_loss).attention
    assert one.hidden_queries == 2 * 2 * ROWS and one.queries == 2 * CTX * ROWS


def test_logits_are_those_that_enter_the_loss():
    model = transformer()
    found = watched(model, loss).logits
    logits = np.array(model(BATCH[0])).astype(float).reshape(-1, VOCABULARY)
    log_z = np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1)) + logits.max(1)
    assert (found.source, found.tokens, found.vocabulary) == (CROSS_ENTROPY, ROWS * CTX, VOCABULARY)
    assert found.max == pytest.approx(logits.max(), rel=1e-6)
    assert found.mean_max == pytest.approx(logits.max(1).mean(), rel=1e-6)
    assert found.log_z_max == pytest.approx(log_z.max(), rel=1e-6)
    assert found.log_z_mean == pytest.approx(log_z.mean(), rel=1e-6)


def test_micro_batches_are_one_step():
    model = transformer()
    whole, (x, y) = watched(model, loss), BATCH
    parts = watched(model, loss, *((x[start : start + 2], y[start : start + 2]) for start in (0, 2, 4)))
    assert parts.logits.tokens == whole.logits.tokens
    assert parts.logits.log_z_mean == pytest.approx(whole.logits.log_z_mean, rel=1e-6)
    for one, other in zip(parts.attention, whole.attention, strict=True):
        assert (one.path, one.call, one.queries) == (other.path, other.call, other.queries)
        assert one.logit_max == pytest.approx(other.logit_max, rel=1e-5)
        assert one.entropy == pytest.approx(other.entropy, rel=1e-5)


def test_an_mlp_has_no_attention_and_no_logits():
    model = nn.Sequential(nn.Linear(CTX, 4), nn.Tanh(), nn.Linear(4, 1))
    found = watched(model, lambda model, x, y: mx.mean(model(x.astype(mx.float32)) ** 2))
    assert (found.attention, found.logits, found.targets) == ([], None, None)


# ----------------------------------------------------------------------------------------------------- what a loss says


def logits_of(model, inputs):
    return model(inputs).astype(mx.float32)


def by_extras(model, inputs, targets):
    logits = logits_of(model, inputs)
    picked = mx.take_along_axis(logits, targets[..., None], -1).squeeze(-1)
    return mx.mean(mx.logsumexp(logits, -1) - picked), {"logits": logits}


def test_a_loss_of_ones_own_can_hand_out_its_logits():
    found, expected = watched(transformer(), by_extras).logits, watched(transformer(), loss).logits
    assert found.source == EXTRAS and found.max == expected.max
    assert found.log_z_mean == pytest.approx(expected.log_z_mean, rel=1e-6)


def test_extras_are_no_second_source():
    def both(model, inputs, targets):
        logits = logits_of(model, inputs)
        return mx.mean(nn.losses.cross_entropy(logits, targets)), {"logits": 2 * logits}

    assert watched(transformer(), both).logits == watched(transformer(), loss).logits


@pytest.mark.parametrize(
    ("extras", "expected"),
    [
        (lambda y: {"targets": 7}, 7),
        (lambda y: {"targets": mx.array(7)}, 7),
        (lambda y: {"targets": mx.array(7.0, mx.bfloat16)}, 7),
        (lambda y: {"targets": y > 3}, None),
        (lambda y: {"targets": (y > 3).astype(mx.int32)}, None),
        (lambda y: {"targets": y}, "unknown"),  # ids: those that are 0 would not be counted
        (lambda y: {"mask": (y > 3).astype(mx.float32)}, None),
        (lambda y: {"mask": (y > 3) * 0.25}, None),
        (lambda y: {"mask": mx.zeros(y.shape)}, 0),
        (lambda y: {"targets": 0}, 0),
        (lambda y: {"token_loss": y}, "unknown"),
        (lambda y: "no dict", "unknown"),
    ],
)
def test_the_count_of_targets(extras, expected):
    def own(model, inputs, targets):
        return loss(model, inputs, targets)[0], extras(targets)

    expected = int(np.count_nonzero(np.array(BATCH[1]) > 3)) if expected is None else expected
    found = watched(transformer(), own, BATCH, BATCH).targets
    assert found == (None if expected == "unknown" else 2 * expected)


@pytest.mark.parametrize("positional", [True, False])
def test_weights_of_cross_entropy_count_the_targets(positional):
    def weighted(model, inputs, targets):
        weights = (targets > 3).astype(mx.float32)
        arguments = ((weights,), {}) if positional else ((), {"weights": weights, "axis": -1})
        return mx.sum(nn.losses.cross_entropy(logits_of(model, inputs), targets, *arguments[0], **arguments[1]))

    assert watched(transformer(), weighted).targets == np.count_nonzero(np.array(BATCH[1]) > 3)


def test_logits_along_another_axis():
    def turned(model, inputs, targets):
        return mx.mean(nn.losses.cross_entropy(logits_of(model, inputs).swapaxes(1, 2), targets, None, 1))

    found, expected = watched(transformer(), turned).logits, watched(transformer(), loss).logits
    assert (found.vocabulary, found.tokens, found.max) == (VOCABULARY, ROWS * CTX, expected.max)


def test_heads_of_different_vocabularies_have_no_common_number():
    def two(model, inputs, targets):
        logits = logits_of(model, inputs)
        return mx.mean(nn.losses.cross_entropy(logits, targets)) + mx.mean(
            nn.losses.cross_entropy(logits[..., :5], mx.minimum(targets, 4))
        )

    assert watched(transformer(), two).logits is None


def test_under_vmap_there_is_nothing_to_keep():
    def by_row(model, inputs, targets):
        return mx.mean(mx.vmap(lambda x, y: nn.losses.cross_entropy(x, y))(logits_of(model, inputs), targets))

    found = watched(transformer(), by_row)
    assert found.logits is None and len(found.attention) == 2


# ----------------------------------------------------------------------------------------------------- leaving no trace


@pytest.mark.parametrize("name", MODELS)
def test_classes_and_functions_are_as_before_twice_in_a_row(name):
    make, loss_fn = MODELS[name]
    model = make()
    before = classes_of(model)
    for _ in range(2):
        with Watch(model, loss_fn):
            assert classes_of(model) != before
        assert classes_of(model) == before
    with pytest.raises(ValueError, match="stop"), Watch(model, loss_fn) as watch:
        watch._loss_fn = lambda *a: (_ for _ in ()).throw(ValueError("stop"))
        watch.loss_fn(model)
    assert classes_of(model) == before


def test_another_thread_is_not_watched():
    model, other = transformer(), transformer()
    watch = Watch(model, loss)
    with watch:
        thread = threading.Thread(target=lambda: mx.eval(loss(other, *BATCH)[0], loss(model, *BATCH)[0]))
        thread.start()
        thread.join()
        assert watch.seen == []
        mx.eval(watch.loss_fn(model, *BATCH))
    assert len(watch.seen) == 3


def test_outside_of_the_loss_function_nothing_is_noted():
    model = transformer()
    watch = Watch(model, loss)
    with watch:
        mx.eval(loss(model, *BATCH)[0])
    assert watch.seen == []


@pytest.mark.parametrize("order", ["around", "within", "made"])
def test_deterministic_operations_may_be_active_as_well(order):
    expected = watched(transformer(), loss)
    model = transformer()
    if order == "made":
        found = watched(make_deterministic(model), loss)
    elif order == "around":
        with deterministic_operations():
            found = watched(model, loss)
    else:

        def within(model, *batch):
            with deterministic_operations():
                return loss(model, *batch)

        found = watched(model, within)
    assert found == expected
    assert mx.fast.scaled_dot_product_attention.__module__ != "workbench.deterministic"


def test_a_backward_pass_that_computes_again_is_not_seen_twice():
    class Checkpointed(ByHand):
        def __call__(self, x):
            return nn.utils.checkpoint(self, super().__call__)(x)

    found = watched(seeded(lambda: Decoder([Checkpointed()])), token_loss)
    assert [(one.path, one.call) for one in found.attention] == [("blocks.0", 0)]
