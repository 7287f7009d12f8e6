"""The numeric environment: everything outside the code that can move a bit, as found on this machine.

Recorded in the manifest and in each trace, compared before a replay. Knows machines; nothing of runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .errors import ReplayError
from .files import sha256
from .surroundings import differences as differences

# This process, so that a replay can tell whether the recording was made by another one.
PROCESS = uuid.uuid4().hex

# Variables that choose kernels, precision or thread counts (found in the libraries' sources and binaries).
_PREFIXES = ("MLX_", "GATED_", "OPENBLAS_", "OMP_", "MKL_", "BLIS_", "VECLIB_", "CUBLAS", "NVIDIA_TF32_OVERRIDE")
# Scheduling, caching and paths only: no effect on bits.
_HARMLESS = ("MLX_BFS_MAX_WIDTH", "MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_PTX_CACHE_DIR")
# Where the ranks of a data-parallel run meet; how they add is in the manifest (see `ranks.rank_setup`).
_MEETING = (
    *("MLX_RANK", "MLX_WORLD_SIZE", "MLX_HOSTFILE", "MLX_RING_VERBOSE"),
    *("MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"),
)


def numeric_environment() -> dict[str, Any]:
    """A JSON object, nested at most one level; the same on every call in one process, but for the default device and
    what the process itself sets: variables, thread counts, compilation, the mode of the smallest floats."""
    device = mx.default_device()
    on_cpu = device.type == mx.DeviceType.cpu
    linux_cpu = on_cpu and platform.system() == "Linux"
    return {
        "mlx": importlib.metadata.version("mlx"),
        "backend": "cpu" if on_cpu else "metal" if mx.metal.is_available() else "cuda",
        "device": _cpu_name() if on_cpu else _gpu(),
        "system": platform.system(),
        "machine": platform.machine(),
        "blas": _mlx_blas() if on_cpu else None,
        "libc": _libc() if linux_cpu else None,
        "jit_compiler": _jit_compiler() if linux_cpu else None,
        "compile_disabled": _compile_disabled(on_cpu),
        "flush_to_zero": _flushes_to_zero() if on_cpu else None,
        "default_dtype": str(mx.zeros(1).dtype).removeprefix("mlx.core."),
        "tf32": None if on_cpu else os.environ.get("MLX_ENABLE_TF32", "1") != "0",
        "numpy": np.__version__,
        "numpy_blas": dict(_numpy_blas()),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_PREFIXES) and name not in (*_HARMLESS, *_MEETING)
        },
        "hash_seed": _hash_seed(),
    }


def no_gpu() -> str:
    """The sentence for a machine without a GPU that MLX can use, with the remedy where only the installation is wrong.

    The packages mlx-cpu and mlx-cuda-N contain the same files, so the one installed last is the one in use.
    """
    installed = {str(one.metadata["Name"]).lower() for one in importlib.metadata.distributions()}
    cuda = sorted(name for name in installed if name.startswith("mlx-cuda"))
    if not cuda or "mlx-cpu" not in installed:
        return "this machine has no GPU that MLX can use"
    return (
        f"MLX can use no GPU here: mlx-cpu and {cuda[0]} are both installed and hold the same files; "
        f"pip uninstall mlx-cpu, then pip install --force-reinstall --no-deps {cuda[0]}"
    )


@contextlib.contextmanager
def on_device(backend: str) -> Iterator[None]:
    """Makes the recorded device type the default one for a while.

    Raises:
        ReplayError: this machine has no such device.
    """
    wanted = mx.DeviceType.cpu if backend == "cpu" else mx.DeviceType.gpu
    if not mx.is_available(mx.Device(wanted)):
        raise ReplayError(f"the run was recorded on {backend}, and {no_gpu()}")
    before = mx.default_device()
    mx.set_default_device(mx.Device(wanted))
    try:
        yield
    finally:
        mx.set_default_device(before)


def _compile_disabled(on_cpu: bool) -> bool | None:
    """Whether `mx.disable_compile()` was called. None if not; or if a variable or the lack of a compiler has the same
    effect, for these are recorded already. False if MLX compiles in spite of the variable, which came too late."""
    linux_cpu = on_cpu and platform.system() == "Linux"
    if linux_cpu and (_jit_compiler() or "").startswith("none"):
        return None
    disabled = compile_disabled()
    return None if disabled == ("MLX_DISABLE_COMPILE" in os.environ) else disabled


def compile_disabled() -> bool:
    """Whether `mx.compile` does nothing here: MLX can't be asked, but then it traces a function on every call."""
    traced = []

    def nothing(x: mx.array) -> mx.array:
        traced.append(x)
        return x

    compiled, x = mx.compile(nothing), mx.zeros(1)
    compiled(x), compiled(x)
    return len(traced) > 1


def _flushes_to_zero() -> bool | None:
    """Whether this thread, or MLX's, takes the smallest floats for zero, as some libraries switch on when they are
    loaded (Intel's FTZ and DAZ bits; such a library was linked with -ffast-math). None if not."""
    tiny = np.float32(2.0**-126) * np.float32(0.5), (mx.array(2.0**-126) * 0.5).item()
    return True if 0.0 in tiny else None


@functools.cache
def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    return platform.processor() or "unknown"


def _gpu() -> str:
    info = mx.device_info()
    return " ".join(str(info[key]) for key in ("device_name", "architecture", "compute_capability") if key in info)


class _Symbol(ctypes.Structure):
    """`Dl_info` of dlfcn.h."""

    _fields_ = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


def _defining_file(library: ctypes.CDLL, symbol: str) -> Path | None:
    """The shared object from which `symbol` is taken when looked up through `library`."""
    try:
        address = ctypes.cast(getattr(library, symbol), ctypes.c_void_p)
    except AttributeError:
        return None
    info = _Symbol()
    dladdr = ctypes.CDLL(None).dladdr
    dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Symbol)]
    return Path(os.fsdecode(info.file)) if dladdr(address, ctypes.byref(info)) and info.file else None


def _mlx_blas() -> dict[str, Any]:
    """The BLAS that MLX's CPU backend really calls: a preloaded library comes before the one it was linked with."""
    if platform.system() == "Darwin":
        return {"library": "Accelerate", "version": platform.mac_ver()[0]}
    facts = dict(_library())
    for pool in _pools():  # nothing for the reference BLAS; for a thin libblas, the library behind it
        if not _is_numpys(pool):
            facts |= {key: pool.get(key) for key in ("internal_api", "version", "architecture", "num_threads")}
    return facts


@functools.cache
def _library() -> tuple[tuple[str, Any], ...]:
    """That BLAS, as a file."""
    library = _defining_file(ctypes.CDLL(None), "cblas_sgemm")
    if library is None:
        for path in Path(mx.__file__).parent.glob("lib/libmlx.so"):
            library = _defining_file(ctypes.CDLL(str(path)), "cblas_sgemm")
    if library is None:
        return (("library", "unknown"),)
    resolved = library.resolve()
    return (("library", resolved.name), ("sha256", sha256(resolved.read_bytes())[:16]))


@functools.cache
def _libc() -> str | None:
    """The C library, from which MLX's CPU backend has tanhf, powf, log1pf and others."""
    name, version = platform.libc_ver()
    return f"{name} {version}" if name and version else None


def _hash_seed() -> str:
    """What Python hashes texts with, and so the order of a set of texts: a number, or "random", another one in each
    process. Only what was set when the process began counts."""
    if not sys.flags.hash_randomization:
        return "0"
    asked = None if sys.flags.ignore_environment else os.environ.get("PYTHONHASHSEED")
    with contextlib.suppress(OSError):
        began = Path("/proc/self/environ").read_bytes().split(b"\0")
        if f"PYTHONHASHSEED={asked}".encode() not in began:
            asked = None
    return asked if asked is not None and asked.isdecimal() else "random"


@functools.cache
def _numpy_blas() -> tuple[tuple[str, Any], ...]:
    """The BLAS behind numpy, which computes the logged norms. Its thread count can't matter: see `host.square_sum`."""
    for pool in _pools():
        if _is_numpys(pool):
            return (("library", Path(pool["filepath"]).name), ("architecture", pool.get("architecture")))
    config = np.show_config(mode="dicts")
    found = config.get("Build Dependencies", {}).get("blas", {}) if isinstance(config, dict) else {}
    return (("library", found.get("name", "unknown")), ("version", found.get("version")))


def _is_numpys(pool: dict[str, Any]) -> bool:
    parents, folder = Path(pool["filepath"]).resolve().parents, Path(np.__file__).parent
    return folder in parents or folder.with_name("numpy.libs") in parents


def _pools() -> list[dict[str, Any]]:
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


@functools.cache
def _jit_compiler() -> str | None:
    """MLX compiles fused CPU kernels with the g++ on PATH; without one it runs uncompiled and says nothing."""
    if shutil.which("g++") is None:
        return "none (MLX runs uncompiled)"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["g++", "-dumpfullversion", "-dumpversion"]
        return f"g++ {subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()}"
    return "g++ (version unknown)"
