"""Portions of a pass measured one after the other: the same rows as of all at once, and nothing is held."""

import mlx.core as mx
import numpy as np

from workbench.probes.measure import measure
from workbench.probes.streamed import PORTION, portions, streamed


def chain(length, size):
    """Tensors that are computed one from the other, by path, not evaluated."""
    found, value = {}, mx.arange(size).astype(mx.float32) / size - 0.5
    for number in range(length):
        value = mx.tanh(value * 1.5) if number != 2 else value / mx.maximum(value, 0)
        found[f"layer.{number}"] = value
    return found


def test_the_rows_are_those_of_all_at_once_whatever_the_portions():
    for size in (10, PORTION // 3, PORTION):
        whole = measure("activation", chain(7, size))
        assert any(row.nonfinite for row in whole)  # one of them divides by zero
        assert streamed(portions("activation", chain(7, size))) == whole


def test_portions_hold_what_they_measure_alone_and_are_used_up():
    tensors = chain(5, PORTION // 2 + 1)
    waiting = portions("activation", tensors)
    assert tensors == {}
    assert [list(one.tensors) for one in waiting] == [["layer.0", "layer.1"], ["layer.2", "layer.3"], ["layer.4"]]
    streamed(waiting)
    assert waiting == []


def test_what_stands_beside_a_tensor_is_computed_with_it():
    tensors = chain(3, 4)
    last = mx.sum(tensors["layer.1"])
    assert streamed(portions("activation", tensors, {"layer.1": [last], "elsewhere": []}))
    assert np.isfinite(np.array(last))


def test_the_host_is_asked_once_for_what_else_it_has_to_do_and_also_where_nothing_is_measured():
    calls = []
    streamed(portions("activation", chain(4, PORTION)), lambda: calls.append(1))
    streamed(portions("activation", {}), lambda: calls.append(2))
    assert calls == [1, 2]
