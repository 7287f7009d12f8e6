"""How two states differ: which tensors, and in what way."""

import mlx.core as mx
import numpy as np
import pytest

from workbench.cause.damage import damages, listed
from workbench.snapshot import State
from workbench.state_edits import flipped, scaled_moment, scaled_weight, seeded, swapped, zeroed

SHAPES = {"a.weight": (3, 4), "a.bias": (4,), "b.weight": (5,)}


def state(dtype=mx.float32):
    draw = np.random.default_rng(0)
    weights = {path: mx.array(draw.standard_normal(shape), mx.float32).astype(dtype) for path, shape in SHAPES.items()}
    optimizer = {"step": mx.array(3, mx.uint64), "learning_rate": mx.array(0.1, mx.float32)}
    for path, shape in SHAPES.items():
        optimizer[f"{path}.m"] = mx.array(draw.standard_normal(shape), mx.float32).astype(dtype)
        optimizer[f"{path}.v"] = mx.array(draw.uniform(1e-4, 1, shape), mx.float32).astype(dtype)
    return State(3, weights, optimizer, (1, 2), {"number": 3})


LEFT = state()


def found(changed, left=LEFT):
    return damages(left, changed, SHAPES)


def test_equal_states_have_no_damage():
    assert found(state()) == []


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("factor", [20.0, 1e-3, 3.7])
def test_a_scaled_tensor_is_named_with_its_factor(dtype, factor):
    left = state(dtype)
    (one,) = found(scaled_weight(left, "a.weight", factor), left)
    assert (one.lane, one.path, one.how) == ("weights", "a.weight", "scaled")
    assert one.numbers["factor"] == pytest.approx(factor, rel=2e-2 if dtype == mx.bfloat16 else 2e-3)
    assert one.numbers["differing"] == one.numbers["size"] == 12


@pytest.mark.parametrize(("leaf", "lane"), [("weight", "weights"), ("m", "adam_m"), ("v", "adam_v")])
def test_one_flipped_bit_is_named_with_index_and_bit(leaf, lane):
    (one,) = found(flipped(LEFT, leaf, "a.weight", 7, 30))
    assert (one.lane, one.path, one.how) == (lane, "a.weight", "one bit")
    assert (one.numbers["index"], one.numbers["bit"], one.numbers["differing"]) == (7, 30, 1)
    assert one.detail.startswith("bit 30 of element 7: ")


def test_two_flipped_bits_are_no_flipped_bit():
    (one,) = found(flipped(flipped(LEFT, "m", "a.bias", 1, 3), "m", "a.bias", 2, 4))
    assert one.how == "changed" and one.numbers["differing"] == 2


def test_zeroed_and_swapped_moments():
    assert {(one.lane, one.how) for one in found(zeroed(LEFT, ["v"]))} == {("adam_v", "zeroed")}
    both = found(swapped(LEFT))
    assert {(one.lane, one.path) for one in both} == {(lane, path) for lane in ("adam_m", "adam_v") for path in SHAPES}
    assert {one.how for one in both} == {"swapped"}


def test_a_moment_scaled_below_what_is_normal_is_still_scaled():
    tiny = found(scaled_moment(LEFT, "v", 1e-30))
    assert {one.how for one in tiny} == {"scaled"} and tiny[0].numbers["factor"] == pytest.approx(1e-30)


def test_what_is_no_tensor():
    moved = State(LEFT.step, LEFT.weights, LEFT.optimizer, LEFT.rng, {"number": 1})
    assert [(one.lane, one.path) for one in found(moved)] == [("cursor", "")]
    assert [(one.lane, one.path) for one in found(seeded(LEFT, 9))] == [("rng", "")]
    fewer = {path: array for path, array in LEFT.optimizer.items() if path != "a.bias.v"}
    (one,) = found(State(LEFT.step, LEFT.weights, fewer, LEFT.rng, LEFT.cursor))
    assert one.path == "a.bias" and "only in one" in one.detail
    other = LEFT.optimizer | {"step": mx.array(9, mx.uint64)}
    (one,) = found(State(LEFT.step, LEFT.weights, other, LEFT.rng, LEFT.cursor))
    assert (one.lane, one.path) == ("other", "step")


def test_the_list_in_words():
    assert listed(found(scaled_weight(LEFT, "a.bias", 20.0))) == "weights of a.bias: scaled by 20"
    assert listed(found(zeroed(LEFT, ["v"]))) == "adam_v zeroed in a.weight, a.bias, b.weight"
    assert listed([]) == ""
