"""The flushing of a file begun while it is written, so that less is left to wait for at its end.

It makes nothing durable: only an `fsync` does, of which it is the first part. For 128 MB on ext4 the two together take
a third less time than to write first and flush then; and small files whose places on the disk were found early are
flushed by one commit of the journal. By `sync_file_range`, which only Linux has.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begins to write what is not being written yet, and waits for nothing


def begin(descriptor: int, start: int, size: int) -> None:
    """Has the system begin to write a stretch of a file to the disk, where it can. Whatever fails is left to the
    flushing, which says why."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, start, size, _WRITE)


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None).sync_file_range
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call
