"""Which optimizers have a second moment, and that its correction is the optimizer's own."""

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from helpers import advance, experiment, state_of

from workbench.probes.quantities import bias_correction
from workbench.probes.second_moment import second_moments

PATHS = ["layers.0.weight", "layers.3.bias"]


def found(optimizer, steps=3):
    job = experiment(optimizer=optimizer)
    advance(job, steps)
    state = state_of(job, steps).optimizer
    return second_moments(job.optimizer, state, PATHS), state


@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("make", [optim.Adam, optim.AdamW])
def test_adam_s_own_setting_decides(make, correct):
    moments, state = found(make(1e-2, betas=[0.9, 0.98], eps=1e-5, bias_correction=correct))
    assert sorted(moments) == sorted(PATHS)
    for path, one in moments.items():
        assert one.eps == 1e-5 and one.array is state[f"{path}.v"]
        assert one.correction == (bias_correction(0.98, 3) if correct else 1)


def test_what_it_divides_by_is_what_mlx_divides_by():
    """The update recomputed from m and v̂ in float64."""
    import numpy as np

    job = experiment(optimizer=optim.Adam(1e-2, betas=[0.9, 0.98], eps=1e-3, bias_correction=True))
    advance(job, 4)
    before = state_of(job, 4).weights["layers.0.weight"]
    advance(job, 1)
    after, state = state_of(job, 5), state_of(job, 5).optimizer
    one = second_moments(job.optimizer, state, PATHS)["layers.0.weight"]
    m = np.array(state["layers.0.weight.m"]).astype(float) / (1 - 0.9**5)
    v_hat = np.array(one.array).astype(float) * one.correction
    expected = np.array(before).astype(float) - 1e-2 * m / (np.sqrt(v_hat) + one.eps)
    np.testing.assert_allclose(np.array(after.weights["layers.0.weight"]), expected, rtol=1e-5, atol=1e-7)


def test_rmsprop_has_one_and_no_correction():
    moments, _ = found(optim.RMSprop(1e-2, alpha=0.9, eps=1e-6))
    assert {(one.eps, one.correction) for one in moments.values()} == {(1e-6, 1.0)}


@pytest.mark.parametrize(
    "make",
    [
        lambda: optim.SGD(1e-2, momentum=0.9),
        lambda: optim.Muon(1e-2),
        lambda: optim.Adamax(1e-2),
        lambda: optim.Adagrad(1e-2),
        lambda: optim.AdaDelta(1e-2),
        lambda: optim.Lion(1e-2),
        lambda: optim.Adafactor(),
    ],
)
def test_what_others_call_v_is_no_second_moment(make):
    assert found(make())[0] == {}


def test_a_rule_of_ones_own_is_unknown_and_an_inherited_one_is_not():
    class Own(optim.AdamW):
        def apply_single(self, gradient, parameter, state):
            return super().apply_single(2 * gradient, parameter, state)

    class Renamed(optim.AdamW):
        pass

    assert found(Own(1e-2))[0] == {} and len(found(Renamed(1e-2))[0]) == 2


def test_each_member_of_a_multi_optimizer_has_its_own_settings():
    members = [optim.AdamW(1e-2, eps=1e-4, bias_correction=True), optim.SGD(1e-2, momentum=0.9)]
    moments, _ = found(optim.MultiOptimizer(members, [lambda path, weight: weight.ndim == 2]))
    assert list(moments) == ["layers.0.weight"]
    assert moments["layers.0.weight"].eps == 1e-4
    assert moments["layers.0.weight"].correction == pytest.approx(bias_correction(0.999, 3))
    assert isinstance(moments["layers.0.weight"].array, mx.array)
