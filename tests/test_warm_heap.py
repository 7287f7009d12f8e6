"""A process of our own may keep its memory and skip looking for garbage; somebody else's is left alone."""

import gc
import subprocess
import sys

import pytest

from workbench import short_lived, warm_heap

OURS = """
import sys
from types import SimpleNamespace
sys.modules["__main__"].__spec__ = SimpleNamespace(name="workbench.__main__")
"""


def printed(code):
    done = subprocess.run([sys.executable, "-c", OURS + code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_nothing_is_changed_in_a_process_of_somebody_else():
    frozen = gc.get_freeze_count()
    assert not short_lived.ours()
    assert warm_heap.warm(1 << 28) == 0
    short_lived.importing()
    assert gc.isenabled()
    short_lived.imported()
    short_lived.ending()
    assert gc.get_freeze_count() == frozen


def test_our_own_process_looks_for_garbage_only_once_all_is_imported():
    code = """
import gc
from workbench import short_lived
short_lived.importing(); print(gc.isenabled())
short_lived.imported(); print(gc.isenabled(), gc.get_freeze_count() > 0)
"""
    assert printed(code) == ["False", "True", "True"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_arrays_of_our_own_process_come_from_a_heap_that_does_not_shrink():
    code = """
from pathlib import Path
import numpy as np
from workbench import warm_heap
def heap():  # numpy has the system treat parts of it in another way, so that they are listed apart
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("[heap]")]
    places = [int(place, 16) for line in lines for place in line.split()[0].split("-")]
    return min(places), max(places)
size = warm_heap.warm(1 << 27)  # less where memory is short
print(size)
before = heap()
array = np.ones(size // 16); array += 1  # 64 MiB of 128, which would else be mapped by themselves
print(before[0] <= array.ctypes.data < before[1], array.sum() == 2 * array.size)
del array
print(heap()[1] >= before[1] >= before[0] + size)
"""
    warmed, *found = printed(code)
    if int(warmed) == 0:
        pytest.skip("this system promises no more memory than it has, or has another C library")
    assert int(warmed) <= 1 << 27 and found == ["True", "True", "True"]
