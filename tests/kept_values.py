"""Steps of one's own that keep something beside the state, each in another place: habits of a `helpers.ScaledJob`."""

import collections
import dataclasses
import functools
import io
import itertools
import queue
import random
import types

import mlx.core as mx
import numpy as np
from helpers import Points, ScaledJob, record_scaled

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
