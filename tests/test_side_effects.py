"""A step that changes what is outside of Python's memory is not performed twice; nor is one that might."""

import ctypes
import decimal
import gc
import mmap
import multiprocessing
import os
import subprocess
import sys
import threading
import warnings
from multiprocessing import shared_memory
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from workbench import Recorder
from workbench.shared_settings import ProcessSettings
from workbench.side_effects import side_effects


def a_number():
    value = multiprocessing.Value("i", 0)

    def count():
        value.value += 1
        return value.value

    yield count


def shared_bytes():
    shared = shared_memory.SharedMemory(create=True, size=8)

    def count():
        shared.buf[0] += 1
        return shared.buf[0]

    yield count
    shared.close()
    shared.unlink()


def a_process():
    echo = "import sys\nfor n, line in enumerate(sys.stdin, 1): print(n, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", echo], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )

    def count():
        process.stdin.write("\n")
        process.stdin.flush()
        return int(process.stdout.readline())

    yield count
    process.communicate()


def a_connection():
    mine, its = multiprocessing.Pipe()
    for number in range(1, 9):
        its.send(number)

    def count():
        return mine.recv()

    yield count
    mine.close()
    its.close()


def a_pipe():
    reading, writing = os.pipe()
    os.write(writing, bytes(range(1, 9)))

    def count():
        return os.read(reading, 1)[0]

    yield count
    os.close(reading)
    os.close(writing)


def of_a_file(change):
    def begun(folder):
        path = folder / "count"
        path.write_text("")
        os.utime(path, (0, 0))
        yield lambda: change(path)

    return begun


def written(path):
    count = len(path.read_text()) + 1
    path.write_text("x" * count)
    return count


def appended(path):
    with open(path, "a") as file:
        file.write("\n")
    with open(path) as file:
        return len(file.readlines())


def touched(path):
    count = int(os.stat(path).st_mtime) + 1
    os.utime(path, (count, count))
    return count


def by_descriptor(path):
    at = os.open(path, os.O_RDWR | os.O_APPEND)
    os.write(at, b"x")
    os.close(at)
    return path.stat().st_size


def made(path):
    count = len(list(path.parent.glob("made*"))) + 1
    os.mkdir(path.parent / f"made{count}")
    return count


def a_buffer_in_c():
    buffer = (ctypes.c_int * 1)()

    def count():
        buffer[0] += 1
        return buffer[0]

    yield count


def a_memory_map():
    held = mmap.mmap(-1, 8)

    def count():
        held[0] += 1
        return held[0]

    yield count
    held.close()


COUNTERS = {one.__name__: one for one in (a_number, shared_bytes, a_process, a_connection, a_pipe)}
COUNTERS |= {one.__name__: one for one in (a_buffer_in_c, a_memory_map)}
CHANGES = {one.__name__: of_a_file(one) for one in (written, appended, touched, by_descriptor, made)}


def recorded(path, count, steps=2):
    model, optimizer, counts = nn.Linear(2, 2), optim.SGD(0.1), []

    def step(x):
        loss, gradients = nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x))))(model, x)
        optimizer.update(model, gradients)
        return loss + count()

    with Recorder(path, model, optimizer, step_fn=step) as recorder:
        for number in range(steps):
            counts.append(round(recorder.step(mx.full((3, 2), number + 1.0)).item()))
    return counts, recorder


@pytest.mark.parametrize("name", [*COUNTERS, *CHANGES])
def test_what_is_outside_of_memory_is_moved_once_a_step(tmp_path, name):
    begun = COUNTERS[name]() if name in COUNTERS else CHANGES[name](tmp_path)
    count = next(begun)
    loss = []

    def noting():
        loss.append(count())
        return 0

    with pytest.warns(UserWarning, match="the self-check is unverified: step 1 was not performed twice") as told:
        recorded(tmp_path / "run", count)
    assert not any("performed again" in str(one.message) for one in told)
    assert count() == 3, "two steps and this"
    next(begun, None)


def seen(action):
    with side_effects() as did:
        action()
    return did


def test_what_a_step_does_is_named(tmp_path):
    path = tmp_path / "a"
    assert seen(lambda: path.write_text("x")) == [f"it opens {path} for writing"]
    assert seen(path.read_text) == [] and seen(lambda: open(path, "rb").close()) == []
    assert seen(lambda: os.close(os.open(path, os.O_RDONLY))) == []
    assert seen(lambda: open(os.devnull, "w").close()) == [] and seen(lambda: os.write(1, b"")) == []
    assert seen(lambda: mx.save(str(tmp_path / "b.npy"), mx.ones(1))) == [f"it opens {tmp_path / 'b.npy'} for writing"]
    assert seen(lambda: os.replace(path, tmp_path / "c")) == [f"it calls os.replace of {path}"]
    assert "it starts a process (subprocess.Popen)" in seen(lambda: subprocess.run([sys.executable, "-c", ""]))


def test_another_thread_is_not_the_step(tmp_path):
    def elsewhere():
        thread = threading.Thread(target=lambda: Path(tmp_path / "a").write_text("x"))
        thread.start()
        thread.join()

    assert seen(elsewhere) == [] and (tmp_path / "a").read_text() == "x"


def test_afterwards_all_is_as_it_was():
    import builtins
    import io

    def places():
        return builtins.open, io.open, os.open, os.read, os.utime, subprocess.Popen.__init__, mx.save

    before = places()
    with pytest.raises(ZeroDivisionError), side_effects():
        assert places() != before
        _ = 1 / 0
    assert places() == before


@pytest.fixture
def tanh():
    ordinary = nn.Tanh.__call__
    yield ordinary
    nn.Tanh.__call__ = ordinary


def test_a_function_of_ones_own_on_a_class_of_mlx_is_looked_into(tmp_path, tanh):
    calls = [0]

    def counting(self, x):
        calls[0] += 1
        return tanh(self, x)

    nn.Tanh.__call__ = counting
    model, optimizer = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), optim.SGD(0.1)

    def step(x):
        loss, gradients = nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x))))(model, x)
        optimizer.update(model, gradients)
        return loss

    with Recorder(tmp_path / "run", model, optimizer, step_fn=step) as recorder:
        with pytest.warns(UserWarning, match=r"changes what no checkpoint holds: .*Tanh.__call__.calls"):
            recorder.step(mx.ones((3, 2)))
        assert calls == [1]


def test_an_attribute_on_a_class_of_mlx_is_put_back(tmp_path):
    model, optimizer = nn.Linear(2, 2), optim.SGD(0.1)

    def step(x):
        nn.Linear._count = getattr(nn.Linear, "_count", 0) + 1
        loss, gradients = nn.value_and_grad(model, lambda model, x: mx.mean(mx.square(model(x))))(model, x)
        optimizer.update(model, gradients)
        return loss

    try:
        with Recorder(tmp_path / "run", model, optimizer, step_fn=step) as recorder:
            with pytest.warns(UserWarning, match=r"changes what no checkpoint holds: model.Linear._count"):
                recorder.step(mx.ones((3, 2)))
            assert nn.Linear._count == 1
    finally:
        del nn.Linear._count


SETTINGS = {
    "np.seterr": (lambda: np.seterr(over="ignore")["over"] == "warn" and np.seterr(over="raise"), np.geterr),
    "the thresholds of gc": (lambda: gc.set_threshold(gc.get_threshold()[0] + 1), gc.get_threshold),
    "the switch interval": (lambda: sys.setswitchinterval(sys.getswitchinterval() + 0.001), sys.getswitchinterval),
    "the context of decimal": (
        lambda: setattr(decimal.getcontext(), "prec", decimal.getcontext().prec + 1),
        lambda: decimal.getcontext().prec,
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_process_are_moved_once_a_step_and_named(tmp_path, name):
    change, read = SETTINGS[name]
    before = ProcessSettings()
    try:
        change()
        expected = read()
        before.put_back()
        assert before.moved() == []
        with pytest.warns(UserWarning, match=f"changes what no checkpoint holds: .*{name}"):
            recorded(tmp_path / "run", lambda: change() and 0 or 0, steps=1)
        assert read() == expected
    finally:
        before.put_back()


def test_attributes_of_sys_and_mlx_and_filters_of_warnings_are_put_back(tmp_path):
    before = ProcessSettings()

    def count():
        sys.counted = getattr(sys, "counted", 0) + 1
        mx.counted = getattr(mx, "counted", 0) + 1
        warnings.filters.append(("ignore", None, UserWarning, f"a{len(warnings.filters)}", 0))
        return 0

    try:
        filters = len(warnings.filters)
        recorded(tmp_path / "run", count, steps=1)
        assert (sys.counted, mx.counted, len(warnings.filters)) == (1, 1, filters + 1)
    finally:
        before.put_back()
    assert not hasattr(sys, "counted") and not hasattr(mx, "counted") and len(warnings.filters) == filters
