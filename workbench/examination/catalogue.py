"""The catalogue: each kind of operation that a training step is made of, on fixed inputs, ready to be repeated.

What may vary, and why, was read in MLX's source and measured on one H200 (mlx 0.32.4): a scatter of floats adds with
atomics, in an order that the GPU's scheduler decides; fused attention on CUDA leaves cuDNN's backward free to do the
same; the rest sums in a fixed order. Nothing of that is taken for granted here: every entry is run and its bits are
counted. Sizes are those of a small model on the CPU, where order is fixed by a loop, and large enough on a GPU that
many blocks compete for a slot.

Knows MLX's operations; nothing of steps, runs or reports.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from ..deterministic import deterministic_operations
from ..experiment import random_key, set_random_key
from .diagnosis import SUFFIX
from .operations import UNEXPECTED, Operation, Run

FLOATS = ("float32", "bfloat16")
BY_DEFAULT = "record with deterministic operations (the default)"


class Inputs:
    """Fixed inputs of one operation, drawn on the host, so that they never depend on what is being examined."""

    def __init__(self, dtype: str) -> None:
        self.dtype: mx.Dtype = getattr(mx, dtype)
        large = mx.default_device().type == mx.DeviceType.gpu
        self.tokens, self.width, self.vocabulary = (4096, 512, 8192) if large else (512, 128, 256)
        self.batch, self.heads, self.length = (8, 8, 512) if large else (1, 2, 128)  # cuDNN's backward: length 128·n
        self._draw = np.random.Generator(np.random.Philox(key=3))

    def normal(self, *shape: int) -> mx.array:
        return mx.array(self._draw.standard_normal(shape, np.float32)).astype(self.dtype)

    def ids(self, high: int, *shape: int) -> mx.array:
        """Integers below `high`, the low ones far more often, as words in a text: many addends fall on one row."""
        return mx.array((high * self._draw.random(shape) ** 3).astype(np.int32))


Draw = Callable[[Inputs], Run]

CATALOGUE: list[Operation] = []


def _entry(
    name: str,
    remedy: str = UNEXPECTED,
    *,
    dtypes: tuple[str, ...] = FLOATS,
    replaced: bool = False,
    elsewhere: bool = False,
) -> Callable[[Draw], Draw]:
    """Puts a function into the catalogue; `replaced`: the workbench's deterministic variant too, as rows of its own."""

    def register(draw: Draw) -> Draw:
        for dtype in dtypes:
            CATALOGUE.append(Operation(name, dtype, partial(_drawn, draw, dtype, False), remedy, elsewhere))
        for dtype in dtypes if replaced else ():
            CATALOGUE.append(Operation(name + SUFFIX, dtype, partial(_drawn, draw, dtype, True)))
        return draw

    return register


def _drawn(draw: Draw, dtype: str, deterministic: bool) -> Run:
    run = draw(Inputs(dtype))

    def replaced() -> Any:
        with deterministic_operations():
            return run()

    return replaced if deterministic else run


def _gradient(function: Callable[..., mx.array], primals: list[mx.array], inputs: Inputs) -> Run:
    """The backward pass of `function` for a fixed cotangent."""
    cotangent = inputs.normal(*function(*primals).shape)
    return lambda: mx.vjp(function, primals, [cotangent])[1]


@_entry("matrix products")
def _matmul(inputs: Inputs) -> Run:
    x, w = inputs.normal(inputs.tokens, inputs.width), inputs.normal(inputs.width, 4 * inputs.width)
    y, stack = inputs.normal(inputs.tokens, 4 * inputs.width), inputs.normal(4, inputs.width, inputs.width)
    return lambda: [x @ w, y @ w.T, x.T @ y, y.T @ x, stack @ stack.swapaxes(1, 2), x[:3] @ w, x[0] @ w]


@_entry("quantized matrix product", elsewhere=True)
def _quantized(inputs: Inputs) -> Run:
    x, w = inputs.normal(inputs.tokens, inputs.width), inputs.normal(2 * inputs.width, inputs.width)
    packed = mx.quantize(w, group_size=64, bits=4)

    def product(x: mx.array) -> mx.array:
        return mx.quantized_matmul(x, *packed, transpose=True, group_size=64, bits=4)

    backward = _gradient(product, [x], inputs)
    return lambda: [product(x), backward()]


@_entry("embedding gradient", BY_DEFAULT, replaced=True)
def _embedding(inputs: Inputs) -> Run:
    ids = inputs.ids(inputs.vocabulary, 2, inputs.tokens // 2)
    return _gradient(lambda table: table[ids], [inputs.normal(inputs.vocabulary, inputs.width)], inputs)


def _attention(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask="causal")


def _queries(inputs: Inputs) -> list[mx.array]:
    return [inputs.normal(inputs.batch, inputs.heads, inputs.length, 64) for _ in range(3)]


@_entry("attention forward")
def _attention_forward(inputs: Inputs) -> Run:
    parts = _queries(inputs)
    return lambda: _attention(*parts)


@_entry("attention backward", f"{BY_DEFAULT}, or set MLX_CUDA_USE_CUDNN_SDPA=0 before Python starts", replaced=True)
def _attention_backward(inputs: Inputs) -> Run:
    return _gradient(_attention, _queries(inputs), inputs)


@_entry("gated delta rule backward", "on Metal try GATED_DELTA_VJP_FALLBACK=1, or expect red", elsewhere=True)
def _gated_delta(inputs: Inputs) -> Run:
    heads = [inputs.normal(1, 64, 2, 64) for _ in range(3)]
    gates = [mx.sigmoid(inputs.normal(1, 64, 2)) for _ in range(2)]
    return _gradient(lambda *parts: mx.fast.gated_delta_update(*parts)[0], heads + gates, inputs)


@_entry("layer norm and RMS norm backward")
def _norms(inputs: Inputs) -> Run:
    x, w, b = inputs.normal(inputs.tokens, inputs.width), inputs.normal(inputs.width), inputs.normal(inputs.width)
    layer = _gradient(lambda x, w, b: mx.fast.layer_norm(x, w, b, 1e-5), [x, w, b], inputs)
    rms = _gradient(lambda x, w: mx.fast.rms_norm(x, w, 1e-5), [x, w], inputs)
    return lambda: [layer(), rms()]


@_entry("cross-entropy and its gradient")
def _cross_entropy(inputs: Inputs) -> Run:
    rows = inputs.tokens // 2
    logits, targets = inputs.normal(rows, inputs.vocabulary), inputs.ids(inputs.vocabulary, rows)
    return lambda: mx.value_and_grad(lambda x: nn.losses.cross_entropy(x, targets, reduction="mean"))(logits)


@_entry("reductions")
def _reductions(inputs: Inputs) -> Run:
    x = inputs.normal(inputs.tokens, 4 * inputs.width)
    return lambda: [
        *(function(x, axis=axis) for axis in (None, 0, 1) for function in (mx.sum, mx.mean, mx.max, mx.logsumexp)),
        mx.sum(mx.square(x)),
        mx.sum(x.reshape(8, -1, x.shape[1]), axis=(0, 2)),
    ]


@_entry("softmax and cumulative sums")
def _softmax(inputs: Inputs) -> Run:
    x = inputs.normal(inputs.tokens, inputs.width)
    return lambda: [mx.softmax(x, axis=-1), mx.softmax(x, axis=0), mx.cumsum(x, axis=0), mx.cumsum(x, axis=1)]


@_entry("sorting with ties", "break ties yourself, for example by sorting value·N + position", elsewhere=True)
def _sort(inputs: Inputs) -> Run:
    x = inputs.ids(7, inputs.tokens, 32).astype(inputs.dtype)
    return lambda: [f(x, axis=axis) for f in (mx.sort, mx.argsort, mx.argmax) for axis in (0, 1)]


@_entry("convolution forward", elsewhere=True)
def _convolution(inputs: Inputs) -> Run:
    x, w = _image(inputs)
    return lambda: mx.conv2d(x, w, padding=1)


@_entry("convolution backward", "cuDNN chose a plan that varies: try other sizes, or expect red", elsewhere=True)
def _convolution_backward(inputs: Inputs) -> Run:
    return _gradient(lambda x, w: mx.conv2d(x, w, padding=1), _image(inputs), inputs)


def _image(inputs: Inputs) -> list[mx.array]:
    side, channels = (32, 64) if inputs.width > 128 else (12, 8)
    return [inputs.normal(4, side, side, channels), inputs.normal(channels, 3, 3, channels)]


@_entry("overlapping pooling backward", "use a stride equal to the window, or expect red", elsewhere=True)
def _pooling(inputs: Inputs) -> Run:
    x, _ = _image(inputs)
    runs = [_gradient(pool(3, stride=2), [x], inputs) for pool in (nn.MaxPool2d, nn.AvgPool2d)]
    return lambda: [run() for run in runs]


@_entry("mixture of experts backward", "sort tokens by expert (sorted_indices=True), or expect red", elsewhere=True)
def _experts(inputs: Inputs) -> Run:
    x, w = inputs.normal(inputs.tokens, 1, inputs.width), inputs.normal(8, inputs.width, inputs.width)
    chosen = inputs.ids(8, inputs.tokens)
    return _gradient(lambda x, w: mx.gather_mm(x, w, rhs_indices=chosen), [x, w], inputs)


@_entry("scatter-add and scatter-multiply", "give each slot one addend, or expect red", elsewhere=True)
def _scatter_add(inputs: Inputs) -> Run:
    slots, values, base, at = _scattered(inputs)
    return lambda: [base.at[at].add(values), base.at[at].multiply(values), slots.at[at].add(values[:, 0])]


@_entry("scatter-maximum and -minimum", elsewhere=True)
def _scatter_max(inputs: Inputs) -> Run:
    _, values, base, at = _scattered(inputs)
    return lambda: [base.at[at].maximum(values), base.at[at].minimum(values)]


@_entry("assignment to repeated indices", "make the indices unique: which write is last is a race", elsewhere=True)
def _scatter_assign(inputs: Inputs) -> Run:
    _, values, base, at = _scattered(inputs)
    along = mx.broadcast_to(at[:, None], values.shape)

    def assign() -> list[mx.array]:
        copy = mx.array(base)
        copy[at] = values
        return [copy, mx.put_along_axis(base, along, values, axis=0)]

    return assign


@_entry("take_along_axis backward", "make the indices unique along the axis, or expect red", elsewhere=True)
def _take_along_axis(inputs: Inputs) -> Run:
    _, values, base, at = _scattered(inputs)
    along = mx.broadcast_to(at[:, None], values.shape)
    return _gradient(lambda x: mx.take_along_axis(x, along, axis=0), [base], inputs)


def _scattered(inputs: Inputs) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    slots = inputs.vocabulary // 4
    values, base = inputs.normal(inputs.tokens, inputs.width), inputs.normal(slots, inputs.width)
    return mx.zeros((slots,), inputs.dtype), values, base, inputs.ids(slots, inputs.tokens)


@_entry("scatter-add of integers", dtypes=("int32",), elsewhere=True)
def _scatter_integers(inputs: Inputs) -> Run:
    values, at = inputs.ids(1 << 20, inputs.tokens, 16), inputs.ids(64, inputs.tokens)
    return lambda: mx.zeros((64, 16), mx.int32).at[at].add(values)


@_entry("random integers and permutations", dtypes=("int32",), elsewhere=True)
def _random(inputs: Inputs) -> Run:
    key = mx.random.key(3)
    return lambda: [
        mx.random.randint(0, 1 << 30, (inputs.tokens, 33), key=key),
        mx.random.permutation(inputs.tokens, key=key),
        mx.random.split(key, 5),
    ]


@_entry("random normal and dropout")
def _dropout(inputs: Inputs) -> Run:
    x, key, dropout = inputs.normal(inputs.tokens, inputs.width), random_key(), nn.Dropout(0.1)

    def draw() -> list[mx.array]:
        set_random_key(key)
        return [mx.random.normal((inputs.tokens, 33), inputs.dtype), dropout(x)]

    return draw


def _updates(name: str, make: Callable[[], optim.Optimizer], *, elsewhere: bool = False) -> None:
    @_entry(f"{name} update", elsewhere=elsewhere)
    def two_updates(inputs: Inputs) -> Run:
        shapes = {"matrix": (inputs.width, 2 * inputs.width), "vector": (inputs.width,)}
        weights = {path: inputs.normal(*shape) for path, shape in shapes.items()}
        gradients = {path: inputs.normal(*shape) for path, shape in shapes.items()}

        def update() -> Any:
            optimizer = make()
            once = optimizer.apply_gradients(gradients, weights)
            return optimizer.apply_gradients(gradients, once), optimizer.state

        return update


_updates("AdamW", lambda: optim.AdamW(1e-3, betas=[0.9, 0.95], bias_correction=True))
_updates("Adafactor", lambda: optim.Adafactor(1e-3, relative_step=False), elsewhere=True)
_updates("Muon", lambda: optim.Muon(1e-3), elsewhere=True)
