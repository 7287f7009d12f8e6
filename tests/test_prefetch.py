"""Prefetching changes neither batches nor cursors, and no error of it is lost."""

import subprocess
import sys
import threading
import time

import pytest
from windows import equal, sampler

from workbench.errors import DataError
from workbench.trainer.prefetch import Prefetcher

pytest_plugins = ["window_fixtures"]


def in_time(function):
    """The outcome of `function`, or a failure instead of a test that hangs."""
    outcome = []

    def call():
        try:
            outcome.append(("value", function()))
        except BaseException as error:
            outcome.append(("error", error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(5)
    assert outcome, "still waiting after 5 s"
    kind, value = outcome[0]
    if kind == "error":
        raise value
    return value


def wait_until(condition):
    while not condition():
        time.sleep(0.001)


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "workbench-prefetch"]


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetching_changes_neither_batches_nor_cursors(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        assert stream.state_dict() == plain.state_dict()
        for _ in range(30):
            assert equal(in_time(stream.__next__), next(plain))
            assert stream.state_dict() == plain.state_dict()
        assert bool(prefetch_threads()) == (depth > 0)
    assert not prefetch_threads()
    assert stream.state_dict() == plain.state_dict()


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_prefetcher_goes_where_it_is_told(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        for target in (9, 2, 2, 40):
            plain.seek(target)
            stream.load_state_dict(plain.state_dict())
            assert stream.state_dict() == plain.state_dict()
            for _ in range(5):
                assert equal(in_time(stream.__next__), next(plain))
                assert stream.state_dict() == plain.state_dict()
        assert len(prefetch_threads()) == (depth > 0)
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 4])
def test_a_refused_cursor_loses_nothing(corpus, depth):
    plain = sampler(corpus)
    with Prefetcher(sampler(corpus), depth) as stream:
        for _ in range(3):
            assert equal(in_time(stream.__next__), next(plain))
            in_time(lambda: wait_until(lambda: stream.sampler.step == plain.step + depth))  # there is something to lose
            with pytest.raises(DataError, match="seed"):
                stream.load_state_dict({"seed": 7, "epoch": 0, "index": 0})
            assert stream.state_dict() == plain.state_dict()


class Counter:
    """A sampler of 1, 2, 3, ... that reports each draw, raises at one of them, and keeps handing out one dict."""

    def __init__(self, fails_at=None, error=ValueError):
        self.cursor = {"drawn": 0}
        self.fails_at, self.error = fails_at, error
        self.reached = threading.Condition()

    def __next__(self):
        if self.cursor["drawn"] + 1 == self.fails_at:
            raise self.error("no more")
        with self.reached:
            self.cursor["drawn"] += 1
            self.reached.notify_all()
        return self.cursor["drawn"]

    def state_dict(self):
        return self.cursor

    def load_state_dict(self, state):
        self.cursor.update(state)


def test_prefetcher_draws_at_most_depth_ahead_and_hides_it():
    counter = Counter()
    with Prefetcher(counter, 3) as stream:
        assert counter.cursor["drawn"] == 0  # nothing before the first batch is asked for
        for taken in (1, 2):
            assert in_time(stream.__next__) == taken
            with counter.reached:
                assert counter.reached.wait_for(lambda taken=taken: counter.cursor["drawn"] == taken + 3, timeout=5)
                # Time enough for a thread that ignores the bound.
                assert not counter.reached.wait_for(lambda taken=taken: counter.cursor["drawn"] > taken + 3, 0.05)
            assert stream.state_dict() == {"drawn": taken}
            stream.state_dict()["drawn"] = 99  # a copy
            assert stream.state_dict() == {"drawn": taken}


@pytest.mark.parametrize("error", [ValueError, StopIteration, KeyboardInterrupt])
def test_an_error_comes_where_its_batch_would_have(error):
    with Prefetcher(Counter(fails_at=3, error=error), 4) as stream:
        assert [in_time(stream.__next__), in_time(stream.__next__)] == [1, 2]
        for _ in range(3):
            with pytest.raises(error, match="no more"):
                in_time(stream.__next__)
        assert stream.state_dict() == {"drawn": 2}
        stream.load_state_dict({"drawn": 7})  # past the fault: it goes on
        assert in_time(stream.__next__) == 8
    assert not prefetch_threads()


def test_close_is_final_and_harmless_at_any_time():
    for taken in (0, 1, 5):
        stream = Prefetcher(Counter(), 2)
        for _ in range(taken):
            in_time(stream.__next__)
        in_time(stream.close)
        in_time(stream.close)
        assert not prefetch_threads()
        assert stream.state_dict() == {"drawn": taken}
        for use in (stream.__next__, lambda stream=stream: stream.load_state_dict({"drawn": 0})):
            with pytest.raises(DataError, match="closed"):
                in_time(use)
        assert not prefetch_threads()


def test_prefetcher_depth_is_checked(corpus):
    for depth in (-1, True, 1.5):
        with pytest.raises(DataError, match=f"depth is {depth!r}"):
            Prefetcher(sampler(corpus), depth)


def test_an_unclosed_prefetcher_does_not_keep_the_process_alive():
    code = """
from workbench.trainer.prefetch import Prefetcher
class Endless:
    def __next__(self): return 1
    def state_dict(self): return {}
stream = Prefetcher(Endless(), 2)
print(next(stream))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr, done.returncode) == ("1\n", "", 0)


def test_the_module_imports_neither_mlx_nor_pandas():
    code = "import sys, workbench.trainer.prefetch; print([m for m in ('mlx', 'pandas', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert done.stdout.strip() == "['numpy']", done.stderr  # numpy: the list can show something
