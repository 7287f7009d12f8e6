"""An effect's numbers, from weights before and after."""

import mlx.core as mx
import numpy as np
import pytest

from workbench.interventions.effect import effect
from workbench.step import StepResult


def of(before, after):
    before, after = ({path: mx.array(np.array(a, np.float32)) for path, a in one.items()} for one in (before, after))
    result = StepResult(np.float32(1.5), np.float32(2.5), {path: after[path] for path in after}, {}, None)
    return effect(None, result, before, after)


def test_updates_and_their_ratios_are_norms_of_the_change():
    found = of({"a": [3.0, 4.0], "b": [[1.0, 0.0]]}, {"a": [3.0, 4.5], "b": [[1.0, 0.75]]})
    assert found.updates == {"a": 0.5, "b": 0.75} and found.ratios == {"a": 0.1, "b": 0.75}
    assert found.update_norm == pytest.approx(np.sqrt(0.25 + 0.5625), rel=1e-7)
    assert found.worst == ("b", 0.75) and (found.loss, found.grad_norm, found.steps) == (1.5, 2.5, 1)


def test_a_parameter_of_zeros_has_no_ratio_and_is_the_worst_only_if_it_moved():
    moved = of({"a": [1.0], "z": [0.0]}, {"a": [1.5], "z": [1.0]})
    assert np.isnan(moved.ratios["z"]) and moved.worst[0] == "z"
    still = of({"a": [1.0], "z": [0.0]}, {"a": [1.5], "z": [0.0]})
    assert np.isnan(still.ratios["z"]) and still.worst == ("a", 0.5)


def test_what_is_not_finite_shows():
    found = of({"a": [1.0], "b": [1.0]}, {"a": [np.nan], "b": [9.0]})
    assert np.isnan(found.updates["a"]) and np.isnan(found.update_norm) and found.worst[0] == "a"
    assert of({"a": [1.0]}, {"a": [np.inf]}).update_norm == np.inf


def test_half_precision_is_subtracted_in_float32():
    before, after = mx.array([256.0], mx.bfloat16), mx.array([258.0], mx.bfloat16)
    result = StepResult(np.float32(0), np.float32(0), {"a": after}, {}, None)
    assert effect(None, result, {"a": before}, {"a": after}).updates == {"a": 2.0}


def test_a_skipped_step_has_no_numbers():
    found = effect(None, None, {}, {})
    assert (found.loss, found.grad_norm, found.update_norm, found.worst, found.steps) == (None, None, None, None, 0)
