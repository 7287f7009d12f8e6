"""Norms and digests of many arrays on a CUDA device, in one read of their memory, without a copy to the host.

Each block of a kernel reads its own share of one array and writes its own partial results, so no result depends on the
order in which blocks run. Knows `cuda_kernel` and the element mix of `mixing`; nothing of steps or runs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .cuda_kernel import CudaKernel
from .mixing import MULTIPLIERS, STEPS

NORMS = "float32 partial sums, CUDA blocks of 65536 words"  # named in the manifest, as `host.NORMS`
ARRAYS = 64  # a kernel's arrays: few launches, and a kernel's arguments stay far below their limit of 4 KiB
CHUNK = 1 << 16  # 32-bit words that a block of threads reads
THREADS = 256


def available() -> bool:
    """Whether MLX's default device is a CUDA one."""
    return mx.default_device().type == mx.DeviceType.gpu and mx.cuda.is_available()


@dataclass(frozen=True)
class Reading:
    """What was asked of the device.

    Attributes:
        pending: arrays that hold the answer once they are evaluated, alone or together with the arrays that are read.
    """

    count: int
    groups: Sequence[_Group]
    pending: Sequence[list[mx.array]]
    digests: bool

    def result(self) -> tuple[np.ndarray, np.ndarray]:
        """What the device found, once `pending` is evaluated.

        Returns:
            float64 (n,): the sum of squares of each floating array, from float32 sums over 65536 words (NaN or inf if
            an element is; 0 where squares underflow); and uint32 (n, 2): `mixing.digest` of each, or zeros.
        """
        squares, found = np.zeros(self.count), np.zeros((self.count, 2), np.uint32)
        for group, (partial, mixed) in zip(self.groups, self.pending, strict=True):
            squares[group.numbers] = np.add.reduceat(np.array(partial, np.float64), group.starts)
            if self.digests:
                found[group.numbers] = np.add.reduceat(np.array(mixed), group.starts, dtype=np.uint32)
        return squares, found


def launch(arrays: Sequence[mx.array], *, digests: bool) -> Reading:
    """Asks for the sums of squares and digests of arrays, which need not be evaluated yet.

    Args:
        digests: False: only the sums of squares, which then run over each array in the order of its memory.
    """
    groups = _groups(tuple((array.dtype, array.size) for array in arrays))
    pending = []
    for group in groups:
        chosen = [arrays[number] for number in group.numbers]
        if not digests:
            chosen = [mx.contiguous(array, allow_col_major=True) for array in chosen]
        spare = [chosen[0]] * (ARRAYS - len(chosen))
        outputs = _kernel(group.dtype, digests)(
            [*chosen, *spare, group.work],
            grid=(group.chunks * THREADS, 1, 1),
            threadgroup=(THREADS, 1, 1),
            output_shapes=[(group.chunks,), (group.chunks, 2)],
            output_dtypes=[mx.float32, mx.uint32],
        )
        pending.append(outputs)
    return Reading(len(arrays), groups, pending, digests)


@dataclass(frozen=True)
class _Group:
    """Arrays of one dtype that one kernel reads: which ones, and which block reads what."""

    dtype: mx.Dtype
    numbers: list[int]
    starts: np.ndarray  # the first chunk of each array
    chunks: int
    work: mx.array  # int64 (chunks, 4): array, first word, end, bytes of the array


@functools.lru_cache(maxsize=64)
def _groups(kinds: tuple[tuple[mx.Dtype, int], ...]) -> list[_Group]:
    by_dtype: dict[Any, list[int]] = {}
    for number, (dtype, size) in enumerate(kinds):
        if size:
            by_dtype.setdefault(dtype, []).append(number)
    return [
        _group(dtype, numbers[start : start + ARRAYS], kinds)
        for dtype, numbers in by_dtype.items()
        for start in range(0, len(numbers), ARRAYS)
    ]


def _group(dtype: mx.Dtype, numbers: list[int], kinds: Sequence[tuple[mx.Dtype, int]]) -> _Group:
    starts: list[int] = []
    work: list[tuple[int, int, int, int]] = []
    for place, number in enumerate(numbers):
        starts.append(len(work))
        size = kinds[number][1] * dtype.size
        words = -(-size // 4)
        work += [(place, first, min(first + CHUNK, words), size) for first in range(0, words, CHUNK)]
    array = mx.array(np.array(work, np.int64))
    mx.eval(array)
    return _Group(dtype, numbers, np.array(starts), len(work), array)


_VALUES = {  # the float32 values in a word
    mx.float32: ["__uint_as_float(word)"],
    mx.complex64: ["__uint_as_float(word)"],
    mx.bfloat16: ["__uint_as_float(word << 16)", "__uint_as_float(word & 0xffff0000u)"],
    mx.float16: [f"workbench_half_value((word >> {shift}) & 0xffffu)" for shift in (0, 16)],
}


@functools.cache
def _kernel(dtype: mx.Dtype, digests: bool) -> CudaKernel:
    inputs = [*(f"x{number}" for number in range(ARRAYS)), "work"]
    return CudaKernel("reading", _source(dtype, digests), inputs, ["squares", "mixed"], ensure_row_contiguous=digests)


def _source(dtype: mx.Dtype, digests: bool) -> str:
    cases = "\n".join(f"    case {number}: bytes = (const unsigned char*)x{number}; break;" for number in range(ARRAYS))
    take = "".join(
        f"{{ const float value = {value}; square = fmaf(value, value, square); }}" for value in _VALUES.get(dtype, [])
    )
    if digests:
        for lane, ((place, *rest), shifts) in enumerate(zip(MULTIPLIERS, STEPS, strict=True)):
            take += f"{{ unsigned int x = word ^ place * {place}u; "
            take += "".join(f"x *= {by}u; x ^= x >> {shift}; " for by, shift in zip(rest, shifts, strict=True))
            take += f"lane{lane} += x; }} "
    return f"""
  const unsigned char* bytes = nullptr;
  const long long* mine = (const long long*)work + 4 * blockIdx.x;
  switch (mine[0]) {{
{cases}
  }}
  const long long start = mine[1], stop = mine[2], size = mine[3];
  float* const sums = (float*)squares;
  unsigned int* const words = (unsigned int*)mixed;
  float square = 0.0f;
  unsigned int lane0 = 0, lane1 = 0;
  auto take = [&](const unsigned int word, const unsigned int place) {{
    {take}
  }};
  long long first = start;
  if (((unsigned long long)bytes & 15) == 0) {{
    const uint4* quads = (const uint4*)bytes;
    const long long last = (stop < size / 4 ? stop : size / 4) / 4;
    #pragma unroll 4
    for (long long i = start / 4 + threadIdx.x; i < last; i += {THREADS}) {{
      const uint4 quad = quads[i];
      const unsigned int place = (unsigned int)(4 * i);
      take(quad.x, place);
      take(quad.y, place + 1);
      take(quad.z, place + 2);
      take(quad.w, place + 3);
    }}
    first = 4 * last > start ? 4 * last : start;
  }}
  for (long long i = first + threadIdx.x; i < stop; i += {THREADS}) {{  // a slice that starts anywhere; the last bytes
    unsigned int word = 0;
    for (int byte = 0; byte < 4; ++byte)
      if (4 * i + byte < size) word |= (unsigned int)bytes[4 * i + byte] << (8 * byte);
    take(word, (unsigned int)i);
  }}
  for (int offset = 16; offset; offset >>= 1) {{
    square += __shfl_down_sync(0xffffffffu, square, offset);
    lane0 += __shfl_down_sync(0xffffffffu, lane0, offset);
    lane1 += __shfl_down_sync(0xffffffffu, lane1, offset);
  }}
  __shared__ float partial[8];
  __shared__ unsigned int partial0[8], partial1[8];
  if ((threadIdx.x & 31) == 0) {{
    partial[threadIdx.x >> 5] = square;
    partial0[threadIdx.x >> 5] = lane0;
    partial1[threadIdx.x >> 5] = lane1;
  }}
  __syncthreads();
  if (threadIdx.x == 0) {{
    for (int warp = 1; warp < 8; ++warp) {{
      square += partial[warp];
      lane0 += partial0[warp];
      lane1 += partial1[warp];
    }}
    sums[blockIdx.x] = square;
    words[2 * blockIdx.x] = lane0;
    words[2 * blockIdx.x + 1] = lane1;
  }}
"""
