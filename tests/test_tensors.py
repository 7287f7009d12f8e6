"""The tensors of a step: all of them, in order of execution; and a difference named with its size."""

from dataclasses import replace

import helpers
import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest

from workbench.divergence.tensors import difference, differing, raw, state_tensors, step_tensors
from workbench.experiment import as_batch
from workbench.step import Stepper


def performed(job):
    """All tensors of the first step of an experiment, and the state after it."""
    stepper = Stepper(job)
    batch = as_batch(next(job.sampler))
    result = stepper(batch)
    after = helpers.state_of(job, 1)
    return step_tensors(stepper.layers, stepper.owned, batch, result, after), after


def test_a_step_has_all_its_tensors_in_order_of_execution():
    def loss_fn(model, x, y):
        errors = (model(x) - y) ** 2
        return errors.mean(), {"token_loss": errors}

    found, _ = performed(helpers.experiment(loss_fn=loss_fn))
    parameters = ["layers.0.weight", "layers.0.bias", "layers.3.weight", "layers.3.bias"]
    assert list(found) == [
        *(("batch", "0"), ("batch", "1")),
        *(("activation", "layers.0"), ("activation", "layers.3")),
        *(("token_loss", ""), ("loss", "")),
        *(("gradient", path) for path in parameters[2:] + parameters[:2]),
        ("grad_norm", ""),
        *((kind, path) for kind in ("adam_m", "adam_v", "weight") for path in parameters),
        *(("other", "learning_rate"), ("other", "step")),
        *(("rng", ""), ("cursor", "")),
    ]
    assert found["activation", "layers.3"].shape == (12, 1)
    assert np.array(found["cursor", ""]).tobytes() == b'{"number":1}'


def test_moments_of_several_optimizers_and_frozen_weights_have_a_place():
    split = optim.MultiOptimizer([optim.Adam(1e-3), optim.SGD(1e-2)], [lambda path, weight: "weight" in path])
    job = helpers.experiment(optimizer=split)
    found, after = performed(job)
    assert ("adam_m", "states.0.layers.0.weight") in found
    assert sum(kind in ("adam_m", "adam_v", "other") for kind, _ in found) == len(after.optimizer)
    order = ["layers.3.bias", "layers.0.weight"]
    assert [path for kind, path in state_tensors(order, after) if kind == "weight"] == [
        *order,
        *sorted(after.weights.keys() - set(order)),
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_planted_bit_is_found_in_its_tensor_with_its_size(dtype):
    optimizer = optim.AdamW(1e-2, eps=1e-4)  # the default is zero in float16, and makes NaN
    found, _ = performed(helpers.experiment(dtype=dtype, optimizer=optimizer))
    assert differing(found, dict(found)) == (None, 0)
    for key, array in found.items():
        if not array.size or key[0] in ("rng", "cursor"):
            continue
        first, count = differing(found, found | {key: helpers.flipped(array)})
        assert (first.kind, first.path) == key and count == 1
        if mx.issubdtype(array.dtype, mx.floating):
            assert (first.differing, first.size, first.max_ulp, first.nonfinite) == (1, array.size, 1, 0)
            assert first.dtype in (dtype, "float32") and first.shape == list(array.shape)


def test_the_first_of_several_is_named_and_all_are_counted():
    found, _ = performed(helpers.experiment())
    planted = [("weight", "layers.0.bias"), ("gradient", "layers.0.bias"), ("adam_v", "layers.3.weight")]
    other = found | {key: helpers.flipped(found[key], bit=22) for key in planted}
    first, count = differing(found, dict(reversed(other.items())))  # whatever order the other has
    assert (first.kind, first.path, count) == ("gradient", "layers.0.bias", 3)
    assert first.max_ulp == 2**22


def test_a_state_that_differs_in_random_state_or_cursor_says_how():
    _, after = performed(helpers.experiment(dropout=0.5))
    tensors = state_tensors([], after)
    first, _ = differing(tensors, state_tensors([], replace(after, rng=(after.rng[0], after.rng[1] ^ 1))))
    assert (first.name, first.differing, first.max_ulp) == ("random state", 1, None)
    first, _ = differing(tensors, state_tensors([], replace(after, cursor={"number": 7})))
    assert str(first).endswith('{"number":1} against {"number":7}') and first.differing is None


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (mx.zeros((2, 3)), None, "only in the recorded way"),
        (None, mx.zeros((2, 3)), "only in the other way"),
        (mx.zeros((2, 3)), mx.zeros((3, 2)), "float32[2, 3] against float32[3, 2]"),
        (mx.zeros(2, mx.uint16), mx.zeros(2, mx.bfloat16), "uint16[2] against bfloat16[2]"),
    ],
)
def test_what_has_no_counterpart_differs(ours, theirs, words):
    key = ("activation", "layers.0")
    reference, other = ({} if one is None else {key: one} for one in (ours, theirs))
    first, count = differing(reference, other)
    assert count == 1 and first.detail == words and first.extent == words and first.size is None


def test_in_words():
    left, right = mx.array([1.0, 2.0, 3.0, 4.0]), mx.array([1.0, float("nan"), 3.0, 4.0000005])
    said = difference(("activation", "blocks.0.mlp.up"), raw(left), raw(right))
    assert said.name == "activation of blocks.0.mlp.up"
    assert said.extent == "2 of 4 elements, at most 1 ULP (4.77e-07), 1 NaN or infinite on a side"
    assert difference(("activation", ""), raw(left), raw(right)).name == "activation of (model)"
    assert difference(("loss", ""), raw(mx.array(1.0)), raw(mx.array(-1.0))).name == "loss"
