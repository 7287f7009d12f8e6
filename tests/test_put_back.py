"""Performing the first step twice, to see whether it can be replayed, leaves no trace in what a step keeps outside."""

import collections
import dataclasses
import functools
import io
import itertools
import math
import os
import queue
import random
import sys
import threading
import types
import warnings
import weakref

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, ScaledJob, mlp, mse, record_scaled
from mlx.utils import tree_flatten

import workbench as wb
from workbench.deep_snapshot import DeepSnapshot
from workbench.errors import ExperimentError
from workbench.standins import Touched, other_threads, without_counting

COUNT = 0
KEPT = []
SHARED = types.SimpleNamespace(seen=[])


def plain(make, steps=6):
    job, sampler = ScaledJob(make()), Points()
    return [job.step(*map(mx.array, next(sampler))).item() for _ in range(steps)]


def recorded(path, make, **options):
    return record_scaled(path, make, 6, **options)


class Slotted:
    __slots__ = ("norms",)

    def __init__(self):
        self.norms = []


@dataclasses.dataclass(slots=True)
class Ring:
    values: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(4))
    filled: list = dataclasses.field(default_factory=list)

    def __call__(self, norm):
        self.values[len(self.filled) % 4] = norm
        self.filled.append(norm)
        return 1 / (1 + self.values[: len(self.filled)].mean())


class Counted:
    calls = 0

    def __call__(self, norm):
        Counted.calls += 1
        return 1 / Counted.calls


def listed():
    norms = []
    return lambda norm: norms.append(norm) or 1 / (1 + np.mean(norms))


def bound():
    norms = []
    push = norms.append
    return lambda norm: push(norm) or 1 / (1 + np.mean(norms))


def queued():
    norms = collections.deque(maxlen=3)
    return lambda norm: norms.append(norm) or 1 / (1 + np.mean(norms))


def slotted():
    held = Slotted()
    return lambda norm: held.norms.append(norm) or 1 / (1 + np.mean(held.norms))


def mapped():
    norms = collections.defaultdict(list)
    return lambda norm: norms["all"].append(norm) or 1 / (1 + len(norms["all"]))


def buffered():
    norms = np.zeros(20)

    def habit(norm):
        norms[1 + int(norms[0])] = norm
        norms[0] += 1
        return 1 / (1 + norms[1 : 1 + int(norms[0])].mean())

    return habit


def in_bytes():
    seen = bytearray(8)

    def habit(norm):
        seen[0] += 1
        return 1 / seen[0]

    return habit


def in_a_text():
    text = io.StringIO()
    return lambda norm: text.write("x") and 1 / len(text.getvalue())


def ordered():
    scales = collections.OrderedDict((number, 1 / number) for number in range(1, 6))

    def habit(norm):
        scales.move_to_end(next(iter(scales)))
        return next(iter(scales.values()))

    return habit


def by_default():
    def habit(norm, seen=[], *, kept=collections.deque([], 2)):  # noqa: B006, B008 - what is tested
        seen.append(norm)
        kept.append(norm)
        return 1 / (1 + np.mean(seen))

    return habit


def in_a_queue():
    scales = queue.Queue()
    for number in range(1, 9):
        scales.put(1 / number)
    return lambda norm: scales.get_nowait()


def averaged():
    mean = mx.zeros(1)

    def habit(norm):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * norm
        return 1 / (1 + mean)

    return habit


def averaged_in_place():
    mean = mx.zeros(1)

    def habit(norm):
        nonlocal mean
        mean += norm
        return 1 / (1 + mean)

    return habit


def of_the_module():
    SHARED.seen = []
    return lambda norm: SHARED.seen.append(norm) or 1 / (1 + len(SHARED.seen))


def counted_globally():
    globals()["COUNT"] = 0

    def habit(norm):
        global COUNT
        COUNT += 1
        return 1 / COUNT

    return habit


def of_the_class():
    Counted.calls = 0
    return Counted()


def of_the_function():
    def habit(norm):
        habit.calls += 1
        return 1 / habit.calls

    habit.calls = 0
    return habit


def cycled():
    scales = itertools.cycle([1.0, 0.5, 0.25])
    return lambda norm: next(scales)


def bound_next():
    scale = itertools.count(1).__next__
    return lambda norm: 1 / scale()


def generated():
    def scales():
        yield from (1.0, 0.5)
        while True:
            yield 0.25

    given = scales()
    return lambda norm: next(given)


def caught():
    """It catches whatever its iterator raises."""
    scales = iter([1.0, 0.5, 0.25, 0.1, 0.1, 0.1])

    def habit(norm):
        try:
            return next(scales)
        except Exception:
            return 0.3

    return habit


def read():
    file = io.TextIOWrapper(io.BufferedReader(io.BytesIO(b"1\n0.5\n0.25\n0.2\n0.1\n0.3\n")))
    return lambda norm: float(file.readline())


def in_a_tuple():
    held = (itertools.cycle([1.0, 0.5, 0.25]),)
    return lambda norm: next(held[0])


def drawn():
    own = random.Random(1)
    return lambda norm: own.random()


def drawn_with_numpy():
    own = np.random.default_rng(1)
    return lambda norm: float(own.random())


def in_a_set():
    norms = set()
    return lambda norm: norms.add(round(norm, 3)) or 1 / (1 + len(norms))


def cached():
    @functools.cache
    def table(size):
        return mx.arange(size).sum().item()

    return lambda norm: 1 / (1 + table(4))


def cached_with_memory():
    @functools.cache
    def kept():
        return []

    return lambda norm: kept().append(norm) or 1 / (1 + len(kept()))


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


# ------------------------------------------------------------------------------------------------------- the snapshot


def test_the_same_objects_get_what_they_held():
    inner = [1, 2]
    whole = {"inner": inner, "again": inner, "set": {1}, "array": np.arange(3), "deque": collections.deque([1], 4)}
    objects = dict(whole)
    before = DeepSnapshot([("whole", whole)])
    inner.append(3)
    whole["array"] += 1
    whole["set"].add(2)
    whole["deque"].extend([5, 6])
    whole["inner"] = []
    whole["new"] = 1
    assert sorted(one.path for one in before.changed()) == [
        "whole",
        "whole.array",
        "whole.deque",
        "whole.inner",
        "whole.set",
    ]
    assert before.put_back() == [] and before.changed() == []
    assert list(whole) == list(objects) and all(whole[key] is objects[key] for key in objects)
    assert inner == [1, 2] and whole["set"] == {1} and whole["array"].tolist() == [0, 1, 2]
    assert whole["deque"] == collections.deque([1]) and whole["deque"].maxlen == 4


def test_an_array_that_is_too_large_to_be_copied_can_not_be_written_to(monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.BUDGET", 100)
    whole = {"large": np.zeros(100), "view": None, "small": np.zeros(2)}
    whole["view"] = whole["large"][3:]
    found = DeepSnapshot([("whole", whole)])
    assert found.large == ["whole.large", "whole.view"] and found.left_out == []
    with found.read_only():
        for name in ("large", "view"):
            with pytest.raises(ValueError, match="read-only"):
                whole[name][0] = 1
        whole["small"][0] = 1
    whole["large"][0] = whole["view"][0] = 1  # as before


def test_a_step_that_writes_to_such_an_array_is_unverified(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.BUDGET", 100)
    norms = np.zeros(100)

    def habit(norm):
        norms[int(norms[-1])] = norm
        norms[-1] += 1
        return 0.5

    losses, said = recorded(tmp_path / "run", lambda: habit)
    assert norms[-1] == 6 and "habit.norms, too large to be copied and put back" in said[0]
    assert losses == plain(lambda: lambda norm: 0.5)


def test_what_is_too_much_to_look_through_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("workbench.deep_snapshot.ITEMS", 50)
    seen = list(range(100))
    losses, said = recorded(tmp_path / "run", lambda: lambda norm: seen.append(norm) or 0.5)
    assert len(seen) == 106 and losses == plain(lambda: lambda norm: 0.5)
    assert "unverified" in said[0] and "there is more in step_fn.habit.seen than can be looked through" in said[0]


def test_a_stand_in_tells_of_its_use_in_its_own_thread_only():
    holder = {"given": iter([1, 2])}
    original, got = holder["given"], []
    around = DeepSnapshot([("holder", holder)])
    with pytest.raises(Touched), without_counting(around, around.opaque.values()) as touched:
        assert isinstance(holder["given"], type(original)) and holder["given"] is not original
        thread = threading.Thread(target=lambda: got.append(next(holder["given"])))
        thread.start()
        thread.join()
        assert got == [1] and touched == []
        next(holder["given"])
    assert [one.path for one in touched] == ["holder.given"]
    assert holder["given"] is original and list(original) == [2]


# -------------------------------------------------------------------------------- what a step reaches in other ways


class Node:
    """Hashable, and it holds something."""

    def __init__(self):
        self.seen = []


def dict_key():
    table = {Node(): 1}
    return lambda norm: [one.seen.append(norm) or 1 / (1 + len(one.seen)) for one in table][0]


def weak_reference():
    KEPT[:] = [Node()]
    node = weakref.ref(KEPT[0])
    return lambda norm: node().seen.append(norm) or 1 / (1 + len(node().seen))


def weak_keys():
    KEPT[:] = [Node()]
    table = weakref.WeakKeyDictionary({KEPT[0]: []})

    def habit(norm):
        seen = table[KEPT[0]]
        seen.append(norm)
        return 1 / (1 + len(seen))

    return habit


def weak_set():
    KEPT[:] = [Node()]
    nodes = weakref.WeakSet(KEPT)
    return lambda norm: [one.seen.append(norm) or 1 / (1 + len(one.seen)) for one in nodes][0]


def module(name, **values):
    made = types.ModuleType(name)
    vars(made).update(values)
    sys.modules[name] = made
    return made


def within_a_module():
    inner = module("a_package.inner", SEEN=[])
    globals()["a_package"] = module("a_package", inner=inner)
    return lambda norm: a_package.inner.SEEN.append(norm) or 1 / (1 + len(a_package.inner.SEEN))  # noqa: F821


def imported_inside():
    module("a_module_of_ones_own", SEEN=[])

    def habit(norm):
        from a_module_of_ones_own import SEEN

        SEEN.append(norm)
        return 1 / (1 + len(SEEN))

    return habit


def by_type():
    seen = []

    @functools.singledispatch
    def scale(norm):
        return 1.0

    @scale.register
    def _(norm: float):
        seen.append(norm)
        return 1 / (1 + len(seen))

    return scale


def read_only_view():
    shown = types.MappingProxyType({"seen": []})
    return lambda norm: shown["seen"].append(norm) or 1 / (1 + len(shown["seen"]))


def of_an_operator():
    seen = []

    class Scale:
        def __matmul__(self, norm):
            seen.append(norm)
            return 1 / (1 + len(seen))

        def __getattr__(self, name):
            return self @ 0

    scale = Scale()
    return lambda norm: (scale @ norm) * scale.other


def on_leaving_a_block():
    seen = []

    class Timed:
        def __enter__(self):
            return 1 / (1 + len(seen))

        def __exit__(self, *error):
            seen.append(1)

    def habit(norm):
        with Timed() as scale:
            return scale

    return habit


def of_a_descriptor():
    seen = []

    class Scale:
        def __get__(self, holder, kind):
            seen.append(1)
            return 1 / (1 + len(seen))

    class Holder:
        scale = Scale()

    holder = Holder()
    return lambda norm: holder.scale


def of_a_metaclass():
    seen = []

    class Meta(type):
        def __call__(cls):
            seen.append(1)
            return 1 / (1 + len(seen))

    class Made(metaclass=Meta):
        pass

    return lambda norm: Made()


class Noted(np.ndarray):
    pass


def beside_an_array():
    array = np.zeros(1).view(Noted)
    array.seen = []
    return lambda norm: array.seen.append(norm) or 1 / (1 + len(array.seen))


def masked():
    array = np.ma.array(np.zeros(20), mask=np.zeros(20, bool))

    def habit(norm):
        array[int(array.count()) - 1] = np.ma.masked
        return 1 / (22 - int(array.count()))

    return habit


def objects_in_fields():
    array = np.zeros(1, dtype=[("scale", "f4"), ("seen", object)])
    array["seen"][0] = []
    return lambda norm: array["seen"][0].append(norm) or 1 / (1 + len(array["seen"][0]))


def in_the_environment():
    os.environ["WORKBENCH_TEST"] = ""

    def habit(norm):
        os.environ["WORKBENCH_TEST"] += "x"
        return 1 / len(os.environ["WORKBENCH_TEST"])

    return habit


def signed_zero():
    """All four numbers are equal to those before; from the fourth step on, the last is another."""
    held = [0.0] * 4

    def habit(norm):
        held[:] = [-0.0, *held[:3]]
        return 1.5 + math.copysign(1, held[3])

    return habit


def attribute_given_later():
    def habit(norm):
        habit.seen = [*getattr(habit, "seen", []), norm]
        return 1 / (1 + len(habit.seen))

    return habit


HIDDEN = [
    *(dict_key, weak_reference, weak_keys, weak_set, within_a_module, imported_inside, by_type, read_only_view),
    *(of_an_operator, on_leaving_a_block, of_a_descriptor, of_a_metaclass, beside_an_array, masked),
    *(objects_in_fields, in_the_environment, attribute_given_later),
]


def after_two(make):
    """A habit that does not scale anything before it is called for the third time: both checks let it pass."""

    def late():
        habit, calls = make(), []
        return lambda norm: (
            (calls.append(1), habit(norm))[1] if len(calls) > 1 else (calls.append(1), habit(norm), 0.5)[2]
        )

    return late


@pytest.fixture
def _undone(monkeypatch):
    for name in ("a_package", "a_package.inner", "a_module_of_ones_own"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setenv("WORKBENCH_TEST", "")
    monkeypatch.setitem(globals(), "a_package", None)


@pytest.mark.usefixtures("_undone")
@pytest.mark.parametrize("make", [*HIDDEN, signed_zero])
def test_wherever_it_is_kept_the_check_leaves_it_alone(tmp_path, make):
    losses, said = recorded(tmp_path / "run", after_two(make))
    assert losses == plain(after_two(make))
    assert len(said) == 1 and said[0].startswith("the step changes what no checkpoint holds: ")


@pytest.mark.usefixtures("_undone")
@pytest.mark.parametrize("make", HIDDEN)
def test_wherever_it_is_kept_a_step_that_depends_on_it_is_refused(tmp_path, make):
    with pytest.raises(ExperimentError, match=r"step [12] can't be replayed: "):
        recorded(tmp_path / "run", make)


def test_an_attribute_that_a_function_has_only_since_is_named(tmp_path):
    def habit(norm):
        habit.seen = [*getattr(habit, "seen", []), norm]
        return 0.5

    said = recorded(tmp_path / "run", lambda: habit)[1]
    assert len(said) == 1 and "no checkpoint holds: step_fn.habit (a dict)" in said[0] and len(habit.seen) == 6


# ----------------------------------------------------------------------------- weights that something else holds, too


def averaged_lazily(model, kept):
    for name, value in tree_flatten(model.parameters()):
        kept[name] = value if name not in kept else 0.9 * kept[name] + 0.1 * value


def first_ones(model, kept):
    kept.setdefault("all", [value for _, value in tree_flatten(model.parameters())])


def squares(model, x, y):
    return mx.mean((model(x) - y) ** 2)


@pytest.mark.parametrize("keep", [averaged_lazily, first_ones])
@pytest.mark.parametrize("in_place", [False, True])
def test_weights_that_stand_elsewhere_are_those_of_the_plain_loop(tmp_path, keep, in_place):
    def trained(record):
        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))  # the recorder replaces weights (1, n)
        mx.eval(model.parameters())
        optimizer, kept, sampler, found = optim.Adam(1e-2), {}, Points(), []
        passes = nn.value_and_grad(model, squares)

        def step(x, y):
            for _, value in tree_flatten(model.parameters()) if in_place else ():
                value *= 1 - 1e-3  # the object itself, wherever it stands
            loss, gradients = passes(model, x, y)
            optimizer.update(model, gradients)
            keep(model, kept)
            return loss

        def note():
            found.append([np.array(value).tobytes() for _, value in tree_flatten([kept, model.parameters()])])

        if not record:
            for _ in range(4):
                step(*map(mx.array, next(sampler)))
                note()
            return found
        with wb.Recorder(tmp_path / "run", model, optimizer, squares, sampler, step_fn=step, spikes=None) as recorder:
            for batch in recorder.batches(4):
                recorder.step(batch)
                note()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert trained(True) == trained(False)


def test_no_code_of_a_class_is_run_to_look_at_it():
    ran = []

    def noting(name, base):
        def method(self, *args):
            ran.append(name)
            return getattr(base, name)(self, *args)

        return method

    names = ["__iter__", "__len__", "__getattribute__"]
    kinds = [list, dict, set, tuple, frozenset, collections.deque, object]
    made = {
        base: type(f"Of{base.__name__}", (base,), {name: noting(name, base) for name in names if hasattr(base, name)})
        for base in kinds
    }
    inner = [1]
    whole = [made[list]([inner]), made[dict](a=inner), made[set]([1]), made[tuple]([inner]), made[frozenset]([1])]
    whole += [made[collections.deque]([inner]), made[object]()]
    object.__setattr__(whole[-1], "inner", inner)
    object.__setattr__(whole[-1], "number", 1)
    before = DeepSnapshot([("whole", whole)])
    list.append(whole[0], 2)
    dict.__setitem__(whole[1], "b", 2)
    set.add(whole[2], 2)
    object.__setattr__(whole[-1], "number", 2)
    inner.append(2)
    changed = [one.path for one in before.changed()]
    failed = before.put_back()
    assert ran == [] and failed == [] and len(changed) == 5
    assert inner == [1] and list.__len__(whole[0]) == dict.__len__(whole[1]) == set.__len__(whole[2]) == 1
    assert object.__getattribute__(whole[-1], "number") == 1
