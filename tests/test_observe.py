"""What telemetry logs of a step, recomputed slowly from the step's own arrays."""

import json

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import Points, advance, experiment, flipped, mse

from workbench.bits import bits_float
from workbench.compare import ITEMS
from workbench.experiment import as_batch, batch_hash, random_key, state_arrays
from workbench.fingerprint import lanes
from workbench.lines.line import ARRAYS
from workbench.observe import learning_rate, observe
from workbench.step import Stepper


def observed(job, steps=3):
    stepper = Stepper(job)
    for _ in range(steps):
        batch = as_batch(next(job.sampler))
        result = stepper(batch)
    return stepper, batch, result, observe(stepper, batch, result, job.sampler.state_dict())


def joint(arrays):
    """L2 norm over several arrays, in float64."""
    return np.sqrt(sum(np.sum(np.array(a.astype(mx.float32)).astype(np.float64) ** 2) for a in arrays))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_are_numpy_s_for_each_layer(dtype):
    job = experiment(dtype=dtype)
    stepper, _, result, seen = observed(job)
    optimizer = state_arrays(job.optimizer.state)
    assert stepper.layers == ["layers.0", "layers.3"]
    for index, layer in enumerate(stepper.layers):
        owned = [f"{layer}.weight", f"{layer}.bias"]
        expected = {
            "per_layer_act_norms": joint([result.activations[layer]]),
            "per_layer_grad_norms": joint([result.gradients[path] for path in owned]),
            "adam_m_norms": joint([optimizer[f"{path}.m"] for path in owned]),
            "adam_v_norms": joint([optimizer[f"{path}.v"] for path in owned]),
        }
        for name in ARRAYS:
            assert seen.norms[name][index].dtype == np.float32
            assert float(seen.norms[name][index]) == pytest.approx(expected[name], rel=2e-6)


def test_the_rest_is_of_the_state_after_the_update():
    job = experiment(clip=0.5)
    _, batch, result, seen = observed(job)
    assert seen.batch_hash == batch_hash(batch)
    assert (seen.loss, seen.grad_norm) == (result.loss, result.grad_norm)
    assert seen.state == lanes(
        state_arrays(job.model), state_arrays(job.optimizer.state), random_key(), job.sampler.state_dict()
    )


def test_evidence_names_every_item_but_the_checkpoint_and_keeps_bits():
    *_, seen = observed(experiment())
    evidence = seen.evidence()
    assert [name for name in ITEMS if name not in evidence] == ["checkpoint"]
    assert bits_float(evidence["loss"]) == seen.loss
    assert [bits_float(bits) for bits in evidence["adam_v_norms"]] == seen.norms["adam_v_norms"]


def test_observing_moves_nothing():
    job = experiment(dropout=0.5)
    stepper, batch, result, first = observed(job)
    second = observe(stepper, batch, result, job.sampler.state_dict())
    assert first.evidence() == second.evidence()


def test_learning_rate_is_the_one_used_in_the_update():
    """MLX calls the schedule with the number of updates already made."""
    rates = [0.5, 0.25, 0.125]
    job = experiment(optimizer=optim.SGD(lambda done: mx.array(rates)[done]))
    for rate in rates:
        stepper, (result,) = advance(job, 1)
        assert learning_rate(job) == rate
    assert learning_rate(experiment(optimizer=optim.Adafactor())) is None


def test_an_optimizer_with_other_state_has_no_moment_norms():
    job = experiment(optimizer=optim.Lion(1e-3))
    *_, seen = observed(job)
    assert None not in seen.norms["adam_m_norms"] and seen.norms["adam_v_norms"] == [None, None]
    *_, seen = observed(experiment(optimizer=optim.Adafactor(1e-3)))
    assert seen.norms["adam_m_norms"] == seen.norms["adam_v_norms"] == [None, None]


def test_a_layer_that_is_never_called_has_no_activation_and_a_gradient_of_zero():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(4, 1), nn.Linear(2, 2)

        def __call__(self, x):
            return self.used(x)

    *_, seen = observed(experiment(model=Idle()))
    assert seen.norms["per_layer_act_norms"][1] is None
    assert seen.norms["per_layer_grad_norms"][1] == 0
    fields = seen.fields()
    assert fields["per_layer_act_norms"][1] is None and "per_layer_act_norms_bits" not in fields


def test_members_of_a_multi_optimizer_share_the_parameters_names():
    adamw, sgd = optim.AdamW(1e-2), optim.SGD(1e-2, momentum=0.5)
    job = experiment(optimizer=optim.MultiOptimizer([adamw, sgd], [lambda path, weight: weight.ndim == 2]))
    *_, seen = observed(job)
    for index, layer in enumerate((0, 3)):
        matrix, bias = adamw.state["layers"][layer]["weight"], sgd.state["layers"][layer]["bias"]
        assert float(seen.norms["adam_m_norms"][index]) == pytest.approx(joint([matrix["m"]]), rel=2e-6)
        assert float(seen.norms["adam_v_norms"][index]) == pytest.approx(joint([matrix["v"], bias["v"]]), rel=2e-6)


def test_a_parameter_named_like_a_moment_is_no_moment():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.m, self.v = mx.ones((4, 1)), mx.ones(1)

        def __call__(self, x):
            return x @ self.m + self.v

    job = experiment(model=Odd(), optimizer=optim.Adam(1e-2))
    stepper, *_, seen = observed(job)
    optimizer = state_arrays(job.optimizer.state)
    assert stepper.layers == [""]
    assert float(seen.norms["adam_m_norms"][0]) == pytest.approx(joint([optimizer["m.m"], optimizer["v.m"]]), rel=2e-6)


@pytest.mark.parametrize(("value", "bits"), [(float("nan"), "0x7fc00000"), (float("inf"), "0x7f800000")])
def test_non_finite_values_stay_apart_in_strict_json(value, bits):
    def loss_fn(model, x, y):
        return mse(model, x, y) + value

    *_, seen = observed(experiment(loss_fn=loss_fn), steps=1)
    fields = json.loads(json.dumps(seen.fields(), allow_nan=False))
    assert fields["loss"] is None and fields["loss_bits"] == bits


class Broken(Points):
    """A NaN in one row, which reaches every gradient."""

    def __next__(self):
        x, y = super().__next__()
        x[0, 0] = np.nan
        return x, y


def test_arrays_with_a_non_finite_entry_say_so_in_bits():
    job = experiment()
    job.sampler = Broken()
    *_, seen = observed(job)
    fields = json.loads(json.dumps(seen.fields(), allow_nan=False))
    for name in ARRAYS:
        assert fields[name] == [None, None] and fields[f"{name}_bits"] == ["0x7fc00000"] * 2
    assert seen.evidence()["per_layer_grad_norms"] == ["0x7fc00000"] * 2


@pytest.mark.parametrize("lane", ["weights", "adam_m", "adam_v", "other"])
def test_one_bit_of_one_tensor_shows_in_its_lane_alone(lane):
    job = experiment()
    stepper, batch, result, before = observed(job)
    moments = job.optimizer.state["layers"][3]["weight"]
    if lane == "weights":
        job.model.layers[3].weight = flipped(job.model.layers[3].weight)
    elif lane == "other":
        job.optimizer.state["step"] = flipped(job.optimizer.state["step"])
    else:
        moments[lane[-1]] = flipped(moments[lane[-1]])
    after = observe(stepper, batch, result, job.sampler.state_dict())
    assert [name for name in after.state if after.state[name] != before.state[name]] == [lane]
