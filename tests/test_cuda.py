"""Reading arrays on a CUDA device: the host's digests, bit for bit, and sums of squares that repeat."""

import mlx.core as mx
import numpy as np
import pytest

from workbench import cuda
from workbench.host import raw_views
from workbench.mixing import digest

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU that MLX can use"),
]
DTYPES = ("float32", "bfloat16", "float16", "uint32", "int32", "uint64", "int64", "uint8", "bool_", "complex64")


def arrays():
    draw = np.random.default_rng(0)
    found = []
    for name in DTYPES:
        for shape in ((), (1,), (33,), (7, 300), (0, 4), (65_536,), (65_537,), (513, 1025)):
            values = draw.standard_normal(shape).astype(np.float32) * 100
            found.append(mx.array(values).astype(getattr(mx, name)))
    wide = mx.array(draw.standard_normal((300, 400)).astype(np.float32))
    found += [wide.T, wide[::2], wide[:, 5:9], mx.broadcast_to(wide[0], (9, 400))]
    odd = mx.array(draw.standard_normal(1000).astype(np.float32)).astype(mx.bfloat16)
    found += [odd[1:], odd[3:900], odd[2::3], wide[1:, 1:], mx.array(np.arange(999) % 251).astype(mx.uint8)[5:]]
    mx.eval(found)
    return found


def read(arrays, digests):
    reading = cuda.launch(arrays, digests=digests)
    mx.eval(reading.pending)
    return reading.result()


def test_digests_are_those_of_the_host():
    given = arrays()
    found = read(given, digests=True)[1]
    assert [tuple(lanes) for lanes in found.tolist()] == [digest(view) for view in raw_views(given)]


@pytest.mark.parametrize("digests", [True, False])
def test_sums_of_squares_repeat_and_are_close_to_float64(digests):
    given = [array for array in arrays() if mx.issubdtype(array.dtype, mx.floating)]
    first, _ = read(given, digests=digests)
    for _ in range(5):
        assert read(given, digests=digests)[0].tobytes() == first.tobytes()
    for array, found in zip(given, first, strict=True):
        expected = np.square(np.array(array.astype(mx.float32)).astype(np.float64)).sum()
        assert found == pytest.approx(expected, rel=2e-6)


def test_values_that_are_not_finite_show():
    sums, _ = read([mx.array([1.0, np.nan]), mx.array([np.inf, 1.0]), mx.array([1e30, 1.0])], digests=False)
    assert np.isnan(sums[0]) and sums[1] == np.inf and sums[2] == np.inf
