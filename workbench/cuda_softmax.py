"""The softmax in the middle of attention's backward pass, as one CUDA kernel: a warp a row, in a fixed order.

In MLX's own operations this part reads and writes seven float32 arrays as large as the logits; here it reads two, and
under a causal mask only their lower half. Knows MLX's custom kernels; nothing of modules.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import mlx.core as mx

_THREADS = 256

_SOURCE = """
  const int length = sizes[0], span = sizes[1], rows = sizes[2];
  const float scale = scales[0], after = scales[1];
  const long long row = ((long long)blockIdx.x * blockDim.x + threadIdx.x) >> 5;
  const int lane = threadIdx.x & 31;
  if (row >= rows) return;
  const int stop = CAUSAL ? span - length + (int)(row % length) + 1 : span;
  const float* x = logits + row * span;
  const float* y = towards + row * span;
  T* p = weights + row * span;
  T* s = steep + row * span;

  float top = -INFINITY;
  for (int j = lane; j < stop; j += 32) top = fmaxf(top, x[j] * scale);
  for (int o = 16; o; o >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, o));

  float total = 0.0f;
  for (int j = lane; j < stop; j += 32) total += expf(x[j] * scale - top);
  for (int o = 16; o; o >>= 1) total += __shfl_xor_sync(0xffffffffu, total, o);

  const float mean = inner[row];
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
    found: list[mx.array] = _kernel()(
        inputs=[logits, towards, inner, mx.array([length, span, rows], mx.int32), mx.array([scale, after])],
        template=[("T", dtype), ("CAUSAL", causal)],
        grid=(-(-rows * 32 // _THREADS) * _THREADS, 1, 1),
        threadgroup=(_THREADS, 1, 1),
        output_shapes=[logits.shape, logits.shape],
        output_dtypes=[dtype, dtype],
    )
    return found[0], found[1]


@functools.cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        # MLX finds a compiled kernel by its name alone, in memory and on disk: the name must change with the source.
        name=f"workbench_softmax_{hashlib.sha256(_SOURCE.encode()).hexdigest()[:16]}",
        input_names=["logits", "towards", "inner", "sizes", "scales"],
        output_names=["weights", "steep"],
        source=_SOURCE,
    )
