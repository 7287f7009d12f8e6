"""CUDA kernels of our own, compiled without MLX's headers.

`mx.fast.cuda_kernel` compiles a kernel in every process anew, together with headers that take far longer than the
kernel itself, and MLX keeps none of these on the disk (mlx/backend/cuda/custom_kernel.cpp, 0.32): 1.4 to 1.6 s each
on an H200, against 0.05 to 0.29 s without the headers. So the sources here need none, and are compiled by the NVRTC
that MLX has loaded; where that can't be had they go through MLX. Tests compare the bits of both ways. Knows nothing of
steps or runs.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

# What <cuda_fp16.h> and <cuda_bf16.h> would give: https://docs.nvidia.com/cuda/parallel-thread-execution/ (cvt).
PRELUDE = """
struct workbench_half {
  unsigned short bits;
  __device__ workbench_half() {}
  __device__ explicit workbench_half(float value) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
};
struct workbench_bfloat {
  unsigned short bits;
  __device__ workbench_bfloat() {}
  __device__ explicit workbench_bfloat(float value) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value)); }
};
__device__ __forceinline__ float workbench_half_value(unsigned int bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((unsigned short)bits));
  return value;
}
"""
TYPES = {mx.float32: "float", mx.float16: "workbench_half", mx.bfloat16: "workbench_bfloat"}
_BFLOAT_SINCE = 80  # the compute capability, times ten, from which the hardware rounds to bfloat16


@dataclass(frozen=True)
class CudaKernel:
    """A kernel whose arguments are pointers: its inputs, then its outputs.

    Attributes:
        source: the body of the function.
        inputs, outputs: the arguments' names, which the body casts to what it needs.
        ensure_row_contiguous: MLX copies an input that is not.
    """

    name: str
    source: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    ensure_row_contiguous: bool = True

    @functools.cached_property
    def full_name(self) -> str:
        """With a digest: MLX finds a compiled kernel by its name alone, so that must change with the source."""
        return f"workbench_{self.name}_{hashlib.sha256((PRELUDE + self.source).encode()).hexdigest()[:16]}"

    @functools.cached_property
    def binary(self) -> bytes | None:
        """Its machine code for the GPU here; None: it can't be had without MLX."""
        arguments = [f"const void* {name}_" for name in self.inputs] + [f"void* {name}_" for name in self.outputs]
        casts = [f"const unsigned char* {name} = (const unsigned char*){name}_;" for name in self.inputs]
        casts += [f"unsigned char* {name} = (unsigned char*){name}_;" for name in self.outputs]
        opening = f'extern "C" __global__ void {self.full_name}({", ".join(arguments)}) {{\n'
        return compiled(PRELUDE + opening + "\n".join(casts) + self.source + "}\n")

    def __call__(
        self,
        inputs: Sequence[mx.array],
        *,
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[tuple[int, ...]],
        output_dtypes: Sequence[mx.Dtype],
        by_mlx: bool = False,
    ) -> list[mx.array]:
        """Its outputs, which are not evaluated yet.

        Args:
            grid, threadgroup: threads of the whole, and of a block.
            by_mlx: compile it through MLX although it could be had without.
        """
        shared: dict[str, Any] = {
            "inputs": list(inputs),
            "grid": grid,
            "threadgroup": threadgroup,
            "output_shapes": list(output_shapes),
            "output_dtypes": list(output_dtypes),
        }
        binary = None if by_mlx else self.binary
        if binary is None:
            return list(self._through_mlx(template=[], **shared))
        return mx.fast.precompiled_cuda_kernel(
            name=self.full_name,
            compiled_source=binary,
            scalars=[],
            ensure_row_contiguous=self.ensure_row_contiguous,
            **shared,
        )

    @functools.cached_property
    def _through_mlx(self) -> Any:
        return mx.fast.cuda_kernel(
            name=f"{self.full_name}_by_mlx",
            input_names=list(self.inputs),
            output_names=list(self.outputs),
            source=self.source,
            header=PRELUDE,
            ensure_row_contiguous=self.ensure_row_contiguous,
        )


def compiled(source: str) -> bytes | None:
    """CUDA C++ without headers as machine code (a cubin) for the GPU here.

    Returns:
        None: MLX has loaded no NVRTC here, or that does not know this GPU or refuses the source.
    """
    nvrtc, architecture = _nvrtc(), _architecture()
    if nvrtc is None or architecture is None:
        return None
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"workbench.cu", 0, None, None):
        return None
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={architecture}".encode())
        if nvrtc.nvrtcCompileProgram(program, 1, options) or nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)):
            return None
        binary = ctypes.create_string_buffer(size.value)
        return None if nvrtc.nvrtcGetCUBIN(program, binary) else binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """The very library that MLX uses, found where the system has mapped it: no other version is mixed in."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = [line.split(maxsplit=5)[-1].strip() for line in maps if "libnvrtc.so" in line]
        return ctypes.CDLL(paths[0]) if paths else None
    except OSError:
        return None


@functools.cache
def _architecture() -> str | None:
    """As NVRTC calls it ("sm_90"); None: unknown, or the hardware doesn't round to bfloat16."""
    named = str(mx.device_info(mx.gpu).get("architecture", ""))
    digits = named.removeprefix("sm_").rstrip("af")
    return f"sm_{digits}" if digits.isdecimal() and int(digits) >= _BFLOAT_SINCE else None
