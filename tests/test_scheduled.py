"""AdamW with settings that change on the way has the bits of AdamW told so by hand, and is replayed and resumed."""

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
import runs
from autopsies import SETTINGS
from helpers import tensor_bytes
from mlx.utils import tree_flatten

from workbench import open_run
from workbench.cause.adam import settings
from workbench.errors import ExperimentError
from workbench.hyperparameters import describe_optimizer
from workbench.interventions.scene import Scene
from workbench.trainer.scheduled import AdamChange, Drift, ScheduledAdamW, adamw
from workbench.trainer.training import train_run

USUAL = {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}


def rate(updates):
    return mx.array(1e-2, mx.float32) * (updates.astype(mx.float32) + 1)


def walked(optimizer, steps=8, before=lambda step: None, dtype=mx.float32):
    """Parameters after some updates with gradients that a seed gives, byte for byte."""
    weights = {"one": mx.array([[1.0, -2.0], [0.5, 3.0]], dtype), "two": mx.array([0.25, -0.75], dtype)}
    found = []
    for step in range(1, steps + 1):
        before(step)
        draw = np.random.default_rng(step)
        gradients = {path: mx.array(draw.standard_normal(array.shape), dtype) for path, array in weights.items()}
        weights = optimizer.apply_gradients(gradients, weights)
        mx.eval(weights, optimizer.state)
        found.append(tensor_bytes(weights))
    return found


def numbers(optimizer, **options):
    """The same as one row of float32 an update."""
    parts = [[np.frombuffer(one[path], np.float32) for path in ("one", "two")] for one in walked(optimizer, **options)]
    return np.array([np.concatenate(row) for row in parts])


def test_without_changes_it_is_adamw():
    plain = adamw(rate, USUAL, [], [])
    assert type(plain) is optim.AdamW and walked(plain) == walked(optim.AdamW(rate, **USUAL))


def test_a_change_holds_in_its_updates_and_no_others():
    change = AdamChange(step=3, until=5, option="beta2", value=0.5)
    by_hand = optim.AdamW(rate, **USUAL)

    def told(step):
        by_hand.betas = [0.9, mx.array(0.5 if 3 <= step <= 5 else 0.95, mx.float32)]

    found, expected = numbers(adamw(rate, USUAL, [change], [])), numbers(by_hand, before=told)
    usual = numbers(optim.AdamW(rate, **USUAL))
    assert np.allclose(found, expected, rtol=1e-5)  # a number in the graph rounds otherwise than one in Python
    assert np.allclose(found[:2], usual[:2], rtol=1e-5) and not np.allclose(found[2], usual[2], rtol=1e-2)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_dtype_stays(dtype):
    changes = [AdamChange(step=2, option="eps", value=1e-3), AdamChange(step=2, option="beta2", value=0.5)]
    optimizer = adamw(rate, USUAL, changes, [])
    walked(optimizer, steps=3, dtype=dtype)
    leaves = dict(tree_flatten(optimizer.state))
    assert {leaves[f"one.{leaf}"].dtype for leaf in ("m", "v")} == {dtype}


def test_a_drift_multiplies_its_parameters_before_the_update():
    drift = Drift(step=2, until=3, growth=1.5, parameters=("one",))
    optimizer = adamw(rate, USUAL | {"weight_decay": 0.0}, [], [drift])
    assert [type(one) for one in optimizer.optimizers] == [ScheduledAdamW, optim.AdamW]
    weights = {"one": mx.array([2.0, -4.0]), "two": mx.array([1.0])}
    for step in (1, 2, 3, 4):
        nothing = {path: mx.zeros_like(array) for path, array in weights.items()}
        weights = optimizer.apply_gradients(nothing, weights)
        grown = 1.5 ** min(max(step - 1, 0), 2)
        assert np.allclose(np.array(weights["one"]), np.array([2.0, -4.0]) * grown, rtol=1e-5)
    assert weights["two"].item() == 1.0


def test_what_is_set_by_hand_takes_the_schedules_place():
    optimizer = adamw(rate, USUAL, [AdamChange(step=1, option="beta2", value=0.5)], [])
    optimizer.betas = [0.9, 0.99]
    assert walked(optimizer) == walked(optim.AdamW(rate, **(USUAL | {"betas": [0.9, 0.99]})))


def test_a_growth_that_is_none_is_refused():
    with pytest.raises(ExperimentError, match="growth 0"):
        Drift(step=1, growth=0.0, parameters=("one",))


def test_a_run_with_changes_replays_exactly_and_resumes_to_the_same_bits(tmp_path):
    faults = ["beta2@5:value=0.3,for=3", "attention-growth@6:growth=1.2,for=4"]
    run = train_run(tmp_path / "run", runs.corpus(), 12, **(SETTINGS | {"save_every": 4, "faults": faults}))
    assert all(run.replay(step).exact for step in (5, 7, 12))
    scene = Scene.open(run, 12, context=11)
    known = {step: settings(run.manifest.optimizer, scene.state(step)) for step in (4, 5, 7, 8)}
    path = "blocks.0.mlp.up.weight"
    assert [round(known[step][path].beta2, 6) for step in (4, 5, 7, 8)] == [0.95, 0.3, 0.3, 0.95]
    query = "blocks.0.attention.query.weight"
    norms = [float(mx.linalg.norm(scene.state(step).weights[query]).item()) for step in (5, 9, 11)]
    assert norms[1] == pytest.approx(norms[0] * 1.2**4, rel=0.2) and norms[2] < 1.2 * norms[1]
    last = run.evidence(12, 0)["state.weights"]
    said = runs.here("train", "--out", run.path, "--resume", "8")
    assert said.code == 0, said.err
    assert open_run(run.path).evidence(12, 1)["state.weights"] == last


def test_the_description_says_what_is_on_a_schedule():
    optimizer = adamw(rate, USUAL, [AdamChange(step=1, option="eps", value=1e-3)], [])
    described = describe_optimizer(optimizer)
    assert described["class"] == "ScheduledAdamW" and described["schedules"] == ["eps", "learning_rate"]
    assert described["betas"] == [0.9, 0.95] and described["eps"] == 1e-8
