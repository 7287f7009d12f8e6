"""How each parameter was updated, against the formulas in float64 on the step's own arrays."""

import math

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import experiment
from models import job
from test_probe import performed

from workbench.probes import quantities
from workbench.probes.measure import measure, parameter_updates
from workbench.probes.on_device import moved
from workbench.step import StepResult


def exact(array):
    return np.array(array.astype(mx.float32)).astype(float)


def expected(state_before, state_after, result, path, *, clip, eps, correction):
    before, after = exact(state_before.weights[path]), exact(state_after.weights[path])
    gradient, update = exact(result.gradients[path]), after - before
    scale = 1.0 if clip is None else min(1.0, clip / (float(result.grad_norm) + 1e-6))
    v, m = exact(state_after.optimizer[f"{path}.v"]), exact(state_after.optimizer[f"{path}.m"])
    asked = (gradient != 0) | (m != 0)
    lengths = np.linalg.norm(update) * np.linalg.norm(gradient)
    return {
        "ratio": np.linalg.norm(update) / np.linalg.norm(before),
        "cosine": -(update * gradient).sum() / lengths if lengths else None,
        "staleness_rms": math.sqrt(np.mean((scale * gradient) ** 2 / np.maximum(correction * v, eps**2))),
        "eps_fraction": np.mean(np.sqrt(correction * v) < eps),
        "stuck_fraction": np.mean((update == 0)[asked]),
    }


@pytest.mark.parametrize("there", [False, True], ids=["on the host", "on the device"])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", ["transformer", "bfloat16", "shared"])
def test_every_quantity_is_its_formula(name, clip, correct, there, monkeypatch):
    monkeypatch.setattr("workbench.probes.measure.on_its_device", lambda: there)
    eps = 3e-4
    one = job(name, optimizer=optim.AdamW(1e-2, betas=[0.9, 0.95], eps=eps, bias_correction=correct), clip=clip)
    _, before, after, _, result = performed(one)
    assert clip is None or result.grad_norm > 2 * clip
    found = parameter_updates(one, before, after, result)
    assert [update.path for update in found] == sorted(result.gradients)
    correction = 1 / (1 - 0.95**3) if correct else 1.0
    middling = 0
    for update in found:
        wanted = expected(before, after, result, update.path, clip=clip, eps=eps, correction=correction)
        middling += 0 < wanted["eps_fraction"] < 1
        for quantity, value in wanted.items():
            near = None if value is None else pytest.approx(value, rel=2e-5, abs=1e-7)
            assert getattr(update, quantity) == near, (update.path, quantity)
        assert update.dtype == ("bfloat16" if name == "bfloat16" else "float32")
    assert middling  # ε is among the √v̂ of this test


def test_without_a_second_moment_its_quantities_are_null_and_the_rest_is_there():
    one = experiment(optimizer=optim.SGD(1e-2, momentum=0.9))
    _, before, after, _, result = performed(one)
    for update in parameter_updates(one, before, after, result):
        assert update.staleness_rms is None and update.eps_fraction is None
        assert update.ratio > 0 and -1 <= update.cosine <= 1 and update.stuck_fraction is not None


def test_plain_gradient_descent_has_cosine_one():
    one = experiment(optimizer=optim.SGD(1e-2))
    _, before, after, _, result = performed(one)
    assert all(u.cosine == pytest.approx(1, abs=1e-5) for u in parameter_updates(one, before, after, result))


def test_a_bfloat16_weight_near_one_never_moves_by_1e_4():
    """Case R11: the norms' weights start at 1."""
    one = job("bfloat16", optimizer=optim.AdamW(1e-4, weight_decay=0.0, bias_correction=True))
    _, before, after, _, result = performed(one)
    found = {update.path: update.stuck_fraction for update in parameter_updates(one, before, after, result)}
    norms = [path for path in found if "norm" in path]
    assert len(norms) == 5 and {found[path] for path in norms} == {1.0}
    assert found["head.weight"] < 0.5


def test_what_has_no_value_is_null():
    one = experiment()
    _, before, after, _, result = performed(one)
    broken = {path: mx.full(array.shape, mx.nan) for path, array in result.gradients.items()}
    zero = {path: mx.zeros(array.shape) for path, array in result.gradients.items()}
    for gradients in (broken, zero):
        changed = StepResult(result.loss, result.grad_norm, gradients, result.activations, None)
        for update in parameter_updates(one, before, after, changed):
            assert update.cosine is None and update.ratio > 0
            assert update.staleness_rms == (None if gradients is broken else 0)


def test_a_weight_of_zeros_has_no_ratio():
    one = experiment()
    one.model.layers[0].bias = mx.zeros(8)
    _, before, after, _, result = performed(one, steps=1)
    found = {update.path: update for update in parameter_updates(one, before, after, result)}
    assert found["layers.0.bias"].ratio is None and found["layers.3.bias"].ratio is not None


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_mean_and_zero_fraction(dtype):
    array = (mx.random.normal((70, 90), key=mx.random.key(1)) + 0.5).astype(dtype)
    array[::7] = 0
    values = exact(array)
    (row,) = measure("weight", {"w": array})
    assert row.mean == pytest.approx(values.mean(), rel=1e-5) and row.zero_fraction == np.mean(values == 0)


def test_mean_of_nothing_and_of_what_is_not_finite():
    empty, broken = measure("weight", {"a": mx.zeros((0, 3)), "b": mx.array([0.0, mx.nan])})
    assert empty.mean is None and empty.zero_fraction is None
    assert broken.mean is None and broken.zero_fraction == 0.5


def test_many_tensors_are_measured_as_one_by_one(monkeypatch):
    tensors = {str(n): mx.random.normal((n + 1, 3), key=mx.random.key(n)) for n in range(6)}
    whole = measure("weight", tensors)
    monkeypatch.setattr("workbench.probes.measure.AT_ONCE", 10)
    assert measure("weight", tensors) == whole and [row.path for row in whole] == list(tensors)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_on_the_device_rows_are_those_of_the_host(dtype, monkeypatch):
    """To the last digits of sums; counts and peaks exactly; and where float32's range does not suffice, the host's."""
    draw = mx.random.normal((300, 70), key=mx.random.key(3)).astype(dtype)
    holes = mx.where(mx.abs(draw) < 0.5, mx.zeros_like(draw), draw)
    odd = mx.concatenate([draw.reshape(-1), mx.array([math.nan, math.inf, -math.inf, 0.0]).astype(dtype)])
    tensors = {"plain": draw.T, "holes": holes, "odd": odd, "empty": mx.zeros((0, 3), dtype), "zeros": mx.zeros((9,))}
    if dtype == mx.float32:
        tensors |= {"large": draw * 1e30, "larger": mx.full((999,), 3e38), "minute": draw * 1e-30}
    elsewhere = measure("weight", tensors)
    monkeypatch.setattr("workbench.probes.measure.on_its_device", lambda: True)
    for row, other in zip(measure("weight", tensors), elsewhere, strict=True):
        for name in ("path", "dtype", "size", "max_abs", "nonfinite", "l2_bits", "zero_fraction"):
            assert getattr(row, name) == getattr(other, name), (row.path, name)
        for name in ("l2", "rms", "mean"):
            near = getattr(other, name)
            assert getattr(row, name) == (
                None if near is None else pytest.approx(near, rel=1e-5, abs=1e-6 * (row.rms or 1))
            )


@pytest.mark.parametrize("eps", [1e-8, 1e-4, 3e-4, 1e-46])
def test_on_the_device_the_eps_regime_is_counted_or_left_to_the_host(eps):
    v, g = mx.array(np.geomspace(1e-18, 1e-4, 4001).astype(np.float32)), mx.full((4001,), 0.1)
    found = moved(g * 1.1, g, g, g, v, eps=eps)
    if eps < 1e-40:
        assert found is None
    else:  # a device's square root may be off by a unit in the last place: one element, at most
        assert found.eps_fraction == pytest.approx(quantities.eps_fraction(np.array(v), eps=eps), abs=1 / 4001)
        assert 0 < found.eps_fraction < 1 and found.cosine <= 1


def test_on_the_device_what_leaves_the_range_is_the_hosts():
    one = mx.ones((50,))
    assert moved(one * 2, one, one, one, one, eps=1e-8) is not None
    for arrays in [(one, one, one), (one * 2, one, one * 0), (one * 2, one, one * 1e25), (one * math.nan, one, one)]:
        assert moved(*arrays, one, one, eps=1e-8) is None
    assert moved(one * 2, one, one, None, None).staleness is None
