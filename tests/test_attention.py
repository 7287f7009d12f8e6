"""Logit maximum and entropy of each head against loops in float64, whatever masks, groups, sinks and tiles."""

import math

import mlx.core as mx
import numpy as np
import pytest

from workbench.probes import attention
from workbench.probes.attention import attention_statistics, softmax_statistics

B, T, S, D = 2, 5, 7, 8


def draw(*shape, seed=0, dtype=mx.float32, scale=1.0):
    return (mx.random.normal(shape, key=mx.random.key(seed)) * scale).astype(dtype)


def reference(q, k, *, scale, allowed=None, bias=None, sinks=None):
    """Logit maximum, mean entropy and number of visible queries of each head, one query at a time."""
    q, k = (np.array(array.astype(mx.float32)).astype(float) for array in (q, k))
    batch, heads, length, _ = q.shape
    share, span = heads // k.shape[1], k.shape[2]
    allowed = np.broadcast_to(True if allowed is None else allowed, (batch, heads, length, span))
    bias = np.broadcast_to(0.0 if bias is None else bias, (batch, heads, length, span))
    tops, entropies, visible = [], [], []
    for head in range(heads):
        top, found = -math.inf, []
        for row in range(batch):
            for place in range(length):
                logits = scale * (k[row, head // share] @ q[row, head, place]) + bias[row, head, place]
                logits = logits[allowed[row, head, place]]
                if not logits.size:
                    continue
                top = max(top, logits.max())
                outcomes = logits if sinks is None else np.append(logits, float(sinks[head].item()))
                p = np.exp(outcomes - outcomes.max())
                p /= p.sum()
                found.append(-sum(x * math.log(x) for x in p if x > 0))
        tops.append(top)
        entropies.append(np.mean(found) if found else math.nan)
        visible.append(len(found))
    return np.array(tops), np.array(entropies), np.array(visible)


def agrees(found, expected, rel=2e-5):
    tops, entropies, visible = expected
    np.testing.assert_allclose(found.logit_max, tops, rtol=rel, atol=1e-6)
    np.testing.assert_allclose(found.entropy / found.visible, entropies, rtol=rel, atol=2e-6)
    assert found.visible.tolist() == visible.tolist() and found.queries.tolist() == [B * T] * len(tops)


CAUSAL = np.arange(S)[None] <= np.arange(T)[:, None] + (S - T)
RANDOM = np.random.default_rng(3).random((B, 1, T, S)) < 0.5
RANDOM[1, 0, 2] = False  # a query that sees nothing
PER_HEAD = np.random.default_rng(4).standard_normal((1, 4, T, S))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("groups", [4, 2, 1])
def test_without_a_mask_and_in_groups(groups, dtype):
    q, k = draw(B, 4, T, D, dtype=dtype), draw(B, groups, S, D, seed=1, dtype=dtype)
    agrees(attention_statistics(q, k, scale=0.4), reference(q, k, scale=0.4))


@pytest.mark.parametrize("tile", [1, 100, 1 << 23])
@pytest.mark.parametrize("sinks", [None, mx.array([0.5, -2.0, 3.0, 0.0])])
@pytest.mark.parametrize("kind", ["causal", "boolean", "minus infinity", "large negative", "bias", "one row"])
def test_masks_sinks_and_tiles(kind, sinks, tile, monkeypatch):
    monkeypatch.setattr(attention, "TILE", tile)
    q, k = draw(B, 4, T, D), draw(B, 2, S, D, seed=1)
    allowed, bias, mask = None, None, None
    if kind == "causal":
        mask, allowed = "causal", CAUSAL
    elif kind == "boolean":
        mask, allowed = mx.array(RANDOM), RANDOM
    elif kind == "one row":
        mask, allowed = mx.array(RANDOM[0, 0, 0]), RANDOM[0, 0, 0]
    elif kind == "bias":
        mask, bias = mx.array(PER_HEAD), np.array(mx.array(PER_HEAD))
    else:
        allowed = RANDOM
        mask = mx.where(mx.array(RANDOM), 0.0, -mx.inf if kind == "minus infinity" else -1e9)
    found = attention_statistics(q, k, scale=0.4, mask=mask, sinks=sinks)
    agrees(found, reference(q, k, scale=0.4, allowed=allowed, bias=bias, sinks=sinks))


def test_more_queries_than_keys_leave_some_without_a_position():
    q, k = draw(B, 2, S, D), draw(B, 2, T, D, seed=1)
    found = attention_statistics(q, k, scale=0.4, mask="causal")
    assert found.visible.tolist() == [B * T] * 2 and found.queries.tolist() == [B * S] * 2
    assert np.isfinite(found.entropy).all()


def test_scores_on_their_way_into_a_softmax():
    q, k = draw(B, 4, T, D), draw(B, 4, S, D, seed=1)
    scores = mx.where(mx.array(RANDOM), q @ k.swapaxes(-1, -2) * 0.4, -mx.inf)
    agrees(softmax_statistics(scores), reference(q, k, scale=0.4, allowed=RANDOM))


def test_one_position_has_entropy_zero_and_equal_ones_ln_of_their_number():
    q, k = mx.zeros((B, 2, T, D)), draw(B, 2, S, D)
    found = attention_statistics(q, k, scale=1.0)
    np.testing.assert_allclose(found.entropy / found.visible, math.log(S), rtol=1e-6)
    only = attention_statistics(q, k, scale=1.0, mask=mx.arange(S) == 3)
    assert only.entropy.tolist() == [0, 0] and only.logit_max.tolist() == [0, 0]


def test_logits_that_ran_away_keep_their_entropy():
    """Differences of 1 on top of 1e4: a plain sum of p·logit would have lost them."""
    q = mx.ones((1, 1, 1, 1)) * 100
    k = mx.array([100.0, 100.01, 99.99]).reshape(1, 1, 3, 1)
    found = attention_statistics(q, k, scale=1.0)
    (top,), (entropy,), _ = reference(q, k, scale=1.0)
    assert found.logit_max[0] == pytest.approx(top, rel=1e-6) and found.entropy[0] == pytest.approx(entropy, rel=5e-3)


def test_nothing_visible_is_minus_infinity_and_nan_is_nan():
    q, k = draw(B, 2, T, D), draw(B, 2, S, D, seed=1)
    hidden = attention_statistics(q, k, scale=0.4, mask=mx.zeros((T, S), dtype=mx.bool_))
    assert hidden.visible.tolist() == [0, 0] and hidden.logit_max.tolist() == [-math.inf] * 2
    broken = attention_statistics(q * mx.nan, k, scale=0.4)
    assert np.isnan(broken.logit_max).all() and np.isnan(broken.entropy).all() and (broken.visible > 0).all()


def test_calls_add_up():
    q, k = draw(2 * B, 2, T, D), draw(2 * B, 2, S, D, seed=1)
    whole = attention_statistics(q, k, scale=0.4)
    parts = attention_statistics(q[:B], k[:B], scale=0.4) + attention_statistics(q[B:], k[B:], scale=0.4)
    np.testing.assert_allclose(whole.entropy, parts.entropy, rtol=1e-6)
    assert (whole.logit_max.tolist(), whole.queries.tolist()) == (parts.logit_max.tolist(), parts.queries.tolist())
