"""Memory that is mapped before it is needed, for a process of the workbench's own, on Linux with glibc.

MLX's CPU backend asks the C library for each array, and glibc maps and unmaps each large one by itself: a new process
that replays one step of a GPT of 10.7M parameters takes 224,000 page faults, a third of them for memory that it had
before, and the step waits for them (measured). Here freed memory is kept, and another thread has the system map what
will be needed while Python is still importing. Pages of 2 MiB would need 11,000 faults; but where a virtual machine
gives free ones back to its host, having them again took 5 times as long as all those faults (measured). Where an array
lies moves no bit of it. Knows the C library and files of /proc; nothing of arrays, and imports no MLX.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path

from .short_lived import ours

# From glibc's malloc.h and Linux's mman-common.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
_MADV_POPULATE_WRITE = 23  # since Linux 5.14; an older one refuses it
_PAGE = 1 << 12
_AT_ONCE = 1 << 21  # bytes: as long as one is being mapped, whoever maps anything else waits

_COMMIT = Path("/proc/sys/vm/overcommit_memory")
_MEMORY = Path("/proc/meminfo")


def warm(size: int) -> int:
    """Has a thread map a heap for the C library, from which all arrays come then. What is freed, the process keeps.

    To be called once, early. In a process that somebody else may go on with, it does nothing.

    Args:
        size: bytes that are needed at a time; at most a quarter of what is available is mapped.

    Returns:
        Bytes that are being mapped; 0 where the system has no such call, or promises no more memory than it has.
    """
    try:
        if not ours() or not sys.platform.startswith("linux") or _COMMIT.read_text().strip() == "2":
            return 0
        size = min(size, _available() // 4) // _AT_ONCE * _AT_ONCE
        library = ctypes.CDLL(None)
        library.mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    except (OSError, ValueError, AttributeError):  # no /proc, another C library
        return 0
    library.malloc.argtypes, library.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.free.argtypes = [ctypes.c_void_p]
    # One heap for all threads, which never shrinks: nothing is mapped by itself, and unmapped.
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1))
    if size == 0 or not all(library.mallopt(what, value) for what, value in settings):
        return 0
    start = library.malloc(size)
    if not start:
        return 0
    library.free(start)  # and it stays a part of the heap

    def populate() -> None:
        first = -(-start // _PAGE) * _PAGE
        for place in range(first, start + size - _AT_ONCE, _AT_ONCE):  # changes no byte that is in use by then
            if library.madvise(place, _AT_ONCE, _MADV_POPULATE_WRITE):
                return

    threading.Thread(target=populate, daemon=True).start()
    return size


def _available() -> int:
    """Bytes of memory that can be had without taking any from other processes."""
    lines = [line for line in _MEMORY.read_text().splitlines() if line.startswith("MemAvailable")]
    return int(lines[0].split()[1]) * 1024 if lines else 0  # a kernel before 3.14 does not say
