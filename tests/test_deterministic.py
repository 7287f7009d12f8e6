"""The replacements against float64 and against stock, on the CPU; whether they repeat on a GPU, `-m cuda` says."""

import contextlib
import itertools
import threading

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten

from workbench import deterministic
from workbench.deterministic import (
    attention_calls,
    attention_gradient,
    deterministic_operations,
    gather_gradient,
    make_deterministic,
)

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
stock_attention = mx.fast.scaled_dot_product_attention


def wide(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def table_gradient(ids: np.ndarray, cotangent: mx.array, rows: int) -> np.ndarray:
    """The gradient of a gather, by a loop in float64."""
    tail = cotangent.shape[ids.ndim :]
    found = np.zeros((rows, *tail))
    np.add.at(found, ids.reshape(-1), wide(cotangent).reshape(-1, *tail))
    return found


def error(found: mx.array, reference: np.ndarray) -> float:
    return float(np.abs(wide(found) - reference).max() / np.abs(reference).max())


IDS = {
    "repeated": np.array([3, 3, 3, 3, 3, 3, 3, 1]),
    "out of order": np.array([7, 0, 5, 0, 7, 2, 5, 0]),
    "one token": np.array([4]),
    "two axes": np.arange(24).reshape(4, 6) % 5,
    "three axes": (np.arange(24).reshape(2, 3, 4) * 7) % 11,
    "many": np.minimum(np.random.default_rng(0).zipf(1.3, (16, 64)), 12) - 1,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS)
def test_gather_gradient_is_at_least_as_good_as_stock(ids, dtype):
    rng = np.random.default_rng(1)
    scale = 10.0 ** rng.integers(-4, 2, (*ids.shape, 1))  # addends of very different size in one row
    cotangent = mx.array((rng.standard_normal((*ids.shape, 9)) * scale).astype(np.float32)).astype(dtype)
    reference = table_gradient(ids, cotangent, 12)
    stock = mx.grad(lambda table: (table[mx.array(ids)] * cotangent).sum())(mx.zeros((12, 9), dtype))
    found = gather_gradient(mx.array(ids), cotangent, 12)
    assert found.shape == (12, 9) and found.dtype == dtype
    assert error(found, reference) <= max(error(stock, reference), 2 * np.finfo(np.float32).eps)
    assert not np.array(found)[np.setdiff1d(np.arange(12), ids)].any() if dtype != mx.bfloat16 else True


def test_gather_gradient_is_free_of_the_order_of_tokens():
    rng = np.random.default_rng(2)
    ids = np.minimum(rng.zipf(1.3, 500), 9) - 1
    cotangent = rng.standard_normal((500, 7)).astype(np.float32) * 10.0 ** rng.integers(-5, 5, (500, 1))
    cotangent = cotangent.astype(np.float32)
    results = set()
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(500)
        found = gather_gradient(mx.array(ids[order]), mx.array(cotangent[order]), 9)
        results.add(np.array(found).tobytes())
    assert len(results) == 1


def test_a_sum_in_token_order_is_not_free_of_it():
    """The test above can fail: the same comparison on what stock does."""
    rng = np.random.default_rng(2)
    ids, values = np.zeros(500, int), rng.standard_normal((500, 7)).astype(np.float32)
    results = set()
    for seed in range(8):
        order = np.random.default_rng(seed).permutation(500)
        found = mx.zeros((1, 7)).at[mx.array(ids)].add(mx.array(values[order]))
        results.add(np.array(found).tobytes())
    assert len(results) > 1


def test_gather_gradient_keeps_non_finite_values_where_they_are():
    cotangent = np.ones((4, 3), np.float32)
    cotangent[1, 1], cotangent[2, 0], cotangent[3, 0], cotangent[0, 2] = np.nan, np.inf, -np.inf, np.inf
    found = np.array(gather_gradient(mx.array([0, 1, 2, 2]), mx.array(cotangent), 4))
    assert np.isnan(found[1, 1]) and np.isnan(found[2, 0]) and found[0, 2] == np.inf
    found[1, 1] = found[2, 0] = found[0, 2] = 0
    assert found.tolist() == [[1, 1, 0], [1, 0, 1], [0, 2, 2], [0, 0, 0]]


@pytest.mark.parametrize("value", [3e38, 1e-38, 1e-44, -0.0, 1.0])
def test_gather_gradient_at_the_ends_of_float32(value):
    found = np.array(gather_gradient(mx.array([1, 1, 0]), mx.array([[value], [0.0], [value]], mx.float32), 3))
    assert found[:, 0].tolist() == pytest.approx([value, value, 0.0], rel=1e-6, abs=2e-38)


def test_gather_gradient_of_no_tokens():
    assert gather_gradient(mx.zeros((0,), mx.int32), mx.zeros((0, 5)), 3).tolist() == [[0.0] * 5] * 3


MASKS = ("none", "causal", "boolean", "additive")


def attention_case(heads: int, groups: int, mask: str, dtype: mx.Dtype, size: int = 8, length: int = 16):
    rng = np.random.default_rng(3)

    def draw(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)

    arrays = [draw(2, count, length, size) for count in (heads, groups, groups, heads)]
    masks = {
        "none": None,
        "causal": "causal",
        "boolean": mx.array(np.tril(rng.random((length, length)) > 0.2) | np.eye(length, dtype=bool)),
        "additive": draw(1, heads, length, length),
    }
    return arrays, masks[mask]


def float64_gradients(q, k, v, cotangent, scale, mask):
    """dq, dk, dv by the definition, in float64."""
    q, k, v, cotangent = (wide(x) for x in (q, k, v, cotangent))
    share = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, share, 1), np.repeat(v, share, 1)
    logits = q @ keys.swapaxes(-1, -2) * scale
    length = q.shape[2]
    if isinstance(mask, str):
        logits = np.where(np.tril(np.ones((length, length), bool)), logits, -np.inf)
    elif mask is not None:
        logits = np.where(np.array(mask), logits, -np.inf) if mask.dtype == mx.bool_ else logits + wide(mask)
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    slope = p * (cotangent @ values.swapaxes(-1, -2) - (cotangent * (p @ values)).sum(-1, keepdims=True))
    shape = (k.shape[0], k.shape[1], share, *k.shape[2:])
    dk = (slope.swapaxes(-1, -2) @ q * scale).reshape(shape).sum(2)
    return slope @ keys * scale, dk, (p.swapaxes(-1, -2) @ cotangent).reshape(shape).sum(2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("mask", MASKS)
def test_attention_gradient_is_about_as_good_as_stock(heads, groups, mask, dtype):
    """Stock here is MLX's unfused backward. Root mean squares, as single elements round either way; 1.2 for that."""
    (q, k, v, cotangent), how = attention_case(heads, groups, mask, dtype)
    reference = float64_gradients(q, k, v, cotangent, 0.3, how)
    output, stock = mx.vjp(lambda *qkv: stock_attention(*qkv, scale=0.3, mask=how), [q, k, v], [cotangent])
    found = attention_gradient(q, k, v, output[0], cotangent, scale=0.3, mask=how)[:3]
    for ours, theirs, right in zip(found, stock, reference, strict=True):
        assert ours.dtype == dtype and ours.shape == theirs.shape
        ours_off, theirs_off = (np.sqrt(np.mean((wide(x) - right) ** 2)) for x in (ours, theirs))
        assert ours_off <= 1.2 * theirs_off + 1e-7


def test_gradients_of_an_additive_mask_and_of_sinks():
    """MLX has none of its own for these; against finite differences in float64 they are right."""
    (q, k, v, cotangent), mask = attention_case(4, 2, "additive", mx.float32, size=4, length=6)
    sinks = mx.array(np.linspace(-1, 1, 4).astype(np.float32))

    def value(mask64, sinks64):
        keys, values = np.repeat(wide(k), 2, 1), np.repeat(wide(v), 2, 1)
        logits = wide(q) @ keys.swapaxes(-1, -2) * 0.5 + mask64
        extra = np.broadcast_to(sinks64.reshape(1, 4, 1, 1), (*logits.shape[:3], 1))
        every = np.exp(np.concatenate([extra, logits], -1))
        return ((every[..., 1:] / every.sum(-1, keepdims=True)) @ values * wide(cotangent)).sum()

    output = stock_attention(q, k, v, scale=0.5, mask=mask, sinks=sinks)
    *_, slope, dsinks = attention_gradient(q, k, v, output, cotangent, scale=0.5, mask=mask, sinks=sinks)
    step = 1e-5
    for head in range(4):
        moved = wide(sinks)
        moved[head] += step
        slope_there = (value(wide(mask), moved) - value(wide(mask), wide(sinks))) / step
        assert dsinks[head].item() == pytest.approx(slope_there, rel=1e-3, abs=1e-4)
    dmask = deterministic._reduced(slope, mask.shape)
    moved = wide(mask)
    moved[0, 2, 3, 1] += step
    assert dmask[0, 2, 3, 1].item() == pytest.approx(
        (value(moved, wide(sinks)) - value(wide(mask), wide(sinks))) / step, rel=1e-3, abs=1e-4
    )


class Model(nn.Module):
    """An embedding that is also the head, one that is indexed directly, and attention called by its full name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.table = mx.random.normal((20, 8))
        self.attention = nn.MultiHeadAttention(8, 2)
        self.blocks = [nn.Linear(8, 8), {"norm": nn.RMSNorm(8)}]

    def __call__(self, ids: mx.array) -> mx.array:
        x = self.embedding(ids) + self.table[ids] + mx.take(self.table, ids, axis=0)
        x = x + self.attention(x, x, x)
        q = x.reshape(*x.shape[:2], 2, 4).swapaxes(1, 2)
        x = x + mx.fast.scaled_dot_product_attention(q, q, q, scale=0.5).swapaxes(1, 2).reshape(x.shape)
        return self.embedding.as_linear(self.blocks[1]["norm"](self.blocks[0](x)))


def test_make_deterministic_changes_neither_paths_nor_weights_nor_forward_bits():
    mx.random.seed(0)
    model, ids = Model(), mx.array([[1, 1, 2, 19], [3, 1, 1, 0]])
    before, paths = model(ids), [path for path, _ in tree_flatten(model.parameters())]
    classes = [type(module) for module in model.modules()]
    assert make_deterministic(model) is model
    assert [path for path, _ in tree_flatten(model.parameters())] == paths
    assert np.array(model(ids)).tobytes() == np.array(before).tobytes()
    assert isinstance(model, Model) and type(model).__name__ == "Model"
    make_deterministic(model)  # twice is once
    assert all(type(module).__mro__[1] is cls for module, cls in zip(model.modules(), classes, strict=True))


def test_a_deterministic_model_uses_the_replacements(monkeypatch):
    """Four gathers and two attention calls reach them; a stock model's none."""
    calls = []
    for name in ("gather_gradient", "attention_gradient"):
        original = getattr(deterministic, name)
        monkeypatch.setattr(deterministic, name, lambda *a, _f=original, _n=name, **k: calls.append(_n) or _f(*a, **k))
    mx.random.seed(0)
    model, ids = Model(), mx.array([[1, 1, 2, 19]])
    model.set_dtype(mx.bfloat16)
    step = nn.value_and_grad(model, lambda model, ids: model(ids).astype(mx.float32).sum())
    mx.eval(step(model, ids))
    assert calls == []
    make_deterministic(model)
    mx.eval(step(model, ids))
    assert sorted(calls) == ["attention_gradient"] * 2 + ["gather_gradient"] * 3


def test_a_deterministic_model_trains_compiled():
    mx.random.seed(0)
    model = make_deterministic(Model())
    optimizer = optim.SGD(0.1)
    step = nn.value_and_grad(model, lambda ids: mx.square(model(ids)).mean())
    state = [model.state, optimizer.state]

    def update(ids):
        loss, gradients = step(ids)
        optimizer.update(model, gradients)
        return loss

    run = mx.compile(update, inputs=state, outputs=state)
    losses = [run(mx.array([[1, 1, 2, 19]])).item() for _ in range(5)]
    assert losses[-1] < losses[0]


def test_operations_are_replaced_only_while_open_and_only_in_this_thread():
    originals = (mx.array.__getitem__, mx.take, mx.fast.scaled_dot_product_attention)
    seen = []
    with deterministic_operations():
        with deterministic_operations():
            assert mx.take is not originals[1]
        assert mx.take is not originals[1] and deterministic._active()
        thread = threading.Thread(target=lambda: seen.append(deterministic._active()))
        thread.start()
        thread.join()
    assert seen == [False]
    assert (mx.array.__getitem__, mx.take, mx.fast.scaled_dot_product_attention) == originals
    with pytest.raises(RuntimeError), deterministic_operations():
        raise RuntimeError
    assert (mx.array.__getitem__, mx.take, mx.fast.scaled_dot_product_attention) == originals


@pytest.mark.parametrize("on", [False, True], ids=["stock", "deterministic"])
def test_attention_calls_pass_through_a_handler_only_while_open_and_only_in_this_thread(on):
    q, k, v = (mx.random.normal((1, 2, 4, 8), key=mx.random.key(n)).astype(mx.bfloat16) for n in range(3))
    mask, seen = mx.zeros((4, 4), mx.bfloat16), []

    def call():
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.5, mask=mask)

    def handler(number):
        def handle(perform, *qkv, **options):
            seen.append((number, qkv, options))
            return perform(*qkv, **options)

        return handle

    expected = wide(call())
    for _ in range(2):
        with deterministic_operations() if on else contextlib.nullcontext():
            call()
            with attention_calls(handler(1)):
                assert (wide(call()) == expected).all()
                with attention_calls(handler(2)):
                    call()
                thread = threading.Thread(target=lambda: mx.eval(call()))
                thread.start()
                thread.join()
                call()
            call()
        assert mx.fast.scaled_dot_product_attention is stock_attention
        with deterministic_operations():
            call()
        assert [number for number, _, _ in seen] == [1, 2, 1]
        assert all(found is given for found, given in zip(seen[0][1], (q, k, v), strict=True))
        assert seen[0][2]["mask"] is mask and seen[0][2]["scale"] == 0.5
        seen.clear()


def test_other_indexing_is_stock():
    array = mx.arange(12).reshape(3, 4).astype(mx.float32)
    whole = mx.arange(12).reshape(3, 4)
    cases = (0, -1, slice(1, 3), (slice(None), 2), (mx.array([0, 2]), mx.array([1, 3])), None, ..., mx.array(1))
    with deterministic_operations():
        inside = [np.array(array[case]) for case in cases] + [np.array(whole[mx.array([2, 0])])]
        negative = np.array(array[mx.array([-1, 0])])
    outside = [np.array(array[case]) for case in cases] + [np.array(whole[mx.array([2, 0])])]
    assert all((left == right).all() for left, right in zip(inside, outside, strict=True))
    assert (negative == np.array(array[mx.array([-1, 0])])).all()


@pytest.mark.cuda
@pytest.mark.skipif(not mx.is_available(mx.Device(mx.DeviceType.gpu)), reason="no GPU that MLX can use")
@pytest.mark.parametrize(
    ("size", "heads", "groups", "length", "mask"),
    [
        (64, 12, 12, 512, "causal"),
        (128, 8, 2, 1024, "causal"),
        (64, 8, 8, 2048, "boolean"),
        (64, 8, 4, 512, "additive"),
    ],
)
def test_on_a_gpu_attention_repeats(size, heads, groups, length, mask):
    with mx.stream(mx.gpu):
        (q, k, v, cotangent), how = attention_case(heads, groups, mask, mx.bfloat16, size, length)

        def gradients():
            with deterministic_operations():
                attention = lambda *qkv: mx.fast.scaled_dot_product_attention(*qkv, scale=0.1, mask=how)  # noqa: E731
                return mx.vjp(attention, [q, k, v], [cotangent])[1]

        results = {b"".join(wide(x).tobytes() for x in gradients()) for _ in range(8)}
    assert len(results) == 1


@pytest.mark.cuda
@pytest.mark.skipif(not mx.is_available(mx.Device(mx.DeviceType.gpu)), reason="no GPU that MLX can use")
@pytest.mark.parametrize("dtype", (mx.float32, mx.bfloat16), ids=str)
def test_on_a_gpu_the_gather_gradient_repeats_and_has_the_cpus_bits(dtype):
    rng = np.random.default_rng(4)
    ids = mx.array(np.minimum(rng.zipf(1.2, 8192), 50257) - 1)
    cotangent = mx.array(rng.standard_normal((8192, 64)).astype(np.float32)).astype(dtype)
    results = set()
    for device, _ in itertools.chain([(mx.cpu, 0)], ((mx.gpu, i) for i in range(8))):
        with mx.stream(device):
            results.add(wide(gather_gradient(ids, cotangent, 50257)).tobytes())
    assert len(results) == 1
