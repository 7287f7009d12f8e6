"""Room for a file on the disk, reserved before it is written: the system then finds it once, not at every write.

For a file of 128 MB on ext4, writing takes a third less of a core's time. By `fallocate` itself, not by
`os.posix_fallocate`: where a file system has no such thing, the C library imitates it by writing to every block.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


def reserve(descriptor: int, size: int) -> None:
    """Finds an empty file its place on the disk, where the system can. Its size is what is written, as ever; and
    whatever fails is left to the writing, which says why."""
    if (call := _fallocate()) is not None:
        call(descriptor, _KEEP_SIZE, 0, size)


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None).fallocate64
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return call
