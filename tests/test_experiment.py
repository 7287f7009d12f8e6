"""What a step needs: prepared in one form, hashed to the bit, restored in place."""

import hashlib

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, experiment, flipped, mlp, mse, tensor_bytes

from workbench.errors import ExperimentError
from workbench.experiment import (
    Experiment,
    StepOptions,
    as_batch,
    batch_hash,
    ensure_initialised,
    random_key,
    read_cursor,
    replace_arrays,
    set_random_key,
    state_arrays,
)


@pytest.mark.parametrize(
    ("options", "named"),
    [({"accumulate": 0}, "accumulate is 0"), ({"clip": 0.0}, "clip is 0.0"), ({"clip": float("nan")}, "clip is nan")],
)
def test_options_out_of_range_are_named(options, named):
    with pytest.raises(ExperimentError, match=named):
        StepOptions(**options)


def test_what_gives_no_batches_is_no_sampler():
    with pytest.raises(ExperimentError, match="the sampler is a int; expected an iterator with state_dict"):
        Experiment(mlp(), optim.AdamW(1e-3), mse, 3)


# ----------------------------------------------------------------------------------------------------------- the cursor


class Cursor(Points):
    """Hands out the very object that it goes on changing."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def state_dict(self):
        return self.value


def test_a_cursor_is_a_copy_all_the_way_down():
    sampler = Cursor({"stream": {"number": 1}, "seen": [1]})
    cursor = read_cursor(sampler)
    sampler.value["stream"]["number"] = 2
    sampler.value["seen"].append(2)
    assert cursor == {"stream": {"number": 1}, "seen": [1]}


def test_a_cursor_holds_what_json_holds_to_the_bit():
    generator = np.random.PCG64(3).state  # whole numbers of 128 bits
    value = {"generator": generator, "pair": (1, 2.5), "none": None, "yes": True, "big": 2**64 - 1, "text": "é"}
    cursor = read_cursor(Cursor(value))
    assert cursor == {**value, "pair": [1, 2.5]}
    assert type(cursor["yes"]) is bool and type(cursor["big"]) is int


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({"n": np.int64(3)}, ".n is numpy.int64"),
        ({"n": np.float64(1.5)}, ".n is numpy.float64"),
        ({"n": np.str_("x")}, ".n is numpy.str_"),
        ({"a": {"b": [0, float("nan")]}}, "a.b.1 is nan"),
        ({"a": {1: 2}}, ".a has the key 1"),
        ({"a": {1, 2}}, "a is set"),
        ({"a": b"x"}, "a is bytes"),
        ([1, 2], "list"),
        (None, "NoneType"),
    ],
)
def test_a_cursor_that_json_would_change_is_refused_by_name(value, named):
    with pytest.raises(ExperimentError, match="cursor") as error:
        read_cursor(Cursor(value))
    assert named in str(error.value)


# ------------------------------------------------------------------------------------------------------------ the batch


def test_a_batch_is_a_tuple_of_row_major_arrays():
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    for batch in (matrix, (matrix,), [matrix], mx.array(matrix)):
        (array,) = as_batch(batch)
        np.testing.assert_array_equal(np.array(array), matrix)
    (turned,) = as_batch(mx.array(matrix).T)
    assert memoryview(turned).c_contiguous


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ([[1, 2], [3]], "the batch holds a list that makes no array .*: pad what has rows of several lengths"),
        ((mx.ones(2), (mx.ones(2), mx.ones(3))), "the batch holds a tuple that makes no array"),
        ([mx.ones(2, mx.bfloat16)], "the batch holds a list that makes no array"),
        (np.zeros(2, np.longdouble), f"an array of {np.dtype(np.longdouble)}, which MLX has nothing for; convert it"),
    ],
)
def test_what_makes_no_array_is_refused_in_a_sentence(part, words):
    with pytest.raises(ExperimentError, match=words):
        as_batch((mx.ones(2), part))


@pytest.mark.parametrize("kind", [">f4", ">i4", ">u2", ">f2", ">c8", "<f4"])
def test_arrays_of_numpy_in_another_order_of_bytes_or_read_backwards(kind):
    values = np.arange(12).reshape(4, 3).astype(kind)
    wanted = np.arange(12).reshape(4, 3).astype(np.dtype(kind).newbyteorder("="))
    for given, expected in ((values, wanted), (values[::-1], wanted[::-1]), (values[:, ::-2], wanted[:, ::-2])):
        (array,) = as_batch(given)
        assert np.asarray(array).tobytes() == np.ascontiguousarray(expected).tobytes()
        assert batch_hash((array,)) == batch_hash((mx.array(np.ascontiguousarray(expected)),))


def test_batch_hash_is_sha256_over_dtype_shape_and_bytes():
    batch = (mx.array([[1, 2], [3, 4]], dtype=mx.int32), mx.array([1.5], dtype=mx.bfloat16))
    expected = hashlib.sha256(b"mlx.core.int32(2, 2)" + np.array([1, 2, 3, 4], "<i4").tobytes())
    expected.update(b"mlx.core.bfloat16(1,)" + (0x3FC0).to_bytes(2, "little"))
    assert batch_hash(batch) == expected.hexdigest()


def test_batch_hash_sees_every_bit_order_dtype_and_shape():
    x, y = mx.arange(4, dtype=mx.int32), mx.arange(4, 8, dtype=mx.int32)
    changed = [(flipped(x, bit, element), y) for bit in range(32) for element in range(4)]
    batches = [
        *((x, y), (y, x), (x, x), (x,), (x, y, mx.zeros((0,))), (x.view(mx.float32), y), (x.reshape(2, 2), y)),
        *changed,
    ]
    assert len({batch_hash(batch) for batch in batches}) == len(batches)


# --------------------------------------------------------------------------------------------------------- random state


@pytest.mark.parametrize("key", [(0, 0), (0, 1), (1, 0), (0xFFFFFFFF, 0xFFFFFFFF), (0x9E3779B9, 0x80000001)])
def test_random_state_is_restored_exactly(key):
    set_random_key(key)
    assert random_key() == key
    draws = mx.random.uniform(shape=(4,)).tolist()
    assert random_key() != key
    set_random_key(key)
    assert mx.random.uniform(shape=(4,)).tolist() == draws


# ---------------------------------------------------------------------------------------------------------------- state


def test_arrays_are_replaced_in_place_in_lists_and_dicts():
    tree = {"a": [mx.zeros(1), {"b": mx.zeros(1)}], "c": mx.zeros(1), "text": "kept"}
    containers = [tree["a"], tree["a"][1]]
    replace_arrays(tree, {"a.0": mx.ones(1), "a.1.b": mx.full((1,), 2.0)})
    assert [tree["a"][0].item(), tree["a"][1]["b"].item(), tree["c"].item(), tree["text"]] == [1, 2, 0, "kept"]
    assert containers[0] is tree["a"] and containers[1] is tree["a"][1]


def test_state_arrays_include_frozen_parameters_and_are_sorted():
    model = mlp()
    model.layers[0].freeze()
    assert list(state_arrays(model)) == ["layers.0.bias", "layers.0.weight", "layers.3.bias", "layers.3.weight"]


def test_prepare_keeps_transposed_views_and_closes_gaps_without_changing_a_value():
    job = experiment()
    job.model.layers[0].weight = mx.array(np.arange(32, dtype=np.float32).reshape(4, 8)).T
    job.model.layers[3].weight = mx.array(np.arange(16, dtype=np.float32).reshape(1, 16))[:, ::2]
    before = tensor_bytes(state_arrays(job.model))
    job.prepare()
    assert memoryview(job.model.layers[0].weight).strides == (4, 32)
    assert memoryview(job.model.layers[3].weight).strides == (32, 4)
    assert job.relaid == {"layers.3.weight": (1, 8)}
    assert tensor_bytes(state_arrays(job.model)) == before


def test_the_optimizer_is_initialised_once_and_a_running_one_keeps_its_state():
    job = experiment()
    ensure_initialised(job.optimizer, job.model)
    assert set(state_arrays(job.optimizer.state)) == {
        *("step", "learning_rate"),
        *(f"layers.{n}.{name}.{leaf}" for n in (0, 3) for name in ("weight", "bias") for leaf in ("m", "v")),
    }
    moment = mx.ones((8, 4))
    replace_arrays(job.optimizer.state, {"layers.0.weight.m": moment})
    ensure_initialised(job.optimizer, job.model)
    assert tensor_bytes({"": state_arrays(job.optimizer.state)["layers.0.weight.m"]}) == tensor_bytes({"": moment})


def test_members_of_a_multi_optimizer_are_initialised():
    members = [optim.Muon(1e-2), optim.AdamW(1e-3)]
    optimizer = optim.MultiOptimizer(members, [lambda path, weight: weight.ndim == 2])
    ensure_initialised(optimizer, nn.Linear(2, 2))
    assert {"states.0.weight.v", "states.1.bias.m", "states.1.bias.v"} <= set(state_arrays(optimizer.state))


def test_a_random_state_that_a_compiled_function_left_without_numbers_is_named():
    def draws(x):
        return x + mx.random.uniform()

    mx.eval(mx.compile(draws, inputs=mx.random.state)(mx.ones(2)))  # it is no output
    try:
        with pytest.raises(ExperimentError, match="holds no numbers: a compiled function drew from mx.random"):
            random_key()
    finally:
        mx.random.seed(0)
