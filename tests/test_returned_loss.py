"""The loss that a recorder returns: what a loop computes with it has the bits that it had with MLX's array."""

import operator

import mlx.core as mx
import numpy as np
import pytest

from workbench.recording.returned_loss import ReturnedLoss

OPERATIONS = (operator.add, operator.sub, operator.mul, operator.truediv)


def values():
    return np.random.default_rng(7).standard_normal(40).astype(np.float32).tolist() + [0.0, -0.0, float("inf"), 3e38]


def bits(number):
    return np.float32(number.item() if isinstance(number, mx.array) else number).tobytes()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: one.__name__)
def test_arithmetic_has_the_bits_of_an_array(operation):
    other = [0.1, 0.9, 3, True, -7.25, 1e-30]
    for value in values():
        ours, theirs = ReturnedLoss(value), mx.array(value)
        for number in other:
            assert bits(operation(ours, number)) == bits(operation(theirs, number)), (value, number)
            assert bits(operation(number, ours)) == bits(operation(number, theirs)), (number, value)
        assert bits(operation(ours, ReturnedLoss(2.7))) == bits(operation(theirs, mx.array(2.7)))


def test_a_moving_average_has_too():
    mine, its = 0.0, 0.0
    for value in values()[:40]:
        mine = 0.9 * mine + 0.1 * ReturnedLoss(value)
        its = 0.9 * its + 0.1 * mx.array(value)
    assert bits(mine) == bits(its)
    assert bits(sum(map(ReturnedLoss, values()[:40]))) == bits(sum(map(mx.array, values()[:40])))


def test_with_an_array_of_mlx_it_is_one():
    found = ReturnedLoss(0.3) * mx.array([1.0, 2.0])
    assert isinstance(found, mx.array) and found.dtype == mx.float32
    assert np.array_equal(np.array(found), np.array(mx.array(0.3) * mx.array([1.0, 2.0])))


def test_it_is_still_a_number():
    loss = ReturnedLoss(0.5)
    assert loss == 0.5 and loss < 1 and f"{loss:.2f}" == "0.50" and loss.item() == loss.tolist() == float(loss)
    assert type(loss.item()) is float and type(loss + 1) is ReturnedLoss
    with pytest.raises(TypeError):
        loss + "x"
