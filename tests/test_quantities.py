"""Each quantity against its formula in float64, at sizes below, at and above a stretch, and in half precision."""

import math
import subprocess
import sys

import numpy as np
import pytest

from workbench.probes import quantities as q

SIZES = (1, 7, 4096, q.STRETCH, q.STRETCH + 4099)
RNG = np.random.default_rng(11)


def draw(size, scale=1.0):
    return (RNG.standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e25])
def test_cosine(size, scale):
    left, right = draw(size, scale), draw(size)
    right = (right + 0.3 * left / np.float32(scale)).astype(np.float32)
    a, b = left.astype(float), right.astype(float)
    assert q.cosine(left, right) == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-5, abs=1e-6)
    # Sums of float32 products: near 1, as the reference in float64 says, but never beyond it.
    assert 1 >= q.cosine(left, left) == pytest.approx(1, rel=1e-6)
    assert -1 <= q.cosine(left, -left) == pytest.approx(-1, rel=1e-6)


def test_cosine_of_nothing_and_of_what_is_not_finite():
    assert q.cosine(np.zeros(3, np.float32), draw(3)) is None
    assert q.cosine(draw(3), np.zeros(3, np.float32)) is None
    assert q.cosine(draw(0), draw(0)) is None
    assert math.isnan(q.cosine(np.array([1, np.nan], np.float32), draw(2)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("eps", "correction"), [(1e-8, 1.0), (1e-2, 1.0), (1e-8, 20.0), (1e-40, 3.0)])
def test_staleness(size, eps, correction):
    gradient = draw(size, 1e-2)
    v = (draw(size, 1e-2) ** 2).astype(np.float32)
    v[::5] = 0
    gradient[::10] = 0
    gradient[5::10] *= np.float32(0 if eps < 1e-30 else 1)  # g/ε would leave float32 and be no one's healthy case
    g, second = gradient.astype(float), v.astype(float)
    expected = math.sqrt(np.mean(g**2 / np.maximum(correction * second, eps**2)))
    found = q.staleness_rms(gradient, v, eps=eps, correction=correction)
    assert found == pytest.approx(expected, rel=1e-5)
    assert q.staleness_rms(gradient, v, eps=eps, correction=correction, scale=0.25) == pytest.approx(found / 4)


def test_staleness_is_about_one_where_v_tracks_and_bounded_by_beta2():
    gradient, beta2 = draw(5000), 0.95
    assert q.staleness_rms(gradient, gradient**2, eps=1e-8) == pytest.approx(1, rel=1e-5)
    v = ((1 - beta2) * gradient**2).astype(np.float32)  # all of v is the last gradient
    assert q.staleness_rms(gradient, v, eps=1e-8) == pytest.approx(1 / math.sqrt(1 - beta2), rel=1e-5)
    corrected = q.staleness_rms(gradient, v, eps=1e-8, correction=q.bias_correction(beta2, 1))
    assert corrected == pytest.approx(1, rel=1e-5)  # the first step of a corrected Adam


def test_staleness_without_gradient_is_zero_whatever_v_and_eps():
    zero = np.zeros(4, np.float32)
    assert q.staleness_rms(zero, zero, eps=0.0) == 0
    assert q.staleness_rms(draw(0), draw(0), eps=1e-8) is None
    assert q.staleness_rms(np.ones(1, np.float32), zero[:1], eps=0.0) == math.inf
    assert math.isnan(q.staleness_rms(np.array([np.nan], np.float32), zero[:1], eps=1e-8))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("eps", "correction"), [(1e-8, 1.0), (3e-3, 1.0), (3e-3, 20.0), (1e-60, 1.0)])
def test_eps_fraction(size, eps, correction):
    v = (draw(size, 1e-2) ** 2).astype(np.float32)
    v[::3] = 0
    expected = np.mean(np.sqrt(correction * v.astype(float)) < eps)
    assert q.eps_fraction(v, eps=eps, correction=correction) == pytest.approx(expected, abs=2 / size)
    assert q.eps_fraction(np.zeros(2, np.float32), eps=0.0) == 0
    assert q.eps_fraction(draw(0), eps=1e-8) is None


def half_ulp(weights, dtype):
    """Half the spacing of a dtype's numbers at each weight, in float64."""
    if dtype == "bfloat16":
        return 2.0 ** (np.floor(np.log2(np.abs(weights.astype(float)))) - 7) / 2
    return np.spacing(np.abs(weights).astype(dtype)).astype(float) / 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_stuck_weights_are_those_whose_update_is_under_half_an_ulp(dtype):
    """Against the definition: the change wished for, in float64, beside half an ULP of the weight in its own dtype."""
    import mlx.core as mx

    weights = mx.random.normal((20_000,), key=mx.random.key(2)).astype(getattr(mx, dtype))
    size = {"float32": 2**-25, "bfloat16": 2**-7, "float16": 2**-11}[dtype]
    change = (mx.random.normal((20_000,), key=mx.random.key(3)) * size).astype(weights.dtype)
    moved = (weights + change).astype(mx.float32) - weights.astype(mx.float32)
    w, wished, moved = (np.array(array.astype(mx.float32)) for array in (weights, change, moved))
    half = half_ulp(w, dtype)
    clear = np.abs(np.abs(wished) / half - 1) > 1e-3  # a tie rounds to even: either way
    clear &= np.abs(np.log2(np.abs(w)) % 1) > 1e-2  # just above a power of two, the spacing below is half as wide
    expected = np.mean(np.abs(wished[clear]) < half[clear])
    assert 0.2 < expected < 0.8
    assert q.stuck_fraction(moved[clear], wished[clear]) == pytest.approx(expected, abs=1e-12)


def test_who_was_not_asked_is_not_stuck():
    update = np.array([0, 0, 1, 0], np.float32)
    gradient = np.array([0, 1, 1, 0], np.float32)
    m = np.array([0, 0, 0, 1], np.float32)
    assert q.stuck_fraction(update, gradient) == 0.5
    assert q.stuck_fraction(update, gradient, m) == pytest.approx(2 / 3)
    assert q.stuck_fraction(update, 0 * gradient) is None
    assert q.stuck_fraction(draw(0), draw(0)) is None


def test_ratio_scale_and_correction():
    assert q.update_ratio(2.0, 8.0) == 0.25 and q.update_ratio(2.0, 0.0) is None
    assert q.clip_scale(4.0, None) == 1 and q.clip_scale(0.5, 1.0) == 1
    assert q.clip_scale(4.0, 1.0) == pytest.approx(0.25, rel=1e-6) and q.clip_scale(math.inf, 1.0) == 0
    assert math.isnan(q.clip_scale(math.nan, 1.0))
    assert q.bias_correction(0.95, 1) == pytest.approx(20) and q.bias_correction(0.95, 10_000) == 1


def test_it_needs_no_mlx():
    code = "import sys; from workbench.probes import findings, neighbours, quantities, summary\n"
    code += "sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
