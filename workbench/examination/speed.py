"""How fast this machine multiplies matrices, and what keeps it from being faster. Knows no steps."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

# Measured on two x86-64 cores, mlx 0.32.4: 4 to 8 GFLOP/s with the reference BLAS that the Linux wheel links, 80 to 210
# with OpenBLAS 0.3.21 preloaded.
SLOW = 15.0


def matmul_gflops() -> float:
    """Speed of a float32 matrix product, the best of three: other processes can only slow it down."""
    size = 768 if mx.default_device().type == mx.DeviceType.cpu else 4096
    square = mx.ones((size, size))
    mx.eval(square @ square)
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        mx.eval(square @ square)
        best = min(best, time.perf_counter() - began)
    return round(2 * size**3 / best / 1e9, 1)


def advice(environment: dict[str, Any], gflops: float) -> list[str]:
    """What a user of this machine should know, a sentence each."""
    notes = []
    if environment["backend"] == "cpu":
        notes.append("On the CPU a step uses stock operations in either setting: their order of adding is fixed there.")
    blas = environment.get("blas") or {}
    if blas and blas.get("internal_api") is None and environment["system"] == "Linux" and gflops < SLOW:
        notes.append(
            f"MLX's CPU backend runs on a reference BLAS ({blas.get('library')}, {gflops:.0f} GFLOP/s). A tuned one is "
            "10 to 30 times as fast; on Debian or Ubuntu: apt-get install libopenblas0-pthread, then start Python with "
            "LD_PRELOAD=/usr/lib/$(uname -m)-linux-gnu/openblas-pthread/libblas.so.3. It has other bits: replay a run "
            "with the BLAS that it was recorded with."
        )
    if str(environment.get("jit_compiler")).startswith("none"):
        notes.append(
            "There is no g++ on PATH, so that MLX runs compiled steps uncompiled, without a word (apt-get install g++)."
        )
    return notes
