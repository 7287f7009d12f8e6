"""Measuring a step while it is computed gives the bits of measuring it afterwards, and holds on to nothing."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import experiment, mlp, tensor_bytes
from mlx.utils import tree_flatten

from workbench.experiment import as_batch, read_cursor
from workbench.host import square_sum
from workbench.observe import measure_alongside, observe
from workbench.step import Stepper
from workbench.trees import state_arrays

STEPS = 3


def half():
    model = mlp(dropout=0.1)
    model.set_dtype(mx.bfloat16)
    return model


def wide():
    """Its state is read in several parts, and none of its arrays is as large as another."""
    return nn.Sequential(nn.Linear(4, 500), nn.Tanh(), nn.Linear(500, 300), nn.Tanh(), nn.Linear(300, 1))


JOBS = {
    "float32": {},
    "in parts": {"model": wide, "compile": True},
    "bfloat16": {"model": half},
    "accumulation": {"accumulate": 2},
    "compiled": {"compile": True},
    "no moments": {"optimizer": lambda: optim.SGD(0.1)},
    "two optimizers": {
        "optimizer": lambda: optim.MultiOptimizer(
            [optim.Muon(1e-2), optim.AdamW(1e-3)], [lambda path, weight: weight.ndim == 2]
        )
    },
}


def made(name):
    mx.random.seed(6)
    return experiment(**{key: value() if callable(value) else value for key, value in JOBS[name].items()})


@pytest.mark.parametrize("name", JOBS)
def test_a_step_measured_alongside_is_a_step_measured_afterwards(name):
    seen = []
    for alongside in (False, True):
        job = made(name)
        stepper = measure_alongside(Stepper(job)) if alongside else Stepper(job)
        for _ in range(STEPS):
            batch = as_batch(next(job.sampler))
            result = stepper(batch)
            observed = observe(stepper, batch, result, read_cursor(job.sampler))
            seen.append((observed.evidence(), observed.fields()))
    assert seen[:STEPS] == seen[STEPS:]
    assert len({str(one) for one in seen[:STEPS]}) == STEPS  # what is compared differs from step to step


def test_an_observation_of_another_batch_is_no_observation_of_the_one_that_was_asked_for():
    job = made("float32")
    stepper = measure_alongside(Stepper(job))
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    other = as_batch([array + 1 for array in batch])
    cursor = read_cursor(job.sampler)
    first, second, again = (observe(stepper, one, result, cursor) for one in (batch, other, batch))
    assert first.batch_hash == again.batch_hash != second.batch_hash
    assert first.evidence() == again.evidence() and first.norms == second.norms


@pytest.mark.parametrize("hold", [False, True])
def test_a_states_arrays_are_held_only_for_who_asked(hold):
    job = made("float32")
    stepper = measure_alongside(Stepper(job), hold=hold)
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    seen = observe(stepper, batch, result, read_cursor(job.sampler))
    assert result.asked.weights == {} and result.asked.done
    if not hold:
        assert seen.arrays is None
        return
    weights, optimizer = seen.arrays
    live = state_arrays(job.model)
    assert tensor_bytes(weights) == tensor_bytes(live) and len(optimizer) == len(state_arrays(job.optimizer.state))
    assert all(weights[path] is not live[path] for path in live)  # handles of their own


class Odd(nn.Module):
    """Attributes that are parameters, and ones that are not."""

    def __init__(self):
        super().__init__()
        self.weight, self._private, self._module = mx.zeros(1), mx.zeros(2), nn.Linear(2, 2)
        self.pair, self.number, self.empty = (mx.zeros(3),), 4.0, []
        self.table = {"_key": mx.zeros(5), "list": [nn.Linear(2, 3), (mx.zeros(6),), {"x": mx.ones(7)}, None]}


@pytest.mark.parametrize(
    "tree", [Odd(), {"module": Odd()}, [mx.zeros(1), (mx.zeros(2), {"k": {}}), 3, "s"], {}, mx.zeros(1)], ids=str
)
def test_arrays_are_found_where_mlx_finds_them(tree):
    flat = tree_flatten(tree.parameters() if isinstance(tree, nn.Module) else tree)
    expected = {path: leaf for path, leaf in flat if isinstance(leaf, mx.array)}
    found = state_arrays(tree)
    assert list(found) == sorted(expected) and all(found[path] is expected[path] for path in expected)


SIZES = [0, 1, 7, 64, 4095, 4096, 4097, 8192, 12289, 131071, 131072, 131073, 300001]


def blockwise(values):
    """Sums as the manifest names them, one block after another: float32 in blocks of 4096, float64 above."""
    whole = values.size - values.size % 4096
    sums = [np.vecdot(values[start : start + 4096], values[start : start + 4096]) for start in range(0, whole, 4096)]
    rest = float(np.vecdot(values[whole:], values[whole:])) if whole < values.size else 0.0
    return float(np.sum(np.array(sums, values.dtype), dtype=np.float64)) + rest


@pytest.mark.parametrize("size", SIZES)
def test_sums_of_squares_have_the_bits_of_blocks_whatever_the_size(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    expected = blockwise(values) if size else 0.0
    parts = []
    assert square_sum(values).hex() == square_sum(values, parts.append).hex() == expected.hex()
    assert b"".join(np.asarray(part).tobytes() for part in parts) == values.tobytes()
