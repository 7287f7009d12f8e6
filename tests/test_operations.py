"""The doctor's operations: which there are, and how many results each has."""

import itertools

import mlx.core as mx
import numpy as np
import pytest
from helpers import tensor_bytes
from planted_operations import steady_operation, varying_operation

from workbench import doctor
from workbench.examination import shards
from workbench.examination.catalogue import CATALOGUE, Inputs
from workbench.examination.operations import Operation, count_distinct, with_one_bit_flipped


def test_every_operation_has_one_result_on_the_cpu(monkeypatch):
    monkeypatch.setattr(doctor, "REPEATS", 2)
    rows = [shards.count(operation, lambda number: None) for operation in CATALOGUE]
    assert [row.name for row in rows if row.distinct > 1] == []
    absent = [(row.name, row.dtype) for row in rows if row.distinct == 0]
    assert absent in ([], [("mixture of experts backward", "bfloat16")])
    assert all(row.remedy is None for row in rows if row.distinct == 1)
    assert len({(row.name, row.dtype) for row in rows}) == len(rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    """matrix products|embedding gradient|embedding gradient (deterministic)|attention forward|attention backward
    attention backward (deterministic)|layer norm and RMS norm backward|cross-entropy and its gradient|reductions
    sorting with ties|convolution backward|overlapping pooling backward|random normal and dropout|AdamW update
    scatter-add and scatter-multiply|assignment to repeated indices|take_along_axis backward""".replace(
        "\n", "|"
    ).split("|"),
)
def test_the_catalogue_has(name, dtype):
    assert any((operation.name, operation.dtype) == (name.strip(), dtype) for operation in CATALOGUE)


def test_rows_of_a_scattered_table_get_three_addends_or_more():
    """Two floats add to the same sum in either order; three don't."""
    ids = np.array(Inputs("float32").ids(256, 512))
    assert np.bincount(ids).max() >= 3 and np.sum(np.bincount(ids) >= 3) > 20


def test_the_deterministic_row_really_runs_the_replacement(monkeypatch):
    from workbench import deterministic

    calls = []
    real = deterministic.gather_gradient
    monkeypatch.setattr(deterministic, "gather_gradient", lambda *parts: calls.append(1) or real(*parts))
    for operation in CATALOGUE:
        if operation.name.startswith("embedding gradient"):
            before = len(calls)
            count_distinct(operation.make(), 2)
            assert len(calls) - before == (2 if operation.name.endswith("(deterministic)") else 0)


def test_results_are_counted_by_bits():
    assert count_distinct(varying_operation().make(), 5) == 5
    assert count_distinct(steady_operation().make(), 5) == 1
    zeros = itertools.cycle([0.0, -0.0])
    assert count_distinct(lambda: mx.array([next(zeros)]), 4) == 2
    assert count_distinct(lambda: [mx.array(1), {"a": mx.array(2)}], 3) == 1


def test_what_a_backend_cannot_do_is_no_result():
    def make():
        raise RuntimeError("[Thing::eval] not here.\nmore")

    row = shards.count(Operation("thing", "float32", make), lambda number: None)
    assert (row.distinct, row.remedy) == (0, "MLX can't do it here: [Thing::eval] not here")


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint64, mx.uint8])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_one_bit_is_flipped_and_no_other(dtype, shape):
    array = mx.ones(shape).astype(dtype)
    one, other = (tensor_bytes({"": a})[""] for a in (array, with_one_bit_flipped(array)))
    assert sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True)) == 1
