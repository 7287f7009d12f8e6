"""Attention logits and their entropy, recomputed from what entered an attention call, a tile of queries at a time.

Knows MLX arrays; nothing of models, steps or where a call was seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

# An additive mask at or below this hides: the least of the usual stand-ins for -inf (-1e4, -1e9, the dtype's minimum).
# Position biases stay above it: ALiBi's steepest slope of 1/2 (arXiv:2108.12409) reaches it after 20,000 tokens.
HIDING = -1e4
HIDING_SCORE = -1e8  # the same for a score that holds its mask already; plain logits that have run away stay above it
TILE = 1 << 23  # logits held at a time: 32 MiB


@dataclass
class HeadStatistics:
    """Of one or more calls with the same heads; arrays (heads,) of float64.

    Attributes:
        logit_max: largest logit that is not hidden; -inf where all are, NaN if a logit is NaN.
        entropy: sum over visible queries of the entropy in nats.
        visible: queries with a position that is not hidden.
        queries: all queries.
    """

    logit_max: np.ndarray
    entropy: np.ndarray
    visible: np.ndarray
    queries: np.ndarray

    def __add__(self, other: HeadStatistics) -> HeadStatistics:
        return HeadStatistics(
            np.maximum(self.logit_max, other.logit_max),
            self.entropy + other.entropy,
            self.visible + other.visible,
            self.queries + other.queries,
        )


def attention_statistics(
    q: mx.array, k: mx.array, *, scale: float, mask: Any = None, sinks: mx.array | None = None
) -> HeadStatistics:
    """Logit maximum and entropy of softmax(scale·q·kᵀ + mask) for each query head, in float32.

    The entropy of a query is −Σ p ln p over its positions; a sink is one more outcome, but its logit is not in the
    maximum.

    Args:
        q: (B, Hq, T, D); k: (B, Hk, S, D), Hq a multiple of Hk (grouped queries, arXiv:2305.13245).
        mask: None, "causal" (the last query sees all), or an array that broadcasts to (B, Hq, T, S): boolean (False:
            hidden) or additive.
        sinks: None, or (Hq,).
    """
    batch, heads, length, size = q.shape
    groups, span = k.shape[1], k.shape[2]
    keys = k.astype(mx.float32).swapaxes(-1, -2)[:, :, None]  # (B, Hk, 1, D, S)
    sink = None if sinks is None else sinks.astype(mx.float32).reshape(1, heads, 1, 1)
    found = None
    for start, stop in _tiles(length, batch * heads * span):
        queries = q[:, :, start:stop].astype(mx.float32).reshape(batch, groups, heads // groups, stop - start, size)
        shape = batch, heads, stop - start, span
        part = _statistics(*_masked(((queries @ keys) * scale).reshape(shape), mask, start, length), sink)
        found = part if found is None else found + part
    assert found is not None
    return found


def softmax_statistics(scores: mx.array) -> HeadStatistics:
    """The same for scores (B, H, T, S) on their way into a softmax over the last axis, masked already."""
    batch, heads, length, span = scores.shape
    found = None
    for start, stop in _tiles(length, batch * heads * span):
        logits = scores[:, :, start:stop].astype(mx.float32)
        part = _statistics(logits, logits <= HIDING_SCORE, None)
        found = part if found is None else found + part
    assert found is not None
    return found


def _tiles(length: int, each: int) -> Iterator[tuple[int, int]]:
    rows = max(1, TILE // max(each, 1))
    return ((start, min(start + rows, length)) for start in range(0, max(length, 1), rows))


def _masked(logits: mx.array, mask: Any, start: int, length: int) -> tuple[mx.array, mx.array | None]:
    """Logits of the queries from `start` on with an additive mask added, and which are hidden."""
    if mask is None:
        return logits, None
    rows, span = logits.shape[-2:]
    if isinstance(mask, str):
        places = mx.arange(start, start + rows) + (span - length)
        return logits, mx.arange(span)[None] > places[:, None]
    if mask.ndim >= 2 and mask.shape[-2] != 1:
        mask = mask[..., start : start + rows, :]
    if mask.dtype == mx.bool_:
        return logits, mx.logical_not(mask)
    return logits + mask.astype(mx.float32), mask.astype(mx.float32) <= HIDING


def _statistics(logits: mx.array, hidden: mx.array | None, sink: mx.array | None) -> HeadStatistics:
    lowest = mx.array(-mx.inf, mx.float32)
    batch, heads, rows, _ = logits.shape
    seen = logits if hidden is None else mx.where(hidden, lowest, logits)
    peak = mx.max(seen, axis=-1, keepdims=True)
    visible = peak != lowest  # True for NaN
    shift = mx.where(visible, peak, 0.0) if sink is None else mx.maximum(peak, sink)
    below = seen - shift
    mx.eval(below, peak, visible)
    del logits, hidden, seen  # a tile each
    terms = mx.exp(below)
    total = mx.sum(terms, axis=-1, keepdims=True)
    weighted = mx.sum(mx.where(terms == 0, 0.0, terms * below), axis=-1, keepdims=True)
    if sink is not None:
        total = total + mx.exp(sink - shift)
        weighted = weighted + mx.where(sink == shift, 0.0, mx.exp(sink - shift) * (sink - shift))
    entropy = mx.where(visible, mx.log(total) - weighted / total, 0.0)
    axes = (0, 2, 3)
    # A row of one head is a partial sum in float32; rows are added in float64.
    parts = [mx.max(peak, axis=axes), mx.sum(entropy, axis=(2, 3)), mx.sum(visible, axis=axes)]
    mx.eval(parts)
    entropies = np.array(parts[1]).astype(np.float64).sum(axis=0)
    return HeadStatistics(
        np.array(parts[0]).astype(np.float64),
        entropies,
        np.array(parts[2]).astype(np.float64),
        np.full(heads, float(batch * rows)),
    )
