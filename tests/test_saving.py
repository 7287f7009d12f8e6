"""Saving beside training: in order, bounded, nothing lost in silence, nothing left running."""

import threading

import pytest
from helpers import python

from workbench.saving import Save, Saver


def test_everything_is_saved_in_order_and_off_this_thread():
    saver, done = Saver(2), []
    for number in range(20):
        saver.put(Save(number, lambda number=number: done.append((number, threading.current_thread().name))))
    saver.wait()
    assert [number for number, _ in done] == list(range(20)) and saver.idle and saver.failed() == []
    assert {name for _, name in done} == {"workbench-saver"}
    for thread in threading.enumerate():
        if thread.name == "workbench-saver":
            thread.join(30)  # it lives only while there is something to save
    assert "workbench-saver" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_more_than_so_many_are_unfinished(limit):
    saver, go, arrived, begun = Saver(limit), threading.Event(), threading.Event(), []

    def slow(number):
        begun.append(number)
        arrived.set()
        assert go.wait(30)

    for number in range(limit):
        saver.put(Save(number, lambda number=number: slow(number)))
    last = threading.Thread(target=lambda: saver.put(Save("last", lambda: begun.append("last"))))
    last.start()
    assert arrived.wait(30)
    last.join(0.2)
    assert last.is_alive() and begun == [0]  # the loop waits, and the first is still being written
    go.set()
    last.join(30)
    saver.wait()
    assert begun == [*range(limit), "last"]


def test_with_a_limit_of_0_each_is_waited_for():
    saver, done = Saver(0), []
    saver.put(Save(1, lambda: done.append(1)))
    assert done == [1]


def test_a_failure_is_told_though_somebody_asks_while_it_is_noted():
    """It was added to the list that had just been handed out."""
    saver, told = Saver(2), []

    class Asked:
        @property
        def key(self):
            told.extend(saver.failed())
            return "a"

        def perform(self):
            raise OSError(28, "No space left on device")

    saver.put(Asked())
    saver.wait()
    assert [key for key, _ in [*told, *saver.failed()]] == ["a"]


def test_what_failed_is_told_once_and_stops_nothing():
    saver, done = Saver(2), []

    def fail():
        raise OSError(28, "No space left on device")

    saver.put(Save("a", fail))
    saver.put(Save("b", lambda: done.append("b")))
    saver.put(Save("c", lambda: 1 / 0))
    saver.wait()
    assert [(key, type(error)) for key, error in saver.failed()] == [("a", OSError), ("c", ZeroDivisionError)]
    assert done == ["b"] and saver.failed() == []


def test_what_was_saved_is_held_no_longer():
    import gc
    import weakref

    class State:
        pass

    saver, state = Saver(2), State()
    seen = weakref.ref(state)
    saver.put(Save(1, lambda state=state: None))
    saver.wait()
    del state
    gc.collect()
    assert seen() is None


def test_an_interpreter_that_ends_waits_for_it(tmp_path):
    code = f"""
import time
from pathlib import Path
from workbench.saving import Save, Saver
saver = Saver(2)
for name in "ab":
    saver.put(Save(name, lambda name=name: (time.sleep(0.2), Path({str(tmp_path)!r}, name).touch())))
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
