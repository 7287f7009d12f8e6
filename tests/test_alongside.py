"""Work beside the caller's: done once, by whoever comes first, and its needs are let go of when it is done."""

import threading
import weakref
from functools import partial

import mlx.core as mx
import pytest

from workbench import alongside
from workbench.alongside import Alongside

HERE = threading.get_ident()


@pytest.fixture(autouse=True)
def as_without_a_gpu(monkeypatch):
    monkeypatch.setattr(alongside, "_has_gpu", lambda: False)


@pytest.mark.parametrize("here", [True, False])
def test_what_came_of_it_can_be_asked_for_again(here):
    calls = []
    work = Alongside(lambda: calls.append(1) or len(calls), here=here)
    assert [work.result(), work.result()] == [1, 1] and calls == [1]


@pytest.mark.parametrize("here", [True, False])
def test_its_failure_belongs_to_who_asks(here):
    work = Alongside(lambda: 1 // 0, here=here)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            work.result()


def test_a_ctrl_c_stops_the_caller_who_does_it_itself():
    """Kept for who asks, it would come when all files of a checkpoint are read; or never, if another was damaged."""

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Alongside(interrupted, here=True)


def test_a_thread_does_it():
    begun = threading.Event()
    work = Alongside(lambda: (begun.set(), threading.get_ident())[1])
    assert begun.wait(10) and work.result() != HERE
    assert Alongside(threading.get_ident, here=True).result() == HERE


def test_a_gpu_is_not_shared_with_the_caller(monkeypatch):
    monkeypatch.setattr(alongside, "_has_gpu", lambda: True)
    assert Alongside(threading.get_ident).result() == HERE


def test_who_asks_does_it_where_no_thread_is_free():
    """So work that waits for other work never waits for ever, however many there are."""

    def nested(depth):
        return 1 + Alongside(lambda: nested(depth - 1)).result() if depth else 0

    works = [Alongside(lambda: nested(4)) for _ in range(9)]
    assert [work.result() for work in works] == [4] * 9


def test_who_asks_does_it_where_the_system_gives_no_thread(monkeypatch):
    class Refusing:
        def submit(self, work):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(alongside, "_pool", Refusing)
    assert Alongside(threading.get_ident).result() == HERE


def test_what_it_needs_is_let_go_of_when_it_is_done():
    class Needed:
        pass

    needed = Needed()
    gone = weakref.ref(needed)
    work = Alongside(partial(type, needed))
    del needed
    assert work.result() is Needed
    # The thread may be on its way out of the call.
    Alongside(lambda: None).result()
    assert gone() is None


def test_arrays_are_measured_in_threads_that_stay():
    """MLX keeps a thread for each that evaluated anything: a new one each time would leave as many."""
    a = mx.arange(10.0)
    mx.eval(a)

    def summed():
        found = mx.sum(a * a)
        mx.eval(found)
        return found.item(), threading.get_ident()

    found = [Alongside(summed).result() for _ in range(20)]
    assert {value for value, _ in found} == {285.0}
    assert len({thread for _, thread in found} - {HERE}) <= alongside._THREADS
