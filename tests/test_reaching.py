"""Wherever a step keeps something it is found there, and to look at it runs no code of the user's."""

import collections
import contextlib
import functools
import operator
import types

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from helpers import Points, mlp, mse

import workbench as wb
from workbench.deep_snapshot import DeepSnapshot
from workbench.errors import ExperimentError
from workbench.object_graph import walk
from workbench.reachable import Surroundings, visit

# ------------------------------------------------------------------------------------------ what holds another function


def keeping(seen):
    def function(x):
        seen.append(1.0)
        return x

    return function


def custom_with_gradient(seen):
    function = mx.custom_function(lambda x: x)
    function.vjp(lambda primals, cotangents, outputs: (seen.append(1.0), cotangents)[1])
    return function


class Called:
    def __init__(self, seen):
        self.seen = seen

    def __call__(self, x):
        self.seen.append(1.0)
        return x

    def method(self, x):
        return self(x)


class OfAClass:
    @classmethod
    def call(cls, x):
        cls.seen.append(1.0)
        return x


def of_a_class(seen):
    return type("Made", (OfAClass,), {"seen": seen, "__module__": __name__}).call


class Lazy:
    def __init__(self, seen):
        self.function = keeping(seen)

    @functools.cached_property
    def value(self):
        return self.function(1)


class WithProperty:
    def __init__(self, seen):
        self.held = seen

    @property
    def value(self):
        return self.held.append(1.0)


def in_a_managed_block(seen):
    @contextlib.contextmanager
    def block():
        seen.append(1.0)
        yield

    return block


def wrapped(seen):
    @functools.wraps(len)  # so that it says it is of the module "builtins"
    def function(x):
        return seen.append(x)

    function.__module__ = __name__
    return function


def schedule(seen):
    return optim.join_schedules([keeping(seen), lambda step: step], [5])


def partly(seen):
    """Which says of itself that it is of a module of MLX: only functions have one that is taken over."""
    return nn.value_and_grad(nn.Linear(1, 1), functools.partial(keeping(seen)))


HOLDING = {
    "value_and_grad": lambda seen: mx.value_and_grad(keeping(seen)),
    "grad": lambda seen: mx.grad(keeping(seen)),
    "compile": lambda seen: mx.compile(keeping(seen)),
    "compile inputs": lambda seen: mx.compile(lambda x: x, inputs=[{"seen": seen}]),
    "compile outputs": lambda seen: mx.compile(lambda x: x, outputs=[seen]),
    "vmap": lambda seen: mx.vmap(keeping(seen)),
    "checkpoint": lambda seen: mx.checkpoint(keeping(seen)),
    "custom_function": lambda seen: mx.custom_function(keeping(seen)),
    "its gradient": custom_with_gradient,
    "one in another": lambda seen: mx.compile(mx.value_and_grad(mx.checkpoint(keeping(seen)))),
    "nn.value_and_grad of a partial": partly,
    "partial": lambda seen: functools.partial(keeping(seen), 1),
    "argument of a partial": lambda seen: functools.partial(print, seen),
    "keyword of a partial": lambda seen: functools.partial(print, end=seen),
    "method of a partial": lambda seen: functools.partialmethod(keeping(seen)),
    "bound method": lambda seen: Called(seen).method,
    "bound method of a list": lambda seen: seen.append,
    "class method": of_a_class,
    "object that is called": Called,
    "cached": lambda seen: functools.cache(keeping(seen)),
    "cached property": Lazy,
    "property": WithProperty,
    "wrapped": wrapped,
    "managed block": in_a_managed_block,
    "schedule of MLX": schedule,
}


@pytest.mark.parametrize("name", HOLDING)
def test_what_a_function_in_it_closes_over_is_followed(name):
    seen = [object()]  # a list of plain values would not be looked into
    holder = HOLDING[name](seen)
    assert any(edge.value is seen for edge in walk([("root", holder)], ()))
    before = DeepSnapshot([("root", holder)])
    seen.append(1)
    assert len(before.changed()) == 1 and before.put_back() == [] and len(seen) == 1


CHEAPLY = [name for name in HOLDING if name != "bound method of a list"]


@pytest.mark.parametrize("name", CHEAPLY)
def test_arrays_and_numbers_are_found_there_between_steps_too(name):
    seen = [mx.zeros(1)]
    assert any(value is seen[0] for _, value, _ in visit(HOLDING[name](seen), "root"))


class Dropped(nn.Module):
    """A model with a function of MLX's as attribute."""

    def __init__(self, seen):
        super().__init__()
        self.layer, self._passes = nn.Linear(4, 1), mx.checkpoint(keeping(seen))

    def __call__(self, x):
        return self._passes(self.layer(x))


def record(path, model, loss_fn, step_fn=None, steps=3):
    with wb.Recorder(path, model, optim.SGD(1e-2), loss_fn, Points(), step_fn=step_fn, compile=False) as recorder:
        for batch in recorder.batches(steps):
            recorder.step(batch)


@pytest.mark.parametrize("transform", [mx.value_and_grad, mx.checkpoint, mx.custom_function, mx.vmap])
def test_a_step_that_depends_on_what_such_a_function_keeps_is_refused(tmp_path, transform):
    norms = []

    def scaled(x):
        norms.append(1.0)
        return (x * x).sum() / len(norms)

    function = transform(scaled)

    def loss_fn(model, x, y):
        out = function(model(x))
        return (out[0] if isinstance(out, tuple) else out).mean() + mse(model, x, y)

    with pytest.raises(ExperimentError, match=r"no checkpoint holds[:,] .*loss_fn\.function\.norms|norms \(a list\)"):
        record(tmp_path / "run", mlp(), loss_fn)
    assert norms == []


def test_a_loop_may_give_its_loss_to_value_and_grad_itself(tmp_path):
    """What the loss keeps is seen there, too."""
    model, seen = mlp(), []

    def loss_fn(parameters, x, y):
        model.update(parameters)
        seen.append(1.0)
        return mse(model, x, y) * len(seen)

    passes, optimizer = mx.value_and_grad(loss_fn), optim.SGD(1e-2)

    def step(x, y):
        loss, gradients = passes(model.trainable_parameters(), x, y)
        optimizer.update(model, gradients)
        return loss

    with (
        wb.Recorder(tmp_path / "run", model, optimizer, mse, Points(), step_fn=step) as recorder,
        pytest.raises(ExperimentError, match=r"step_fn\.passes\.seen \(a list\)"),
    ):
        recorder.step(next(recorder.batches()))
    assert seen == []


def test_a_generator_that_shares_a_list_with_the_step(tmp_path):
    """Its frame is not looked into: a step that takes from it is refused, and another one does not change it."""
    seen = []

    def given():
        while True:
            seen.append(1.0)
            yield len(seen)

    source = given()

    def loss_fn(model, x, y):
        return mse(model, x, y) / next(source)

    with pytest.raises(ExperimentError, match=r"it takes something from loss_fn\.source \(a generator\)"):
        record(tmp_path / "run", mlp(), loss_fn)


# ------------------------------------------------------------------------------------------------- nothing of it is run

ran: list[str] = []
HOOKS = "__getattribute__ __getattr__ __iter__ __len__ __eq__ __ne__ __hash__ __bool__ __repr__ __str__ __contains__"
HOOKS += " __getitem__ __setitem__ __delitem__ __call__ __next__ __reduce__ __reduce_ex__ __copy__ __deepcopy__"
HOOKS += " __getstate__ __sizeof__ __format__ __index__ __float__ __int__ __bytes__ __fspath__ __dir__ __set__"
HOOKS += " __lt__ __array__ items keys values get append pop update func args keywords data closed readable getvalue"


def hook(name):
    def method(self, *args, **kwargs):
        ran.append(name)
        raise RuntimeError(name)

    return method


def hooked(base):
    """A class all of whose hooks tell, and raise; nothing may ask it for its class, module or dict either."""
    names = {name: hook(name) for name in HOOKS.split()}
    names |= {name: property(hook(name)) for name in ("__class__", "__dict__", "func", "args", "keywords", "data")}
    if base in (int, float, str):
        del names["__hash__"]
    return type(f"Of{base.__name__}", (base,), names)


class Meta(type):
    """Whose classes tell, too."""

    def __getattribute__(cls, name):
        ran.append(f"class.{name}")
        return super().__getattribute__(name)

    def __hash__(cls):
        ran.append("class.__hash__")
        return 1

    def __eq__(cls, other):
        ran.append("class.__eq__")
        return cls is other

    def __subclasscheck__(cls, other):
        ran.append("class.__subclasscheck__")
        return False

    def __instancecheck__(cls, other):
        ran.append("class.__instancecheck__")
        return False

    def __iter__(cls):
        ran.append("class.__iter__")
        return iter(())


class OfMeta(metaclass=Meta):
    kept = []


class Slotted:
    __slots__ = ("inner", "never")
    __getattribute__ = hook("__getattribute__")


class Shadowed(Slotted):
    """Whose property hides a slot."""

    __slots__ = ()
    inner = property(hook("inner"), hook("inner"))


def hostile(inner):
    """Objects of such classes, each of which holds `inner` but for the numbers and texts."""
    made = [hooked(list)(), hooked(dict)(), hooked(tuple)((inner,)), hooked(collections.deque)()]
    list.append(made[0], inner)
    dict.__setitem__(made[1], "a", inner)
    collections.deque.append(made[3], inner)
    plain = object.__new__(hooked(object))
    object.__setattr__(plain, "other", 1)
    slotted = object.__new__(Slotted)
    Slotted.inner.__set__(slotted, inner)
    shadowed = object.__new__(Shadowed)
    vars(Slotted)["inner"].__set__(shadowed, inner)
    return [
        *made,
        *(plain, slotted, shadowed, OfMeta()),
        *(hooked(float)(1.5), hooked(int)(3), hooked(str)("a")),
        hooked(functools.partial)(keeping(inner)),
        types.MappingProxyType({"a": inner}),
        {"key": hooked(object)()},
    ]


def held_by(inner):
    return types.SimpleNamespace(all=hostile(inner))


def test_a_snapshot_runs_nothing_of_what_it_looks_at():
    inner = [object()]
    root = held_by(inner)
    ran.clear()
    before = DeepSnapshot([("root", root)])
    inner.append(1)
    changed = before.changed()
    told = [str(one) for one in before.opaque.values()]
    failed = before.put_back()
    assert (ran, failed, told, len(changed), len(inner)) == ([], [], [], 1, 1)


def test_looking_for_numbers_runs_nothing_either():
    inner = [mx.zeros(1)]
    root = held_by(inner)
    ran.clear()
    around = Surroundings(lambda: visit(root, "root"))
    inner[0] = mx.ones(1)
    text = repr(around.changed())
    around.put_back()
    assert ran == [] and text.count("array(") >= 2 and inner[0].item() == 0


def test_the_hooks_of_these_tests_are_heard():
    ran.clear()
    for name, call in {
        "__iter__": iter,
        "__len__": len,
        "__repr__": repr,
        "__hash__": hash,
        "__class__": lambda value: isinstance(value, int),
        "__getattribute__": operator.attrgetter("other"),
    }.items():
        with pytest.raises(RuntimeError):
            call(hooked(list)() if name != "__class__" else object.__new__(hooked(object)))
        assert ran and name in ran[-1] + " __class__ __getattribute__"
    ran.clear()
    assert hash(OfMeta) == 1 and ran


def test_a_whole_recording_runs_nothing_of_a_hostile_object_beside_the_step(tmp_path):
    held = held_by([object()])

    def loss_fn(model, x, y):
        assert held is not None
        return mse(model, x, y)

    ran.clear()
    record(tmp_path / "run", mlp(), loss_fn)
    assert ran == [] and wb.open_run(tmp_path / "run").last_step == 3


def test_what_a_slot_and_a_subclass_of_a_list_held_is_put_back_past_their_classes():
    slotted, listed = object.__new__(Shadowed), hooked(list)()
    vars(Slotted)["inner"].__set__(slotted, 1)
    list.extend(listed, [1, [2]])
    whole = types.SimpleNamespace(slotted=slotted, listed=listed)
    ran.clear()
    before, numbers = DeepSnapshot([("whole", whole)]), Surroundings(lambda: visit(whole, "whole"))
    vars(Slotted)["inner"].__set__(slotted, 2)
    list.__setitem__(listed, 0, 5)
    assert numbers.changed() == {"whole.slotted.inner": (1, 2), "whole.listed[0]": (1, 5)}
    numbers.put_back()
    assert before.changed() == []
    vars(Slotted)["never"].__set__(slotted, 3)
    list.clear(listed)
    assert before.put_back() == [] and before.changed() == [] and list.__len__(listed) == 2
    with pytest.raises(AttributeError):
        vars(Slotted)["never"].__get__(slotted)
    assert ran == []


def test_a_number_of_a_class_of_ones_own_is_told_without_asking_it():
    held = {"number": hooked(int)(3)}
    around = Surroundings(lambda: visit(held, "held"))
    held["number"] = hooked(int)(4)
    ran.clear()
    assert repr(around.changed()) == "{'held.number': (Ofint(3), Ofint(4))}"
    assert ran == []
