"""Bit-exact replacements for the operations whose gradients vary from run to run on a GPU.

Two of MLX's gradients add in an order that atomics decide (measured on an H200, mlx 0.32.4; by source reading, the
first also on Metal): that of a gather such as an embedding, and on CUDA that of fused attention in half precision.
Both get a backward pass whose result does not depend on any order. Forward passes are the stock ones, bit for bit.

On the CPU both stock gradients add in one sequential loop, so nothing is replaced there.
Knows MLX's operations and `nn.Module`; nothing of steps or runs.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import mlx.core as mx
import mlx.nn as nn

from . import cuda
from .cuda_softmax import softmax_gradient

Model = TypeVar("Model", bound=nn.Module)

_stock_getitem = mx.array.__getitem__
_stock_take = mx.take
_stock_attention: Any = mx.fast.scaled_dot_product_attention


# ---- gather


def gather_gradient(ids: mx.array, cotangent: mx.array, rows: int) -> mx.array:
    """The gradient of `table[ids]`: for each row of the table, the sum of its cotangents, free of any order.

    Integers add to the same sum in any order, so each addend becomes fixed point: two int32 planes whose unit is chosen
    for each row of the table, from the largest addend and the number of addends of that row. (Reproducible summation by
    a common grid: Demmel & Nguyen 2013, doi:10.1109/ARITH.2013.9.) An addend keeps at least 24 bits below the row's
    largest, so the sum is as accurate as float32 in a good order; the result is the same on every backend.

    Where a token's cotangent is NaN or infinite, so is that element of its row, and no other.

    Args:
        ids: (…) integers in [0, rows).
        cotangent: ids.shape + (…), floating.
        rows: rows of the table.

    Returns:
        (rows, …) in the cotangent's dtype. Two int32 and two float32 arrays of the table's size are live at the peak.
    """
    count, tail = ids.size, cotangent.shape[ids.ndim :]
    if count == 0 or 0 in tail:
        return mx.zeros((rows, *tail), cotangent.dtype)
    flat = ids.reshape(count)
    values = cotangent.reshape(count, -1).astype(mx.float32)
    finite = mx.isfinite(values)
    addends = mx.where(finite, values, 0.0)
    # The exponents are read from the bits: exact, where log2 would differ between backends.
    peak = mx.max(mx.abs(addends), axis=1).view(mx.int32) >> 23  # biased: every |addend| < 2^(peak - 126)
    peak = mx.zeros((rows,), mx.int32).at[flat].maximum(peak) - 126
    tokens = mx.zeros((rows,), mx.int32).at[flat].add(mx.array(1, mx.int32))
    room = (tokens.astype(mx.float32).view(mx.int32) >> 23) - 126  # tokens < 2^room
    shift = mx.clip(30 - room - peak, -126, 126)  # |addend|·2^shift·tokens < 2^30
    scaled = addends * _power_of_two(shift)[flat][:, None]
    coarse = mx.round(scaled)
    fraction = min(16, 30 - count.bit_length())  # |remainder| <= 1/2, and `count` of them must fit
    fine = mx.round((scaled - coarse) * 2.0**fraction)
    plane = mx.zeros((rows, values.shape[1]), mx.int32)
    whole = plane.at[flat].add(coarse.astype(mx.int32)).astype(mx.float32)
    rest = plane.at[flat].add(fine.astype(mx.int32)).astype(mx.float32)
    total = (whole + rest * 2.0**-fraction) * _power_of_two(-shift)[:, None]
    # Zeros and non-finite values only: their sum is free of order too.
    broken = mx.zeros(total.shape, mx.float32).at[flat].add(mx.where(finite, 0.0, values))
    total = mx.where(mx.isnan(broken), mx.array(mx.nan, mx.float32), total + broken)
    return total.astype(cotangent.dtype).reshape(rows, *tail)


def _power_of_two(exponent: mx.array) -> mx.array:
    """2^exponent for int32 exponents from -126 to 127, exact."""
    return ((exponent + 127) << 23).view(mx.float32)


@mx.custom_function
def _gather(table: mx.array, ids: mx.array) -> mx.array:
    return _stock_getitem(table, ids)


@_gather.vjp
def _gather_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
    table, ids = primals
    with stock_operations():
        return gather_gradient(ids, cotangent, table.shape[0]), mx.zeros_like(ids)


def _is_gather(table: Any, ids: Any) -> bool:
    return (
        isinstance(ids, mx.array)
        and mx.issubdtype(ids.dtype, mx.integer)
        and mx.issubdtype(table.dtype, mx.floating)
        and table.ndim >= 1
        and ids.ndim >= 1  # one row: nothing to add
    )


def _wrapped(ids: mx.array, rows: int) -> mx.array:
    """Negative indices count from the end; stock indexing does this inside its kernel."""
    if mx.issubdtype(ids.dtype, mx.unsignedinteger):
        return ids
    return mx.where(ids < 0, ids + rows, ids)


def _getitem(table: mx.array, index: Any) -> mx.array:
    if _active() and _is_gather(table, index):
        return cast(mx.array, _gather(table, _wrapped(index, table.shape[0])))
    return _stock_getitem(table, index)


def _take(a: mx.array, indices: Any, axis: int | None = None, *args: Any, **kwargs: Any) -> mx.array:
    if _active() and axis == 0 and _is_gather(a, indices):
        return cast(mx.array, _gather(a, _wrapped(indices, a.shape[0])))
    return _stock_take(a, indices, axis, *args, **kwargs)


# ---- attention


def attention_gradient(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    output: mx.array,
    cotangent: mx.array,
    *,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array | None, mx.array | None]:
    """The gradients of softmax(scale·q·kᵀ + mask)·v, recomputed without fusion (arXiv:2205.14135, appendix B.2).

    Logits, probabilities and their gradients are float32: products of half-precision inputs are exact in a float32 or
    TF32 matrix product.

    Args:
        q, output, cotangent: (B, Hq, T, D); k, v: (B, Hk, S, D), Hq a multiple of Hk.
        mask: None, "causal", or an array that broadcasts to (B, Hq, T, S): boolean (False: hidden) or additive.
        sinks: None, or (Hq,): a logit that takes part in the softmax and has no value.

    Returns:
        Gradients of q, k, v; of an additive mask before it was broadcast, as float32 (B, Hq, T, S); of the sinks. None
        for what is not there.
    """
    batch, heads, length, _ = q.shape
    groups, span = k.shape[1], k.shape[2]
    share = heads // groups

    def grouped(x: mx.array) -> mx.array:  # query heads that share a key head side by side: their sum is in the matmul
        return x.astype(mx.float32).reshape(batch, groups, share * length, x.shape[-1])

    keys, values = k.astype(mx.float32), v.astype(mx.float32)
    logits = grouped(q) @ keys.swapaxes(-1, -2)  # q·scale would no longer be exact in TF32
    upstream = cotangent.astype(mx.float32)
    inner = mx.sum(upstream * output.astype(mx.float32), axis=-1, keepdims=True)
    towards = grouped(cotangent) @ values.swapaxes(-1, -2)
    full, flat, half = (batch, heads, length, span), (batch, groups, share * length, span), q.dtype
    slope, unseen = None, None
    if _in_one_kernel(mask, sinks, length, span):
        causal = isinstance(mask, str)
        if mask is not None and not causal:
            logits, scaled = _masked(logits.reshape(full) * scale, mask).reshape(flat), 1.0
        else:
            scaled = scale
        weights, steep = softmax_gradient(
            logits, towards, inner, length=length, scale=scaled, after=scale, causal=causal, dtype=half
        )
    else:
        logits = _masked(logits.reshape(full) * scale, mask)
        if sinks is None:
            probabilities = mx.softmax(logits, axis=-1, precise=True)
        else:
            extra = mx.broadcast_to(sinks.astype(mx.float32).reshape(1, heads, 1, 1), (batch, heads, length, 1))
            every = mx.softmax(mx.concatenate([extra, logits], axis=-1), axis=-1, precise=True)
            unseen, probabilities = every[..., :1], every[..., 1:]
        slope = probabilities * (towards.reshape(full) - inner)
        # The scale goes in before the one rounding to half precision; after the product it would be a second one.
        weights, steep = probabilities.reshape(flat).astype(half), (slope * scale).reshape(flat).astype(half)
    keep = (batch, groups, share * length)
    dq = (steep @ k).reshape(q.shape)
    dk = steep.swapaxes(-1, -2) @ q.reshape(*keep, q.shape[-1])
    dv = weights.swapaxes(-1, -2) @ cotangent.reshape(*keep, v.shape[-1])
    dsinks = None
    if unseen is not None and sinks is not None:
        dsinks = -mx.sum(unseen * inner, axis=(0, 2, 3)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), slope, dsinks


def _in_one_kernel(mask: Any, sinks: Any, length: int, span: int) -> bool:
    """Where the CUDA kernel serves: no sinks, no gradient for the mask, and a causal mask that leaves no row empty."""
    if not cuda.available() or sinks is not None:
        return False
    return length <= span if isinstance(mask, str) else mask is None or mask.dtype == mx.bool_


def _masked(logits: mx.array, mask: Any) -> mx.array:
    if mask is None:
        return logits
    if isinstance(mask, str):
        length, span = logits.shape[-2:]
        mask = mx.arange(span - length, span)[:, None] >= mx.arange(span)[None]
    if mask.dtype == mx.bool_:
        return mx.where(mask, logits, mx.array(mx.finfo(mx.float32).min, mx.float32))
    return logits + mask.astype(mx.float32)


def _reduced(gradient: Any, shape: tuple[int, ...]) -> mx.array:
    """Sums a gradient over the axes along which an array of `shape` was broadcast."""
    lead = gradient.ndim - len(shape)
    axes = [*range(lead), *(lead + i for i, size in enumerate(shape) if size == 1 != gradient.shape[lead + i])]
    return mx.sum(gradient, axis=axes).reshape(shape) if axes else gradient


def _attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    handler = getattr(_state, "handler", None)
    if handler is None:
        return _performed_attention(q, k, v, **options)
    return cast(mx.array, handler(_performed_attention, q, k, v, **options))


def _performed_attention(
    q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: Any = None, sinks: Any = None, **further: Any
) -> mx.array:
    stock = functools.partial(_stock_attention, scale=scale, **further)
    if not _active() or q.dtype == mx.float32:  # in float32 MLX never takes the fused backward
        return stock(q, k, v, mask=mask, sinks=sinks)
    masked, sunk = isinstance(mask, mx.array), sinks is not None

    def parts(arrays: Any) -> tuple[Any, Any]:
        rest = list(arrays[3:])
        return rest.pop(0) if masked else mask, rest.pop(0) if sunk else None

    @mx.custom_function
    def attention(*arrays: mx.array) -> mx.array:
        own_mask, own_sinks = parts(arrays)
        return stock(*arrays[:3], mask=own_mask, sinks=own_sinks)

    @attention.vjp
    def attention_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> Any:
        own_mask, own_sinks = parts(primals)
        with stock_operations():
            q, k, v = primals[:3]
            found = attention_gradient(q, k, v, output, cotangent, scale=scale, mask=own_mask, sinks=own_sinks)
            gradients: list[Any] = list(found[:3])
            slope, dsinks = found[3:]
            if masked:
                boolean = slope is None or own_mask.dtype == mx.bool_
                gradients.append(mx.zeros_like(own_mask) if boolean else _reduced(slope, own_mask.shape))
            return tuple(gradients + ([dsinks] if sunk else []))

    return cast(mx.array, attention(q, k, v, *([mask] if masked else []), *([sinks] if sunk else [])))


# ---- switching


_state = threading.local()
_lock = threading.Lock()
_depth = 0


def _active() -> bool:
    return getattr(_state, "on", False)


@contextlib.contextmanager
def deterministic_operations() -> Iterator[None]:
    """While open, this thread's gathers and attention calls get the deterministic backward pass.

    The functions are replaced where callers look them up (`x[ids]`, `mx.take`, `mx.fast.scaled_dot_product_attention`),
    so modules that index an embedding themselves are reached; other threads see stock behaviour. Nests.
    """
    before = _active()
    with _replaced():
        _state.on = True
        try:
            yield
        finally:
            _state.on = before


@contextlib.contextmanager
def attention_calls(handler: Callable[..., mx.array]) -> Iterator[None]:
    """While open, this thread's attention calls pass through `handler`, whether they are deterministic or stock.

    Args:
        handler: called as `handler(perform, q, k, v, scale=…, …)`, with the arguments of
            `mx.fast.scaled_dot_product_attention`, in place of it; `perform` takes the same and is the call itself.
    """
    before = getattr(_state, "handler", None)
    with _replaced():
        _state.handler = handler
        try:
            yield
        finally:
            _state.handler = before


@contextlib.contextmanager
def _replaced() -> Iterator[None]:
    """The functions that decide by thread stand in place of the stock ones, for as long as any thread needs them."""
    global _depth
    with _lock:
        _depth += 1
        if _depth == 1:
            mx.array.__getitem__ = _getitem  # type: ignore[method-assign]
            mx.take = _take
            mx.fast.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                mx.array.__getitem__ = _stock_getitem  # type: ignore[method-assign]
                mx.take = _stock_take
                mx.fast.scaled_dot_product_attention = _stock_attention


@contextlib.contextmanager
def stock_operations() -> Iterator[None]:
    """Within deterministic operations, this thread's calls are stock again: a backward pass has no backward pass."""
    before = _active()
    _state.on = False
    try:
        yield
    finally:
        _state.on = before


def make_deterministic(model: Model) -> Model:
    """Gives a model the deterministic backward passes, in place.

    Every module's class is exchanged for a subclass of the same name that performs its call within
    `deterministic_operations`. Parameter paths, weights, forward bits and `isinstance` answers stay as they are.
    """
    for _, module in model.named_modules():
        cls: Any = type(module)
        if "_stock_class" not in cls.__dict__ and any("__call__" in base.__dict__ for base in cls.__mro__):
            module.__class__ = _deterministic_class(cls)
    return model


@functools.cache
def _deterministic_class(cls: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with deterministic_operations():
            return cls.__call__(self, *args, **kwargs)

    body = {"__call__": call, "__module__": cls.__module__, "__qualname__": cls.__qualname__, "_stock_class": cls}
    return type(cls.__name__, (cls,), body)
