"""The flushing of a file begun while it is written, so that less is left to wait for at its end.

It makes nothing durable: only an `fsync` does, of which it is the first part. For 128 MB on ext4 the two together take
a third less time than to write first and flush then; and small files whose places on the disk were found early are
flushed by one commit of the journal. By `sync_file_range`, which only Linux has.
"""

from __future__ import annotations

from ctypes import c_int, c_int64, c_uint

from .linux_call import linux_call

_WRITE = 2  # SYNC_FILE_RANGE_WRITE of linux/fs.h: begins to write what is not being written yet, and waits for nothing


def begin(descriptor: int, start: int, size: int) -> None:
    """Has the system begin to write a stretch of a file to the disk, where it can. Whatever fails is left to the
    flushing, which says why."""
    if (call := linux_call("sync_file_range", c_int, c_int64, c_int64, c_uint)) is not None:
        call(descriptor, start, size, _WRITE)
