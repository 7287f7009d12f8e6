"""Values that a step reaches in unusual ways: through a class, a module, a weak reference, an array's fields."""

import functools
import math
import os
import sys
import types
import weakref

import numpy as np
import pytest
from kept_values import KEPT, plain, recorded

from workbench.errors import ExperimentError


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
