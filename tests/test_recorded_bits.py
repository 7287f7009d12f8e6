"""What a step's line holds, against code that is slow and plain: the recorder's is written for speed, and no bit of a
line may depend on how. And the arrays of a tree whose structure changes under whoever remembers where they stand."""

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import runs
import xxhash

from workbench import open_run
from workbench.bits import float_bits, json_floats
from workbench.checkpoints.checkpoint_reader import read
from workbench.experiment import as_batch, batch_hash
from workbench.files import canonical_json
from workbench.trees import Leaves, state_arrays


def stream(arrays):
    """A lane's fingerprint: path, dtype, shape and contents of one array after another."""
    found = xxhash.xxh3_128()
    for path in sorted(arrays):
        array = arrays[path]
        found.update(f"{path}\0{array.dtype}\0{array.shape}\0".encode())
        found.update(np.array(array).tobytes())
    return found.hexdigest()


def square_sum(values):
    """float32 in blocks of 4096, float64 above."""
    blocks = [values[start : start + 4096] for start in range(0, values.size, 4096)]
    return float(np.sum(np.array([np.vecdot(block, block) for block in blocks]), dtype=np.float64))


def printed(value):
    """The shortest text that gives the same float32 again, as a number."""
    return float(np.format_float_scientific(value, unique=True))


@pytest.mark.parametrize("step", [runs.SAVE_EVERY, runs.STEPS])
def test_a_line_has_the_bits_that_plain_code_gives(tmp_path, step):
    path = runs.recorded(tmp_path)
    line = next(one for one in runs.lines(path) if one["type"] == "step" and one["step"] == step)
    state, owned = read(path / "checkpoints", step, 0), open_run(path).manifest.layers
    lanes = {"weights": state.weights, "adam_m": {}, "adam_v": {}, "other": {}}
    for name, array in state.optimizer.items():
        lanes[{"m": "adam_m", "v": "adam_v"}.get(name.rpartition(".")[2], "other")][name] = array
    expected = {lane: stream(arrays) for lane, arrays in lanes.items()}
    expected["rng"] = xxhash.xxh3_128_hexdigest(canonical_json(list(state.rng)))
    expected["cursor"] = xxhash.xxh3_128_hexdigest(canonical_json(state.cursor))
    assert line["state"] == expected
    for moment in ("m", "v"):
        norms = []
        for layer in owned:
            own = [name for name in lanes[f"adam_{moment}"] if name.rpartition(".")[0].rpartition(".")[0] == layer]
            sums = [square_sum(np.array(state.optimizer[name]).ravel()) for name in own]
            norms.append(printed(np.float32(np.sqrt(sum(sums)))))
        assert len(set(norms)) > 1
        assert line[f"adam_{moment}_norms"] == norms


def test_a_batch_is_hashed_as_it_is_wherever_its_arrays_come_from():
    values = np.arange(12, dtype=np.int32).reshape(3, 4)
    column, turned = values[:, :1], mx.array(values).T
    given = [values, mx.array(values), turned.T, mx.array(values.T).T, np.asfortranarray(values)]
    assert {batch_hash(as_batch(one)) for one in given} == {batch_hash(as_batch(values.copy()))}
    assert batch_hash(as_batch(turned)) == batch_hash(as_batch(values.T.copy())) != batch_hash(as_batch(values))
    for one in (turned, mx.array(column), mx.array(values)[:, :1], column, np.asfortranarray(values)):
        (array,) = as_batch(one)
        assert memoryview(array).strides == memoryview(mx.array(np.array(one).tolist(), array.dtype)).strides


def test_a_batch_is_a_handle_of_its_own():
    given = mx.array([1.0, 2.0])
    (array,) = as_batch(given)
    before = batch_hash((array,))
    given += 1
    assert batch_hash((array,)) == before != batch_hash(as_batch(given))


def test_numbers_are_printed_alike_one_by_one_and_together():
    words = np.random.default_rng(5).integers(0, 2**32, 20_000, np.uint32)
    for values in words.view(np.float32).reshape(-1, 20):
        numbers, bits = json_floats(list(values))
        expected = [printed(value) if np.isfinite(value) else None for value in values]
        assert json.dumps(numbers) == json.dumps(expected)
        assert bits == (None if np.isfinite(values).all() else [float_bits(value) for value in values])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rest = nn.Linear(2, 3), [nn.Linear(3, 3), {"scale": mx.ones(3)}]
        self._hidden = mx.zeros(1)


def replace_an_array(net):
    net.first.weight = mx.ones((3, 2))


def add_an_array(net):
    net.first.extra = mx.ones(1)


def rename_an_array(net):
    net.rest[1]["shift"] = net.rest[1].pop("scale")


def replace_a_module(net):
    net.first = nn.Linear(2, 3)


def replace_a_list(net):
    net.rest = [*net.rest]


def make_a_module_of_an_array(net):
    net.first.weight = nn.Linear(1, 1)


def make_an_array_of_a_module(net):
    net.rest[0] = mx.ones(4)


def make_an_array_of_a_number(net):
    net.rest[1]["count"] = mx.array(1)


def shorten(net):
    net.rest.pop()


def swap(net):
    net.rest.reverse()


CHANGES = [
    *(replace_an_array, add_an_array, rename_an_array, replace_a_module, replace_a_list, make_a_module_of_an_array),
    *(make_an_array_of_a_module, make_an_array_of_a_number, shorten, swap),
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_leaves_follow_a_tree_that_changes(change):
    net = Net()
    net.rest[1]["count"] = 1
    leaves = Leaves(net)
    before = leaves.arrays()
    change(net)
    now, expected = leaves.arrays(), state_arrays(net)
    assert list(now) == list(expected) and all(now[path] is expected[path] for path in expected)
    assert list(now) != list(before) or any(now[path] is not before[path] for path in now) or change is replace_a_list


def test_new_handles_stay_as_they_are():
    leaves = Leaves({"a": mx.ones(2)})
    held = leaves.handles()["a"]
    leaves.tree["a"] += 1
    assert held.tolist() == [1.0, 1.0] and leaves.arrays()["a"].tolist() == [2.0, 2.0]


def test_a_constant_that_becomes_a_parameter_is_found():
    net = Net()
    net._late = mx.ones(2)
    leaves = Leaves(net)
    assert "late" not in leaves.arrays()
    net.late = dict.pop(net, "_late")  # as many entries as before
    assert "late" in leaves.arrays() and list(leaves.arrays()) == list(state_arrays(net))
