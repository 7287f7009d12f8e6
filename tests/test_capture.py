"""Capture sees what each layer returns, leaves classes as they were, and moves no bit of the step."""

import threading
from collections import namedtuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import mlp, mse, tensor_bytes
from mlx.utils import tree_flatten

from workbench.capture import Capture, layers_of

X = mx.array(np.random.default_rng(0).standard_normal((6, 4)), dtype=mx.float32)
Y = mx.array(np.random.default_rng(1).standard_normal((6, 1)), dtype=mx.float32)


def attributes(model):
    """What every class in the tree holds under its own name, by identity."""
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    return {cls: dict(cls.__dict__) for cls in classes if cls is not object}


def equal(left, right):
    return tensor_bytes({"": left}) == tensor_bytes({"": right})


class Doubled(nn.Linear):
    """Calls the method of its base, which may be patched as well."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Inheriting(nn.Linear):
    pass


class Uncalled(nn.Module):
    """Owns a parameter, has no `__call__`."""

    def __init__(self):
        super().__init__()
        self.scale = mx.ones(4)


class Nested(nn.Module):
    """Parameters at the root, modules in lists and dicts, a module without `__call__`, and one called twice."""

    def __init__(self):
        super().__init__()
        self.bias = mx.full((4,), 0.5)
        self.stack = [nn.Linear(4, 4), Doubled(4, 4)]
        self.named = {"a": Inheriting(4, 4), "list": [nn.Linear(4, 1)]}
        self.shared = nn.Linear(4, 4)
        self.idle = nn.Linear(4, 4)
        self.uncalled = Uncalled()

    def __call__(self, x):
        x = self.stack[1](self.stack[0](x + self.bias))
        x = self.shared(mx.tanh(self.shared(self.named["a"](x)))) * self.uncalled.scale
        return self.named["list"][0](x)


@pytest.fixture
def nested():
    mx.random.seed(0)
    model = Nested()
    mx.eval(model.parameters())
    return model


def test_layers_are_the_modules_that_own_trainable_parameters(nested):
    assert {path: sorted(owned) for path, owned in layers_of(nested).items()} == {
        "": ["bias"],
        "stack.0": ["stack.0.bias", "stack.0.weight"],
        "stack.1": ["stack.1.bias", "stack.1.weight"],
        "named.a": ["named.a.bias", "named.a.weight"],
        "named.list.0": ["named.list.0.bias", "named.list.0.weight"],
        "shared": ["shared.bias", "shared.weight"],
        "idle": ["idle.bias", "idle.weight"],
        "uncalled": ["uncalled.scale"],
    }


def test_frozen_modules_and_parameters_are_no_layers(nested):
    nested.shared.freeze()
    nested.idle.freeze(keys="bias")
    found = layers_of(nested)
    assert "shared" not in found and found["idle"] == ["idle.weight"]


def test_arrays_in_a_list_or_dict_belong_to_the_module_that_holds_them():
    model = nn.Sequential(nn.Module(), nn.Linear(1, 1))
    model.layers[0].tables = {"x": [mx.ones(2)]}
    assert layers_of(model)["layers.0"] == ["layers.0.tables.x.0"]


def test_outputs_are_kept_by_path_and_call_in_order_of_execution(nested):
    with Capture(nested, list(layers_of(nested))) as capture:
        out = nested(X)
    assert capture.order == ["stack.0", "stack.1", "named.a", "shared", "named.list.0", ""]
    assert list(capture.activations) == [
        *("stack.0", "stack.1", "named.a", "shared", "shared#1", "named.list.0", ""),
    ]
    assert equal(capture.activations[""], out) and equal(capture.activations["named.list.0"], out)
    first = nested.stack[0](X + nested.bias)
    assert equal(capture.activations["stack.0"], first)
    assert equal(capture.activations["stack.1"], nested.stack[1](first))


def test_the_last_call_speaks_for_a_layer(nested):
    with Capture(nested, list(layers_of(nested))) as capture:
        nested(X)
    last = capture.last(capture.activations)
    assert equal(last["shared"], capture.activations["shared#1"])
    assert not equal(last["shared"], capture.activations["shared"])
    assert "idle" not in last and "uncalled" not in last


def test_a_module_that_calls_its_base_is_seen_once(nested):
    """`Doubled` is called once; its base's method, which is patched for `stack.0`, runs inside."""
    with Capture(nested, ["stack.0", "stack.1"], gradients=True) as capture:
        loss, _ = nn.value_and_grad(nested, mse)(nested, X, Y)
    assert list(capture.activations) == ["stack.0", "stack.1"]
    assert sorted(capture.activation_gradients) == ["stack.0", "stack.1"]


@pytest.mark.parametrize("gradients", [False, True])
def test_classes_are_as_before_twice_in_a_row_and_after_an_exception(nested, gradients):
    before = attributes(nested)
    for _ in range(2):
        with Capture(nested, list(layers_of(nested)), gradients=gradients):
            assert attributes(nested) != before
            nested(X)
        assert attributes(nested) == before
    with pytest.raises(ValueError, match="shapes"), Capture(nested, list(layers_of(nested)), gradients=gradients):
        nested(mx.ones((2, 3)))
    assert attributes(nested) == before
    assert "__call__" not in Inheriting.__dict__


def test_parameters_and_paths_are_untouched(nested):
    before = tensor_bytes(dict(tree_flatten(nested.parameters())))
    with Capture(nested, list(layers_of(nested)), gradients=True):
        nested(X)
        assert tensor_bytes(dict(tree_flatten(nested.parameters()))) == before
    assert tensor_bytes(dict(tree_flatten(nested.parameters()))) == before


def test_other_instances_of_a_watched_class_are_left_alone(nested):
    other = nn.Linear(4, 4)
    with Capture(nested, ["stack.0"]) as capture:
        other(X)
        nested.shared(X)
    assert capture.activations == {}


Pair = namedtuple("Pair", "index, value")


@pytest.mark.parametrize("kind", [tuple, list, Pair._make])
def test_of_a_tuple_the_first_floating_array_is_the_output_and_its_type_stays(kind):
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = mx.ones(4)

        def __call__(self, x):
            return kind([mx.arange(3), x * self.weight])

    model = Split()
    with Capture(model, [""], gradients=True) as capture:
        out = model(X)
    assert type(out) is type(kind([0, 1])) and equal(out[1], X)
    assert equal(capture.activations[""], X)


def test_outputs_without_a_floating_array_are_passed_through():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = mx.ones(1)

        def __call__(self, x):
            return x

    model = Odd()
    outputs = [None, {"a": X}, (None, "text"), mx.arange(3), 5, ()]
    with Capture(model, [""], gradients=True) as capture:
        assert all(model(output) is output for output in outputs)
    assert capture.activations == {} and capture.order == []


def test_activation_gradients_are_those_of_plain_autograd(nested):
    """Each output gets an offset of zeros that plain autograd differentiates; no tap is involved there."""
    paths = [path for path in layers_of(nested) if path]
    with Capture(nested, paths, gradients=True) as capture:
        nn.value_and_grad(nested, mse)(nested, X, Y)

    def with_offsets(offsets):
        stack, a, shared = nested.stack, nested.named["a"], nested.shared
        x = stack[0](X + nested.bias) + offsets["stack.0"]
        x = stack[1](x) + offsets["stack.1"]
        x = shared(a(x) + offsets["named.a"]) + offsets["shared"]
        x = (shared(mx.tanh(x)) + offsets["shared#1"]) * nested.uncalled.scale
        return nn.losses.mse_loss(nested.named["list"][0](x) + offsets["named.list.0"], Y)

    offsets = {path: mx.zeros(array.shape) for path, array in capture.activations.items()}
    expected = mx.grad(with_offsets)(offsets)
    assert tensor_bytes(capture.activation_gradients) == tensor_bytes(expected)


def test_a_layer_off_the_way_to_the_loss_has_no_gradient():
    model = mlp()
    with Capture(model, list(layers_of(model)), gradients=True) as capture:
        nn.value_and_grad(model, lambda m, x: (m(x), m.layers[0](x))[1].sum())(model, X)
    assert list(capture.activations) == ["layers.0", "layers.3", "layers.0#1"]
    assert list(capture.activation_gradients) == ["layers.0#1"]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("gradients", [False, True])
def test_taps_move_no_bit_of_loss_and_gradients(nested, compiled, gradients):
    layers = list(layers_of(nested))

    def plain(x, y):
        return nn.value_and_grad(nested, mse)(nested, x, y)

    def tapped(x, y):
        with Capture(nested, layers, gradients=gradients) as capture:
            found = nn.value_and_grad(nested, mse)(nested, x, y)
        return found, capture.activations, capture.activation_gradients

    if compiled:
        plain = mx.compile(plain, inputs=nested.state, outputs=nested.state)
        tapped = mx.compile(tapped, inputs=nested.state, outputs=nested.state)
    expected, (found, activations, activation_gradients) = plain(X, Y), tapped(X, Y)
    mx.eval(expected, found, activations, activation_gradients)
    assert tensor_bytes(dict(tree_flatten(found))) == tensor_bytes(dict(tree_flatten(expected)))
    assert bool(activation_gradients) == gradients


def test_a_tap_keeps_the_sign_of_a_zero_gradient():
    """Adding a zero, as a tap might, would turn -0.0 into 0.0."""

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = mx.array([1.0, 2.0])

        def __call__(self, x):
            return self.weight * x

    model = Scale()
    with Capture(model, [""], gradients=True) as capture:
        _, gradients = nn.value_and_grad(model, lambda m, x: -mx.maximum(m(x), 100.0).sum())(model, mx.ones(2))
    negative = mx.array([-0.0, -0.0])
    assert equal(gradients["weight"], negative) and equal(capture.activation_gradients[""], negative)


def test_two_threads_capture_without_disturbing_each_other():
    before = dict(nn.Linear.__dict__)
    models = [mlp(seed=seed) for seed in range(2)]
    failures = []

    def work(model):
        try:
            for _ in range(200):
                with Capture(model, list(layers_of(model))) as capture:
                    model(X)
                assert list(capture.activations) == ["layers.0", "layers.3"]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert dict(nn.Linear.__dict__) == before
