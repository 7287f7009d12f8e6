"""Norms against numpy in float64, over the whole range of float32, and the same bits whatever the thread count."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import python

from workbench.host import float_views, norm, raw_views, square_sum

# float32 products (half an ULP each) and sums of at most 4096 of them in float32; all above that is float64. Rounding
# errors of a sum of n positive terms stay below n·2^-24 relative, and the blocked kernels of every BLAS do far better;
# the square root halves it, and rounding the result to float32 adds half an ULP.
BOUND = 4096 * 2.0**-24 / 2 + 2.0**-24
USUAL = 2e-6  # what is really met: a hundredth of that

SIZES = [1, 2, 3, 4095, 4096, 4097, 12288, 100_003]


def reference(values):
    return np.sqrt(np.sum(values.astype(np.float64) ** 2))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-18, 1e-20, 1e-30, 1e-38, 1e8, 1e18, 1e30])
def test_norm_is_float64_s(size, scale):
    values = (np.random.default_rng(size).standard_normal(size) * scale).astype(np.float32)
    expected = reference(values)
    assert abs(float(norm([values])) - expected) <= min(BOUND, USUAL) * expected


@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, 1e-45])
def test_neither_overflow_nor_underflow_of_a_square(value):
    values = np.full(5000, value, np.float32)
    expected = reference(values)
    if expected > np.finfo(np.float32).max:
        assert norm([values]) == np.inf  # the norm itself leaves float32, although each element is finite
    else:
        assert float(norm([values])) == pytest.approx(expected, rel=USUAL)
    assert square_sum(values) == pytest.approx(expected**2, rel=USUAL)


def test_a_large_element_among_small_ones():
    values = np.full(10_000, 1e-25, np.float32)
    values[9_999] = 1e25
    assert float(norm([values])) == pytest.approx(1e25, rel=USUAL)


@pytest.mark.parametrize("place", [0, 4095, 4096, 9_999])
def test_nan_and_inf_show_wherever_they_are(place):
    values = np.ones(10_000, np.float32)
    values[place] = np.nan
    assert np.isnan(norm([values]))
    values[place] = -np.inf
    assert norm([values]) == np.inf


def test_empty_and_zero():
    assert norm([]) == 0
    assert norm([np.zeros(0, np.float32)]) == 0
    assert norm([np.zeros(5000, np.float32), np.zeros(3, np.float32)]) == 0


def test_norm_of_several_is_that_of_all_elements():
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in (3, 5000, 1)]
    assert float(norm(arrays)) == pytest.approx(reference(np.concatenate(arrays)), rel=USUAL)


def test_one_changed_bit_changes_the_sum():
    values = np.random.default_rng(1).standard_normal(100).astype(np.float32)
    before = square_sum(values)
    values.view(np.uint32)[7] ^= 1 << 22  # a high bit of the mantissa
    assert square_sum(values) != before


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_views_are_the_array_s_own_bytes_and_values(dtype):
    array = mx.array([[1.0, -0.0, 3.5], [float("nan"), float("inf"), -2.0]]).astype(dtype)
    (raw,), (floats,) = raw_views([array]), float_views([array])
    assert raw.shape == (2, 3) and raw.nbytes == array.nbytes
    assert raw.tobytes() == bytes(memoryview(array.view(mx.uint8)))
    assert floats.dtype == np.float32 and floats.shape == (6,)
    np.testing.assert_array_equal(floats, [1, -0.0, 3.5, np.nan, np.inf, -2])
    assert np.signbit(floats[1])


def test_raw_views_are_row_major_and_float_views_flat_in_memory_order():
    matrix = mx.arange(6, dtype=mx.float32).reshape(2, 3).T
    scalar, empty = mx.array(2.5), mx.zeros((0, 3), dtype=mx.bfloat16)
    raws = raw_views([matrix, scalar, empty])
    assert [raw.shape for raw in raws] == [(3, 2), (), (0, 3)]
    np.testing.assert_array_equal(raws[0], [[0, 3], [1, 4], [2, 5]])
    assert [list(view) for view in float_views([matrix, scalar, empty])] == [[0, 1, 2, 3, 4, 5], [2.5], []]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint64])
def test_views_outlive_what_the_caller_does_with_its_array(dtype):
    """`a += 1` lets go of the buffer, which MLX then gives to another array."""
    for views in (raw_views, float_views):
        array = mx.full((50_000,), 3).astype(dtype)
        (view,) = views([array])
        before = view.copy()
        array += 1
        mx.eval(array, [mx.full((50_000,), n).astype(dtype) for n in range(20)])
        np.testing.assert_array_equal(view, before)


def test_views_of_float32_are_no_copies():
    array = mx.zeros((1000, 1000))
    mx.eval(array)
    before = mx.get_active_memory()
    views = raw_views([array]) + float_views([array])
    assert mx.get_active_memory() - before < array.nbytes / 2
    assert np.shares_memory(*views)


def test_bfloat16_norm_is_that_of_its_exact_values():
    array = mx.random.normal((300, 20), key=mx.random.key(0)).astype(mx.bfloat16)
    words = np.asarray(array.view(mx.uint16)).astype(np.uint32) << 16  # bfloat16 is the upper half of a float32
    assert float(norm(float_views([array]))) == pytest.approx(reference(words.view(np.float32)), rel=USUAL)


THREADS = """
import numpy as np
from threadpoolctl import threadpool_info
from workbench.host import square_sum
values = np.random.default_rng(0).standard_normal(3_000_001).astype(np.float32)
blas = [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]
print(blas, [square_sum((values * np.float32(scale)).astype(np.float32)).hex() for scale in (1, 1e-22, 1e22)])
"""


def test_thread_count_of_the_blas_moves_no_bit():
    """The three scales take the float32 path, and the float64 path for underflow and for overflow."""
    one, two = (python("-c", THREADS, OPENBLAS_NUM_THREADS=str(count)) for count in (1, 2))
    assert one.returncode == 0 and two.returncode == 0, one.stderr + two.stderr
    assert one.stdout.partition("]")[2] == two.stdout.partition("]")[2]
