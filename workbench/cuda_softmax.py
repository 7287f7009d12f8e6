"""The softmax in the middle of attention's backward pass, as one CUDA kernel: a warp a row, in a fixed order.

In MLX's own operations this part reads and writes seven float32 arrays as large as the logits; here it reads two, and
under a causal mask only their lower half. Knows `cuda_kernel`; nothing of modules.
"""

from __future__ import annotations

import functools

import mlx.core as mx

from .cuda_kernel import TYPES, CudaKernel

_THREADS = 256

_SOURCE = """
  const int length = ((const int*)sizes)[0], span = ((const int*)sizes)[1], rows = ((const int*)sizes)[2];
  const float scale = ((const float*)scales)[0], after = ((const float*)scales)[1];
  const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const int lane = threadIdx.x & 31;
  if (row >= rows) return;
  const int stop = CAUSAL ? span - length + (int)(row % length) + 1 : span;
  const float* x = (const float*)logits + row * span;
  const float* y = (const float*)towards + row * span;
  T* p = (T*)weights + row * span;
  T* s = (T*)steep + row * span;

  float top = __int_as_float(0xff800000);  // minus infinity
  for (int j = lane; j < stop; j += 32) top = fmaxf(top, x[j] * scale);
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));

  float total = 0.0f;
  for (int j = lane; j < stop; j += 32) total += expf(x[j] * scale - top);
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);

  const float mean = ((const float*)inner)[row];
  for (int j = lane; j < stop; j += 32) {
    const float probability = expf(x[j] * scale - top) / total;
    p[j] = T(probability);
    s[j] = T(probability * (y[j] - mean) * after);
  }
  for (int j = stop + lane; j < span; j += 32) {
    p[j] = T(0.0f);
    s[j] = T(0.0f);
  }
"""


def softmax_gradient(
    logits: mx.array,
    towards: mx.array,
    inner: mx.array,
    *,
    length: int,
    scale: float,
    after: float,
    causal: bool,
    dtype: mx.Dtype,
) -> tuple[mx.array, mx.array]:
    """P = softmax(scale·logits), and after·P·(towards - inner): the logits' gradient.

    Args:
        logits, towards: float32 (…, rows, span), where `length` query positions follow one another in the rows.
        inner: float32, one a row.
        causal: position t sees the first span - length + t + 1 keys; span is at least length.
        dtype: of the results, each rounded once from float32.
    """
    span = logits.shape[-1]
    rows = logits.size // span
    found = _kernel(dtype, causal)(
        [logits, towards, inner, mx.array([length, span, rows], mx.int32), mx.array([scale, after])],
        grid=(-(-rows * 32 // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[logits.shape, logits.shape],
        output_dtypes=[dtype, dtype],
    )
    return found[0], found[1]


@functools.cache
def _kernel(dtype: mx.Dtype, causal: bool) -> CudaKernel:
    constants = f"\n  using T = {TYPES[dtype]};\n  constexpr bool CAUSAL = {str(causal).lower()};"
    inputs = ["logits", "towards", "inner", "sizes", "scales"]
    return CudaKernel("softmax", constants + _SOURCE, inputs, ["weights", "steep"])
