"""Kernels compiled without MLX's headers: the bits of those compiled with them, and MLX's own way where that fails."""

import mlx.core as mx
import numpy as np
import pytest

from workbench import cuda, cuda_kernel, cuda_softmax
from workbench.cuda_kernel import CudaKernel, compiled

NEEDS_GPU = pytest.mark.skipif(not mx.cuda.is_available(), reason="no NVIDIA GPU that MLX can use")
DOUBLE = "((float*)y)[threadIdx.x] = 2.0f * ((const float*)x)[threadIdx.x];"


def doubled(kernel, **more):
    x = mx.array([1.5, -2.0, 3.25])
    shape = {"grid": (3, 1, 1), "threadgroup": (3, 1, 1), "output_shapes": [(3,)], "output_dtypes": [mx.float32]}
    return kernel([x], **shape, **more)[0].tolist()


def through_mlx(monkeypatch):
    """From here on every kernel is compiled by MLX."""
    call = CudaKernel.__call__
    monkeypatch.setattr(CudaKernel, "__call__", lambda self, *given, **more: call(self, *given, **more, by_mlx=True))


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_nothing_is_compiled():
    assert compiled("") is None and CudaKernel("double", DOUBLE, ["x"], ["y"]).binary is None


def test_the_name_follows_the_source():
    first, second = (CudaKernel("double", source, ["x"], ["y"]) for source in (DOUBLE, DOUBLE.replace("2.0f", "3.0f")))
    assert first.full_name != second.full_name
    assert first.full_name == CudaKernel("double", DOUBLE, ["x"], ["y"]).full_name


@pytest.mark.cuda
@NEEDS_GPU
def test_a_kernel_runs_either_way():
    kernel = CudaKernel("double", DOUBLE, ["x"], ["y"])
    assert kernel.binary and kernel.binary == CudaKernel("double", DOUBLE, ["x"], ["y"]).binary
    assert doubled(kernel) == doubled(kernel, by_mlx=True) == [3.0, -4.0, 6.5]


@pytest.mark.cuda
@NEEDS_GPU
def test_without_nvrtc_mlx_compiles(monkeypatch):
    monkeypatch.setattr(cuda_kernel, "_nvrtc", lambda: None)
    kernel = CudaKernel("double", DOUBLE, ["x"], ["y"])
    assert kernel.binary is None and doubled(kernel) == [3.0, -4.0, 6.5]


@pytest.mark.cuda
@NEEDS_GPU
def test_a_source_that_is_refused_has_no_binary():
    assert compiled("this is not C++") is None


def words(arrays):
    """The bits of arrays: NaN equals NaN."""
    mx.eval(arrays)
    return [np.array(array.view(mx.uint8)).tobytes() for array in arrays]


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "uint32"])
@pytest.mark.parametrize("digests", [True, False])
def test_readings_have_the_bits_of_mlx_s_compilation(dtype, digests, monkeypatch):
    draw = np.random.default_rng(1)
    given = [mx.array(draw.standard_normal(size).astype(np.float32) * 300) for size in (1, 33, 65_537, 300_000)]
    given = [array.astype(getattr(mx, dtype)) for array in given]
    if dtype != "uint32":
        given.append(mx.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-30, 6e-8]).astype(getattr(mx, dtype)))

    def read():
        reading = cuda.launch(given, digests=digests)
        mx.eval(reading.pending)
        return [part.tobytes() for part in reading.result()]

    mine = read()
    through_mlx(monkeypatch)
    assert read() == mine


@pytest.mark.cuda
@NEEDS_GPU
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("causal", [True, False])
def test_the_softmax_has_the_bits_of_mlx_s_compilation(dtype, causal, monkeypatch):
    mx.random.seed(3)
    logits = mx.random.normal((2, 3, 65, 65)) * 30
    logits[0, 0, 4, 2] = mx.nan
    logits[1, 1, 7, 0] = -mx.inf
    towards, inner = mx.random.normal(logits.shape), mx.random.normal(logits.shape[:-1])

    def gradient():
        sizes = {"length": 65, "scale": 0.3, "after": 0.7}
        return words(cuda_softmax.softmax_gradient(logits, towards, inner, **sizes, causal=causal, dtype=dtype))

    mine = gradient()
    through_mlx(monkeypatch)
    assert gradient() == mine
