"""Performing the first step twice, to see whether it can be replayed, leaves no trace in what a step keeps outside."""

import collections
import random
import threading

import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, ScaledJob, mlp, mse
from kept_values import (
    Ring,
    averaged,
    averaged_in_place,
    bound,
    bound_next,
    buffered,
    by_default,
    cached,
    cached_with_memory,
    caught,
    counted_globally,
    cycled,
    drawn,
    drawn_with_numpy,
    generated,
    in_a_queue,
    in_a_set,
    in_a_text,
    in_a_tuple,
    in_bytes,
    listed,
    mapped,
    of_the_class,
    of_the_function,
    of_the_module,
    ordered,
    plain,
    queued,
    read,
    recorded,
    slotted,
)

import workbench as wb
from workbench.errors import ExperimentError
from workbench.standins import other_threads

TWO = r"step 2 can't be replayed: it depends on what step 1 changed beside its state, .*"
NUMBER = r"step 1 can't be replayed: the step changes a number that no checkpoint holds, .*"
MOVED = r"step 1 can't be replayed: it takes something from .*"
DRAWN = r"step 1 can't be replayed: it draws random numbers from .*"
OTHER = r"step 1 can't be replayed: performed again from the same state, .*no checkpoint holds: .*"

REFUSED = [
    (listed, TWO + r"norms \(a list\)"),
    (bound, TWO + r"norms \(a list\)"),
    (queued, TWO + r"norms \(a deque\)"),
    (slotted, TWO + r"held\.norms \(a list\)"),
    (mapped, OTHER + r"norms \(a dict\)"),
    (buffered, TWO + r"norms \(a numpy array\)"),
    (in_bytes, OTHER + r"seen \(a buffer\)"),
    (in_a_text, OTHER + r"text \(a stream\)"),
    (ordered, OTHER + r"scales \(the order of a dict\)"),
    (by_default, TWO + r"default 0 \(a list\), step_fn\.habit\.kept \(a deque\)"),
    (in_a_queue, MOVED + r"scales \(a queue.Queue\)"),
    (averaged, OTHER + "mean"),
    (averaged_in_place, OTHER + "mean"),
    (of_the_module, OTHER + r"SHARED\.seen \(a list\)"),
    (Ring, TWO + r"values \(a numpy array\)"),
    (counted_globally, OTHER + "COUNT"),
    (of_the_class, OTHER + r"Counted\.calls"),
    (of_the_function, OTHER + r"habit\.calls"),
    (cycled, MOVED + r"scales \(a itertools.cycle\)"),
    (bound_next, MOVED + r"scale "),
    (generated, MOVED + r"given \(a generator\)"),
    (caught, MOVED + r"scales \(a list_iterator\)"),
    (read, MOVED + r"file \(a _io.TextIOWrapper\)"),
    (cached_with_memory, TWO + r"kept \(a cache\)"),
    (drawn, DRAWN + "own"),
    (drawn_with_numpy, DRAWN + "own"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED, ids=lambda one: getattr(one, "__name__", ""))
def test_what_a_later_step_depends_on_is_named_and_refused(tmp_path, make, words):
    with pytest.raises(ExperimentError, match=words):
        recorded(tmp_path / "run", make)


@pytest.mark.parametrize("make", [make for make, _ in REFUSED] + [in_a_set, in_a_tuple, cached])
def test_without_the_check_it_trains_as_the_plain_loop(tmp_path, make):
    assert recorded(tmp_path / "run", make, self_check=False)[0] == plain(make)


@pytest.mark.parametrize("make", [in_a_set, in_a_tuple])
def test_what_can_not_be_put_back_is_not_performed_twice_and_unverified(tmp_path, make):
    losses, said = recorded(tmp_path / "run", make)
    assert losses == plain(make)
    assert any(one.startswith("the self-check is unverified: step 1 was not performed twice, for it ") for one in said)


def test_a_cache_is_left_with_what_it_held(tmp_path):
    assert recorded(tmp_path / "run", cached) == (plain(cached), [])


def logging_only(kind, add):
    def make():
        seen = kind()
        return lambda norm: (add(seen, norm), 0.5)[1]

    return make


LOGS = [
    logging_only(list, lambda seen, norm: seen.append(norm)),
    logging_only(collections.deque, lambda seen, norm: seen.appendleft(norm)),
    logging_only(dict, lambda seen, norm: seen.__setitem__(norm, 1)),
    logging_only(lambda: np.zeros(3), lambda seen, norm: seen.__setitem__(slice(None), norm)),
]


@pytest.mark.parametrize("make", LOGS, ids=["list", "deque", "dict", "array"])
def test_what_no_step_depends_on_is_recorded_and_replays(tmp_path, make):
    losses, said = recorded(tmp_path / "run", make)
    assert losses == plain(make)
    assert len(said) == 1 and said[0].startswith("the step changes what no checkpoint holds: step_fn.habit.seen (a ")
    job = ScaledJob(make())
    own = wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step)
    assert wb.open_run(tmp_path / "run").replay(5, experiment=own, with_probe=False).exact


class Clip:
    """The remedy for AutoClip's list: it is in the checkpoints."""

    def __init__(self):
        self.norms = []

    def __call__(self, norm):
        self.norms.append(norm)
        return 1 / (1 + np.mean(self.norms))

    def state_dict(self):
        return {"norms": self.norms}

    def load_state_dict(self, state):
        self.norms[:] = state["norms"]


def test_handed_over_as_extra_it_is_recorded_and_replays(tmp_path):
    clip = Clip()
    losses, said = recorded(tmp_path / "run", lambda: clip, extra={"clip": clip}, save_every=3)
    assert losses == plain(Clip) and said == []
    job = ScaledJob(other := Clip())
    own = wb.Experiment(job.model, job.optimizer, mse, Points(), step_fn=job.step, extra={"clip": other})
    assert [trace.exact for trace in wb.open_run(tmp_path / "run").replay(range(1, 7), experiment=own)] == [True] * 6


def test_a_log_has_as_many_entries_as_there_were_steps(tmp_path):
    seen = []
    recorded(tmp_path / "run", lambda: lambda norm: seen.append(norm) or 0.5)
    assert len(seen) == 6 == len(set(seen))


def test_a_refusal_leaves_everything_at_its_start(tmp_path):
    seen, scales = {"all": [], "count": 0}, iter([1.0, 0.5])

    def habit(norm):
        seen["all"].append(norm)
        seen["count"] += 1
        return 0.5 if seen["count"] < 100 else 0.25

    with pytest.raises(ExperimentError, match="seen.count"):
        recorded(tmp_path / "run", lambda: habit)
    assert seen == {"all": [], "count": 0} and not (tmp_path / "run").exists()
    with pytest.raises(ExperimentError, match="list_iterator"):
        recorded(tmp_path / "run", lambda: lambda norm: next(scales))
    assert list(scales) == [0.5]  # moved on by the step itself, and not once more


def test_the_generators_of_the_process_are_drawn_from_once(tmp_path):
    def habit(norm):
        return 0.5 + 0 * (random.random() + np.random.rand())

    random.seed(1), np.random.seed(1)
    recorded(tmp_path / "run", lambda: habit)
    after = random.random(), np.random.rand()
    random.seed(1), np.random.seed(1)
    for _ in range(6):
        random.random(), np.random.rand()
    assert after == (random.random(), np.random.rand())


def test_what_a_sampler_keeps_beside_its_cursor_is_put_back(tmp_path):
    class Noting(Points):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __next__(self):
            self.seen.append(self.number)
            return super().__next__()

    sampler, model = Noting(), mlp()
    with wb.Recorder(tmp_path / "run", model, optim.SGD(0.1), mse, sampler) as recorder:
        for batch in recorder.batches(4):
            recorder.step(batch)
    assert sampler.seen == [0, 1, 2, 3]


def test_another_thread_is_not_taken_for_the_step(tmp_path):
    filled, stop = [], threading.Event()

    def fill():
        while not stop.wait(0.0005):
            filled.append(len(filled))

    def habit(norm):
        return 0.5 + 0 * len(filled)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        assert other_threads() == [thread.name]
        recorded(tmp_path / "run", lambda: habit)
    finally:
        stop.set()
        thread.join()
    assert filled == list(range(len(filled)))
